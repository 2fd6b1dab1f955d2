"""Entries of a RocksDB as rows of the state's table, without the classes of their values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa

from ...state.evolution import ENCODING, LAST_USED_COLUMN
from ...state.forms import plain_of
from ...state.keyed.canonical import NAMESPACE_COLUMN, VALUE_COLUMN
from ...state.keyed.keys import TEXT_MAX, decode_token, encode_key, key_of
from ...state.keygroups import KeyGroupRange
from ...state.rocksdb.database import database_options, shared_memory
from ...state.rocksdb.layout import GROUP_BYTES, group_of, split_value
from ...state.rocksdb.restore import StoredDatabase
from ...state.settings import RocksDBSettings
from ...state.snapshot import KEY_GROUP_COLUMN, RestoredFiles
from .keys import KEY_TEXT, is_opaque
from .snapshot import StoredState, unreadable

ROWS_PER_TABLE: Final = 65_536


def rocksdb_tables(
    state: StoredState,
    files: RestoredFiles,
    groups: KeyGroupRange,
    schema: pa.Schema,
    directory: Path,
) -> Iterator[pa.Table]:
    """The rows with these key groups.

    Raises:
        StateError: a file is missing, or the map has keys of bytes, of which it is not known what they are.
    """
    entry = state.entry_column
    if state.kind == "map" and pa.types.is_binary(schema.field(entry).type):
        raise unreadable(state)
    settings = RocksDBSettings()
    options = database_options(settings, shared_memory(settings), copy=True)
    stored = StoredDatabase(files, groups)
    rows = _Rows(state, schema)
    for key, value in stored.entries(directory / "database", options):
        rows.add(key, value)
        if len(rows.groups) == ROWS_PER_TABLE:
            yield rows.table()
            rows = _Rows(state, schema)
    if rows.groups:
        yield rows.table()


@dataclass(slots=True)
class _Rows:
    state: StoredState
    schema: pa.Schema
    groups: list[int] = field(default_factory=list)
    parts: list[list[Any]] = field(default_factory=list)
    """The key of each entry, and its namespace and entry key where it has them."""
    values: list[bytes] = field(default_factory=list)
    last_used: list[int] = field(default_factory=list)

    def add(self, key: bytes, data: bytes) -> None:
        at, parts = GROUP_BYTES, []
        while at < len(key):
            token, at = decode_token(key, at)
            parts.append(key_of(token))
        value, used = split_value(data, LAST_USED_COLUMN in self.schema.names)
        self.groups.append(group_of(key))
        self.parts.append(parts)
        self.values.append(value)
        self.last_used.append(used)

    def table(self) -> pa.Table:
        """The rows as a table."""
        return pa.Table.from_arrays([self._column(one) for one in self.schema], schema=self.schema)

    def _column(self, one: pa.Field) -> pa.Array:
        if one.name == KEY_GROUP_COLUMN:
            return pa.array(self.groups, one.type)
        if one.name == VALUE_COLUMN:
            return self._values(one)
        if one.name == LAST_USED_COLUMN:
            return pa.array(self.last_used, pa.int64()).cast(one.type)
        if one.name == self.state.entry_column:
            return _array([parts[-1] for parts in self.parts], one.type)
        if one.name == NAMESPACE_COLUMN:
            return pa.array([encode_key(parts[1]) for parts in self.parts], one.type)
        return self._keys(one)

    def _keys(self, one: pa.Field) -> pa.Array:
        keys = [parts[0] for parts in self.parts]
        names = self.state.hash_columns or ()
        if is_opaque(names, self.schema):
            if one.name == KEY_TEXT:
                return pa.array([repr(key)[:TEXT_MAX] for key in keys], one.type)
            return pa.array(map(encode_key, keys), one.type)
        if len(names) > 1 or isinstance(keys[0], tuple):
            keys = [key[names.index(one.name)] for key in keys]
        return _array(keys, one.type)

    def _values(self, one: pa.Field) -> pa.Array:
        if ENCODING in (one.metadata or {}):
            return pa.array(self.values, one.type)
        plain = plain_of(one.type)
        return pa.array([plain(msgspec.msgpack.decode(data)) for data in self.values], one.type)


def _array(keys: list[Any], type_: pa.DataType) -> pa.Array:
    """Keys as tables have them: UUIDs as bytes, and where they are entries, as text."""
    if pa.types.is_string(type_):
        keys = [str(key) if isinstance(key, UUID | Decimal) else key for key in keys]
    elif pa.types.is_fixed_size_binary(type_):
        keys = [key.bytes if isinstance(key, UUID) else key for key in keys]
    elif pa.types.is_timestamp(type_) and type_.tz is None:
        keys = [_naive(key) for key in keys]
    return pa.array(keys, type_)


def _naive(key: Any) -> Any:
    aware = isinstance(key, datetime) and key.tzinfo is not None
    return key.astimezone(UTC).replace(tzinfo=None) if aware else key
