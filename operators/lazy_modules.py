"""Polars, Arrow's compute functions and its Parquet files, each loaded when it is first used.

The import of Polars is about a fifth of the start of a small job, which may need none of them. Arrow writes
a Python function, with its documentation, for each of its kernels when `pyarrow.compute` is imported, which
is another tenth.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["is_expression", "pc", "pl", "pq"]

_loading = threading.Lock()
_handler_of = ctypes.pythonapi.PyOS_getsig
_handler_of.argtypes, _handler_of.restype = [ctypes.c_int], ctypes.c_void_p
_set_handler = ctypes.pythonapi.PyOS_setsig
_set_handler.argtypes, _set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p


def _polars() -> Any:
    """Return the module Polars, and leave Ctrl-C to the program.

    As it is loaded, Polars takes SIGINT, to end the query that runs with KeyboardInterrupt. A program that
    handles Ctrl-C itself, as `headgate run` does to take a final checkpoint, would end in the middle of it.
    The handler of the process is put back, not that of Python: only the main thread may set that one, and
    any thread of a job may be the first to need Polars.
    """
    with _loading:  # a second thread must not take the handler of Polars for that of the program
        if "polars" in sys.modules or signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return import_module("polars")
        before = ctypes.c_void_p(_handler_of(signal.SIGINT))
        module = import_module("polars")
        _set_handler(signal.SIGINT, before)
        return module


if TYPE_CHECKING:
    import polars as pl
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from typing_extensions import TypeIs
else:

    class _Module:
        """Stands for a module until one of its names is asked for."""

        def __init__(self, load: Callable[[], Any]) -> None:
            self._load = load

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._load(), name)
            setattr(self, name, value)
            return value

    pc = _Module(partial(import_module, "pyarrow.compute"))
    pl = _Module(_polars)
    pq = _Module(partial(import_module, "pyarrow.parquet"))


def is_expression(value: object) -> TypeIs[pl.Expr]:
    """Return whether a value is a Polars expression, without loading Polars where it cannot be one."""
    return "polars" in sys.modules and isinstance(value, pl.Expr)
