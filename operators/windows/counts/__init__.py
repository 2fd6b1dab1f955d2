"""Count windows: aggregates over the last records of each key, after a fixed number of records."""
