"""Where records come from and go: sources and sinks."""
