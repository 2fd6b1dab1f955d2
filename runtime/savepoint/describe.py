"""The content of a savepoint or a checkpoint as plain values: for inspection, comparison and checks."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ...state.snapshot import KEY_GROUP_COLUMN, StateHandle, StateInfo
from ..protocol.checkpoints.manifest import ManifestOperator
from .locate import StoredSnapshot

SPLITS = "splits"
"""The state with the positions of a source."""


def describe(located: StoredSnapshot) -> dict[str, Any]:
    """Describe a savepoint for a person, as JSON values.

    Rows of incremental checkpoints count each row as often as it was written: base and deltas.
    """
    manifest, savepoint = located.manifest, located.savepoint
    operators = [_operator(operator, manifest.max_parallelism) for operator in manifest.operators]
    return {
        "path": located.root,
        "kind": "savepoint" if savepoint is not None else "checkpoint",
        "job": located.job,
        "id": manifest.checkpoint_id,
        "created_ms": manifest.completed_ms,
        "duration_ms": manifest.duration_ms,
        "format": ("native" if savepoint.native else "canonical") if savepoint else "checkpoint",
        "format_version": savepoint.format_version if savepoint is not None else None,
        "headgate": savepoint.headgate if savepoint is not None else None,
        "max_parallelism": manifest.max_parallelism,
        "bytes": sum(handle.size_bytes for handle in manifest.handles()),
        "files": len(manifest.files()),
        "operators": operators,
    }


def states_of(operator: ManifestOperator) -> dict[str, StateInfo | None]:
    """Return the non-empty states of an operator, with their declarations."""
    infos = operator.infos()
    named = {handle.state for handle in operator.handles() if handle.channel is None}
    return {name: infos.get(name) for name in sorted(named)}


def _operator(operator: ManifestOperator, max_parallelism: int) -> dict[str, Any]:
    in_flight = [handle for handle in operator.handles() if handle.channel is not None]
    return {
        "operator": operator.name,
        "parallelism": operator.parallelism,
        "finished": sum(subtask.finished for subtask in operator.subtasks),
        "in_flight_rows": sum(handle.rows for handle in in_flight),
        "in_flight_bytes": sum(handle.size_bytes for handle in in_flight),
        "states": [
            _state(name, info, [h for h in operator.handles() if h.state == name], max_parallelism)
            for name, info in states_of(operator).items()
        ],
    }


def _state(
    name: str, info: StateInfo | None, pieces: list[StateHandle], max_parallelism: int
) -> dict[str, Any]:
    keyed = [piece for piece in pieces if piece.kind not in ("items", "meta") and piece.rows]
    items = [piece for piece in pieces if piece.kind == "items"]
    keys, values = columns_of(info)
    return {
        "state": name,
        "kind": info.kind if info is not None else (items[0].redistribution if items else "table"),
        "stored_as": "+".join(sorted({piece.kind for piece in pieces})),
        "keys": keys,
        "values": values,
        "rows": sum(piece.rows for piece in (items or keyed)),
        "bytes": sum(piece.size_bytes for piece in pieces),
        "key_groups": _key_groups(keyed),
        "max_parallelism": max_parallelism,
        "version": info.version if info is not None else 1,
        "ttl_ms": info.ttl_ms if info is not None else None,
    }


def columns_of(info: StateInfo | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return names and types of the key columns and of the others."""
    schema: pa.Schema | None = info.arrow_schema() if info is not None else None
    if info is None or schema is None:
        return {}, {}
    fields = {field.name: str(field.type) for field in schema if field.name != KEY_GROUP_COLUMN}
    keys = {name: type_ for name, type_ in fields.items() if name in info.keys}
    return keys, {name: type_ for name, type_ in fields.items() if name not in keys}


def _key_groups(keyed: list[StateHandle]) -> list[int]:
    """Return first and last key group with rows; empty: not keyed, or no rows."""
    if not keyed:
        return []
    return [min(h.first_key_group for h in keyed), max(h.last_key_group for h in keyed)]
