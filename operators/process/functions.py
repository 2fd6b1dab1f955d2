"""Base classes for users: functions of keyed records that keep state and set timers."""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, Final, Generic, TypeVar

from ..base import OperatorContext
from .context import BroadcastContext, Context, Timer

K = TypeVar("K")
In = TypeVar("In")
First = TypeVar("First")
Second = TypeVar("Second")
Broadcasted = TypeVar("Broadcasted")
Out = TypeVar("Out")


class ProcessFunction(Generic[K, Out]):
    """The base of all process functions. Each subtask works with a copy of the given instance.

    State is declared in the class body with descriptors (`hg.ValueState` and the others), side
    outputs with `hg.SideOutput`. Attributes set in `__init__` or `open` are configuration, not
    state: they are not in checkpoints. No two methods of one copy ever run at the same time.
    """

    def open(self, ctx: OperatorContext) -> None:
        """Set up the copy: called in each subtask before its first record or timer, also after a
        restore."""

    def on_timer(self, timer: Timer, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle a due timer, with its key and state; return or yield results, if there are any.

        Results have the timer's time as event time. Only functions with this method can set timers.
        """
        raise NotImplementedError

    def finish(self, ctx: BroadcastContext[K]) -> Iterable[Out] | None:
        """Handle the end of the subtask's input, after the last record and timer.

        Return or yield results, if there are any; they have the latest event time of the subtask's
        records. Not called when the job is cancelled, or stopped without `--drain`.
        """

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Note that a checkpoint is durable. Called at most once for each; some are never reported."""

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Note that a checkpoint was aborted; this subtask may not have begun it."""

    def close(self) -> None:
        """Release resources when the subtask ends, also after failures. Must not raise."""


class Process(ProcessFunction[None, Out], Generic[In, Out]):
    """A function of the records of a stream without keys, with state of the subtask: no timers."""

    def on_record(self, record: In, ctx: Context[None]) -> Iterable[Out] | None:
        """Handle one record; return or yield results, if there are any."""
        raise NotImplementedError


class KeyedProcess(ProcessFunction[K, Out], Generic[K, In, Out]):
    """A function of the records of one keyed stream."""

    def on_record(self, record: In, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record; return or yield results, if there are any."""
        raise NotImplementedError


class CoProcess(ProcessFunction[K, Out], Generic[K, First, Second, Out]):
    """A function of the records of two streams.

    Keyed streams share keys, state and timers; others the state of the subtask (`CoProcess[None,
    ...]`).
    """

    def on_first(self, record: First, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record of the stream on which `connect` was called."""
        raise NotImplementedError

    def on_second(self, record: Second, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record of the stream given to `connect`."""
        raise NotImplementedError


class BroadcastProcess(ProcessFunction[K, Out], Generic[K, In, Broadcasted, Out]):
    """A function of keyed records and of records broadcast to all subtasks.

    Without keys it is `BroadcastProcess[None, ...]`. Broadcast state can only be written in
    `on_broadcast` and `open`, because every subtask sees the same broadcast records. If several
    subtasks send them, their order may differ between subtasks.
    """

    def on_record(self, record: In, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one keyed record; broadcast state is read-only here and in `on_timer`."""
        raise NotImplementedError

    def on_broadcast(self, record: Broadcasted, ctx: BroadcastContext[K]) -> Iterable[Out] | None:
        """Handle one broadcast record, in every subtask: each subtask emits its results."""
        raise NotImplementedError


_SETS: Final = ("at", "after")


def sets_clock_timers(function: ProcessFunction[Any, Any]) -> bool:
    """Return whether a method of the function uses `processing_time.at` or `.after`.

    Indirect uses (`getattr`, `super`, helpers outside the class) are not detected: for those the
    timer itself is refused.
    """
    methods = {
        name: value
        for kind in reversed(type(function).__mro__)
        for name, value in vars(kind).items()
    }
    return any(
        here == "processing_time" and next_ in _SETS
        for method in methods.values()
        for code in _codes(getattr(method, "__code__", None))
        for here, next_ in itertools.pairwise(_attributes(code))
    )


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """Yield a function's code and that of nested functions."""
    if code is not None:
        yield code
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)


def _attributes(code: CodeType) -> Iterator[str]:
    """Yield the attribute names in the code, in order."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(step.argval)
