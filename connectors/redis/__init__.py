"""Streams of Redis and Valkey as sources and sinks."""
