"""Checks requests of clients before anything happens."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from typing import Any, Final

from ...errors import JobError, UsageError
from ..options.state import SAVEPOINT_DIR
from ..plan import PhysicalPlan
from ..savepoint import store
from ..savepoint.locate import savepoint_address
from .context import ClientWish, JobContext
from .manifests import size_of

FORMER_MAX: Final = 16
"""A savepoint that is asked for again is looked for with so many coordinators before this one."""


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
    trigger = _trigger_of(job, wish.arguments)
    token = _directory_of(job, wish.arguments, job.generation) if trigger else secrets.token_hex(6)
    return _savepoint_address(job, wish.arguments, token)


async def savepoint_of_trigger(
    job: JobContext, arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The result of a savepoint that a client asks for again, with the same trigger id.

    The directory of such a savepoint is named by its trigger id and by the generation of the coordinator
    that took it. So a coordinator that takes over finds what the one before has completed, and writes
    nothing where a worker of that one may still be writing.

    Returns:
        None if the savepoint has to be taken.

    Raises:
        UsageError: this coordinator tried before, and it failed.
        HeadgateError: the storage cannot be read.
    """
    if not _trigger_of(job, arguments):
        return None
    for generation in range(job.generation, max(0, job.generation - 1 - FORMER_MAX), -1):
        address = _savepoint_address(job, arguments, _directory_of(job, arguments, generation))
        async with store.opened(job.open_at, address, job.spec.options, writable=False) as place:
            savepoint = await store.read(place)
            if savepoint is not None:
                manifest = savepoint.manifest
                return {
                    "savepoint": address,
                    "checkpoint": manifest.checkpoint_id,
                    "duration_ms": manifest.duration_ms,
                    "size_bytes": size_of(manifest),
                }
            if generation == job.generation and await store.unfinished_files(place, address):
                raise JobError(
                    "a savepoint with this triggerId has failed before",
                    fix="choose a new id for each operation",
                )
    return None


def _trigger_of(job: JobContext, arguments: Mapping[str, Any]) -> str:
    """The trigger id of a savepoint; empty if there is none, or the job has no run that others continue."""
    trigger = str(arguments.get("trigger", ""))
    return trigger if trigger and job.log is not None else ""


def _directory_of(job: JobContext, arguments: Mapping[str, Any], generation: int) -> str:
    """The last part of the name of the directory of a savepoint with a trigger id."""
    assert job.log is not None
    native = str(bool(arguments.get("native")))
    parts = (job.log.view.run, str(arguments["trigger"]), native, str(generation))
    return hashlib.blake2s("\0".join(parts).encode(), digest_size=6).hexdigest()


def _savepoint_address(job: JobContext, arguments: Mapping[str, Any], token: str) -> str:
    target = arguments.get("savepoint") or job.options.get(SAVEPOINT_DIR)
    if not target:
        raise UsageError(
            "nobody says where savepoints go",
            fix=f"name a directory, or set {SAVEPOINT_DIR.key}",
        )
    address = savepoint_address(str(target), job.spec.name, token)
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
