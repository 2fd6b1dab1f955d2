"""Streams of Amazon Kinesis as sources and sinks."""
