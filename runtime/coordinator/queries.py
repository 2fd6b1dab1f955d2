"""Queries of state at the coordinator: it finds the owners of the keys, and asks their workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from ..control.job_client import ENDED
from ..control.messages import AskState, StateAnswer, StateOutcome
from ..options.network import OLD_VALUES, QUERY_ANSWER_MAX, QUERY_TIMEOUT, QUERY_WAITING_MAX
from ..options.registry import Options
from ..plan import PhysicalPlan, Vertex
from ..protocol.ids import SubtaskId
from ..reads.wire import KEYS_MAX
from .commands import check_keeps_checkpoints
from .context import JobContext
from .pending_queries import PendingQueries
from .workers import LiveWorker

LIVE: Final = "live"
"""The level of an answer that is read while the job runs: a failure may take it back."""
COMMITTED: Final = "committed"
"""The level of an answer that is as of the newest complete checkpoint."""
TRIES: Final = 5
"""How often a query of level `committed` is repeated while checkpoints complete."""
LATER: Final = "ask again in a moment"


def describe_states(plan: PhysicalPlan) -> dict[str, Any]:
    """Return the queryable states of a job."""
    return {
        "states": [
            {
                "name": state.name,
                "step": node.name,
                "kind": state.kind,
                "key": state.key_types or None,
                "levels": [LIVE, COMMITTED] if state.committed else [LIVE],
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
        given: `state`, the name; `key`, the text of the key; and `level`, which is `live` by default.

    Raises:
        StateNotFound: the job has no queryable state of that name.
        UsageError: the text is not a key of that state, or the state does not have that level.
        JobNotReady: the job does not run just now, the subtask does not answer, too many ask, or the
            values as of the newest complete checkpoint are not known.
        JobError: the job has ended, or the value is too large.
        StateError: the value cannot be read.
    """
    if not isinstance(given.get("key"), str):
        name = str(given.get("state"))[:200]
        raise UsageError(f"the query has no key state=`{name}`", fix="give key=...")
    answer = await query_keys(job, pending, {**given, "keys": [given["key"]]})
    (row,) = answer.pop("rows")
    return {**answer, **row}


