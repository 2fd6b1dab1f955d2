"""The canonical table of a state, with the same columns whatever the backend, and how stored ones are
adapted.

| column | |
|---|---|
| `key_group` | int32; rows are sorted by it |
| key columns | typed; see `KeyShape` |
| `namespace` | binary (`keys.py`), for states with namespaces only |
| `map_key`, `position` | for a map: typed; for timers: the tag; for a list: int64, one row per element |
| `value` | typed; see `codecs`; for timers: int64, when they are due, ms since 1970 UTC |
| `last_used` | timestamp(ms, UTC), for states with a TTL only |
| `deleted` | in deltas only; where it is true, the columns from `value` on mean nothing |
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, StateError
from ..codecs import Codec, PickleCodec
from ..evolution import (
    ENCODING,
    LAST_USED_COLUMN,
    LAST_USED_TYPE,
    adapt,
    check_compatible,
    is_declared_later,
)
from ..hashing import hash_keys, key_groups_of
from ..snapshot import DELETED_COLUMN, KEY_GROUP_COLUMN, RestoredState, StateInfo, state_info
from .keys import KeyShape, decode_key, encode_key

NAMESPACE_COLUMN = "namespace"
VALUE_COLUMN = "value"
ENTRY_COLUMNS = {"map": "map_key", "list": "position", "timers": "map_key"}


@dataclass(slots=True)
class Rows:
    """Rows of one table as lists of equal length; unused columns stay empty."""

    keys: list[Any] = field(default_factory=list)
    namespaces: list[Any] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """Python objects, or `DELETED`."""
    last_used: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    def by_entry(self) -> Rows:
        """Return the rows sorted by entry."""
        order = sorted(range(len(self)), key=self.entries.__getitem__)
        lists = (self.keys, self.namespaces, self.entries, self.values, self.last_used)
        return Rows(*([some[index] for index in order] if some else [] for some in lists))


class Deleted:
    """The type of `DELETED`."""


DELETED = Deleted()
"""Stands for the value in rows of deleted entries."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of the canonical table of one state."""

    keys: KeyShape
    kind: str
    value: Codec
    entry: Codec | None = None
    namespaced: bool = False
    with_ttl: bool = False

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        names = self.keys.names
        if self.namespaced:
            names = (*names, NAMESPACE_COLUMN)
        return names if self.entry is None else (*names, ENTRY_COLUMNS[self.kind])

    def schema(self, *, deltas: bool = False) -> pa.Schema:
        """Return the columns; with `deleted` for deltas."""
        fields = [pa.field(KEY_GROUP_COLUMN, pa.int32(), False), *self.keys.fields]
        if self.namespaced:
            fields.append(pa.field(NAMESPACE_COLUMN, pa.binary(), False))
        if self.entry is not None:
            fields.append(pa.field(ENTRY_COLUMNS[self.kind], self.entry.type_, self.entry.nullable))
        encoding = self.value.encoding
        metadata = None if encoding is None else {ENCODING: encoding}
        nullable = self.value.nullable or deltas
        fields.append(pa.field(VALUE_COLUMN, self.value.type_, nullable, metadata))
        if self.with_ttl:
            fields.append(pa.field(LAST_USED_COLUMN, LAST_USED_TYPE, False))
        if deltas:
            fields.append(pa.field(DELETED_COLUMN, pa.bool_(), False))
        return pa.schema(fields)

    def info(self, name: str, *, version: int = 1, ttl_ms: int | None = None) -> StateInfo:
        """Return the declaration of the state for the snapshot."""
        return state_info(
            name, self.kind, self.schema(), self.identity, version=version, ttl_ms=ttl_ms
        )

    def table(self, rows: Rows, max_parallelism: int, *, deltas: bool = False) -> pa.Table:
        """Return the rows as the canonical table, sorted by key group."""
        groups = key_groups_of(hash_keys(rows.keys), max_parallelism)
        columns: list[pa.Array] = [pa.array(groups), *self.keys.to_arrays(rows.keys)]
        if self.namespaced:
            columns.append(pa.array(map(encode_key, rows.namespaces), pa.binary()))
        if self.entry is not None:
            columns.append(self.entry.to_array(rows.entries))
        gone = [value is DELETED for value in rows.values] if deltas else []
        columns.append(self._values(rows.values, gone))
        if self.with_ttl:
            columns.append(pa.array(rows.last_used, pa.int64()).cast(LAST_USED_TYPE))
        if deltas:
            columns.append(pa.array(gone, pa.bool_()))
        table = pa.Table.from_arrays(columns, schema=self.schema(deltas=deltas))
        return table.take(pa.array(np.argsort(groups, kind="stable")))

    def _values(self, values: list[Any], gone: list[bool]) -> pa.Array:
        if not any(gone):
            return self.value.to_array(values)
        there = self.value.to_array([value for value in values if value is not DELETED])
        places = np.cumsum([not deleted for deleted in gone]) - 1
        return there.take(pa.array(places, pa.int64(), mask=np.array(gone)))

    def rows(self, table: pa.Table, values: list[Any] | None = None) -> Rows:
        """Return the rows of a table of this layout, those of a list in the order of position.

        `values` takes the place of the column of values.

        Raises:
            StateError: a value does not fit its type.
        """
        try:
            if values is None:
                values = self.value.from_array(table.column(VALUE_COLUMN))
            rows = Rows(self.keys.from_table(table), values=values)
        except StateError:
            raise
        except Exception as error:  # unpickling and constructors run the user's code
            raise StateError(
                f"restored values do not fit the declared type: {type(error).__name__}: {error}"
            ) from error
        if self.namespaced:
            rows.namespaces = [decode_key(n) for n in table.column(NAMESPACE_COLUMN).to_pylist()]
        if self.entry is not None:
            rows.entries = self.entry.from_array(table.column(ENTRY_COLUMNS[self.kind]))
        if self.with_ttl:
            rows.last_used = table.column(LAST_USED_COLUMN).cast(pa.int64()).to_pylist()
        return rows.by_entry() if self.kind == "list" else rows

    def plain_values(self, table: pa.Table, field: pa.Field) -> list[Any]:
        """Return the values of a column that was stored under another declaration, as plain data."""
        plain: list[Any] = table.column(VALUE_COLUMN).to_pylist()
        if (field.metadata or {}).get(ENCODING) == PickleCodec.encoding:
            return list(map(pickle.loads, plain))
        return plain


