"""What worker processes print, brought to the terminal of the job.

Ray keeps its workers' output in files. On an embedded Ray, workers write to a named pipe instead, and a
thread of the process that runs the job passes lines on: prints of user code and of the print sink, log
lines of operators. A full pipe makes the writer wait, so nothing is lost and nothing piles up.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

STREAMS = ("stdout", "stderr")
_END = b"\0headgate console end\0\n"


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
    """What the names of the pipes in this directory begin with."""
    return str(Path(directory) / "console")


def attach(stem: str) -> None:
    """Send this process's stdout and stderr to the pipes at `stem`, if somebody reads them."""
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
                # If nobody reads us any more the pipe must be emptied all the same: workers wait for it.
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
