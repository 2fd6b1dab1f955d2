"""The access to the coordinators of jobs, by their REST API."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol

from ...errors import HeadgateError, JobError
from ...runtime.rest.answers import (
    CheckpointCommand,
    Command,
    JobAnswer,
    OperationAnswer,
    OperationStatus,
    RescaleCommand,
    SavepointCommand,
    StopCommand,
)
from ...runtime.rest.client import RestClient
from .. import ports
from ..actions import CallJob, CompletedCheckpoint, JobReport, Operation
from ..objects import TOKEN_KEY, head_name
from .kinds import KINDS, SECRET, Kind

ANSWER_S: Final = 10.0
log = logging.getLogger(__name__)
_STATES: Final[Mapping[str, str]] = {
    "INITIALIZING": "CREATED",
    "RECONCILING": "RESTARTING",
    "FAILING": "RESTARTING",
    "HANDED_OVER": "RESTARTING",
}
"""States of a job that the decisions treat like others. In all of them the job recovers by itself, or
its next
state says that it does not.
"""


class Store(Protocol):
    """The part of the API server that is needed to reach a job."""

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None: ...


def service_url(namespace: str, job: str) -> str:
    """Return the address of the REST API of a job, by the Service of its head."""
    return f"http://{head_name(job)}.{namespace}.svc:{ports.REST.number}"


class RestCoordinators:
    """`Coordinators` over HTTP, with the token from the Secret of each job. It keeps no state."""

    def __init__(self, store: Store, url: Callable[[str, str], str] = service_url) -> None:
        """Prepare the access; it sends no request yet.

        Args:
            store: the API server.
            url: returns the address of the REST API of a job, by namespace and name.
        """
        self._store = store
        self._url = url

    async def report(self, namespace: str, job: str) -> JobReport | None:
        """Return the answer of the coordinator; None if it cannot be reached."""
        try:
            async with await self._client(namespace, job) as client:
                answer = await client.job()
                operations = await client.operations()
                return _report(answer, {each.trigger_id: _operation(each) for each in operations})
        except HeadgateError as error:
            log.debug("%s/%s does not answer: %s", namespace, job, error)
            return None

    async def call(self, namespace: str, job: str, call: CallJob) -> None:
        """Make a request. Raises HeadgateError if it is refused or there is no answer."""
        async with await self._client(namespace, job) as client:
            answer = await client.job()
            if answer.run != call.run_id:
                raise JobError(f"run {answer.run} of {namespace}/{job} answers, not {call.run_id}")
            await client.begin(_command(call))

    async def _client(self, namespace: str, job: str) -> RestClient:
        token = await read_token(self._store, namespace, job)
        return RestClient(self._url(namespace, job), token, timeout_s=ANSWER_S)


async def read_token(store: Store, namespace: str, job: str) -> str:
    """Return the token that the head has mounted, from the job's Secret or from one of the user.

    Raises:
        JobError: the job has no head, or its Secret does not exist.
        ApiError: they cannot be read.
    """
    head = await store.get(KINDS["StatefulSet"], namespace, head_name(job))
    if head is None:
        raise JobError(f"{namespace}/{job} has no head")
    volumes = head["spec"]["template"]["spec"].get("volumes", ())
    names = [each["secret"]["secretName"] for each in volumes if each["name"] == "token"]
    secret = await store.get(SECRET, namespace, names[0]) if names else None
    data: dict[str, Any] = (secret or {}).get("data", {})
    if TOKEN_KEY not in data:
        raise JobError(f"{namespace}/{job} has no Secret with the key {TOKEN_KEY}")
    return base64.b64decode(data[TOKEN_KEY]).decode().strip()


def _command(call: CallJob) -> Command:
    """Return the path and the body of a call for the REST API."""
    arguments, trigger = call.arguments, call.trigger_id
    directory, native = arguments.get("directory", ""), bool(arguments.get("native"))
    match call.verb:
        case "stop":
            savepoint = directory if arguments.get("savepoint") else None
            return StopCommand(trigger_id=trigger, savepoint=savepoint, native=native)
        case "savepoint":
            return SavepointCommand(trigger_id=trigger, savepoint=directory, native=native)
        case "checkpoint":
            return CheckpointCommand(trigger_id=trigger)
        case "rescale":
            return RescaleCommand(trigger_id=trigger, parallelism=arguments["parallelism"])


def _report(answer: JobAnswer, operations: dict[str, Operation]) -> JobReport:
    checkpoint = None
    if answer.last_checkpoint:
        checkpoint = CompletedCheckpoint(
            answer.last_checkpoint,
            answer.last_checkpoint_at_ms,
            answer.last_checkpoint_path,
            answer.last_checkpoint_bytes,
        )
    return JobReport(
        run_id=answer.run,
        state=_STATES.get(answer.status, answer.status),
        parallelism=answer.parallelism,
        epoch=answer.generation,
        restarts=answer.restarts,
        failure=_failure(answer),
        checkpoint=checkpoint,
        failed_checkpoints=answer.checkpoints_failed_in_a_row,
        checkpoint_failure=answer.checkpoint_failure,
        restored=answer.restored_from,
        operations=operations,
    )


def _failure(answer: JobAnswer) -> str:
    """Return the last failure, and the reason why it ended the job if it did."""
    gave_up = answer.reason if answer.status == "FAILED" else ""
    return "; ".join(text for text in (answer.failure, gave_up) if text)


def _operation(answer: OperationAnswer) -> Operation:
    result = answer.result or {}
    if answer.status is OperationStatus.FAILED:
        problem = answer.problem
        if problem is None:
            return Operation("failed", error="it failed")
        return Operation(
            "failed", error=problem.detail, lasting=problem.status == HTTPStatus.BAD_REQUEST
        )
    if answer.status is OperationStatus.IN_PROGRESS:
        return Operation("running")
    return Operation(
        "completed",
        path=str(result.get("savepoint") or result.get("path") or ""),
        size_bytes=int(result.get("size_bytes") or 0),
        checkpoint_id=int(result.get("checkpoint") or 0),
    )
