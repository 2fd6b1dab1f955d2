"""Settings of the processes that Ray makes: memory and threads, their console, and SIGTERM.

Ray keeps its workers' output in files. On an embedded Ray, workers write to a named pipe instead, and a
thread of the process that runs the job passes lines on: prints of user code and of the print sink, log
lines of operators. A full pipe makes the writer wait, so nothing is lost and nothing piles up.

By default SIGTERM has no effect on a process that Ray has made. The main thread waits in native code for
calls, so that a handler in Python never runs, and Ray's is one. Python sets handlers from the main thread
only, and Ray makes actors in any: so `on_sigterm` asks the C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

import pyarrow as pa

SWITCH_INTERVAL_S: Final = 0.0005
"""After this time a function that computes lets another thread have the interpreter's lock.

A thread gives the lock away at each system call, and beside such a function waits this long to get it
back: with Python's 5 ms, a read of a file in twenty calls takes 0.1 s. Heartbeats, uploads of snapshots and
answers to queries wait as well. Where no other thread waits for the lock, nothing changes."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
STREAMS = ("stdout", "stderr")
_END = b"\0headgate console end\0\n"


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


@contextlib.contextmanager
def console(directory: str) -> Iterator[str]:
    """Pass on what arrives in the pipes of `directory` for the time of the block; yields their stem."""
    stem = stem_in(directory)
    pumps = [_Pump(f"{stem}.{name}", getattr(sys, name)) for name in STREAMS]
    try:
        yield stem
    finally:
        for pump in pumps:
            pump.close()


def stem_in(directory: str) -> str:
    """Return the common beginning of the names of the pipes in this directory."""
    return str(Path(directory) / "console")


def attach(stem: str) -> None:
    """Send this process's stdout and stderr to the pipes at `stem`, if they have a reader."""
    for name, descriptor in zip(STREAMS, (1, 2), strict=True):
        try:
            pipe = os.open(f"{stem}.{name}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue  # the reader is gone, or this is another machine
        os.set_blocking(pipe, True)
        os.dup2(pipe, descriptor)
        os.close(pipe)
        stream = os.fdopen(os.dup(descriptor), "w", buffering=1, errors="replace")
        setattr(sys, name, stream)


class _Pump:
    """Reads one pipe in a thread and writes whole lines to a stream."""

    def __init__(self, path: str, stream: TextIO) -> None:
        os.mkfifo(path, 0o600)
        # Open for writing too: the pipe does not end when the last worker leaves.
        self._descriptor = os.open(path, os.O_RDWR)
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name=f"console {path}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as pipe:
            for line in pipe:
                last = line.endswith(_END)  # behind the half line of a worker that was killed
                # Even without a reader the pipe must be emptied: workers wait for it.
                with contextlib.suppress(OSError, ValueError):
                    self._stream.write(line.removesuffix(_END).decode(errors="replace"))
                    self._stream.flush()
                if last:
                    return

    def close(self) -> None:
        """Pass on what is there, then stop."""
        os.write(self._descriptor, _END)
        self._thread.join(timeout=5.0)
        os.close(self._descriptor)


def die_of_sigterm() -> None:
    """Make SIGTERM end this process at once, as a crash would."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, int(signal.SIG_DFL))


def on_sigterm(leave: Callable[[], None]) -> None:
    """Make SIGTERM call `leave`, in a thread of its own; a second one ends the process at once.

    `faulthandler` has the only handler of Python's that works in native code and may be set in any thread:
    it writes to a file. Here that is a pipe, and what comes out of it is a signal.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)  # what does not fit is not needed, and the handler must not wait
    faulthandler.register(signal.SIGTERM, file=theirs, all_threads=True, chain=False)

    def wait() -> None:
        if os.read(ours, 1):
            faulthandler.unregister(signal.SIGTERM)
            die_of_sigterm()
            leave()

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()
