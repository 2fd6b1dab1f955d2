"""Tables of Delta Lake as exactly-once sinks."""
