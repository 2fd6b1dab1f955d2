"""What clients wish for, checked before anything happens."""

from __future__ import annotations

import os
import secrets
from typing import Any

from ...errors import UsageError
from ..checkpoint_options import (
    SAVEPOINT_DIR,
)
from ..plan import PhysicalPlan
from ..savepoint import store
from ..savepoint.locate import savepoint_address
from .context import ClientWish, JobContext


def check_keeps_checkpoints(job: JobContext) -> None:
    """Raise UsageError if the job has nowhere to put a checkpoint."""
    if not job.keeps_checkpoints:
        raise UsageError(
            "the job takes no checkpoints",
            fix="say where to keep them: job.checkpoint(every=..., storage=...)",
        )


def savepoint_target(job: JobContext, wish: ClientWish) -> str:
    """The directory of a new savepoint: below the one the client named, or the option.

    Raises:
        UsageError: neither says where, or it is an address of an unknown kind.
    """
    target = wish.arguments.get("savepoint") or job.options.get(SAVEPOINT_DIR)
    if not target:
        raise UsageError(
            "nobody says where savepoints go",
            fix=f"name a directory, or set {SAVEPOINT_DIR.key}",
        )
    address = savepoint_address(str(target), job.spec.name, secrets.token_hex(6))
    job.open_at(address, job.spec.options)  # not opened: only to see that it is understood
    return address


def check_rescale(job: JobContext, wanted: Any) -> tuple[int, PhysicalPlan]:
    """The parallelism to rescale to, and what runs then.

    Raises:
        UsageError: it is no such number, changes nothing, or is above the number of key groups.
    """
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"not a parallelism value=`{wanted}`", fix="give a whole number from 1 on")
    plan = job.spec.replan(wanted, job.plan.max_parallelism)

    def widths(vertices: Any) -> list[tuple[str, int]]:
        return [(node.name, v.parallelism) for v in vertices for node in v.nodes]

    if sorted(widths(plan.vertices)) == sorted(widths(job.plan.vertices)):
        raise UsageError(
            f"nothing would change parallelism=`{wanted}`",
            fix="operators that set their own parallelism keep it",
        )
    return wanted, plan


async def dispose_savepoint(job: JobContext, path: Any) -> dict[str, Any]:
    """Delete a savepoint and all its files, with the job's access to storages.

    Raises:
        UsageError: no path is given, or the job could not recover without this savepoint.
        HeadgateError: there is no savepoint, or it cannot be deleted.
    """
    if not isinstance(path, str) or not path:
        raise UsageError("nobody says which savepoint to delete", fix="give the path of one")
    began_with = job.spec.restore_from
    has_own = job.log is not None and job.log.view.newest is not None
    if began_with and not has_own and _place(job, path) == _place(job, began_with):
        raise UsageError(
            f"the job began with this savepoint and has no checkpoint of its own yet path=`{path}`",
            fix="take a checkpoint first, or end the job",
        )
    savepoint = await store.dispose(job.open_at, path, job.spec.options)
    return {"path": path, "job": "" if savepoint is None else savepoint.job}


def _place(job: JobContext, address: str) -> str:
    """Where an address leads, however it is written."""
    place = job.open_at(address, job.spec.options).describe()
    return os.path.realpath(place) if place.startswith("/") else place
