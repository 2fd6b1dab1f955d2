"""State that clients read as of the newest complete checkpoint, while it goes on changing.

A state that is declared so keeps *old values*. Each cut of a checkpoint opens a *point*, and whatever
changes for the first time after it leaves its old value there. The value as of a checkpoint is the one in
the first point from that of the checkpoint on that has an entry for it; if none has, it has not changed,
and the present value is the answer. A point is dropped once a later checkpoint is complete. If its own
checkpoint is aborted, its entries move to the point before, which still needs them.

Only the caller knows which checkpoint is complete; a point that is not here gives no answer, and never
that of another checkpoint.

A scan reads a state piece by piece, while checkpoints complete. It *holds* its point, which is then kept
until the scan is over, or until the old values are too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, Self, TypeVar, final

import msgspec

OLD_VALUES_MAX_OPTION: Final = "headgate.queries.committed-max"
OLD_VALUES_MAX: Final = 256 << 20
"""How many bytes of old values one state of one subtask keeps, unless the option says otherwise."""
_ENTRY_BYTES: Final = 150
"""Roughly the memory of a key and of its entry in a dictionary."""


@final
class Queryable(msgspec.Struct, frozen=True):
    """The declaration of a state that clients outside the job read by key, as `queryable=`.

    Args:
        name: the name that clients use, unique in the job.
        committed: clients may also read it as of the newest complete checkpoint. Each key that changes
            after a checkpoint then keeps its old value until the next one is complete.
    """

    name: str
    committed: bool = False


class NotKept(Exception):
    """The old values of a checkpoint are not here, or no longer."""


def once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes a call when it is first called."""
    left = [call]
    return lambda: left.pop()() if left else None


@final
class KeyScan(msgspec.Struct, frozen=True):
    """The keys of a state, for a scan.

    Attributes:
        pieces: the keys in pieces that are cheap to make. At the level of a checkpoint, each key that had
            a value at it comes once; of others, those that come or go meanwhile may come or not.
        close: ends the scan; may be repeated.
    """

    pieces: Iterator[Sequence[Any]]
    close: Callable[[], None]


class OldValues(Protocol):
    """The old values of what has changed since one cut."""

    @property
    def nbytes(self) -> int:
        """Roughly the memory that they take."""
        ...

    def absorb(self, later: Self) -> None:
        """Take over the entries of the next point, except those that this one has, too."""
        ...


V = TypeVar("V", bound=OldValues)


@dataclass(slots=True)
class _Point(Generic[V]):
    """One cut: the checkpoint it belongs to, and what has changed since."""

    checkpoint_id: int
    old: V


