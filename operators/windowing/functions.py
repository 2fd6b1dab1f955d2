"""What users derive from: aggregates of records, and functions of whole windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ...errors import PlanError
from ...state.descriptors import KeyedState
from ..process.context import Context
from ..process.emitter import Emitter
from ..process.functions import ProcessFunction
from .window import GLOBAL, Window

K = TypeVar("K")
In = TypeVar("In")
Acc = TypeVar("Acc")
Out = TypeVar("Out")
Descriptor = TypeVar("Descriptor", bound=KeyedState)


class AggregateFunction(Generic[In, Acc, Out]):
    """Combines records one at a time; a window keeps one accumulator, and no records."""

    def create(self) -> Acc:
        """An empty accumulator."""
        raise NotImplementedError

    def add(self, accumulator: Acc, value: In) -> Acc:
        """The accumulator with one more record; may change and return the one it got."""
        raise NotImplementedError

    def result(self, accumulator: Acc) -> Out:
        """What the accumulator says."""
        raise NotImplementedError

    def merge(self, first: Acc, second: Acc) -> Acc:
        """One accumulator of two; only needed for windows that merge, such as sessions."""
        raise NotImplementedError


class WindowContext(Context[K], Generic[K]):
    """What a `WindowProcess` may know besides the records: see `hg.Context`; there are no timers.

    Attributes:
        window: the window at hand.
    """

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter)
        self.window: Window = GLOBAL


class WindowProcess(ProcessFunction[K, Out], Generic[K, In, Out]):
    """A function of the records of a window, each time it fires.

    State declared in the class body is per key, and the same for all windows of the key;
    `hg.per_window(...)` around a descriptor makes it of the window, and it goes with the window.
    """

    def on_window(
        self, key: K, window: Window, records: list[In], ctx: WindowContext[K]
    ) -> Iterable[Out] | None:
        """Handle what a window holds; return or yield what goes on, if anything.

        Args:
            key: of the records.
            window: its bounds.
            records: in the order they came; behind `reduce` and `aggregate` the one result.
            ctx: clocks and side outputs.
        """
        raise NotImplementedError

    def clear(self, key: K, window: Window, ctx: WindowContext[K]) -> None:
        """The window is gone: clear state per key that is not needed any more."""


def per_window(descriptor: Descriptor) -> Descriptor:
    """Let a state of a `WindowProcess` be of the key and the window, not of the key alone.

    Raises:
        PlanError: not keyed state.
    """
    if not isinstance(descriptor, KeyedState):
        raise PlanError(
            f"per_window needs a keyed state, got `{type(descriptor).__name__}`",
            fix="such as fired = hg.per_window(hg.ValueState[int](default=0))",
        )
    descriptor.per_window = True
    return descriptor
