"""Checks of user functions: plain, coroutine or generator, and whether a step can call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from ...errors import PlanError
from ..origin import Origin


def _either(function: object, is_kind: Callable[[object], bool]) -> bool:
    """Return True if the function itself, or the `__call__` of a callable object, is of the kind."""
    while isinstance(function, partial):
        function = function.func
    return is_kind(function) or is_kind(getattr(function, "__call__", None))  # noqa: B004


def is_async_generator(function: object) -> bool:
    """Return True for `async def` functions that yield, and callables with such a `__call__`."""
    return _either(function, inspect.isasyncgenfunction)


def is_async(function: object) -> bool:
    """Return True for `async def` functions, including those that yield, and such callables."""
    return _either(function, inspect.iscoroutinefunction) or is_async_generator(function)


def check_callable(function: object, kind: str, origin: Origin) -> None:
    """Raise PlanError unless it can be called."""
    if not callable(function):
        raise PlanError(
            f"{kind} needs a function, got `{type(function).__name__}`", where=str(origin)
        )


def check_takes(
    function: Callable[..., Any], what: Sequence[str], kind: str, origin: Origin
) -> None:
    """Raise PlanError if it cannot be called with these arguments, as far as its signature shows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*what)
    except TypeError as error:
        count = "one argument" if len(what) == 1 else f"{len(what)} arguments"
        raise PlanError(
            f"{kind} calls its function with {count}, and this one cannot take that: {error} "
            f"function=`{function_name(function)}({', '.join(signature.parameters)})`",
            where=str(origin),
            fix=f"it is called with: {', '.join(what)}",
        ) from None


def check_plain(function: object, kind: str, origin: Origin) -> None:
    """Raise PlanError unless it is a plain function: a coroutine would not be awaited."""
    check_callable(function, kind, origin)
    if is_async(function):
        raise PlanError(
            f"{kind} needs a plain function, and this one is async "
            f"function=`{function_name(function)}`",
            where=str(origin),
            fix=f"await in an async map before, and let {kind} read its result",
        )


def check_returns(function: object, kind: str, origin: Origin) -> None:
    """Raise PlanError if it yields: `kind` takes one result per record, not a generator object."""
    check_callable(function, kind, origin)
    if is_async_generator(function) or _either(function, inspect.isgeneratorfunction):
        fix = "use return instead of yield"
        raise PlanError(
            f"{kind} needs a function that returns, and this one yields "
            f"function=`{function_name(function)}`",
            where=str(origin),
            fix=f"{fix}, or flat_map instead of map" if kind == "map" else fix,
        )


def function_name(function: object) -> str:
    """Return the name of a function for `explain`."""
    while isinstance(function, partial):
        function = function.func
    return cast(str, getattr(function, "__qualname__", type(function).__name__))