class CommittedPoints(Generic[V]):
    """The points of one state of one subtask, oldest first.

    Attributes:
        newest: where a writer must leave the old value of what it changes; None: nothing is kept.

    Args:
        new: makes an empty set of old values.
        bytes_max: with more, nothing is kept until the next cut.
        drop: called with old values that nobody will ask for any more.
    """

    def __init__(
        self, new: Callable[[], V], bytes_max: int, drop: Callable[[V], None] = lambda _: None
    ) -> None:
        self.newest: V | None = None
        self._new = new
        self._bytes_max = bytes_max
        self._drop = drop
        self._points: list[_Point[V]] = []
        self._held: Counter[int] = Counter()
        self._completed = 0

    def restored(self, checkpoint_id: int) -> None:
        """Note that the state as it is now is that of a checkpoint."""
        self._drop_all()
        self._held.clear()
        self._completed = checkpoint_id
        self.cut(checkpoint_id)

    def cut(self, checkpoint_id: int) -> None:
        """Note that the state as it is now is the one that a checkpoint will have."""
        self.newest = self._new()
        self._points.append(_Point(checkpoint_id, self.newest))

    def completed(self, checkpoint_id: int) -> None:
        """Drop what only older checkpoints need: this one is complete. May be repeated."""
        self._completed = max(self._completed, checkpoint_id)
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        """Drop points before the newest complete checkpoint; of held ones, keep what they need."""
        kept: list[_Point[V]] = []
        for point in self._points:
            if point.checkpoint_id >= self._completed or self._held[point.checkpoint_id]:
                kept.append(point)
            else:
                if kept:
                    kept[-1].old.absorb(point.old)
                self._drop(point.old)
        self._points = kept
        self._find_newest()

    def hold(self, checkpoint_id: int) -> None:
        """Keep the point of a checkpoint until `release`, also when a later one is complete.

        Raises:
            NotKept: it is not here.
        """
        self.since(checkpoint_id)
        self._held[checkpoint_id] += 1

    def release(self, checkpoint_id: int) -> None:
        """End one `hold`."""
        if self._held[checkpoint_id]:
            self._held[checkpoint_id] -= 1
            self._drop_unneeded()

    def aborted(self, checkpoint_id: int) -> None:
        """Join a point to the one before: its checkpoint will never be complete. May be repeated."""
        for place, point in enumerate(self._points):
            if point.checkpoint_id == checkpoint_id:
                if place:
                    self._points[place - 1].old.absorb(point.old)
                del self._points[place]
                self._drop(point.old)
                break
        self._find_newest()

    def since(self, checkpoint_id: int) -> Sequence[V]:
        """Return the old values since the cut of a checkpoint; the first that has an entry counts.

        Raises:
            NotKept: they are not here.
        """
        for place, point in enumerate(self._points):
            if point.checkpoint_id == checkpoint_id:
                return [each.old for each in self._points[place:]]
        raise NotKept

    def grew(self) -> None:
        """Note that a writer has left old values. If they are too many, those that only scans hold are
        dropped, and then all.
        """
        while sum(point.old.nbytes for point in self._points) > self._bytes_max:
            if len(self._points) > 1 and self._points[0].checkpoint_id < self._completed:
                self._drop(self._points.pop(0).old)
            else:
                self._drop_all()
                self.newest = None

    @property
    def checkpoints(self) -> frozenset[int]:
        """The checkpoints that have a point."""
        return frozenset(point.checkpoint_id for point in self._points)

    def take_all(self) -> dict[int, V]:
        """Return the old values since each cut, by the checkpoint, and drop them here."""
        taken = {point.checkpoint_id: point.old for point in self._points}
        self._drop_all()
        self.newest = None
        return taken

    def _drop_all(self) -> None:
        dropped, self._points = self._points, []
        for point in dropped:
            self._drop(point.old)

    def _find_newest(self) -> None:
        self.newest = self._points[-1].old if self._points else None


class OldByKey:
    """Old values by key. A value is in the form in which it is held.

    Attributes:
        gone: keys of which something was removed, which may be in the state no more.
    """

    __slots__ = ("gone", "nbytes", "values")

    def __init__(self) -> None:
        self.nbytes = 0
        self.gone: set[Hashable] = set()
        self.values: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, value: Any) -> None:
        """Add the old value of a key that has none here."""
        self.values[key] = value
        self.nbytes += _ENTRY_BYTES + held_bytes(value)

    def absorb(self, later: OldByKey) -> None:
        """See `OldValues`."""
        for key, value in later.values.items():
            if key not in self.values:
                self.keep(key, value)
        self.gone |= later.gone


class OldEntries:
    """Old values of the entries of each key, as `OldByKey` has those of keys."""

    __slots__ = ("gone", "nbytes", "values")

    def __init__(self) -> None:
        self.nbytes = 0
        self.gone: set[Hashable] = set()
        self.values: dict[Hashable, dict[Hashable, Any]] = {}

    def keep(self, key: Hashable, entry: Hashable, value: Any) -> None:
        """Add the old value of an entry that has none here."""
        self.values.setdefault(key, {})[entry] = value
        self.nbytes += _ENTRY_BYTES + held_bytes(value)

    def absorb(self, later: OldEntries) -> None:
        """See `OldValues`."""
        for key, entries in later.values.items():
            mine = self.values.get(key, {})
            for entry, value in entries.items():
                if entry not in mine:
                    self.keep(key, entry, value)
        self.gone |= later.gone


def held_bytes(value: Any) -> int:
    """Return roughly how many bytes a held value takes beside its entry."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, tuple):
        return 16 + sum(8 + held_bytes(each) for each in value)
    return 16
