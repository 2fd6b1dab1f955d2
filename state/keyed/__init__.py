"""Keyed state with access by single keys: the interface, its memory backend, and the handles users hold."""
