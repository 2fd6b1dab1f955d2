"""The types that users' functions declare in their annotations."""

from __future__ import annotations

import inspect
import typing
from functools import partial
from typing import Any, TypeVar


def returned_type(function: object) -> Any:
    """The type that a function is annotated to return; Any if it does not say, or not in a known name."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the method is wanted
    try:
        hint = typing.get_type_hints(function, include_extras=True).get("return", Any)
    except Exception:  # a name that only a type checker knows, or a function written in C
        return Any
    return Any if isinstance(hint, TypeVar) or hint is type(None) else hint
