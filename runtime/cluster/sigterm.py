"""SIGTERM in a process that Ray has made: by default it has no effect.

The main thread waits in native code for calls, so that a handler in Python never runs, and Ray's is one.
Python sets handlers from the main thread only, and Ray makes actors in any: so this asks the C library.
"""

from __future__ import annotations

import ctypes
import signal


def die_of_sigterm() -> None:
    """From now on SIGTERM ends this process at once, as a crash would."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, int(signal.SIG_DFL))
