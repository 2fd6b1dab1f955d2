"""Joins match rows of two keyed streams by time, window or version.

Rows wait in columnar buffers (`side.py`: rows, times, a chained index by key) until event time
shows that no row can match them any more. Everything works on whole batches; only `co_group` calls
a function per key.
"""
