"""The coordinators of jobs, by their REST API."""

from __future__ import annotations

import base64
import logging
from collections import OrderedDict
from typing import Any, Final

from ...errors import HeadgateError, JobError
from ...runtime.rest.answers import (
    CheckpointWish,
    JobAnswer,
    OperationAnswer,
    OperationStatus,
    RescaleWish,
    SavepointWish,
    StopWish,
    Wish,
)
from ...runtime.rest.client import RestClient
from .. import ports
from ..actions import CallJob, CompletedCheckpoint, JobReport, Operation
from ..objects import TOKEN_KEY, head_name
from .api import Api
from .kinds import KINDS, SECRET

ANSWER_S: Final = 10.0
JOBS_MAX: Final = 4096
TRIGGERS_MAX: Final = 16
"""Operations of one job whose outcome is asked for: the last ones that this operator asked for."""
log = logging.getLogger(__name__)
_Job = tuple[str, str]


class RestCoordinators:
    """`Coordinators` over HTTP, by the Service of each job's head, with the token from its Secret.

    The REST API tells of an operation by its trigger id, and has no list of them. So this remembers the
    trigger ids it has sent. After a restart of the operator it knows none: then `reconcile` makes the same
    request again, with the same trigger id, which is still one operation.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._triggers: OrderedDict[_Job, list[str]] = OrderedDict()

    async def report(self, namespace: str, job: str) -> JobReport | None:
        """What the coordinator answers; None if it cannot be reached."""
        try:
            async with await self._client(namespace, job) as client:
                answer = await client.job()
                operations: dict[str, Operation] = {}
                for trigger in self._triggers.get((namespace, job), ()):
                    try:
                        operations[trigger] = _operation(await client.operation(trigger))
                    except HeadgateError as error:
                        log.debug("operation %s of %s/%s: %s", trigger, namespace, job, error)
                return _report(answer, operations)
        except HeadgateError as error:
            log.debug("%s/%s does not answer: %s", namespace, job, error)
            return None

    async def call(self, namespace: str, job: str, call: CallJob) -> None:
        """Make a request. Raises HeadgateError if it is refused or there is no answer."""
        async with await self._client(namespace, job) as client:
            answer = await client.job()
            if answer.run != call.run_id:
                raise JobError(f"run {answer.run} of {namespace}/{job} answers, not {call.run_id}")
            await client.begin(_wish(call))
        known = self._triggers.setdefault((namespace, job), [])
        self._triggers.move_to_end((namespace, job))
        if call.trigger_id not in known:
            known.append(call.trigger_id)
            del known[:-TRIGGERS_MAX]
        if len(self._triggers) > JOBS_MAX:
            self._triggers.popitem(last=False)

    async def _client(self, namespace: str, job: str) -> RestClient:
        host = f"{head_name(job)}.{namespace}.svc"
        token = await self._token(namespace, job)
        return RestClient(f"http://{host}:{ports.REST.number}", token, timeout_s=ANSWER_S)

    async def _token(self, namespace: str, job: str) -> str:
        """The token that the head has mounted: of the job's own Secret, or one that the user named."""
        head = await self._api.get(KINDS["StatefulSet"], namespace, head_name(job))
        if head is None:
            raise JobError(f"{namespace}/{job} has no head")
        volumes = head["spec"]["template"]["spec"].get("volumes", ())
        names = [each["secret"]["secretName"] for each in volumes if each["name"] == "token"]
        secret = await self._api.get(SECRET, namespace, names[0]) if names else None
        data: dict[str, Any] = (secret or {}).get("data", {})
        if TOKEN_KEY not in data:
            raise JobError(f"{namespace}/{job} has no Secret with the key {TOKEN_KEY}")
        return base64.b64decode(data[TOKEN_KEY]).decode().strip()


def _wish(call: CallJob) -> Wish:
    """The REST API's form of a call."""
    arguments, trigger = call.arguments, call.trigger_id
    directory, native = arguments.get("directory", ""), bool(arguments.get("native"))
    match call.verb:
        case "stop":
            savepoint = directory if arguments.get("savepoint") else None
            return StopWish(trigger_id=trigger, savepoint=savepoint, native=native)
        case "savepoint":
            return SavepointWish(trigger_id=trigger, savepoint=directory, native=native)
        case "checkpoint":
            return CheckpointWish(trigger_id=trigger)
        case "rescale":
            return RescaleWish(trigger_id=trigger, parallelism=arguments["parallelism"])


def _report(answer: JobAnswer, operations: dict[str, Operation]) -> JobReport:
    checkpoint = None
    if answer.last_checkpoint:
        checkpoint = CompletedCheckpoint(answer.last_checkpoint, answer.last_checkpoint_at_ms)
    return JobReport(
        run_id=answer.run,
        state="CREATED" if answer.status == "INITIALIZING" else answer.status,
        parallelism=answer.parallelism,
        epoch=answer.generation,
        restarts=answer.restarts,
        failure=answer.reason,
        checkpoint=checkpoint,
        restored=answer.restored_from,
        operations=operations,
    )


def _operation(answer: OperationAnswer) -> Operation:
    result = answer.result or {}
    if answer.status is OperationStatus.FAILED:
        problem = answer.problem
        return Operation("failed", error=problem.detail if problem is not None else "it failed")
    if answer.status is OperationStatus.IN_PROGRESS:
        return Operation("running")
    return Operation(
        "completed",
        path=str(result.get("savepoint") or result.get("path") or ""),
        size_bytes=int(result.get("bytes") or 0),
        checkpoint_id=int(result.get("checkpoint") or 0),
    )
