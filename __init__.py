"""headgate: a stateful stream processor for Python people."""

__version__ = "0.1.0"
