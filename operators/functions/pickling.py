"""Pickles functions by value, with the name of the file that they were written in.

From 3.1.2 on, cloudpickle leaves that name out, so that tracebacks of other processes would name neither
the user's file nor the line.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


class FunctionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, and keeps the names of files."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](obj)
            return _make_code, (make, arguments, obj.co_filename)
        return super().reducer_override(obj)


def dump_function(function: object) -> bytes:
    """Return a function as bytes that `cloudpickle.loads` takes where headgate is installed."""
    buffer = io.BytesIO()
    FunctionPickler(buffer).dump(function)
    return buffer.getvalue()


def _make_code(
    make: Callable[..., CodeType], arguments: tuple[Any, ...], file_name: str
) -> CodeType:
    return make(*arguments).replace(co_filename=file_name)
