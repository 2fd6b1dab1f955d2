"""Polars, loaded when it is first used: its import takes as long as the rest of a small job's start."""

from __future__ import annotations

import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["is_expression", "pl"]

if TYPE_CHECKING:
    import polars as pl
    from typing_extensions import TypeIs
else:

    class _Polars:
        """Stands for the module until one of its names is asked for."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(_loaded(), name)
            setattr(self, name, value)
            return value

    pl = _Polars()


def _loaded() -> Any:
    """Return the module Polars, and leave Ctrl-C to whom it belongs.

    As it is loaded, Polars takes SIGINT, to end the query that runs with KeyboardInterrupt. A program that
    handles Ctrl-C itself, as `headgate run` does to take a final checkpoint, would end in the middle of it.
    """
    if "polars" in sys.modules:
        return import_module("polars")
    module = import_module("polars")
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
        if handler is not None and handler is not signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)
    return module


def is_expression(value: object) -> TypeIs[pl.Expr]:
    """Return whether a value is a Polars expression, without loading Polars where it cannot be one."""
    return "polars" in sys.modules and isinstance(value, pl.Expr)
