"""The report on subtasks that a worker sends every second; part of the message `Statistics`."""

from __future__ import annotations

import msgspec

from ...operators.splits import History
from ..protocol.backpressure import HotGroup, WaitsFor
from ..protocol.drops import Dropped


class StepTime(msgspec.Struct, frozen=True):
    """Event time of one `event_time` step in one subtask; see `EventTimeStatus`."""

    step: str
    watermark: int
    idle: bool
    held_ms: int
    split: str
    queued: bool
    splits: int
    idle_splits: int
    queued_splits: int
    paused_splits: int


class SubtaskStatistics(msgspec.Struct, frozen=True):
    """Counters of one subtask since the attempt began, and rates over the last second."""

    vertex: int
    index: int
    records_in: int
    records_out: int
    busy_ms_per_second: int
    idle_ms_per_second: int
    backpressured_ms_per_second: int
    watermark: int
    records_written: int = 0
    """Records that the sinks in this subtask took."""
    times: tuple[StepTime, ...] = ()
    """The times of its event-time steps."""
    waits_for: WaitsFor = WaitsFor.NOTHING
    """At the moment."""
    queued: int = 0
    """Buffers that wait in front of it."""
    hot_groups: tuple[HotGroup, ...] = ()
    """Where most of what it sends goes, by exchange; only while it is backpressured."""
    history: History = History.NONE
    """Where its reader stands."""
    dropped: tuple[Dropped, ...] = ()
    """By its steps."""
    full_ms_per_second: int = 0
    """It had as many calls under way as it may."""
    committed: int = 0
    """The newest checkpoint whose output is visible, as far as it is of this subtask."""
