"""Aggregates per key: their descriptions, running aggregates, `reduce`, and tables that exceed memory."""
