"""Arrow's compute functions and its Parquet files, each loaded when it is first used.

Arrow writes a Python function, with its documentation, for each of its kernels when `pyarrow.compute` is
imported. That takes a tenth of the start of a small job, which may need neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["pc", "pq"]

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:

    class _Module:
        """Stands for a module until one of its names is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self._name), name)
            setattr(self, name, value)
            return value

    pc = _Module("pyarrow.compute")
    pq = _Module("pyarrow.parquet")
