"""The changes of some keys of a state since a client was told of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ..protocol.changes import Position, digest_of
from .context import JobContext
from .pending_queries import PendingQueries
from .queries import (
    COMMITTED,
    check_level,
    check_running,
    committed_checkpoint,
    find_state,
    query_keys,
)


async def find_changes(
    job: JobContext, pending: PendingQueries, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of those keys that have changed since `after`, and the position behind them.

    At the level `committed` nothing is read while no other checkpoint is complete.

    Args:
        job: the job.
        pending: the queries to its workers.
        given: `state`, `keys` and `level` as for `query_keys`, but the level is `committed` by default;
            `after`, the `id` of the answer before, without which all keys are told.

    Raises:
        HeadgateError: as `query_keys`.
    """
    _, node, state = find_state(job.attempt.plan, given.get("state"))
    level, run, after = given.get("level") or COMMITTED, job.env.spec.run, given.get("after") or ""
    check_level(state, level)
    try:
        seen = Position.decode(after)
    except ValueError:
        raise UsageError(
            f"this is not the id of an event id=`{after:.200}`",
            fix="give the id of the last event that you got, or none",
        ) from None
    check_running(job, "queried")
    answer: dict[str, Any] = {
        "job": job.env.spec.name,
        "run": run,
        "state": state.name,
        "kind": state.kind,
        "step": node.name,
        "level": level,
        "checkpoint": None,
        "since": seen.checkpoint if seen.run == run and seen.checkpoint else None,
        "id": after,
        "rows": [],
    }
    if level == COMMITTED and seen.is_as_of(run, committed_checkpoint(job, state)):
        return {**answer, "checkpoint": seen.checkpoint}
    found = await query_keys(job, pending, {**given, "level": level})
    rows, is_map = found["rows"], state.kind == "map"
    digests = tuple(digest_of(r["key"], r["found"], r["value"], is_map=is_map) for r in rows)
    return {
        **answer,
        "checkpoint": found["checkpoint"],
        "id": Position(run, found["checkpoint"] or 0, digests).encode(),
        "rows": [rows[place] for place in seen.changed(digests)],
    }
