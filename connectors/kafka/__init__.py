"""Kafka: records of topics as a source, and a topic as a sink."""
