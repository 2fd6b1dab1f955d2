"""Commands of clients: they are checked before anything happens to the job."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...errors import JobError, UsageError
from ..options.state import SAVEPOINT_DIR
from ..plan import JobSpec, PhysicalPlan, Vertex
from ..savepoint import store
from ..savepoint.locate import savepoint_address
from .attempt import Attempt
from .environment import ClientCommand, JobEnvironment

FORMER_MAX: Final = 16
"""A savepoint that is requested again is looked for in this number of generations before this one."""


def check_keeps_checkpoints(env: JobEnvironment) -> None:
    """Raise UsageError if the job has no checkpoint storage."""
    if not env.keeps_checkpoints:
        raise UsageError(
            "the job takes no checkpoints",
            fix="say where to keep them: job.checkpoint(every=..., storage=...)",
        )


def savepoint_target(env: JobEnvironment, command: ClientCommand) -> str:
    """Return the address of a new savepoint: below the directory that the client, or the option, names.

    Raises:
        UsageError: neither names a directory, or it is an address of an unknown kind.
    """
    trigger = _trigger_of(env, command.arguments)
    token = (
        _directory_of(env, command.arguments, env.generation) if trigger else secrets.token_hex(6)
    )
    return _savepoint_address(env, command.arguments, token)


async def savepoint_of_trigger(
    env: JobEnvironment, arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the result of a savepoint that a client requests again, with the same trigger id.

    The directory of such a savepoint is named by its trigger id and by the generation of the coordinator
    that took it. So a coordinator that takes over finds what the one before has completed, and writes
    nothing where a worker of that one may still be writing.

    Returns:
        The result; None if the savepoint has to be taken.

    Raises:
        UsageError: this coordinator tried before, and it failed.
        HeadgateError: the storage cannot be read.
    """
    if not _trigger_of(env, arguments):
        return None
    for generation in range(env.generation, max(0, env.generation - 1 - FORMER_MAX), -1):
        address = _savepoint_address(env, arguments, _directory_of(env, arguments, generation))
        async with store.opened(env.open_at, address, env.spec.options, writable=False) as place:
            savepoint = await store.read(place)
            if savepoint is not None:
                manifest = savepoint.manifest
                return {
                    "savepoint": address,
                    "checkpoint": manifest.checkpoint_id,
                    "duration_ms": manifest.duration_ms,
                    "size_bytes": manifest.size_bytes,
                }
            if generation == env.generation and await store.unfinished_files(place, address):
                raise JobError(
                    "a savepoint with this triggerId has failed before",
                    fix="choose a new id for each operation",
                )
    return None


def _trigger_of(env: JobEnvironment, arguments: Mapping[str, Any]) -> str:
    """Return the trigger id of a savepoint; empty if there is none, or no coordinator can take over."""
    trigger = str(arguments.get("trigger", ""))
    return trigger if trigger and env.log is not None else ""


def _directory_of(env: JobEnvironment, arguments: Mapping[str, Any], generation: int) -> str:
    """Return the last part of the name of the directory of a savepoint with a trigger id."""
    assert env.log is not None
    native = str(bool(arguments.get("native")))
    parts = (env.log.view.run, str(arguments["trigger"]), native, str(generation))
    return hashlib.blake2s("\0".join(parts).encode(), digest_size=6).hexdigest()


def _savepoint_address(env: JobEnvironment, arguments: Mapping[str, Any], token: str) -> str:
    target = arguments.get("savepoint") or env.options.get(SAVEPOINT_DIR)
    if not target:
        raise UsageError(
            "nobody says where savepoints go",
            fix=f"name a directory, or set {SAVEPOINT_DIR.key}",
        )
    address = savepoint_address(str(target), env.spec.name, token)
    env.open_at(address, env.spec.options)  # not opened: this only checks the kind of address
    return address


def check_rescale(attempt: Attempt, spec: JobSpec, wanted: object) -> tuple[int, PhysicalPlan]:
    """Return the parallelism to rescale to, and the plan at that parallelism.

    Raises:
        UsageError: it is not a parallelism, changes nothing, or is above the number of key groups.
    """
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"not a parallelism value=`{wanted}`", fix="give a whole number from 1 on")
    plan = spec.replan(wanted, attempt.plan.max_parallelism)

    def widths(vertices: Iterable[Vertex]) -> list[tuple[str, int]]:
        return [(node.name, v.parallelism) for v in vertices for node in v.nodes]

    if sorted(widths(plan.vertices)) == sorted(widths(attempt.plan.vertices)):
        raise UsageError(
            f"nothing would change parallelism=`{wanted}`",
            fix="operators that set their own parallelism keep it",
        )
    return wanted, plan


async def dispose_savepoint(env: JobEnvironment, path: object) -> dict[str, Any]:
    """Delete a savepoint and all its files, with the job's access to storages.

    Raises:
        UsageError: no path is given, or the job could not recover without this savepoint.
        HeadgateError: there is no savepoint, or it cannot be deleted.
    """
    if not isinstance(path, str) or not path:
        raise UsageError("nobody says which savepoint to delete", fix="give the path of one")
    began_with = env.spec.restore_from
    has_own = env.log is not None and env.log.view.newest is not None
    if began_with and not has_own and _place(env, path) == _place(env, began_with):
        raise UsageError(
            f"the job began with this savepoint and has no checkpoint of its own yet path=`{path}`",
            fix="take a checkpoint first, or end the job",
        )
    savepoint = await store.dispose(env.open_at, path, env.spec.options)
    return {"path": path, "job": "" if savepoint is None else savepoint.job}


def _place(env: JobEnvironment, address: str) -> str:
    """Return a name for the place of an address that does not depend on how the address is written."""
    place = env.open_at(address, env.spec.options).describe()
    return os.path.realpath(place) if place.startswith("/") else place
