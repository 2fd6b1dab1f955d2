"""What is dropped, and how to keep it: every record or timer that a job lets go is counted here.

An operator subtask has one `Drops`. Records that go to a side output which nobody reads are counted where
they vanish, in the operator's output; everything else that is let go is counted by the operator itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, final

DROPPED_COUNTER: Final = "dropped_records"


class DropKind(StrEnum):
    """Why something was dropped."""

    LATE = "late"
    UNREADABLE = "unreadable"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    UNREAD = "unread"
    TIMERS = "timers"
    OPEN_WINDOWS = "open_windows"
    FEEDBACK = "feedback"


_WHAT: Final[Mapping[str, str]] = {
    DropKind.LATE: "late records",
    DropKind.UNREADABLE: "unreadable records",
    DropKind.FAILED: "records that its function raised for",
    DropKind.TIMED_OUT: "records whose call did not end in time",
    DropKind.UNREAD: "records of side outputs that nothing reads",
    DropKind.TIMERS: "timers by the machine's clock that were not due when the input ended",
    DropKind.OPEN_WINDOWS: "results of windows by the machine's clock that were open when the input ended",
    DropKind.FEEDBACK: "records that came back after the loop had ended",
}
_KEEP: Final[Mapping[str, str]] = {
    DropKind.LATE: "read its stream `.late`, or raise max_out_of_order or allowed_lateness",
    DropKind.UNREADABLE: 'give the source on_bad_record="side_output", and read its stream `.rejected`',
    DropKind.FAILED: 'give the step on_error="side_output", and read its stream `.failed`',
    DropKind.TIMED_OUT: "read its stream `.timed_out`, or give the calls more time with timeout=",
    DropKind.UNREAD: "read these streams, or do not emit to them",
    DropKind.TIMERS: "use timers of event time: all of them fire before a job ends",
    DropKind.OPEN_WINDOWS: "use windows of event time: all of them fire before a job ends",
    DropKind.FEEDBACK: "raise max_rounds, if the loop was not to end there",
}
_SIDES: Final[Mapping[str, DropKind]] = {
    "late": DropKind.LATE,
    "late_other": DropKind.LATE,
    "rejected": DropKind.UNREADABLE,
    "failed": DropKind.FAILED,
    "timed_out": DropKind.TIMED_OUT,
}
"""Side outputs that steps have by themselves; all others are of process functions."""


@final
class Drops:
    """What one operator subtask has dropped since its attempt began, by kind."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[DropKind, int] = {}

    def add(self, kind: DropKind, count: int) -> None:
        """Count `count` records or timers that were just dropped."""
        if count:
            self.counts[kind] = self.counts.get(kind, 0) + count

    def unread(self, side: str, rows: int) -> None:
        """Count records that went to a side output which nothing reads."""
        self.add(_SIDES.get(side, DropKind.UNREAD), rows)

    @property
    def total(self) -> int:
        """Of all kinds. May be read by other threads."""
        return sum(list(self.counts.values()))


def dropped_text(kind: str, count: int) -> str:
    """For example `20,386 late records`. A kind of a newer version is shown by its name."""
    return f"{count:,} {_WHAT.get(kind, f'records ({kind})')}"


def how_to_keep(kind: str) -> str:
    """What a user can do so that this kind is not dropped; empty for a kind of a newer version."""
    return _KEEP.get(kind, "")
