"""A query of state, cut into shares that are read one by one, in any process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from ...errors import UsageError
from ...operators.suggestions import suggest
from ...state.evolution import LAST_USED_COLUMN
from ...state.keyed.canonical import VALUE_COLUMN
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import KEY_GROUP_COLUMN
from .changes import changed_rows, changes_schema, check_comparable
from .collect import collect, collected_type, whole_groups
from .files import OpenStore
from .items import items_schema, items_table
from .keys import groups_of_values, is_opaque, values_array
from .rows import OnRead, read_rows, schema_of
from .snapshot import Snapshot, StoredState

SHARE_BYTES: Final = 32 << 20
"""Stored bytes of one share, unless a number of shares is asked for."""
Share: TypeAlias = tuple[KeyGroupRange, ...]
"""Ranges of key groups; of state that is not keyed there is one share, which is empty."""


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
