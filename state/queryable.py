"""State that clients read as of the newest complete checkpoint, while it goes on changing.

A state that is declared so keeps *old values*. Each cut of a checkpoint opens a *point*, and whatever
changes for the first time after it leaves its old value there. The value as of a checkpoint is the one in
the first point from that of the checkpoint on that has an entry for it; if none has, it has not changed,
and the present value is the answer. A point is dropped once a later checkpoint is complete. If its own
checkpoint is aborted, its entries move to the point before, which still needs them.

Only the caller knows which checkpoint is complete; a point that is not here gives no answer, and never
that of another checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, Self, TypeVar, final

OLD_VALUES_MAX_OPTION: Final = "headgate.queries.committed-max"
OLD_VALUES_MAX: Final = 256 << 20
"""How many bytes of old values one state of one subtask keeps, unless the option says otherwise."""
_ENTRY_BYTES: Final = 150
"""Roughly the memory of a key and of its entry in a dictionary."""


@final
@dataclass(frozen=True)
class Queryable:
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
    """

    def __init__(self, new: Callable[[], V], bytes_max: int) -> None:
        self.newest: V | None = None
        self._new = new
        self._bytes_max = bytes_max
        self._points: list[_Point[V]] = []

    def restored(self, checkpoint_id: int) -> None:
        """Note that the state as it is now is that of a checkpoint."""
        self._points = []
        self.cut(checkpoint_id)

    def cut(self, checkpoint_id: int) -> None:
        """Note that the state as it is now is the one that a checkpoint will have."""
        self.newest = self._new()
        self._points.append(_Point(checkpoint_id, self.newest))

    def completed(self, checkpoint_id: int) -> None:
        """Drop what only older checkpoints need: this one is complete. May be repeated."""
        self._points = [point for point in self._points if point.checkpoint_id >= checkpoint_id]
        self._find_newest()

    def aborted(self, checkpoint_id: int) -> None:
        """Join a point to the one before: its checkpoint will never be complete. May be repeated."""
        for place, point in enumerate(self._points):
            if point.checkpoint_id == checkpoint_id:
                if place:
                    self._points[place - 1].old.absorb(point.old)
                del self._points[place]
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
        """Note that a writer has left old values. If they are too many, they are all dropped."""
        if sum(point.old.nbytes for point in self._points) > self._bytes_max:
            self._points = []
            self.newest = None

    def _find_newest(self) -> None:
        self.newest = self._points[-1].old if self._points else None


class OldByKey:
    """Old values by key. A value is in the form in which it is held."""

    __slots__ = ("nbytes", "values")

    def __init__(self) -> None:
        self.nbytes = 0
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


class OldEntries:
    """Old values of the entries of each key, as `OldByKey` has those of keys."""

    __slots__ = ("nbytes", "values")

    def __init__(self) -> None:
        self.nbytes = 0
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


def held_bytes(value: Any) -> int:
    """Return roughly how many bytes a held value takes beside its entry."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, tuple):
        return 16 + sum(8 + held_bytes(each) for each in value)
    return 16
