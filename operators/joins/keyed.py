"""The joins of keyed streams, as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...errors import PlanError
from ..durations import Duration
from ..graph import Origin
from ..origin import capture_origin
from ..partitioning import HashColumns, HashFunction
from ..required_name import named
from .plan import Keyed, add_interval_join
from .step import How

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")

_STATE = "its state is stored under this name"


class KeyedJoins(Generic[T]):
    """What a keyed stream can be joined with."""

    _stream: Stream[T]
    _keyed_by: HashColumns | HashFunction

    @named("stateful step", _STATE)
    def join(
        self,
        other: KeyedJoins[Any],
        *,
        within: tuple[Duration, Duration],
        how: How = "inner",
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Pairs of records of equal keys that are near to each other in event time.

        The result has the columns of both, keys of equal names once, and the later of both event times.
        Records that come behind the watermark are in `.late`, those of `other` in `.side("late_other")`.

        Args:
            other: the other keyed stream, of the same job.
            within: from where to where the other record's time may lie, seen from this one's; both count.
                `("-10m", "0s")`: it is up to ten minutes older.
            how: `inner`; `left`, `right` or `full`: also records that met none, with nulls for the other,
                once event time says that none will come.
            suffix: appended to columns of `other` whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        left, right = self._as_input(), other_input(other, "join", origin)
        return add_interval_join(left, right, within, how, name, suffix, origin)

    def _as_input(self) -> Keyed:
        return self._stream, self._keyed_by


def other_input(other: object, what: str, origin: Origin) -> Keyed:
    """The second stream of a join.

    Raises:
        PlanError: it is not keyed.
    """
    if isinstance(other, KeyedJoins):
        return other._as_input()
    raise PlanError(
        f"{what} needs a keyed stream, got `{type(other).__name__}`",
        where=str(origin),
        fix="call .key_by(...) on it",
    )
