"""State as bytes: what the asynchronous part of a snapshot writes, and what a restore reads.

Tables are Parquet (zstd 1), sorted by key group; items are a msgpack list. Small state travels inline in
the checkpoint's manifest, larger state as a file of its own. Everything carries a checksum, verified on
each read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from ...errors import StateError
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    OperatorSnapshot,
    RestoredState,
    StateHandle,
    StateSnapshot,
)
from ..storage.base import CheckpointStore

INLINE_BYTES_MAX = 20_000
"""State up to this size lies in the manifest (Flink `execution.checkpointing.data-inline-threshold`)."""
INLINE_ITEMS_BYTES_MAX = 1 << 20
"""Items may be larger: the coordinator cuts them apart when the parallelism changes."""
ROW_GROUP_ROWS = 65_536

Piece = tuple[str, str, bytes, int, int, int]
"""State name, kind, bytes, rows, first and last key group."""


def encode_snapshot(snapshot: StateSnapshot) -> list[Piece]:
    """Run the table and item makers and encode what they return. Blocking: call it in a thread."""
    pieces: list[Piece] = []
    for state, maker in snapshot.tables.items():
        table = maker()
        if table.num_rows:
            groups = table.column(KEY_GROUP_COLUMN)
            first, last = groups[0].as_py(), groups[-1].as_py()
            pieces.append((state, "table", _parquet(table), table.num_rows, first, last))
    for state, items in snapshot.items.items():
        values = items() if callable(items) else items
        if values:
            pieces.append((state, "items", msgspec.msgpack.encode(values), len(values), 0, -1))
    return pieces


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table, sink, compression="zstd", compression_level=1, row_group_size=ROW_GROUP_ROWS
    )
    return sink.getvalue()


async def store_pieces(
    store: CheckpointStore,
    operator: str,
    pieces: Sequence[Piece],
    name_of: Callable[[str, str], str],
) -> OperatorSnapshot:
    """Write the large pieces under `name_of(state, kind)`; return handles to all of them."""
    handles: list[StateHandle] = []
    for state, kind, data, rows, first, last in pieces:
        inline = len(data) <= (INLINE_ITEMS_BYTES_MAX if kind == "items" else INLINE_BYTES_MAX)
        name = None if inline else name_of(state, kind)
        if name is not None:
            await store.write_file(name, data)
        handles.append(
            StateHandle(
                state=state,
                kind=kind,
                size_bytes=len(data),
                checksum=xxhash.xxh3_64_hexdigest(data),
                rows=rows,
                inline=data if inline else None,
                file=name,
                first_key_group=first,
                last_key_group=last,
            )
        )
    return OperatorSnapshot(operator=operator, handles=tuple(handles))


async def load_state(
    store: CheckpointStore | None, snapshots: Sequence[OperatorSnapshot], key_groups: KeyGroupRange
) -> RestoredState:
    """Read the handles of one operator (possibly of several old subtasks): own key groups only.

    Raises:
        StateError: a file is missing, or its bytes are not the ones that were written.
    """
    tables: dict[str, list[pa.Table]] = {}
    state = RestoredState()
    for snapshot in snapshots:
        for handle in snapshot.handles:
            data = await _bytes_of(store, snapshot.operator, handle)
            if handle.kind == "items":
                items = msgspec.msgpack.decode(data, type=list[bytes])
                state.items.setdefault(handle.state, []).extend(items)
                continue
            table = pq.read_table(io.BytesIO(data), use_threads=False)
            tables.setdefault(handle.state, []).append(_own_rows(table, handle, key_groups))
    for name, parts in tables.items():
        table = pa.concat_tables(parts)
        state.tables[name] = table.sort_by(KEY_GROUP_COLUMN) if len(parts) > 1 else table
    return state


def _own_rows(table: pa.Table, handle: StateHandle, key_groups: KeyGroupRange) -> pa.Table:
    if handle.first_key_group in key_groups and handle.last_key_group in key_groups:
        return table
    column = table.column(KEY_GROUP_COLUMN)
    return table.filter(
        pc.and_(pc.greater_equal(column, key_groups.first), pc.less_equal(column, key_groups.last))
    )


async def _bytes_of(store: CheckpointStore | None, operator: str, handle: StateHandle) -> bytes:
    if handle.inline is not None:
        data = handle.inline
    elif store is None or handle.file is None:
        raise StateError(f"state has no readable file operator=`{operator}` state=`{handle.state}`")
    else:
        data = await store.read_file(handle.file)
    if len(data) != handle.size_bytes or xxhash.xxh3_64_hexdigest(data) != handle.checksum:
        raise StateError(
            f"state is corrupt operator=`{operator}` state=`{handle.state}` "
            f"expected_bytes=`{handle.size_bytes}` bytes=`{len(data)}`",
            where=handle.file or "the manifest of the checkpoint",
            fix="restore an older checkpoint",
        )
    return data
