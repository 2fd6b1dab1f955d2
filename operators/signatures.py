"""Functions that pass keyword arguments on to another function, which declares and documents them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def signature_with(
    function: Callable[..., object], options: type[Any], general: Callable[..., object]
) -> inspect.Signature:
    """Return the signature of a function, with each argument in place of its `**options`.

    Args:
        function: has `**options: Unpack[...]`.
        options: the TypedDict of these arguments.
        general: the function that declares them, with their defaults.
    """
    own, declared = inspect.signature(function), inspect.signature(general).parameters
    fixed = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    further = [declared[name] for name in declared if name in options.__annotations__]
    return own.replace(parameters=[*fixed, *further])


def passes_on(
    options: type[Any], general: Callable[..., object]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function with `**options: Unpack[...]` look, and be checked, as if it declared each of them.

    Args:
        options: the TypedDict of these arguments.
        general: the function that declares them, with their defaults.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = signature_with(function, options, general)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate
