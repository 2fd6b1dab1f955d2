"""A query of state, cut into shares that are read one by one, in any process.

Keyed state is read in part. Lists, broadcast maps and state that only its operator can read come as a
whole. `changes` compares the rows of two snapshots key by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import StateError, UsageError
from ...operators.suggestions import suggest
from ...state.evolution import ENCODING, LAST_USED_COLUMN
from ...state.forms import plain_of
from ...state.keyed.canonical import NAMESPACE_COLUMN, VALUE_COLUMN
from ...state.keyed.keys import decode_key
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import KEY_GROUP_COLUMN
from .files import OpenStore
from .keys import (
    KEY_TEXT,
    collect,
    collected_type,
    groups_of_values,
    is_opaque,
    values_array,
    whole_groups,
)
from .rows import OnRead, read_rows, schema_of
from .snapshot import Snapshot, StoredState

if TYPE_CHECKING:
    import polars as pl

SHARE_BYTES: Final = 32 << 20
"""Stored bytes of one share, unless a number of shares is asked for."""
Share: TypeAlias = tuple[KeyGroupRange, ...]
"""Ranges of key groups; of state that is not keyed there is one share, which is empty."""
SUBTASK: Final = pa.field("subtask", pa.int32(), False)
POSITION: Final = pa.field("position", pa.int64(), False)
MAP_KEY: Final = pa.field("map_key", pa.string(), False)
ITEM: Final = pa.field("item", pa.binary(), False)
CHANGE: Final = pa.field("change", pa.string(), False)
BEFORE, AFTER = "_before", "_after"


@dataclass(frozen=True, slots=True)
class Query:
    """The query of one state.

    Attributes:
        operator: its name.
        state: the name of the state.
        flatten: a row per element of lists and maps, as they are stored; else a row per key.
        ttl: also the column `last_used`.
        columns: these, in this order; None: all.
        values: only rows whose column has one of these values, by column.
        shares: how many; None: by size.
    """

    operator: str
    state: str
    flatten: bool = True
    ttl: bool = False
    columns: tuple[str, ...] | None = None
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    shares: int | None = None


class StateScan:
    """Reads one state, or its changes since an older snapshot. Plain data: it travels to where it reads.

    Args:
        snapshot: where the state is.
        query: what is wanted of it.
        since: an older snapshot: then the rows say what changed.

    Raises:
        StateError: no such operator or state, or the two cannot be compared.
        UsageError: the query asks for what the state does not have.
    """

    def __init__(self, snapshot: Snapshot, query: Query, since: Snapshot | None = None) -> None:
        self.query = query
        self.state = snapshot.state(query.operator, query.state)
        self._options = dict(snapshot.options)
        self._before = None if since is None else since.state(query.operator, query.state)
        self._stored = self._stored_schema()
        self._shown = self._shown_schema()
        names = self._shown.names if query.columns is None else query.columns
        for name in (*names, *query.values):
            if name not in self._shown.names:
                raise UsageError(
                    f"the state has no such column {self.state.text} column=`{name}`",
                    fix=suggest(name, self._shown.names, "columns"),
                )
        self.schema: pa.Schema = pa.schema([self._shown.field(name) for name in names])
        """The columns of the tables that are read."""

    def type_of(self, column: str) -> pa.DataType:
        """The type of a column, also of one that is not read."""
        return self._shown.field(column).type

    def where(self, column: str, values: Sequence[Any]) -> None:
        """Read only rows whose `column` has one of `values`, also by what was asked for before."""
        allowed = self.query.values.get(column)
        some = tuple(v for v in values if allowed is None or v in allowed)
        self.query = replace(self.query, values={**self.query.values, column: some})

    def shares(self) -> list[Share]:
        """The parts to read; key groups that cannot have wanted rows are in none of them."""
        if not self.state.keyed:
            return [()]
        wanted = self._groups()
        if not wanted:
            return []
        size = self.state.size_bytes * len(wanted) / self.state.max_parallelism
        count = self.query.shares or int(size // SHARE_BYTES) + 1
        count = min(count, len(wanted))
        cuts = [len(wanted) * number // count for number in range(count + 1)]
        return [_ranges(wanted[low:high]) for low, high in pairwise(cuts)]

    def read(self, share: Share, on_read: OnRead | None = None) -> Iterator[pa.Table]:
        """The wanted rows of one share.

        Raises:
            StateError: a file is missing or corrupt, or cannot be read here.
        """
        with OpenStore(self.state.root, self._options) as opened:
            if not self.state.keyed:
                tables = iter([items_table(self.state, opened)])
            elif self._before is not None:
                tables = self._changes(share, opened, on_read)
            else:
                tables = self._rows(share, opened, on_read)
            for table in tables:
                chosen = self._chosen(table)
                if chosen.num_rows:
                    yield chosen.select(self.schema.names)

    # -- schemas ------------------------------------------------------------------------------------

    def _stored_schema(self) -> pa.Schema:
        """The columns as stored, without the time of the last use unless asked for."""
        state = self.state
        if not state.keyed:
            return items_schema(state)
        with OpenStore(state.root, self._options) as opened:
            schema = schema_of(state, opened)
        if self.query.ttl and not state.has_ttl:
            raise UsageError(
                f"the state has no time to live {state.text}", fix="leave out the option `ttl`"
            )
        if not self.query.ttl and state.has_ttl:
            schema = schema.remove(schema.get_field_index(LAST_USED_COLUMN))
        return schema

    def _shown_schema(self) -> pa.Schema:
        if self._before is not None:
            return self._changes_schema(self._before)
        if not self._collects:
            return self._stored
        if self.query.ttl:
            raise UsageError(
                "elements expire one by one, so their last use needs a row of its own",
                fix="leave out `flatten` or `ttl`",
            )
        entry, value = self._entry, self._stored.field(VALUE_COLUMN)
        kept = [each for each in self._stored if each.name not in (entry.name, VALUE_COLUMN)]
        return pa.schema([*kept, pa.field(VALUE_COLUMN, collected_type(entry, value))])

    def _changes_schema(self, before: StoredState) -> pa.Schema:
        if not (self.state.keyed and before.keyed and self.query.flatten):
            raise UsageError(
                f"changes are told of keyed state, and row by row {self.state.text}",
                fix="leave out `from`, or `flatten`",
            )
        with OpenStore(before.root, self._options) as opened:
            old = schema_of(before, opened)
        with OpenStore(self.state.root, self._options) as opened:
            check_comparable(before, self.state, old, schema_of(self.state, opened))
        return changes_schema(self.state.identity, self._stored)

    @property
    def _collects(self) -> bool:
        return self.state.keyed and not self.query.flatten and self.state.entry_column is not None

    @property
    def _entry(self) -> pa.Field:
        return self._stored.field(self.state.entry_column)

    # -- rows ---------------------------------------------------------------------------------------

    def _rows(self, share: Share, opened: OpenStore, on_read: OnRead | None) -> Iterator[pa.Table]:
        needed = self._stored.names if self._collects else self._needed()
        for groups in share:
            tables = read_rows(self.state, groups, opened, needed, on_read)
            if not self._collects:
                yield from tables
                continue
            keys = [n for n in self._shown.names if n != VALUE_COLUMN]
            for table in whole_groups(tables):
                yield collect(table, keys, self._entry.name, VALUE_COLUMN)

    def _needed(self) -> list[str]:
        """Columns that are shown, or that rows are chosen by."""
        wanted = {*self.schema.names, *self.query.values}
        return [name for name in self._stored.names if name in wanted]

    def _changes(
        self, share: Share, opened: OpenStore, on_read: OnRead | None
    ) -> Iterator[pa.Table]:
        assert self._before is not None
        names = self._stored.names
        empty = pa.schema([each.with_nullable(True) for each in self._stored]).empty_table()
        with OpenStore(self._before.root, self._options) as older:
            for groups in share:
                old = pa.concat_tables([empty, *read_rows(self._before, groups, older, names)])
                rows = read_rows(self.state, groups, opened, names, on_read)
                yield changed_rows(old, pa.concat_tables([empty, *rows]), self.state.identity)

    def _chosen(self, table: pa.Table) -> pa.Table:
        for name, values in self.query.values.items():
            column = table.column(name)
            table = table.filter(pc.is_in(column, values_array(values, column.type)))
        return table

    def _groups(self) -> list[int]:
        """The key groups that may have wanted rows, in order."""
        state, values = self.state, self.query.values
        found = frozenset(range(state.max_parallelism))
        if KEY_GROUP_COLUMN in values:
            found &= frozenset(values[KEY_GROUP_COLUMN])
        columns = state.hash_columns
        if columns and not is_opaque(columns, self._stored) and all(c in values for c in columns):
            types = [self._stored.field(column).type for column in columns]
            some = groups_of_values([values[c] for c in columns], types, state.max_parallelism)
            found = found if some is None else found & some
        pieces = [handle for piece in state.pieces for handle in piece.handles]
        if self._before is not None:
            pieces += [handle for piece in self._before.pieces for handle in piece.handles]
        present = [KeyGroupRange(h.first_key_group, h.last_key_group) for h in pieces]
        return sorted(group for group in found if any(group in one for one in present))


def _ranges(groups: Sequence[int]) -> Share:
    """Consecutive numbers put together."""
    found: list[KeyGroupRange] = []
    for group in groups:
        if found and found[-1].last == group - 1:
            found[-1] = KeyGroupRange(found[-1].first, group)
        else:
            found.append(KeyGroupRange(group, group))
    return tuple(found)


def items_schema(state: StoredState) -> pa.Schema:
    """The columns of the table.

    `subtask`, `position`, and `value`, typed; of a broadcast map `map_key`, as text, and `value`; of what
    headgate knows no type of, such as positions of sources, `item`: bytes.
    """
    declared = state.schema
    if declared is None:
        return pa.schema([SUBTASK, POSITION, ITEM])
    value = declared.field(VALUE_COLUMN)
    if state.kind == "broadcast":
        return pa.schema([MAP_KEY, value])
    return pa.schema([SUBTASK, POSITION, value])


def items_table(state: StoredState, opened: OpenStore) -> pa.Table:
    """All items: of lists in the order of subtasks, of a broadcast map one copy.

    Raises:
        StateError: a file is missing or corrupt.
    """
    schema = items_schema(state)
    if state.kind == "broadcast" and state.schema is not None:
        return _broadcast(state, opened, schema)
    subtasks: list[int] = []
    positions: list[int] = []
    found: list[bytes] = []
    for subtask, items in _by_subtask(state, opened):
        subtasks += [subtask] * len(items)
        positions += range(len(items))
        found += items
    last = (
        _values(found, schema.field(2))
        if state.schema is not None
        else pa.array(found, pa.binary())
    )
    columns = [pa.array(subtasks, SUBTASK.type), pa.array(positions, POSITION.type), last]
    return pa.Table.from_arrays(columns, schema=schema)


def _by_subtask(state: StoredState, opened: OpenStore) -> Iterator[tuple[int, list[bytes]]]:
    for piece in state.pieces:
        for handle in piece.handles:
            yield piece.subtask, msgspec.msgpack.decode(opened.content(handle), type=list[bytes])


def _broadcast(state: StoredState, opened: OpenStore, schema: pa.Schema) -> pa.Table:
    """All subtasks have the same."""
    _, items = next(_by_subtask(state, opened), (0, []))
    pairs = [msgspec.msgpack.decode(item, type=tuple[bytes, bytes]) for item in items]
    keys = [decode_key(key) for key, _ in pairs]
    texts = [key if isinstance(key, str) else str(key) for key in keys]
    values = _values([held for _, held in pairs], schema.field(VALUE_COLUMN))
    return pa.Table.from_arrays([pa.array(texts, pa.string()), values], schema=schema)


def _values(held: list[bytes], field: pa.Field) -> pa.Array:
    if ENCODING in (field.metadata or {}):
        return pa.array(held, field.type)
    plain: Any = plain_of(field.type)
    return pa.array([plain(msgspec.msgpack.decode(data)) for data in held], field.type)


def changes_schema(identity: Sequence[str], schema: pa.Schema) -> pa.Schema:
    """`change` (added, changed, removed), the identity, and each other column before and after."""
    kept = [schema.field(name) for name in _shown(identity, schema)]
    fields = []
    for column in schema:
        if column.name not in _shown(identity, schema):
            fields += [column.with_name(column.name + suffix) for suffix in (BEFORE, AFTER)]
    return pa.schema([CHANGE, *kept, *(column.with_nullable(True) for column in fields)])


def check_comparable(
    before: StoredState, after: StoredState, old: pa.Schema, new: pa.Schema
) -> None:
    """Raise StateError unless the rows of two states can be compared key by key."""
    if before.max_parallelism != after.max_parallelism:
        raise StateError(
            f"the snapshots have other key groups {after.text} from=`{before.max_parallelism}` "
            f"to=`{after.max_parallelism}`",
            fix="rewrite one of them to the max parallelism of the other first",
        )
    if before.identity != after.identity or not old.equals(new):
        raise StateError(
            f"the state was of another type in the older snapshot {after.text} "
            f"from=`{_types(old)}` to=`{_types(new)}`",
            fix="read both snapshots, and compare what they have in common",
        )


def changed_rows(before: pa.Table, after: pa.Table, identity: Sequence[str]) -> pa.Table:
    """The rows that are not the same in both; each identity occurs once in each.

    Nulls are equal to nulls, and NaN to NaN.
    """
    import polars as pl  # takes a while, and few reads need it

    target = changes_schema(identity, after.schema)
    pairs = _pairs(before, after, identity)
    left, right = pairs.get_column("left"), pairs.get_column("right")
    there = before.take(left.to_arrow()), after.take(right.to_arrow())
    others = [name for name in after.column_names if name not in _shown(identity, after.schema)]
    differ = np.zeros(len(pairs), bool)
    for name in others:
        old, new = (pl.Series(table.column(name)) for table in there)
        differ |= old.ne_missing(new).to_numpy()
    added, removed = left.is_null().to_numpy(), right.is_null().to_numpy()
    which = pa.array(np.flatnonzero(added | removed | differ))
    words = np.where(added, "added", np.where(removed, "removed", "changed"))
    columns: list[pa.ChunkedArray | pa.Array] = [pa.array(words, pa.string()).take(which)]
    for name in _shown(identity, after.schema):
        old, new = (table.column(name).take(which) for table in there)
        gone = pa.array(removed).take(which)
        columns.append(pa.compute.if_else(gone, old, new))
    for name in others:
        columns += [table.column(name).take(which) for table in there]
    return pa.Table.from_arrays(columns, schema=target)


def _pairs(before: pa.Table, after: pa.Table, identity: Sequence[str]) -> pl.DataFrame:
    """Numbers of rows of equal identity; null where one side has none."""
    import polars as pl

    frames = []
    for table, name in ((before, "left"), (after, "right")):
        frame = pl.from_arrow(table.select(list(identity)))
        assert isinstance(frame, pl.DataFrame)
        frames.append(frame.with_row_index(name))
    return frames[0].join(frames[1], on=list(identity), how="full", nulls_equal=True)


def _shown(identity: Sequence[str], schema: pa.Schema) -> list[str]:
    """The columns that come once: the identity, and what follows from it."""
    derived = ("key_group", KEY_TEXT, NAMESPACE_COLUMN)
    return [name for name in schema.names if name in identity or name in derived]


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
