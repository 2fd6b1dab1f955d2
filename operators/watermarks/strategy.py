"""WatermarkStrategy: the rule by which watermarks follow from event times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

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
