"""Joins: rows of two keyed streams that belong together, by time, window or version.

Rows wait in columnar buffers (`side.py`: rows, times, a chained index by key) until event time says that
nothing can meet them any more. Everything works on whole batches; only `co_group` calls a function per key.
"""
