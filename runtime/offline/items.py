"""State of subtasks as a table: lists, broadcast maps, and what only its operator can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...state.evolution import ENCODING
from ...state.forms import plain_of
from ...state.keyed.canonical import VALUE_COLUMN
from ...state.keyed.keys import decode_key
from .files import OpenStore
from .snapshot import StoredState

SUBTASK: Final = pa.field("subtask", pa.int32(), False)
POSITION: Final = pa.field("position", pa.int64(), False)
MAP_KEY: Final = pa.field("map_key", pa.string(), False)
ITEM: Final = pa.field("item", pa.binary(), False)


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
