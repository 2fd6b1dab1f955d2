"""Periodic savepoints: StreamSnapshots that the operator makes, and deletes when there are enough."""

from __future__ import annotations

from typing import Any, Final

from ..operators.manifest.model import API_VERSION
from .actions import Create, Delete, Object
from .context import Context
from .objects import JOB
from .status import Run, paths_in_use, since_1970_ms

PERIODIC: Final = "headgate.io/periodic"


def keep_savepoints(context: Context, run: Run) -> None:
    """Make the snapshot of this period if there is none, and delete those that are too many or too old.

    Periods begin at multiples of `every` since 1970. The period is in the name, so that two operators, or
    one that sees old things, make one snapshot of it.
    """
    savepoints = context.kubernetes.savepoints
    periodic = [
        each
        for each in context.observed.snapshots
        if each["metadata"].get("labels", {}).get(PERIODIC) == "true"
        and "deletionTimestamp" not in each["metadata"]
    ]
    if savepoints.every is not None:
        every_ms = context.duration(savepoints.every)
        period = context.now_ms // every_ms
        name = f"{context.name}-{period}"
        known = any(each["metadata"]["name"] == name for each in context.observed.snapshots)
        if not known and since_1970_ms(run.running_since) <= period * every_ms:
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


def _snapshot(context: Context, name: str) -> dict[str, Any]:
    """It has no owner: savepoints outlive their job, unless somebody deletes them."""
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
