"""Function objects with a life: `open` before the first record, `close` at the end, a copy per subtask."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from ..errors import HeadgateError, PlanError
from .base import Operator, OperatorContext, OperatorFactory
from .functions import is_async
from .graph import Origin
from .user_code import FAILURES, user_error

_NO_OBJECTS = (type, FunctionType, BuiltinFunctionType, MethodType)


class FunctionLife:
    """The life of one subtask's copy of a function object."""

    def __init__(self, function: Any, step: str, origin: Origin) -> None:
        self._function, self._step, self._origin = function, step, origin
        self._opened = False

    async def open(self, context: OperatorContext) -> None:
        """Call its `open(ctx)`, and await it if it is a coroutine function.

        Raises:
            UserCodeError: it raised.
        """
        await self._call("open", context)
        self._opened = True

    async def close(self) -> None:
        """Call its `close()`, once and only if it was opened.

        Raises:
            UserCodeError: it raised.
        """
        if self._opened:
            self._opened = False
            await self._call("close")

    async def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self._function, name, None)
        if method is None:
            return
        try:
            waiting = method(*arguments)
            if inspect.isawaitable(waiting):
                await waiting
        except HeadgateError:
            raise
        except FAILURES as error:
            raise user_error(self._step, self._origin, None, error) from error


class OwnFunction:
    """A factory of operators, each with its own copy of the step's function object."""

    def __init__(self, factory: OperatorFactory, function: Any, step: str, origin: Origin) -> None:
        self._factory, self._function = factory, function
        self._step, self._origin = step, origin

    def __call__(self) -> Operator:
        # One copy of both: the function inside the factory is the one that is opened.
        factory, function = copy.deepcopy((self._factory, self._function))
        operator: Operator = factory()
        operator.function_life = FunctionLife(function, self._step, self._origin)
        return operator


def has_life(function: object) -> bool:
    """True for function objects with an `open` or a `close`."""
    if isinstance(function, _NO_OBJECTS):
        return False
    return any(callable(getattr(function, name, None)) for name in ("open", "close"))


def with_life(
    factory: OperatorFactory, function: object, step: str, origin: Origin
) -> OperatorFactory:
    """`factory`, with a copy of its function per subtask if that is an object with `open` or `close`.

    Raises:
        PlanError: its `open` does not take one argument, or its `close` takes any.
    """
    while isinstance(function, partial):
        function = function.func
    if not has_life(function):
        return factory
    check_life(function, origin)
    return OwnFunction(factory, function, step, origin)


def check_life(function: object, origin: Origin, *, may_await: bool = True) -> None:
    """Raise PlanError if `open` or `close` cannot be called as they will be."""
    for name, arguments in (("open", (None,)), ("close", ())):
        method = getattr(function, name, None)
        if method is None:
            continue
        if not may_await and is_async(method):
            raise PlanError(
                f"{name} of `{type(function).__name__}` is a coroutine function, which nothing awaits here",
                where=str(origin),
                fix="make it a plain function",
            )
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise PlanError(
                f"{name} of `{type(function).__name__}` cannot be called: {error}",
                where=str(origin),
                fix="write def open(self, ctx), with the context of the subtask, and def close(self)",
            ) from None
