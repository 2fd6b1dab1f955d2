"""The bounds of a set of runs, each with its unit."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The sizes of pieces, and when runs are merged.

    Attributes:
        memory_bytes: for rows not yet in runs, of which there may be two lots (one being filled, one
            being written), and for the indexes of the runs.
        file_bytes: size of one file of a run. Also what a flush, and a merge, buffer while they write.
        runs_per_level: this many runs of like size are merged into one.
        runs_max: more runs than this are merged whatever their sizes.
        runs_stop: so many runs make a flush wait for the merge.
        merge_bytes: rows that a merge handles at a time; best about the size of the processor's cache.
        mapped_bytes: pages of run files that may stay mapped, by estimate; beyond it all are given back
            to the page cache. They are clean: the kernel may take them away at any time.
        prefetch_faults: a lookup that waits for the disk this many times makes the following lookups
            ask for all their pages at once, before they read, until one finds its pages in memory.
        pool_bytes: files that are not needed any more are kept, to be written over, up to this size.
        pool_file_bytes_min: smaller ones are deleted.
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
