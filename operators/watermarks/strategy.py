"""The settings of an event-time step, most of all the rule by which watermarks follow from event times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import msgspec

from ...errors import PlanError
from ..durations import Duration, format_duration, parse_duration
from ..functions.checks import check_plain, function_name
from ..origin import capture_origin
from .generators import BoundedGenerator, WatermarkGenerator


@final
@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """A rule for watermarks; made by one of its three class methods.

    Attributes:
        make: makes the generator of one split.
        text: the rule in a few words, for `explain`.
    """

    make: Callable[[], WatermarkGenerator]
    text: str

    @classmethod
    def monotonous(cls) -> WatermarkStrategy:
        """Return the rule for splits in order of event time: watermarks follow the latest time."""
        return bounded_by(0)

    @classmethod
    def bounded(cls, max_out_of_order: Duration) -> WatermarkStrategy:
        """Return the rule for records that are at most this far behind the latest time of their split.

        Raises:
            UsageError: not a duration.
        """
        where = str(capture_origin())
        return bounded_by(parse_duration(max_out_of_order, "max_out_of_order", where))

    @classmethod
    def custom(cls, make: Callable[[], WatermarkGenerator]) -> WatermarkStrategy:
        """Return a rule of your own.

        Args:
            make: makes a generator, one for each split; a subclass of `WatermarkGenerator`
                qualifies.

        Raises:
            PlanError: `make` cannot be called, or is a generator instead of a function that makes
                one.
        """
        origin = capture_origin()
        if isinstance(make, WatermarkGenerator):
            raise PlanError(
                f"custom needs a function that makes generators type=`{type(make).__name__}`",
                where=str(origin),
                fix=f"each split needs its own: custom({type(make).__name__})",
            )
        check_plain(make, "custom", origin)
        return cls(make, f"by {function_name(make)}")


def bounded_by(bound_ms: int) -> WatermarkStrategy:
    """Return the rule for records at most `bound_ms` behind the latest time seen."""
    text = f"at most {format_duration(bound_ms)} out of order" if bound_ms else "in order"
    return WatermarkStrategy(partial(BoundedGenerator, bound_ms), text)


ALIGN_EVERY_MS: Final = 1_000


@final
class WatermarkAlignmentGroup(msgspec.Struct, frozen=True):
    """Sources that wait for each other.

    Attributes:
        group: the steps with this name wait for each other.
        max_drift_ms: how far a split's watermark may be ahead of the slowest subtask's.
        every_ms: how often each subtask reports its progress.
    """

    group: str
    max_drift_ms: int
    every_ms: int = ALIGN_EVERY_MS

    @property
    def text(self) -> str:
        """Describe the alignment for `explain`."""
        return f"aligned with group {self.group} to {format_duration(self.max_drift_ms)}"


@final
class WatermarkSettings(msgspec.Struct, frozen=True):
    """The settings of the watermarks of a step.

    Attributes:
        idle_after_ms: time without records after which a split, or the subtask, is idle; None:
            never.
        close_after_ms: time without records after which the watermark follows the clock; None:
            never.
        per_split: a generator for each split of the source, not one for all.
        wait_for_queued: splits that the reader has not reached hold the watermark back as well.
        waits_by_default: `wait_for_queued` is a default: it has no effect where it is not
            supported.
    """

    strategy: WatermarkStrategy
    idle_after_ms: int | None = None
    close_after_ms: int | None = None
    per_split: bool = True
    alignment: WatermarkAlignmentGroup | None = None
    wait_for_queued: bool = False
    waits_by_default: bool = False

    @property
    def beside_source(self) -> bool:
        """True if it needs what only its source's subtask knows: the split of a record, or who waits."""
        return self.per_split or self.alignment is not None

    @property
    def text(self) -> str:
        """Describe the settings for `explain`."""
        parts = [self.strategy.text]
        if self.idle_after_ms is not None:
            parts.append(f"idle after {format_duration(self.idle_after_ms)}")
        if self.close_after_ms is not None:
            parts.append(f"by the clock after {format_duration(self.close_after_ms)} of silence")
        if self.wait_for_queued:
            parts.append("waiting for queued splits")
        if self.alignment is not None:
            parts.append(self.alignment.text)
        return ", ".join(parts)
