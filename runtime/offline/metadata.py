"""The contents of a snapshot as a table: a row per state."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from ..savepoint.describe import describe
from .snapshot import Snapshot

_TEXTS: Final = pa.map_(pa.string(), pa.string())
METADATA_SCHEMA: Final = pa.schema(
    [
        ("operator", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("stored_as", pa.string()),
        ("key_columns", _TEXTS),
        ("value_columns", _TEXTS),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("first_key_group", pa.int32()),
        ("last_key_group", pa.int32()),
        ("version", pa.int32()),
        ("ttl_ms", pa.int64()),
        ("parallelism", pa.int32()),
        ("max_parallelism", pa.int32()),
        ("job", pa.string()),
        ("checkpoint_id", pa.int64()),
        ("format", pa.string()),
        ("created", pa.timestamp("us", tz="UTC")),
        ("path", pa.string()),
    ]
)
"""`rows` of a checkpoint counts each row as often as it was written: base and deltas."""


def metadata_table(snapshot: Snapshot) -> pa.Table:
    """A row per state, in the order of operators and names."""
    found = describe(snapshot.located)
    rows = [
        _row(found, operator, state)
        for operator in found["operators"]
        for state in operator["states"]
    ]
    return pa.Table.from_pylist(rows, METADATA_SCHEMA)


def _row(found: dict[str, Any], operator: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    first, last = state["key_groups"] or (None, None)
    return {
        **{name: state[name] for name in ("state", "kind", "stored_as", "rows", "bytes")},
        **{name: state[name] for name in ("version", "ttl_ms", "max_parallelism")},
        "operator": operator["operator"],
        "parallelism": operator["parallelism"],
        "key_columns": list(state["keys"].items()),
        "value_columns": list(state["values"].items()),
        "first_key_group": first,
        "last_key_group": last,
        "job": found["job"],
        "checkpoint_id": found["id"],
        "format": found["format"],
        "created": found["created_ms"] * 1000,
        "path": found["path"],
    }
