"""Tables that keep the old values of what changes, so that they can be read as of a checkpoint.

They stand between a function and the tables of any backend: what is written goes through, once the old
value of the place has been kept (`queryable.py`). Values that a sweep removes have expired, and a query
shows none of those, so sweeps keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

from ..queryable import CommittedPoints, KeyScan, NotKept, OldByKey, OldEntries
from .base import ABSENT, EntryTable, KeyedBackend, KeyWalk, ValueTable
from .canonical import TableSpec
from .keys import key_of, token


def _held_form(spec: TableSpec) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions from a value of a table to its immutable form, and back."""
    hold, release = spec.layout.value.hold, spec.layout.value.release
    if spec.ttl_ms is None:
        return hold, release
    return lambda pair: (hold(pair[0]), pair[1]), lambda pair: (release(pair[0]), pair[1])


_Points = CommittedPoints[OldByKey] | CommittedPoints[OldEntries]


class _Removals:
    """Notes which keys lose something, so that a scan as of a checkpoint finds them all the same."""

    def __init__(self, points: _Points) -> None:
        self._points = points
        self._scans: list[_Scan] = []

    def note(self, key: Hashable) -> None:
        """Note that a value or an entry of a key is about to be removed."""
        old = self._points.newest
        if old is not None:
            old.gone.add(key)
            for scan in self._scans:
                scan.loses(key)

    def scan(self, walk: KeyWalk, checkpoint_id: int) -> KeyScan:
        """Return the keys that may have had something at a checkpoint, each once.

        Raises:
            NotKept: that is not known.
        """
        self._points.hold(checkpoint_id)
        missed = {key for old in self._points.since(checkpoint_id) for key in old.gone}
        scan = _Scan(walk, missed)
        self._scans.append(scan)

        def close() -> None:
            if scan in self._scans:
                self._scans.remove(scan)
                self._points.release(checkpoint_id)

        return KeyScan(scan.pieces(), close)


class _Scan:
    """The keys that one walk comes across, and those that are removed before it does."""

    def __init__(self, walk: KeyWalk, missed: set[Hashable]) -> None:
        self._walk, self._missed = walk, missed

    def loses(self, key: Hashable) -> None:
        if not self._walk.passed(key):
            self._missed.add(key)

    def pieces(self) -> Iterator[Sequence[Any]]:
        while (piece := self._walk.next_piece()) is not None:
            yield [key for current, key in piece if current not in self._missed]
        yield [self._walk.key(current) for current in self._missed]


class CommittedValueTable(ValueTable):
    """A table with one value per key, and the values as of checkpoints."""

    def __init__(self, backend: KeyedBackend, name: str, bytes_max: int) -> None:
        self._inner, self._backend = backend.value_table(name), backend
        self._hold, self._release = _held_form(backend.specs[name])
        self.points = CommittedPoints(OldByKey, bytes_max)
        self.removals = _Removals(self.points)

    def get(self) -> Any:
        return self._inner.get()

    def put(self, value: Any) -> None:
        self._keep()
        self._inner.put(value)

    def delete(self) -> None:
        self._keep()
        self.removals.note(self._backend.current_key)
        self._inner.delete()

    def _keep(self) -> None:
        old = self.points.newest
        if old is None:
            return
        key = self._backend.current_key
        if key not in old.values:
            value = self._inner.get()
            old.keep(key, value if value is ABSENT else self._hold(value))
            self.points.grew()

    def as_of(self, checkpoint_id: int) -> Any:
        """Return the value that the current key had at a checkpoint, or `ABSENT`.

        Raises:
            NotKept: that is not known.
        """
        key = self._backend.current_key
        for old in self.points.since(checkpoint_id):
            if key in old.values:
                held = old.values[key]
                return held if held is ABSENT else self._release(held)
        return self._inner.get()

    def sweep(self, limit: int, dead_until: int) -> int:
        return self._inner.sweep(limit, dead_until)


