"""Counts dropped records and timers by kind, with advice on how to keep them.

An operator subtask has one `Drops`. Records sent to a side output without a consumer are counted in
the operator's output; everything else that is dropped is counted by the operator itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:  # the command line shows drops, and must not wait for Arrow to load
    from .elements import Batch
    from .lost_records import Samples

DROPPED_COUNTER: Final = "dropped_records"


class DropKind(StrEnum):
    """The reason for a drop."""

    LATE = "late"
    UNREADABLE = "unreadable"
    DELETED = "deleted"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    UNREAD = "unread"
    TIMERS = "timers"
    OPEN_WINDOWS = "open_windows"
    FEEDBACK = "feedback"
    REFUSED = "refused"


_WHAT: Final[Mapping[str, str]] = {
    DropKind.LATE: "late records",
    DropKind.UNREADABLE: "unreadable records",
    DropKind.DELETED: "records that were deleted before they were read",
    DropKind.FAILED: "records that its function raised for",
    DropKind.TIMED_OUT: "records whose call timed out",
    DropKind.UNREAD: "records of side outputs that nothing reads",
    DropKind.TIMERS: "processing-time timers that were not due when the input ended",
    DropKind.OPEN_WINDOWS: "results of processing-time windows that were open when the input ended",
    DropKind.FEEDBACK: "records that came back after the loop had ended",
    DropKind.REFUSED: "records that a service refused",
}
_KEEP: Final[Mapping[str, str]] = {
    DropKind.LATE: "read its stream `.late`, or raise max_out_of_order or allowed_lateness",
    DropKind.UNREADABLE: 'give the source on_bad_record="side_output", and read its stream `.rejected`',
    DropKind.DELETED: "keep records for longer where they come from (in Kafka: retention.ms)",
    DropKind.FAILED: 'give the step on_error="side_output", and read its stream `.failed`',
    DropKind.TIMED_OUT: "read its stream `.timed_out`, or give the calls more time with timeout=",
    DropKind.UNREAD: "read these streams, or do not emit to them",
    DropKind.TIMERS: "use event-time timers: all of them fire before a job ends",
    DropKind.OPEN_WINDOWS: "use event-time windows: all of them fire before a job ends",
    DropKind.FEEDBACK: "raise max_rounds, if the loop should go on",
    DropKind.REFUSED: 'give the sink on_refused="dead_letters"',
}
_SIDES: Final[Mapping[str, DropKind]] = {
    "late": DropKind.LATE,
    "late_other": DropKind.LATE,
    "rejected": DropKind.UNREADABLE,
    "failed": DropKind.FAILED,
    "timed_out": DropKind.TIMED_OUT,
}
"""The side outputs of the engine; all others are of process functions."""


@final
class Drops:
    """The drops of one operator subtask since its attempt began, by kind."""

    __slots__ = ("counts", "samples")

    def __init__(self, samples: Samples | None = None) -> None:
        """`samples`: takes some of the dropped records; None: none is looked at."""
        self.counts: dict[DropKind, int] = {}
        self.samples = samples

    def add(self, kind: DropKind, count: int) -> None:
        """Count `count` records or timers that were just dropped."""
        if count:
            self.counts[kind] = self.counts.get(kind, 0) + count

    def unread(self, side: str, batch: Batch, watermark: int) -> None:
        """Count records sent to a side output without a consumer."""
        kind = _SIDES.get(side, DropKind.UNREAD)
        self.add(kind, len(batch))
        if self.samples is not None:
            self.samples.add_rows(kind, batch, watermark=watermark)

    @property
    def total(self) -> int:
        """The number of drops of all kinds. May be read by other threads."""
        return sum(list(self.counts.values()))


def dropped_text(kind: str, count: int) -> str:
    """Format drops, for example `20,386 late records`.

    A kind of a newer version is shown by its name.
    """
    return f"{count:,} {_WHAT.get(kind, f'records ({kind})')}"


def how_to_keep(kind: str) -> str:
    """Return how a user can avoid drops of this kind; empty for a kind of a newer version."""
    return _KEEP.get(kind, "")
