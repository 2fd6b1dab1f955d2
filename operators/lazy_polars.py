"""Polars, loaded when it is first used: its import takes as long as the rest of a small job's start."""

from __future__ import annotations

import sys
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
            value = getattr(import_module("polars"), name)
            setattr(self, name, value)
            return value

    pl = _Polars()


def is_expression(value: object) -> TypeIs[pl.Expr]:
    """Return whether a value is a Polars expression, without loading Polars where it cannot be one."""
    return "polars" in sys.modules and isinstance(value, pl.Expr)
