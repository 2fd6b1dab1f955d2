"""Steps without state that take one record or one batch at a time: map, filter, flat_map, map_batches."""
