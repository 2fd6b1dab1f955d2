"""Formats of single messages, as brokers carry them: payloads become rows of Arrow columns, and back."""
