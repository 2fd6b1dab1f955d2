"""The bounds of state on local disk: sorted runs, RocksDB, and the memory that tables share."""

from __future__ import annotations

import threading

import msgspec

MIB = 1 << 20


class RocksDBSettings(msgspec.Struct, frozen=True):
    """The bounds of the RocksDB backend.

    Attributes:
        memory_bytes: the memory shared by all databases of the process with the same budget.
        write_buffer_ratio: the part of that memory for data not yet written to files.
        write_buffer_bytes: how much data of one state is collected before it is written to a file.
        write_buffers: the number of such buffers, including the one being filled, before writes wait.
        threads: the threads of the process that write and merge files in the background.
        open_files: how many files one state keeps open.
        block_bytes: how much is read at a time.
        held_bytes: the memory of the process for values of keys that were used last, beside
            `memory_bytes`; equal parts for all states.
    """

    memory_bytes: int = 256 * MIB
    write_buffer_ratio: float = 0.5
    write_buffer_bytes: int = 64 * MIB
    write_buffers: int = 2
    threads: int = 2
    open_files: int = 512
    block_bytes: int = 4096
    held_bytes: int = 64 * MIB


class RunSettings(msgspec.Struct, frozen=True):
    """The sizes of pieces, and when runs are merged.

    Attributes:
        memory_bytes: the memory for rows not yet in runs, of which there may be two lots (one being
            filled, one being written), and for the indexes of the runs.
        file_bytes: the size of one file of a run. A flush and a merge also buffer this much while they
            write.
        runs_per_level: this many runs of like size are merged into one.
        runs_max: more runs than this are merged whatever their sizes.
        runs_stop: with this many runs a flush waits for the merge.
        merge_bytes: how much a merge handles at a time; best about the size of the processor's cache.
        mapped_bytes: the estimated size of the pages of run files that may stay mapped; beyond it all are
            given back to the page cache. The pages are clean, so the kernel may take them away at any
            time.
        prefetch_faults: a lookup that waits for the disk this many times makes the following lookups
            ask for all their pages at once, before they read, until one finds its pages in memory.
        pool_bytes: files that are no longer needed are kept up to this total size, to be overwritten.
        pool_file_bytes_min: smaller files are deleted at once.
    """

    memory_bytes: int = 256 * MIB
    file_bytes: int = 64 * MIB
    runs_per_level: int = 4
    runs_max: int = 12
    runs_stop: int = 24
    merge_bytes: int = 4 * MIB
    mapped_bytes: int = 1024 * MIB
    prefetch_faults: int = 16
    pool_bytes: int = 256 * MIB
    pool_file_bytes_min: int = 1 * MIB


_open: dict[int, int] = {}
_lock = threading.Lock()


class MemoryShare:
    """An equal part of `total_bytes` for each table that is open in this process with that total."""

    def __init__(self, total_bytes: int) -> None:
        self._total, self._closed = total_bytes, False
        with _lock:
            _open[total_bytes] = _open.get(total_bytes, 0) + 1

    def __call__(self) -> int:
        """Return the bytes that this table may use at the moment."""
        return self._total // max(1, _open[self._total])

    def close(self) -> None:
        """Leave the memory to the other tables. A second call has no effect."""
        with _lock:
            if not self._closed:
                self._closed = True
                _open[self._total] -= 1
