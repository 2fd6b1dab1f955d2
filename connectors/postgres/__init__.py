"""Tables of PostgreSQL as sources, as streams of changes, and as sinks."""
