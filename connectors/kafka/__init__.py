"""Kafka: records of topics as a source."""
