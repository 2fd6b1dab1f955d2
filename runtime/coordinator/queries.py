"""Queries of state at the coordinator: it finds the owner of the key, and asks the worker that has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ...errors import JobError, JobNotReady, StateError, StateNotFound, UsageError
from ...operators.durations import format_duration
from ...operators.graph import Node
from ...operators.queries import QueryableState, key_as_json, parse_key
from ...operators.suggestions import suggest
from ...state.hashing import hash_key, key_group_of
from ...state.keyed.keys import encode_key
from ...state.keygroups import owner_of
from ..control.messages import AskState, StateAnswer, StateOutcome
from ..options.network import QUERY_ANSWER_MAX, QUERY_TIMEOUT, QUERY_WAITING_MAX
from ..plan import PhysicalPlan, Vertex
from ..protocol.ids import SubtaskId
from .context import JobContext
from .pending_queries import PendingQueries
from .workers import LiveWorker

LIVE: Final = "live"
"""The level of an answer that is read while the job runs: a failure may take it back."""
_LATER: Final = "ask again in a moment"


def describe_states(plan: PhysicalPlan) -> dict[str, Any]:
    """Return the queryable states of a job."""
    return {
        "states": [
            {
                "name": state.name,
                "step": node.name,
                "kind": state.kind,
                "key": state.key_types or None,
            }
            for _, node, state in _states(plan)
        ]
    }


def _states(plan: PhysicalPlan) -> list[tuple[Vertex, Node, QueryableState]]:
    return [
        (vertex, node, state)
        for vertex in plan.vertices
        for node in vertex.nodes
        for state in node.queryable
    ]


async def query_state(
    job: JobContext, pending: PendingQueries, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value that a state has for a key, read between two batches of the key's subtask.

    Args:
        job: the job.
        pending: the queries to its workers.
        given: `state`, the name, and `key`, the text of the key.

    Raises:
        StateNotFound: the job has no queryable state of that name.
        UsageError: the text is not a key of that state.
        JobNotReady: the job does not run just now, the subtask does not answer, or too many ask.
        JobError: the job has ended, or the value is too large.
        StateError: the value cannot be read.
    """
    plan, options = job.attempt.plan, job.env.options
    vertex, node, state = _find(plan, given.get("state"))
    text = given.get("key")
    if not isinstance(text, str):
        raise UsageError(f"the query has no key state=`{state.name}`", fix="give key=...")
    key = parse_key(state, text)
    check_running(job, "queried")
    if len(pending) >= options.get(QUERY_WAITING_MAX):
        raise _too_many(options.get(QUERY_WAITING_MAX))
    key_group = key_group_of(hash_key(key), plan.max_parallelism)
    index = owner_of(key_group, vertex.parallelism, plan.max_parallelism)
    subtask = SubtaskId(vertex.id, index)
    worker, attempt = worker_of(job, subtask, f"state=`{state.name}`")
    number, answer = pending.add(worker.worker_id)
    asked = AskState(
        attempt=attempt,
        query=number,
        vertex=vertex.id,
        index=index,
        operator=node.name,
        state=state.state,
        key=encode_key(key),
        bytes_max=options.get(QUERY_ANSWER_MAX),
        waiting_max=options.get(QUERY_WAITING_MAX),
        timeout_ms=options.get(QUERY_TIMEOUT),
    )
    try:
        worker.send(asked)
        async with asyncio.timeout(asked.timeout_ms / 1000):
            read = await answer
    except TimeoutError:
        raise JobNotReady(
            f"the subtask of the key did not answer within {format_duration(asked.timeout_ms)} "
            f"state=`{state.name}` subtask=`{job.attempt.executions.name(subtask)}`",
            fix="ask again: it restarts, or is in a long call; "
            f"{QUERY_TIMEOUT.key} is how long a query waits",
        ) from None
    finally:
        pending.drop(number)
    _check_read(read, state, asked.waiting_max, asked.bytes_max)
    found = bool(read.value)
    return {
        "job": job.env.spec.name,
        "run": job.env.spec.run,
        "attempt": attempt,
        "state": state.name,
        "kind": state.kind,
        "step": node.name,
        "subtask": index,
        "key": key_as_json(state, key),
        "key_group": key_group,
        "level": LIVE,
        "found": found,
        "value": msgspec.json.decode(read.value) if found else None,
    }


def worker_of(job: JobContext, subtask: SubtaskId, what: str) -> tuple[LiveWorker, int]:
    """Return the worker that has a subtask, and the number of the subtask's attempt.

    `what` is behind the error.

    Raises:
        JobNotReady: the subtask restarts.
    """
    executions = job.attempt.executions
    attempt = executions.attempt_of(subtask)
    worker = job.pool.live.get(executions.placement.get(subtask, ""))
    restarts = executions.failover.region_of(subtask) in job.attempt.restarting
    if worker is None or attempt is None or restarts:
        raise JobNotReady(f"the subtask restarts {what}", fix=_LATER)
    return worker, attempt


def _find(plan: PhysicalPlan, name: object) -> tuple[Vertex, Node, QueryableState]:
    known = _states(plan)
    for found in known:
        if found[2].name == name:
            return found
    text = str(name)[:200]
    raise StateNotFound(
        f"the job has no queryable state of this name state=`{text}`",
        fix=suggest(text, [state.name for _, _, state in known], "queryable states"),
    )


def check_running(job: JobContext, verb: str) -> None:
    """Raise if nothing can be asked of the job's subtasks now; `verb` says what cannot be done."""
    lifecycle = job.lifecycle
    if lifecycle.end is not None or lifecycle.ended_ms:
        raise JobError("the job has ended", fix="read its savepoints and checkpoints instead")
    if not job.works:
        raise JobNotReady(f"the job is {lifecycle.status}, and cannot be {verb}", fix=_LATER)


def _too_many(waiting_max: int) -> JobNotReady:
    return JobNotReady(
        f"too many queries wait for an answer {QUERY_WAITING_MAX.key}=`{waiting_max}`", fix=_LATER
    )


def _check_read(read: StateAnswer, state: QueryableState, waiting_max: int, bytes_max: int) -> None:
    """Raise what a worker answered instead of the value."""
    match read.outcome:
        case StateOutcome.ELSEWHERE | StateOutcome.STARTING:
            raise JobNotReady(f"the subtask of the key restarts state=`{state.name}`", fix=_LATER)
        case StateOutcome.BUSY:
            raise _too_many(waiting_max)
        case StateOutcome.TOO_LARGE:
            raise JobError(
                f"the value is larger than an answer may be state=`{state.name}` "
                f"{QUERY_ANSWER_MAX.key}=`{bytes_max}`",
                fix=f"raise {QUERY_ANSWER_MAX.key}, or keep less per key",
            )
        case StateOutcome.FAILED:
            raise StateError(f"the state could not be read state=`{state.name}`: {read.text}")
