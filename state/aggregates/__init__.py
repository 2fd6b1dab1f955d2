"""Aggregates of many keys at once: accumulators by slot, and all those of one keyed state."""
