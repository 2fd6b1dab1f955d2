"""Periodic savepoints: StreamSnapshots that the operator makes, and deletes when there are too many."""

from __future__ import annotations

from typing import Any, Final

from ..api.cron import last_due_ms
from ..api.manifest.model import API_VERSION
from .actions import Create, Delete, Object
from .context import Context
from .objects import JOB
from .spec import Savepoints, milliseconds
from .status import Run, paths_in_use, since_1970_ms

PERIODIC: Final = "headgate.io/periodic"
LATE_MAX_MS: Final = 3_600_000
"""A savepoint of a schedule that is overdue for longer than this is skipped, so that a new schedule does
not begin with a savepoint of yesterday."""
_MINUTE_MS: Final = 60_000


def keep_savepoints(context: Context, run: Run) -> None:
    """Make the snapshot that is due if there is none, and delete those that are too many or too old."""
    savepoints = context.kubernetes.savepoints
    periodic = [
        each
        for each in context.observed.snapshots
        if each["metadata"].get("labels", {}).get(PERIODIC) == "true"
        and "deletionTimestamp" not in each["metadata"]
    ]
    due = _due(savepoints, context.now_ms)
    if due is not None:
        number, due_ms = due
        name = f"{context.name}-{number}"
        known = any(each["metadata"]["name"] == name for each in context.observed.snapshots)
        if not known and since_1970_ms(run.started_at) <= due_ms:
            context.act(Create(_snapshot(context, name)))
    used = paths_in_use(context.status)
    if context.kubernetes.restore is not None:
        used.add(context.kubernetes.restore.path or "")
    completed = [each for each in periodic if _phase(each) == "Completed"]
    completed.sort(key=_completed_ms, reverse=True)
    for index, each in enumerate(completed):
        age_ms = context.now_ms - _completed_ms(each)
        old = savepoints.max_age is not None and age_ms > context.duration(savepoints.max_age)
        surplus = index >= savepoints.retain or (index and old)
        if surplus and each["status"].get("path") not in used:
            _delete(context, each)
    if completed:
        for each in periodic:
            failed = _phase(each) in ("Failed", "Abandoned")
            if failed and _completed_ms(each) < _completed_ms(completed[0]):
                _delete(context, each)


def _due(savepoints: Savepoints, now_ms: int) -> tuple[int, int] | None:
    """Return the number of the savepoint that was due last, and its time; None if there is none.

    The number follows from the time alone, and is in the name of the snapshot. So two operators, or one
    with old observations, make only one snapshot.
    """
    if savepoints.every is not None:
        every_ms = milliseconds(savepoints.every)
        number = now_ms // every_ms
        return number, number * every_ms
    if savepoints.schedule is not None:
        due_ms = last_due_ms(savepoints.schedule, savepoints.time_zone, now_ms, LATE_MAX_MS)
        return None if due_ms is None else (due_ms // _MINUTE_MS, due_ms)
    return None


def _snapshot(context: Context, name: str) -> dict[str, Any]:
    """Return the snapshot. It has no owner, because savepoints outlive their job."""
    savepoints = context.kubernetes.savepoints
    spec: dict[str, Any] = {
        "jobRef": {"name": context.name},
        "type": "Savepoint",
        "format": savepoints.format,
        "deletionPolicy": "Delete",
    }
    if savepoints.directory:
        spec["directory"] = savepoints.directory
    labels = {JOB: context.name, PERIODIC: "true"}
    metadata = {"name": name, "namespace": context.namespace, "labels": labels}
    return {
        "apiVersion": API_VERSION,
        "kind": "StreamSnapshot",
        "metadata": metadata,
        "spec": spec,
    }


def _delete(context: Context, snapshot: Object) -> None:
    metadata = snapshot["metadata"]
    context.act(Delete("StreamSnapshot", metadata["name"], metadata["uid"]))


def _phase(snapshot: Object) -> str:
    return str(snapshot.get("status", {}).get("phase", "Pending"))


def _completed_ms(snapshot: Object) -> int:
    return since_1970_ms(str(snapshot.get("status", {}).get("completedAt", "")))
