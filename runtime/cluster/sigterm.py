"""SIGTERM in a process that Ray has made: by default it has no effect.

The main thread waits in native code for calls, so that a handler in Python never runs, and Ray's is one.
Python sets handlers from the main thread only, and Ray makes actors in any: so this asks the C library.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable


def die_of_sigterm() -> None:
    """From now on SIGTERM ends this process at once, as a crash would."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, int(signal.SIG_DFL))


def on_sigterm(leave: Callable[[], None]) -> None:
    """From now on SIGTERM calls `leave`, in a thread of its own; a second one ends the process at once.

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
