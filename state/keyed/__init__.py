"""Keyed state with access by single keys: what users declare and hold, the interface of the backends, and
the one in memory.

A user's function declares state (`descriptors.py`) and holds handles of it (`handles.py`), which read and
write the tables of a backend (`base.py`; `memory.py`, `../rocksdb`). Timers (`timers.py`) are a table of
their own. Wrappers around the tables let values expire (`ttl.py`) and take changes back (`undo.py`).
Whatever the backend, stored state has the columns of `canonical.py`, and keys are those of `keys.py`.
"""
