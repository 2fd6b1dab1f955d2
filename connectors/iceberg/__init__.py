"""Tables of Apache Iceberg as exactly-once sinks."""