class CommittedEntryTable(EntryTable):
    """A table of lists or maps, and their entries as of checkpoints."""

    def __init__(self, backend: KeyedBackend, name: str, bytes_max: int) -> None:
        self._inner, self._backend = backend.entry_table(name), backend
        spec = backend.specs[name]
        self._hold, self._release = _held_form(spec)
        codec = spec.layout.entry
        assert codec is not None
        self._entry = codec
        self._in_order = spec.layout.kind == "list"
        self.points = CommittedPoints(OldEntries, bytes_max)
        self.removals = _Removals(self.points)

    def get(self, entry: Any) -> Any:
        return self._inner.get(entry)

    def put(self, entry: Any, value: Any) -> None:
        if self.points.newest is not None:
            # In the form that a written entry has when it is read again.
            self._keep(token(self._entry.hold(entry)))
        self._inner.put(entry, value)

    def delete(self, entry: Any) -> None:
        if self.points.newest is not None:
            self._keep(token(entry))
            self.removals.note(self._backend.current_key)
        self._inner.delete(entry)

    def clear(self) -> None:
        if self.points.newest is not None:
            for entry, _ in self._inner.entries():
                self._keep(token(entry))
            self.removals.note(self._backend.current_key)
        self._inner.clear()

    def _keep(self, name: Any) -> None:
        old = self.points.newest
        if old is None:
            return
        key = self._backend.current_key
        if name not in old.values.get(key, ()):
            value = self._inner.get(key_of(name))
            old.keep(key, name, value if value is ABSENT else self._hold(value))
            self.points.grew()

    def as_of(self, checkpoint_id: int) -> Iterator[tuple[Any, Any]]:
        """Return the entries that the current key had at a checkpoint, as `entries` does.

        Raises:
            NotKept: that is not known.
        """
        key = self._backend.current_key
        kept: dict[Any, Any] = {}
        for old in self.points.since(checkpoint_id):
            for name, held in old.values.get(key, {}).items():
                kept.setdefault(name, held)
        if not kept:
            return self._inner.entries()
        found = [each for each in self._inner.entries() if token(each[0]) not in kept]
        found += [
            (key_of(name), self._release(held)) for name, held in kept.items() if held is not ABSENT
        ]
        return iter(sorted(found, key=lambda each: each[0]) if self._in_order else found)

    def entries(self) -> Iterator[tuple[Any, Any]]:
        return self._inner.entries()

    def last(self) -> int:
        return self._inner.last()

    def empty(self) -> bool:
        return self._inner.empty()

    def sweep(self, limit: int, dead_until: int) -> int:
        return self._inner.sweep(limit, dead_until)


class CommittedTables:
    """The tables of a backend, of which some keep old values.

    Args:
        backend: of the operator subtask.
        names: the states that are read as of checkpoints.
        bytes_max: how many bytes of old values each of them keeps.
    """

    def __init__(self, backend: KeyedBackend, names: Collection[str], bytes_max: int) -> None:
        self._backend = backend
        self.specs = backend.specs
        self.kept: dict[str, CommittedValueTable | CommittedEntryTable] = {}
        for name in names:
            has_entries = backend.specs[name].layout.entry is not None
            kind = CommittedEntryTable if has_entries else CommittedValueTable
            self.kept[name] = kind(backend, name, bytes_max)
        self.points: list[CommittedPoints[Any]] = [table.points for table in self.kept.values()]
        """Those that hear of checkpoints, also of tables that only go back to them."""
        self.points += backend.points

    def value_table(self, name: str) -> ValueTable:
        """See `KeyedBackend`."""
        kept = self.kept.get(name)
        return kept if isinstance(kept, CommittedValueTable) else self._backend.value_table(name)

    def entry_table(self, name: str) -> EntryTable:
        """See `KeyedBackend`."""
        kept = self.kept.get(name)
        return kept if isinstance(kept, CommittedEntryTable) else self._backend.entry_table(name)

    def scan(self, name: str, checkpoint_id: int) -> KeyScan:
        """Return the keys of a state; 0: those that it has now.

        Raises:
            NotKept: those at that checkpoint are not known.
        """
        walk = self._backend.walk(name)
        if not checkpoint_id:
            return KeyScan(_keys(walk), lambda: None)
        if name not in self.kept:
            raise NotKept
        return self.kept[name].removals.scan(walk, checkpoint_id)

    def restored(self, checkpoint_id: int) -> None:
        """See `CommittedPoints.restored`."""
        for points in self.points:
            points.restored(checkpoint_id)

    def cut(self, checkpoint_id: int) -> None:
        """See `CommittedPoints.cut`."""
        for points in self.points:
            points.cut(checkpoint_id)

    def completed(self, checkpoint_id: int) -> None:
        """See `CommittedPoints.completed`."""
        for points in self.points:
            points.completed(checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        """See `CommittedPoints.aborted`."""
        for points in self.points:
            points.aborted(checkpoint_id)


def _keys(walk: KeyWalk) -> Iterator[Sequence[Any]]:
    while (piece := walk.next_piece()) is not None:
        yield [key for _, key in piece]
