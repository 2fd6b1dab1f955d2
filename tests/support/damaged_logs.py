"""A job log, and the metadata of a savepoint, read after one of their objects was damaged."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

from headgate.operators.clock import SystemClock
from headgate.operators.sink import OutputFile
from headgate.runtime.protocol import names
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
)
from headgate.runtime.protocol.job_result import JobFailure
from headgate.runtime.protocol.joblog import DeploymentRecord, JobStatus, Leader
from headgate.runtime.savepoint import store as savepoints
from headgate.runtime.savepoint.store import savepoint_of
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore

from .corruption import damaged, judge
from .damaged_files import files


def _manifest(checkpoint_id: int) -> Manifest:
    return Manifest(
        checkpoint_id=checkpoint_id,
        trigger_ms=1,
        completed_ms=7,
        duration_ms=6,
        max_parallelism=64,
        operators=(
            ManifestOperator(
                name="op",
                parallelism=1,
                subtasks=(ManifestSubtask(subtask=0, snapshots=(files().snapshot,)),),
            ),
        ),
    )


LEADER = Leader(host="here", pid=1, started_ms=5, addresses=("unix:/run/x", "tcp:here:1"))


async def _write(store: MemoryStore) -> None:
    """Write two generations, a trimmed log with each kind of entry, and a savepoint."""
    deployment = DeploymentRecord(
        attempt=1, workers=("a", "b"), plan="p", parallelism=2, max_parallelism=64
    )
    for generation in range(2):
        log = JobLog(store, f"writer-{generation}", SystemClock())
        await log.start_generation(parallelism=2, max_parallelism=64, run="run", leader=LEADER)
        if not generation:
            await log.list_output(
                {"out": [OutputFile("part-1", "1-1"), OutputFile("part-2", "2-1")]}
            )
        await log.deploy(deployment)
        for number in range(3):
            await log.complete_checkpoint(_manifest(3 * generation + number + 1))
            await log.trim(2)
    failure = JobFailure(
        kind="job", text="text", vertex="op", error="JobError", message="it failed"
    )
    await log.end_job(JobStatus.FAILED, "it failed", failure=failure)
    await savepoints.publish(store, savepoint_of(_manifest(9), "job", native=False))


@cache
def objects() -> dict[str, bytes]:
    """Return the written objects, which are always the same except for times."""
    store = MemoryStore("log", {})
    asyncio.run(_write(store))
    return dict(store._objects)


async def _read(store: MemoryStore) -> list[Any]:
    view = await JobLog(store, "reader", SystemClock()).load()
    leader = JobLog(store, "next", SystemClock())
    generation = await leader.start_generation(parallelism=2, max_parallelism=64, run="run")
    savepoint = await savepoints.read(store)
    return [view, generation, leader.view.checkpoints, await leader.old_output(), savepoint]


def read(found: dict[str, bytes]) -> list[Any]:
    """Return the results of a reader, a new leader, and a restore of the savepoint."""
    return asyncio.run(_read(MemoryStore("log", dict(found))))


@cache
def undamaged() -> list[Any]:
    """Return their results for undamaged objects."""
    return read(objects())


def check_damage(name: str, rng: random.Random) -> str:
    """Damage the object called `name`, and read everything; see `judge`."""
    kind, data = damaged(objects()[name], rng)
    return judge(lambda: read({**objects(), name: data}), undamaged(), name, f"{kind} in {name}")


def kind_of(name: str) -> str:
    """Return the kind of an object, for tables of results."""
    if name == names.SAVEPOINT_METADATA:
        return "savepoint metadata"
    return "generation record" if name.startswith("log/generation/") else "log entry"
