"""Queues of Amazon SQS as sources and sinks."""