def address_rows(rows: Rows) -> Iterator[tuple[Any, Any, Any, Any, int]]:
    """Return `(key, namespace, entry, value, last used)` of each row."""
    count = len(rows)
    nothing: Sequence[Any] = [None] * count
    return zip(
        rows.keys,
        rows.namespaces or nothing,
        rows.entries or nothing,
        rows.values,
        rows.last_used or [0] * count,
        strict=True,
    )


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of keyed state.

    Attributes:
        name: unique in the operator.
        layout: its kind, the types of its values and entries, and the columns of its canonical table.
            Kinds `list` and `map` have any number of entries per key and namespace, the others one value.
            Without `layout.namespaced`, the table ignores `set_namespace`.
        ttl_ms: entries carry the time of their last use, and expire this long after it; None: they never
            expire.
        version: the user's version of the state, kept with it.
        migrate: `(old value as plain data, its version) -> value`, for state of another version.
    """

    name: str
    layout: Layout
    ttl_ms: int | None = None
    version: int = 1
    migrate: Callable[[Any, int], Any] | None = None

    @property
    def info(self) -> StateInfo:
        """The declaration that goes into the snapshot."""
        return self.layout.info(self.name, version=self.version, ttl_ms=self.ttl_ms)


# --- stored tables under the present declaration ---------------------------------------------------


def restored_rows(spec: TableSpec, state: RestoredState, now_ms: int) -> Rows | None:
    """Return the rows of a restored table under its present declaration; None if there is no such table.

    Args:
        spec: the present declaration.
        state: all restored state of the operator.
        now_ms: the last use of values that had no TTL when they were stored.

    Raises:
        StateError: the stored state cannot be loaded. The error names the state and both types.
    """
    table = state.tables.get(spec.name)
    if table is None:
        return None
    old = state.states.get(spec.name)
    if old is not None:
        check_compatible(old, spec.info)
    migrated = old is not None and old.version != spec.version
    declared_later = old is not None and not migrated and is_declared_later(old, spec.info)
    target = spec.layout.schema()
    if migrated or declared_later or spec.layout.value.adapts:
        index = target.get_field_index(VALUE_COLUMN)
        target = target.set(index, table.schema.field(VALUE_COLUMN))
    adapted = adapt(table, target, {LAST_USED_COLUMN: now_ms} if spec.ttl_ms is not None else None)
    try:
        if migrated:
            assert old is not None
            return _migrated(spec, adapted, old)
        if declared_later:
            assert old is not None
            return _unpickled(spec, adapted, old)
        return spec.layout.rows(adapted)
    except StateError as error:
        raise StateError(f"state `{spec.name}`: {error.message}", fix=error.fix) from error


def is_reshaped(spec: TableSpec, state: RestoredState) -> bool:
    """Return True if deltas in the present shape cannot be merged with the stored table."""
    old = state.states.get(spec.name)
    stored = state.tables[spec.name].schema if old is None else old.arrow_schema()
    other_version = old is not None and old.version != spec.version
    if other_version or stored is None or not stored.equals(spec.layout.schema()):
        return True
    return old is not None and is_declared_later(old, spec.info)


def _migrated(spec: TableSpec, table: pa.Table, old: StateInfo) -> Rows:
    migrate = spec.migrate
    if migrate is None:
        raise StateError(
            f"it is of version {old.version}, and version {spec.version} is declared without migrate=",
            fix="give migrate=, a function of the old value and its version",
        )
    schema = old.arrow_schema()
    assert schema is not None
    plain = spec.layout.plain_values(table, schema.field(VALUE_COLUMN))
    values = [_call(migrate, value, old.version) for value in plain]
    return spec.layout.rows(table, values)


def _unpickled(spec: TableSpec, table: pa.Table, old: StateInfo) -> Rows:
    """Return the rows of a state that was pickled and now has a declared type."""
    schema = old.arrow_schema()
    assert schema is not None
    values = spec.layout.plain_values(table, schema.field(VALUE_COLUMN))
    for value in values:
        try:
            spec.layout.value.hold(value)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"a value that was pickled is not of the type that is declared now: {error}",
                fix="declare a type that all stored values have; or raise version= and give migrate=, "
                "which turns old values into new ones",
            ) from error
    return spec.layout.rows(table, values)


def _call(migrate: Callable[[Any, int], Any], value: Any, version: int) -> Any:
    try:
        return migrate(value, version)
    except HeadgateError:
        raise
    except Exception as error:
        raise StateError(
            f"migrate= raised {type(error).__name__}: {error} value=`{value!r:.200}` version=`{version}`"
        ) from error