async def query_keys(
    job: JobContext, pending: PendingQueries, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that a state has for several keys.

    Those of level `committed` are all of one checkpoint. Those of level `live` that one subtask has are
    of one moment. The arguments and errors are those of `query_state`, with `keys`, a list of texts.
    """
    plan = job.attempt.plan
    vertex, node, state = find_state(plan, given.get("state"))
    texts, level = given.get("keys"), given.get("level") or LIVE
    check_level(state, level)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"the query has no keys state=`{state.name}`", fix="give key=...")
    if not 0 < len(texts) <= KEYS_MAX:
        raise UsageError(
            f"a query has 1 to {KEYS_MAX} keys, and this has {len(texts)} state=`{state.name}`",
            fix="ask several times",
        )
    keys = [parse_key(state, text) for text in texts]
    check_running(job, "queried")
    query = _Query(job, pending, vertex, node, state, keys)
    checkpoint_id = 0
    if level == COMMITTED:
        for _ in range(TRIES):
            checkpoint_id = committed_checkpoint(job, state)
            values = await query.values(checkpoint_id)
            # A checkpoint may have completed since, and its owners have dropped what was asked for.
            if values is not None or job.checkpoints.committed == checkpoint_id:
                break
    else:
        values = await query.values(checkpoint_id)
    if values is None:
        raise JobNotReady(
            f"the values as of checkpoint {checkpoint_id} are not kept state=`{state.name}`",
            fix="ask again after the next checkpoint; if this goes on, more changes between two "
            f"checkpoints than {OLD_VALUES.key} holds: raise it",
        )
    return {
        "job": job.env.spec.name,
        "run": job.env.spec.run,
        "state": state.name,
        "kind": state.kind,
        "step": node.name,
        "level": level,
        "checkpoint": checkpoint_id or None,
        "rows": [query.row(place, value) for place, value in enumerate(values)],
    }


def check_level(state: QueryableState, level: object) -> None:
    if level not in (LIVE, COMMITTED):
        raise UsageError(
            f"no such level level=`{level!s:.200}`", fix=f"it can be: {LIVE}, {COMMITTED}"
        )
    if level == COMMITTED and not state.committed:
        raise UsageError(
            f"the state can be read live only state=`{state.name}`",
            fix=f'declare it with queryable=hg.Queryable("{state.name}", committed=True)',
        )


def committed_checkpoint(job: JobContext, state: QueryableState) -> int:
    """Return the checkpoint that a client reads now.

    Raises:
        UsageError: the job takes no checkpoints.
        JobNotReady: there is none yet.
    """
    if not job.checkpoints.committed:
        check_keeps_checkpoints(job.env)
        raise JobNotReady(
            f"no checkpoint of the job is complete yet state=`{state.name}`",
            fix="ask again after its first checkpoint, or read the level `live`",
        )
    return job.checkpoints.committed


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
        raise JobNotReady(f"the subtask restarts {what}", fix=LATER)
    return worker, attempt


class _Query:
    """Reads some keys of one state at the subtasks that have them."""

    def __init__(
        self,
        job: JobContext,
        pending: PendingQueries,
        vertex: Vertex,
        node: Node,
        state: QueryableState,
        keys: Sequence[Any],
    ) -> None:
        self._job, self._pending = job, pending
        self._vertex, self._node, self._state = vertex, node, state
        self._keys = keys
        groups = job.attempt.plan.max_parallelism
        self._groups = [key_group_of(hash_key(key), groups) for key in keys]
        self._owners = [owner_of(group, vertex.parallelism, groups) for group in self._groups]
        self._attempts: dict[int, int] = {}

    def row(self, place: int, value: bytes) -> dict[str, Any]:
        """Return the answer for one of the keys, by its place among them."""
        owner = self._owners[place]
        return {
            "attempt": self._attempts[owner],
            "subtask": owner,
            "key": key_as_json(self._state, self._keys[place]),
            "key_group": self._groups[place],
            "found": bool(value),
            "value": msgspec.json.decode(value) if value else None,
        }

    async def values(self, checkpoint_id: int) -> list[bytes] | None:
        """Return the value of each key as JSON; None: some subtask does not have that checkpoint."""
        options, state = self._job.env.options, self._state
        waiting_max, timeout_ms = options.get(QUERY_WAITING_MAX), options.get(QUERY_TIMEOUT)
        owners = sorted(set(self._owners))
        if len(self._pending) and len(self._pending) + len(owners) > waiting_max:
            raise _too_many(waiting_max)
        workers = {owner: self._worker_of(owner) for owner in owners}
        numbers: list[int] = []
        answers: dict[int, asyncio.Future[StateAnswer]] = {}
        try:
            for owner, worker in workers.items():
                number, answers[owner] = self._pending.add(worker.worker_id)
                numbers.append(number)
                worker.send(self._asked(number, owner, checkpoint_id))
            async with asyncio.timeout(timeout_ms / 1000):
                read = {owner: await answer for owner, answer in answers.items()}
        except TimeoutError:
            silent = next(owner for owner, answer in answers.items() if not answer.done())
            name = self._job.attempt.executions.name(SubtaskId(self._vertex.id, silent))
            raise JobNotReady(
                f"the subtask of the key did not answer within {format_duration(timeout_ms)} "
                f"state=`{state.name}` subtask=`{name}`",
                fix="ask again: it restarts, or is in a long call; "
                f"{QUERY_TIMEOUT.key} is how long a query waits",
            ) from None
        finally:
            for number in numbers:
                self._pending.drop(number)
        for answer in read.values():
            check_read(answer, state, options)
        if any(answer.outcome is StateOutcome.NOT_KEPT for answer in read.values()):
            return None
        found = {owner: iter(answer.values) for owner, answer in read.items()}
        values = [next(found[owner]) for owner in self._owners]
        if sum(map(len, values)) > options.get(QUERY_ANSWER_MAX):
            raise _too_large(state, options.get(QUERY_ANSWER_MAX))
        return values

    def _asked(self, number: int, owner: int, checkpoint_id: int) -> AskState:
        options = self._job.env.options
        keys = [key for key, at in zip(self._keys, self._owners, strict=True) if at == owner]
        return AskState(
            attempt=self._attempts[owner],
            query=number,
            vertex=self._vertex.id,
            index=owner,
            operator=self._node.name,
            state=self._state.state,
            keys=tuple(map(encode_key, keys)),
            bytes_max=options.get(QUERY_ANSWER_MAX),
            waiting_max=options.get(QUERY_WAITING_MAX),
            timeout_ms=options.get(QUERY_TIMEOUT),
            checkpoint_id=checkpoint_id,
        )

    def _worker_of(self, owner: int) -> LiveWorker:
        """Return the worker that has a subtask.

        Raises:
            JobNotReady: the subtask restarts.
        """
        subtask = SubtaskId(self._vertex.id, owner)
        worker, attempt = worker_of(self._job, subtask, f"state=`{self._state.name}`")
        self._attempts[owner] = attempt
        return worker


def find_state(plan: PhysicalPlan, name: object) -> tuple[Vertex, Node, QueryableState]:
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
        raise JobError(ENDED, fix="read its savepoints and checkpoints instead")
    if not job.works:
        raise JobNotReady(f"the job is {lifecycle.status}, and cannot be {verb}", fix=LATER)


def _too_many(waiting_max: int) -> JobNotReady:
    return JobNotReady(
        f"too many queries wait for an answer {QUERY_WAITING_MAX.key}=`{waiting_max}`", fix=LATER
    )


def _too_large(state: QueryableState, bytes_max: int) -> JobError:
    return JobError(
        f"the value is larger than an answer may be state=`{state.name}` "
        f"{QUERY_ANSWER_MAX.key}=`{bytes_max}`",
        fix=f"raise {QUERY_ANSWER_MAX.key}, or keep less per key",
    )


def check_read(read: StateAnswer, state: QueryableState, options: Options) -> None:
    """Raise what a worker answered instead of the value."""
    match read.outcome:
        case StateOutcome.ELSEWHERE | StateOutcome.STARTING:
            raise JobNotReady(f"the subtask of the key restarts state=`{state.name}`", fix=LATER)
        case StateOutcome.BUSY:
            raise _too_many(options.get(QUERY_WAITING_MAX))
        case StateOutcome.TOO_LARGE:
            raise _too_large(state, options.get(QUERY_ANSWER_MAX))
        case StateOutcome.FAILED:
            raise StateError(f"the state could not be read state=`{state.name}`: {read.text}")
