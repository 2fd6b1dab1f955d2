"""Base classes for users: aggregates of records, and functions of whole windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ....errors import PlanError
from ....state.keyed.descriptors import KeyedState
from ...process.context import Context
from ...process.emitter import Emitter
from ...process.functions import ProcessFunction
from .window import GLOBAL, Window

K = TypeVar("K")
In = TypeVar("In")
Acc = TypeVar("Acc")
Out = TypeVar("Out")
Descriptor = TypeVar("Descriptor", bound=KeyedState)


class AggregateFunction(Generic[In, Acc, Out]):
    """Combines records one at a time; a window keeps one accumulator, and no records."""

    def create(self) -> Acc:
        """Return an empty accumulator."""
        raise NotImplementedError

    def add(self, accumulator: Acc, value: In) -> Acc:
        """Return the accumulator with one more record; the argument may be changed and returned."""
        raise NotImplementedError

    def result(self, accumulator: Acc) -> Out:
        """Return the result of the accumulator."""
        raise NotImplementedError

    def merge(self, first: Acc, second: Acc) -> Acc:
        """Merge two accumulators into one; only needed for windows that merge, such as sessions."""
        raise NotImplementedError


class WindowContext(Context[K], Generic[K]):
    """The context of a `WindowProcess`: an `hg.Context` without timers.

    Attributes:
        window: the window that fires.
    """

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter)
        self.window: Window = GLOBAL


class WindowProcess(ProcessFunction[K, Out], Generic[K, In, Out]):
    """A function that is called with the records of a window each time it fires.

    State declared in the class body belongs to the key and is shared by all windows of the key.
    `hg.per_window(...)` around a descriptor makes it belong to the window, and it is cleared with
    the window.
    """

    def on_window(
        self, key: K, window: Window, records: list[In], ctx: WindowContext[K]
    ) -> Iterable[Out] | None:
        """Handle the contents of a window; return or yield results, if there are any.

        Args:
            key: the key of the records.
            window: the bounds of the window.
            records: in order of arrival; after `reduce` and `aggregate` the single result.
            ctx: clocks and side outputs.
        """
        raise NotImplementedError

    def clear(self, key: K, window: Window, ctx: WindowContext[K]) -> None:
        """Clear state of the key that is no longer needed, because the window is cleared."""


def per_window(descriptor: Descriptor) -> Descriptor:
    """Make a state of a `WindowProcess` belong to the key and the window, not to the key alone.

    Raises:
        PlanError: the descriptor is not one of keyed state.
    """
    if not isinstance(descriptor, KeyedState):
        raise PlanError(
            f"per_window needs a keyed state, got `{type(descriptor).__name__}`",
            fix="such as fired = hg.per_window(hg.ValueState[int](default=0))",
        )
    descriptor.per_window = True
    return descriptor
