"""Streams of RabbitMQ as sources and sinks."""
