"""What users derive from: functions of keyed records that keep state and set timers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ..base import OperatorContext
from .context import BroadcastContext, Context, Timer

K = TypeVar("K")
In = TypeVar("In")
First = TypeVar("First")
Second = TypeVar("Second")
Broadcasted = TypeVar("Broadcasted")
Out = TypeVar("Out")


class ProcessFunction(Generic[K, Out]):
    """What all process functions share. Each subtask works with a copy of the instance given.

    State is declared in the class body with descriptors (`hg.ValueState` and the others), side outputs
    with `hg.SideOutput`. Attributes set in `__init__` or `open` are configuration, not state: they are
    not in checkpoints. No two methods of one copy ever run at the same time.
    """

    def open(self, ctx: OperatorContext) -> None:
        """Called in each subtask before its first record or timer, after a restore too."""

    def on_timer(self, timer: Timer, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle a timer that is due, with its key and state; return or yield what goes on, if anything.

        Results have the timer's time as event time. Only functions with this method can set timers.
        """
        raise NotImplementedError

    def finish(self, ctx: BroadcastContext[K]) -> Iterable[Out] | None:
        """Called in each subtask at the end of its input, behind the last record and timer.

        Return or yield what goes on, if anything; it has the latest event time of the subtask's records.
        Not called when the job is cancelled, or stopped without `--drain`.
        """

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """A checkpoint with this subtask's state is durable. At most once for each; some are never told."""

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will never complete; this subtask may not have begun with it."""

    def close(self) -> None:
        """Called when the subtask ends, also after failures. Must not raise."""


class Process(ProcessFunction[None, Out], Generic[In, Out]):
    """A function of the records of a stream without keys, with state of the subtask: no timers."""

    def on_record(self, record: In, ctx: Context[None]) -> Iterable[Out] | None:
        """Handle one record; return or yield what goes on, if anything."""
        raise NotImplementedError


class KeyedProcess(ProcessFunction[K, Out], Generic[K, In, Out]):
    """A function of the records of one keyed stream."""

    def on_record(self, record: In, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record; return or yield what goes on, if anything."""
        raise NotImplementedError


class CoProcess(ProcessFunction[K, Out], Generic[K, First, Second, Out]):
    """A function of the records of two streams: keyed, they share keys, state and timers; else
    the state of the subtask (`CoProcess[None, ...]`)."""

    def on_first(self, record: First, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record of the stream on which `connect` was called."""
        raise NotImplementedError

    def on_second(self, record: Second, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record of the stream given to `connect`."""
        raise NotImplementedError


class BroadcastProcess(ProcessFunction[K, Out], Generic[K, In, Broadcasted, Out]):
    """A function of keyed records, and of records that all subtasks get; or of records without a key
    (`BroadcastProcess[None, ...]`).

    Broadcast state can be written in `on_broadcast` (and `open`) only, where every subtask sees the same
    records; they may come in another order in each, if they are sent by several subtasks.
    """

    def on_record(self, record: In, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one keyed record; broadcast state is read-only here, and in `on_timer`."""
        raise NotImplementedError

    def on_broadcast(self, record: Broadcasted, ctx: BroadcastContext[K]) -> Iterable[Out] | None:
        """Handle one broadcast record, in every subtask: what it returns goes on once for each."""
        raise NotImplementedError
