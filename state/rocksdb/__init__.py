"""Keyed state larger than memory in RocksDB, with access by single keys. `backend` is the way in."""
