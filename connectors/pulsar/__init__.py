"""Topics of Apache Pulsar as sources and sinks."""
