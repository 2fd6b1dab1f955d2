"""Profiles of subtasks, on demand: the coordinator finds the worker, and the worker takes the samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from ...errors import JobNotReady, UsageError
from ..control.messages import ProfileAnswer, StateOutcome, TakeProfile
from ..protocol.ids import SubtaskId
from .context import JobContext
from .pending_queries import PendingQueries
from .queries import check_running, worker_of

HERTZ: Final = 100
"""How many looks per second a worker takes: each takes some 20 µs of its processor."""
_GRACE_S: Final = 15.0
"""The worker begins when its event loop is free, and answers when it is free again."""


async def take_profile(
    job: JobContext, pending: PendingQueries, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a subtask ran and waited for, during the next seconds.

    Args:
        job: the job.
        pending: the queries to its workers.
        given: `vertex` and `subtask`, their numbers, and `seconds`.

    Raises:
        UsageError: there is no such subtask.
        JobNotReady: the job does not run just now, the subtask ends meanwhile, or the worker does not
            answer or takes another profile.
        JobError: the job has ended.
    """
    plan, seconds = job.attempt.plan, given["seconds"]
    vertex = plan.vertices[given["vertex"]]
    if given["subtask"] >= vertex.parallelism:
        raise UsageError(
            f"no such subtask vertex=`{vertex.name}` subtask=`{given['subtask']}`",
            fix=f"subtasks are 0 to {vertex.parallelism - 1}",
        )
    check_running(job, "profiled")
    subtask = SubtaskId(vertex.id, given["subtask"])
    name = job.attempt.executions.name(subtask)
    worker, attempt = worker_of(job, subtask, f"subtask=`{name}`")
    number, answer = pending.add(worker.worker_id)
    asked = TakeProfile(
        attempt=attempt,
        query=number,
        vertex=vertex.id,
        index=subtask.index,
        milliseconds=seconds * 1000,
        hertz=HERTZ,
    )
    try:
        worker.send(asked)
        async with asyncio.timeout(seconds + _GRACE_S):
            found: ProfileAnswer = await answer
    except TimeoutError:
        raise JobNotReady(
            f"the worker did not answer within {seconds + _GRACE_S:.0f} s worker=`{worker.worker_id}`",
            fix="a step of it is in one long call; the job's status names it under `busy_steps`",
        ) from None
    finally:
        pending.drop(number)
    match found.outcome:
        case StateOutcome.READ:
            return _described(job, worker.worker_id, name, found)
        case StateOutcome.BUSY:
            raise JobNotReady(
                f"the worker takes another profile worker=`{worker.worker_id}`",
                fix="ask again when it is done",
            )
        case _:
            raise JobNotReady(f"the subtask restarts subtask=`{name}`", fix="ask again in a moment")


def _described(job: JobContext, worker: str, name: str, found: ProfileAnswer) -> dict[str, Any]:
    return {
        "job": job.env.spec.name,
        "task": name,
        "worker": worker,
        "hertz": HERTZ,
        "samples": found.samples,
        "running": found.running,
        "functions": list(found.functions),
        "stacks": [
            {"frames": list(each.frames), "running": each.running, "waiting": each.waiting}
            for each in found.stacks
        ],
        "others": found.others,
    }
