"""Shares the memory that the job grants to a process between its tables."""

from __future__ import annotations

import threading

_open: dict[int, int] = {}
_lock = threading.Lock()


class MemoryShare:
    """An equal part of `total_bytes` for each table that is open in this process with that total."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        with _lock:
            _open[total_bytes] = _open.get(total_bytes, 0) + 1

    def __call__(self) -> int:
        """The bytes of this table, as of now."""
        return self._total // max(1, _open[self._total])

    def close(self) -> None:
        """Leave the memory to the others."""
        with _lock:
            _open[self._total] -= 1
