"""The memory backend: dictionaries, cut in parts, with undo logs for consistent cuts (`cuts.py`).

A value of a scalar type is held as it is, any other is held encoded, so that objects in the dictionaries
never change in place. With a TTL each value is held as a pair with the time of its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from ...errors import StateError
from ..queryable import CommittedPoints
from ..snapshot import FilesCut, KeptState, RestoredState, TableCut
from ..values import Index
from .base import (
    ABSENT,
    Cursor,
    EntryTable,
    KeyedBackend,
    KeyWalk,
    ValueTable,
    in_other_files,
)
from .canonical import DELETED, Rows, TableSpec, address_rows, is_reshaped, restored_rows
from .cuts import PARTS, Address, Changes, Cut, part_of, parts_of
from .handles import INT_MAX, INT_MIN, BoundValueTable, ValueHandle, with_own_code
from .keys import KeyShape, Token, key_of, token, tokens_of
from .rollback import KeptCut, KeptTable, kept_cuts

_ALIVE: Final = -(2**63)


class _Walk(KeyWalk):
    """Goes over a table a part at a time."""

    def __init__(self, parts: list[dict[Any, Any]]) -> None:
        self._parts = parts
        self._passed = 0

    def next_piece(self) -> list[tuple[Hashable, Any]] | None:
        if self._passed == PARTS:
            return None
        part = self._parts[self._passed]
        self._passed += 1
        return [(address, key_of(address)) for address in part]

    def passed(self, current_key: Hashable) -> bool:
        return part_of(current_key) < self._passed

    def key(self, current_key: Hashable) -> Any:
        return key_of(current_key)


class _Table:
    """The base of both kinds of tables: parts, cuts, and the form in which values are held."""

    def __init__(self, spec: TableSpec, cursor: Cursor, max_parallelism: int) -> None:
        self.spec = spec
        self.changes = Changes()
        self._layout = spec.layout
        self._cursor = cursor
        self._max_parallelism = max_parallelism
        self._parts: list[dict[Any, Any]] = [{} for _ in range(PARTS)]
        codec = spec.layout.value
        if spec.ttl_ms is None:
            self._hold: Callable[[Any], Any] = codec.hold
            self._release: Callable[[Any], Any] = codec.release
        else:
            hold, release = codec.hold, codec.release
            self._hold = lambda pair: (hold(pair[0]), pair[1])
            self._release = lambda pair: (release(pair[0]), pair[1])
        self._queue: list[Any] = []
        self._next_part = 0

    def addresses(self) -> Iterator[tuple[Any, Any]]:
        """Yield the key and namespace of every address in the table."""
        for part in self._parts:
            yield from map(self._named, list(part))

    def walk(self) -> KeyWalk:
        """Return a walk over the keys."""
        return _Walk(self._parts)

    def _named(self, address: Any) -> tuple[Any, Any]:
        if self._layout.namespaced:
            return key_of(address[0]), key_of(address[1])
        return key_of(address), None

    def _address(self, key: Any, namespace: Any) -> Address:
        return (token(key), token(namespace)) if self._layout.namespaced else token(key)

    def cut(self, dead_until: int) -> TableCut:
        """Return a cut in the form that the runtime takes."""
        cut = self.changes.cut()

        def make(since: int | None) -> Any:
            try:
                if since is None:
                    rows = self._all_rows(cut, dead_until)
                else:
                    rows = self._changed_rows(cut, since)
                return self._layout.table(rows, self._max_parallelism, deltas=since is not None)
            except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
                raise StateError(
                    f"a value of state `{self.spec.name}` does not fit its column "
                    f"type=`{self._layout.value.type_}`: {error}",
                    fix="set values of the declared type, inside of containers and Structs too",
                ) from error
            finally:
                cut.open = False

        def discard() -> None:
            cut.open = False

        epoch = 0 if self.changes.rebase else cut.epoch
        return TableCut(
            make, self._layout.identity, epoch, discard=discard, confirm=self.changes.confirm
        )

    def _all_rows(self, cut: Cut, dead_until: int) -> Rows:
        rows = Rows()
        for part in range(PARTS):
            held = self._copied(part)
            held.update(cut.overlay(part))
            for where, value in held.items():
                if value is not ABSENT:
                    self._add(rows, where, value, dead_until)
        return rows

    def _changed_rows(self, cut: Cut, since: int) -> Rows:
        rows = Rows()
        seen: set[Any] = set()
        for addresses in self.changes.changed(since, cut):
            for where in addresses:
                if where not in seen:
                    seen.add(where)
                    part, live = self._look(where)
                    self._add(rows, where, cut.find(part, where, live), _ALIVE)
        return rows

    def _add(self, rows: Rows, where: Any, held: Any, dead_until: int) -> None:
        with_ttl = self._layout.with_ttl
        last_used = 0
        if held is ABSENT:
            value: Any = DELETED
        elif with_ttl:
            value, last_used = self._release(held)
            if last_used <= dead_until:
                return
        else:
            value = self._release(held)
        address, entry = self._split(where)
        key, namespace = self._named(address)
        rows.keys.append(key)
        rows.values.append(value)
        if self._layout.namespaced:
            rows.namespaces.append(namespace)
        if self._layout.entry is not None:
            rows.entries.append(key_of(entry))
        if with_ttl:
            rows.last_used.append(last_used)

    def fill(self, rows: Rows, *, rebase: bool) -> None:
        """Take over restored rows; `rebase`: their stored table has another shape."""
        with_ttl = self._layout.with_ttl
        for key, namespace, entry, value, last_used in address_rows(rows):
            held = self._hold((value, last_used) if with_ttl else value)
            self._place(self._address(key, namespace), entry, held)
        self.changes.restored(rebase=rebase)

    def take_over(self, kept: KeptTable[Any], checkpoint_id: int) -> None:
        """Take over the content of the table of a subtask that has ended, as of a checkpoint."""
        old = kept.old_values(checkpoint_id)
        self._parts[:] = kept.parts
        self._put_back(old)
        self.changes.restored()

    def kept(self, points: CommittedPoints[KeptCut]) -> KeptState:
        """Take the content out of the table, with the checkpoints to which it can go back."""
        return KeptTable.of(self._parts, points, self.changes)

    def sweep(self, limit: int, dead_until: int) -> int:
        removed = 0
        for _ in range(limit):
            if not self._queue:
                self._queue = list(self._copied(self._next_part))
                self._next_part = (self._next_part + 1) % PARTS
                if not self._queue:
                    continue
            where = self._queue.pop()
            part, held = self._look(where)
            if held is not ABSENT and held[1] <= dead_until:
                self._remove(part, where)
                removed += 1
        return removed

    # The two kinds differ in places: a place is an address, or an address and an entry.

    def _copied(self, part: int) -> dict[Any, Any]:
        """Return the places and held values of a part; runs in threads too."""
        raise NotImplementedError

    def _look(self, where: Any) -> tuple[int, Any]:
        """Return the part of a place and the value that it holds now; runs in threads too."""
        raise NotImplementedError

    def _split(self, where: Any) -> tuple[Address, Any]:
        raise NotImplementedError

    def _place(self, address: Address, entry: Any, held: Any) -> None:
        raise NotImplementedError

    def _put_back(self, old: Sequence[dict[Any, Any]]) -> None:
        """Let places of each part hold old values again, or nothing (`ABSENT`); no cut is open."""
        raise NotImplementedError

    def _remove(self, part: int, where: Any) -> None:
        raise NotImplementedError


class _ScalarHandle(ValueHandle[Any]):
    """A handle of values that are held as they are, with all that an access needs.

    Args:
        table: the table.
        missing: the value of a key without one, as it is held; None or `ABSENT` are returned themselves.
    """

    __slots__ = ("_changes", "_cursor", "_hold", "_missing", "_parts", "_plain")

    def __init__(self, table: MemoryValueTable, missing: Any) -> None:
        codec = table.spec.layout.value
        self._cursor, self._parts, self._changes = table._cursor, table._parts, table.changes
        self._hold, self._release, self._missing = table._hold, table._release, missing
        self._plain = codec.plain if table.spec.ttl_ms is None else None

    def get(self) -> Any:
        at = self._cursor
        return self._parts[at.place].get(at.token, self._missing)

    def set(self, value: Any) -> None:
        if type(value) is not self._plain:
            value = self._hold(value)
        at, changes = self._cursor, self._changes
        part = self._parts[at.place]
        if changes.active:
            where, dirty = at.token, changes.dirty
            if where not in dirty:
                if changes.newest is not None:
                    changes.log(at.place, where, part.get(where, ABSENT))
                dirty.add(where)
        part[at.token] = value

    def clear(self) -> None:
        at = self._cursor
        if at.token in self._parts[at.place]:
            _remove_value(self._changes, self._parts, at.place, at.token)

    def exists(self) -> bool:
        at = self._cursor
        return at.token in self._parts[at.place]


@with_own_code
class _IntHandle(_ScalarHandle):
    """A handle of ints."""

    __slots__ = ()

    def set(self, value: Any) -> None:
        if type(value) is not int or value > INT_MAX or value < INT_MIN:
            value = self._hold(value)
        # The rest is as in the base: a call would take half as long as all of it.
        at, changes = self._cursor, self._changes
        part = self._parts[at.place]
        if changes.active:
            where, dirty = at.token, changes.dirty
            if where not in dirty:
                if changes.newest is not None:
                    changes.log(at.place, where, part.get(where, ABSENT))
                dirty.add(where)
        part[at.token] = value


@with_own_code
class _EncodedHandle(_ScalarHandle):
    """A handle of values that are held encoded, or with their last use."""

    __slots__ = ()

    def get(self) -> Any:
        at = self._cursor
        held = self._parts[at.place].get(at.token, self._missing)
        return held if held is None or held is ABSENT else self._release(held)


def _remove_value(
    changes: Changes, parts: Sequence[dict[Any, Any]], part: int, address: Address
) -> None:
    if changes.newest is not None:
        changes.log(part, address, parts[part][address])
    changes.dirty.add(address)
    del parts[part][address]


class MemoryValueTable(_Table, BoundValueTable):
    """One value per address."""

    def __init__(self, spec: TableSpec, cursor: Cursor, max_parallelism: int) -> None:
        super().__init__(spec, cursor, max_parallelism)
        codec = spec.layout.value
        if spec.ttl_ms is not None or not codec.held_as_it_is:
            self._bind(_EncodedHandle)
        else:
            self._bind(_IntHandle if codec.plain_ints else _ScalarHandle)

    def _remove(self, part: int, where: Any) -> None:
        _remove_value(self.changes, self._parts, part, where)

    def _copied(self, part: int) -> dict[Any, Any]:
        return self._parts[part].copy()

    def _look(self, where: Any) -> tuple[int, Any]:
        part = part_of(where)
        return part, self._parts[part].get(where, ABSENT)

    def _split(self, where: Any) -> tuple[Address, Any]:
        return where, None

    def _place(self, address: Address, entry: Any, held: Any) -> None:
        self._parts[part_of(address)][address] = held

    def _put_back(self, old: Sequence[dict[Any, Any]]) -> None:
        for part, values in zip(self._parts, old, strict=True):
            part.update(values)
            for where, held in values.items():
                if held is ABSENT:
                    del part[where]


class MemoryEntryTable(_Table, EntryTable):
    """A dictionary of entries per address."""

    def get(self, entry: Any) -> Any:
        at = self._cursor
        entries = self._parts[at.place].get(at.token)
        if entries is None:
            return ABSENT
        held = entries.get(token(entry), ABSENT)
        return held if held is ABSENT else self._release(held)

    def put(self, entry: Any, value: Any) -> None:
        held = self._hold(value)
        at = self._cursor
        part, address = self._parts[at.place], at.token
        name = self._entry_token(entry)
        entries = part.get(address)
        if entries is None:
            entries = part[address] = {}
        where = (address, name)
        changes = self.changes
        if where not in changes.dirty:
            if changes.newest is not None:
                changes.log(at.place, where, entries.get(name, ABSENT))
            changes.dirty.add(where)
        entries[name] = held

    def _entry_token(self, entry: Any) -> Any:
        codec = self._layout.entry
        assert codec is not None
        return token(codec.hold(entry))

    def delete(self, entry: Any) -> None:
        at = self._cursor
        entries = self._parts[at.place].get(at.token)
        if entries is not None and (name := token(entry)) in entries:
            self._remove(at.place, (at.token, name))

    def _remove(self, part: int, where: Any) -> None:
        address, name = where
        entries = self._parts[part][address]
        if self.changes.newest is not None:
            self.changes.log(part, where, entries[name])
        self.changes.dirty.add(where)
        del entries[name]
        if not entries:
            del self._parts[part][address]

    def entries(self) -> Iterator[tuple[Any, Any]]:
        at = self._cursor
        entries = self._parts[at.place].get(at.token)
        found, release = list(entries.items()) if entries else (), self._release
        return ((key_of(name), release(held)) for name, held in found)

    def last(self) -> int:
        at = self._cursor
        entries = self._parts[at.place].get(at.token)
        return next(reversed(entries)) if entries else -1

    def empty(self) -> bool:
        at = self._cursor
        return at.token not in self._parts[at.place]

    def clear(self) -> None:
        at = self._cursor
        for name in list(self._parts[at.place].get(at.token, ())):
            self._remove(at.place, (at.token, name))

    def _copied(self, part: int) -> dict[Any, Any]:
        return {
            (address, name): held
            for address, entries in self._parts[part].copy().items()
            for name, held in entries.copy().items()
        }

    def _look(self, where: Any) -> tuple[int, Any]:
        address, name = where
        part = part_of(address)
        return part, self._parts[part].get(address, {}).get(name, ABSENT)

    def _split(self, where: Any) -> tuple[Address, Any]:
        address, name = where
        return address, name

    def _place(self, address: Address, entry: Any, held: Any) -> None:
        self._parts[part_of(address)].setdefault(address, {})[token(entry)] = held

    def _put_back(self, old: Sequence[dict[Any, Any]]) -> None:
        for part, values in zip(self._parts, old, strict=True):
            grown: set[Any] = set()
            for (address, name), held in values.items():
                entries = part.setdefault(address, {})
                if held is ABSENT:
                    entries.pop(name, None)
                else:
                    if name not in entries:
                        grown.add(address)
                    entries[name] = held
                if not entries:
                    del part[address]
            if self._layout.kind == "list":  # the last entry is that of the last position
                for address in grown & part.keys():
                    part[address] = dict(sorted(part[address].items()))


class MemoryBackend(KeyedBackend):
    """All keyed state of one operator subtask, in memory."""

    def __init__(
        self,
        keys: KeyShape,
        specs: Mapping[str, TableSpec],
        max_parallelism: int,
        kept_bytes_max: int = 0,
    ) -> None:
        """
        Args:
            keys: see `KeyedBackend`.
            specs: see `KeyedBackend`.
            max_parallelism: see `KeyedBackend`.
            kept_bytes_max: how many bytes of old values each table keeps, to go back to a checkpoint; 0:
                no table can.
        """
        super().__init__(keys, specs, max_parallelism)
        self.cursor, self._spaced = Cursor(), Cursor()
        self._namespace: Any = token(None)
        self._any_spaced = any(spec.layout.namespaced for spec in self.specs.values())
        self._tables: dict[str, MemoryValueTable | MemoryEntryTable] = {}
        for name, spec in self.specs.items():
            cursor = self._spaced if spec.layout.namespaced else self.cursor
            kind = MemoryValueTable if spec.layout.entry is None else MemoryEntryTable
            self._tables[name] = kind(spec, cursor, max_parallelism)
        self._kept: dict[str, CommittedPoints[KeptCut]] = {}
        if kept_bytes_max:
            for name, table in self._tables.items():
                self._kept[name] = kept_cuts(table.changes, kept_bytes_max)
        self.points = tuple(self._kept.values())

    def value_table(self, name: str) -> ValueTable:
        table = self._tables[name]
        assert isinstance(table, MemoryValueTable)
        return table

    def entry_table(self, name: str) -> EntryTable:
        table = self._tables[name]
        assert isinstance(table, MemoryEntryTable)
        return table

    def set_key(self, key: Any, key_group: int = -1) -> None:
        kind = type(key)
        address = key if kind is str or kind is int or kind is bytes else token(key)
        self.cursor.token = address
        self.cursor.place = hash(address) % PARTS
        if self._any_spaced:
            self._set_spaced()

    def places(
        self, keys: Sequence[Any], key_groups: Sequence[int], numbers: Index | None = None
    ) -> tuple[Iterable[Token], Iterable[Any]]:
        self._spaced.clear()
        tokens = keys if numbers is not None else tokens_of(keys)
        return tokens, parts_of(tokens, numbers)

    @property
    def current_key(self) -> Hashable:
        found: Hashable = self.cursor.token
        return found

    def set_namespace(self, namespace: Any) -> None:
        self._namespace = token(namespace)
        if self._any_spaced and self.cursor.is_set:
            self._set_spaced()

    def _set_spaced(self) -> None:
        address = (self.cursor.token, self._namespace)
        self._spaced.token, self._spaced.place = address, part_of(address)

    def clear_key(self) -> None:
        self.cursor.clear()
        self._spaced.clear()

    def addresses(self, name: str) -> Iterator[tuple[Any, Any]]:
        return self._tables[name].addresses()

    def walk(self, name: str) -> KeyWalk:
        return self._tables[name].walk()

    def snapshot(self, dead_until: Mapping[str, int]) -> dict[str, TableCut | FilesCut]:
        return {
            name: table.cut(dead_until.get(name, _ALIVE)) for name, table in self._tables.items()
        }

    def keep(self) -> dict[str, KeptState]:
        return {name: self._tables[name].kept(points) for name, points in self._kept.items()}

    def restore(self, state: RestoredState, now_ms: int) -> None:
        for name, table in self._tables.items():
            if (kept := state.kept.get(name)) is not None:
                table.take_over(kept.content, state.checkpoint_id)
                continue
            if state.files.get(name):
                raise in_other_files(name)
            rows = restored_rows(table.spec, state, now_ms)
            if rows is None:
                continue
            try:
                table.fill(rows, rebase=is_reshaped(table.spec, state))
            except TypeError as error:
                raise StateError(
                    f"state `{name}` cannot take over a restored value: {error}",
                    fix="let migrate= return values of the declared type",
                ) from error

    def close(self) -> None:
        self._tables.clear()
