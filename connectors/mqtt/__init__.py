"""Topics of MQTT as sources and sinks."""
