"""Times and sizes of the parts of an attempt's deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class RestoreFigures:
    """Times in ms, of the slowest subtask where there are several; sizes in bytes, of all together.

    Attributes:
        workers_ms: until all workers were available.
        fetching_ms: until a subtask had read and verified its state.
        opening_ms: until its operators had restored it.
        local_bytes: read from copies on the workers' machines.
        storage_bytes: read from the checkpoint's storage.
    """

    workers_ms: int = 0
    fetching_ms: int = 0
    opening_ms: int = 0
    local_bytes: int = 0
    storage_bytes: int = 0

    def add(self, fetching_ms: int, opening_ms: int, local_bytes: int, read_bytes: int) -> None:
        """Take in the report of one worker; `read_bytes` is all that it read."""
        self.fetching_ms = max(self.fetching_ms, fetching_ms)
        self.opening_ms = max(self.opening_ms, opening_ms)
        self.local_bytes += local_bytes
        self.storage_bytes += max(0, read_bytes - local_bytes)
