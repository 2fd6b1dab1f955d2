"""The settings of backends of keyed state, from the options."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RocksDBSettings:
    """The bounds of the RocksDB backend.

    Attributes:
        memory_bytes: shared by all databases of the process with the same budget.
        write_buffer_ratio: the part of it for data not yet written to files.
        write_buffer_bytes: data of one state that is collected before it becomes a file.
        write_buffers: so many of them, the one being filled included, before writes wait.
        threads: that write and merge files in the background, of the process.
        open_files: that one state keeps open.
        block_bytes: what is read at a time.
    """

    memory_bytes: int = 256 * _MIB
    write_buffer_ratio: float = 0.5
    write_buffer_bytes: int = 64 * _MIB
    write_buffers: int = 2
    threads: int = 2
    open_files: int = 512
    block_bytes: int = 4096
