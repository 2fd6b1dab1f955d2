"""Settings of a worker process: for columnar work, and for threads beside user code that computes."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import os
import sys
from typing import Final

import pyarrow as pa

SWITCH_INTERVAL_S: Final = 0.0005
"""After this time a function that computes lets another thread have the interpreter's lock.

A thread gives the lock away at each system call, and beside such a function waits this long to get it
back: with Python's 5 ms, a read of a file in twenty calls takes 0.1 s. Heartbeats, uploads of snapshots and
answers to queries wait as well. Where no other thread waits for the lock, nothing changes."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_process() -> None:
    """Keep freed memory, collect garbage rarely, and let threads in more often (`SWITCH_INTERVAL_S`).

    Measured: numpy temporaries of some MB cost more in page faults than in work (1.8x on hashing
    64k strings), and turning rows into columns triggers full collections (1.4-5x). A running count per
    key in a Python function lost a third of its speed to collections at a threshold of 50,000. Arrow's
    own allocator gives pages back after milliseconds: joining 2 MiB of keys took up to 36 ms, all of it
    page faults, and under a millisecond with that of the C library.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    libc = ctypes.util.find_library("c")
    if libc is not None:
        mallopt = getattr(ctypes.CDLL(libc), "mallopt", None)
        if mallopt is not None:  # glibc only
            mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            mallopt(_M_TRIM_THRESHOLD, 512 << 20)
            pa.set_memory_pool(pa.system_memory_pool())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(500_000, 20, 100)
