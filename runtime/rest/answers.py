"""What the REST API answers, and what it takes: the types that the OpenAPI document is made of.

Field names are those of the CLI's `--json`. Times that end in `_ms` are milliseconds, since the epoch where
the name says `at`, `began` or `ended`. Rates are milliseconds per second: 0 to 1000.

Errors are problem details (RFC 9457).
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...api.resources import DEFAULT_GROUP
from ...errors import (
    HeadgateError,
    InternalError,
    JobNotFound,
    JobNotReady,
    ScanOver,
    StateNotFound,
    StorageError,
    UsageError,
)
from ..protocol.job_result import JobFailure

PROBLEM_TYPE = "application/problem+json"
Watermark = Annotated[
    int | None, Meta(description="In ms since the epoch; null: there is none yet.")
]
Rate = Annotated[int, Meta(description="Milliseconds per second.")]
TriggerId = Annotated[
    str,
    Meta(
        # `.` and `..` are no names in a path, and Python's `$` also matches in front of a last line break.
        pattern=r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}$(?!\n)",
        description="Chosen by the client; the same id is the same operation, however often it is sent.",
    ),
]
Directory = Annotated[
    str,
    Meta(
        pattern=r"^($|/|[a-z][a-z0-9+.-]*://)",
        description="An absolute path or an address; empty: that of execution.checkpointing.savepoint-dir.",
    ),
]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused, or why an operation failed (RFC 9457)."""

    type: str = "about:blank"
    title: str
    """The meaning of the status code."""
    status: int
    detail: str
    """The text of the error, as the CLI prints it."""
    error: str = ""
    """The name of the error's type."""
    message: str = ""
    where: str = ""
    fix: str = ""
    """The way out."""


class RequestProblem(Exception):
    """A request that is refused."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.problem = problem(status, detail)


def problem(status: int, detail: str) -> Problem:
    """A problem with the request itself."""
    return Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)


def problem_of(error: HeadgateError) -> Problem:
    """The problem that tells an error of the job."""
    status = _status(error)
    failure = JobFailure.of("", "", "", error)
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=str(error),
        error=failure.error,
        message=failure.message,
        where=failure.where,
        fix=failure.fix,
    )


def error_of(found: Problem) -> HeadgateError:
    """The error that a problem tells, for callers in Python."""
    error = found.error or ("UsageError" if found.status < 500 else "JobError")
    return JobFailure(
        kind="",
        text="",
        vertex="",
        error=error,
        message=found.message or found.detail,
        where=found.where,
        fix=found.fix,
    ).as_error()


def _status(error: HeadgateError) -> int:
    match error:
        case StateNotFound():
            return HTTPStatus.NOT_FOUND
        case UsageError():
            return HTTPStatus.BAD_REQUEST
        case JobNotFound():
            return HTTPStatus.NOT_FOUND
        case ScanOver():
            return HTTPStatus.GONE
        case StorageError() | JobNotReady():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case InternalError():
            return HTTPStatus.INTERNAL_SERVER_ERROR
    return HTTPStatus.CONFLICT  # the job is not in a state for it, or failed


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all answers."""


class Health(Answer, frozen=True):
    """The process answers, or the job is ready."""

    status: str


class WorkerAnswer(Answer, frozen=True):
    """A worker that is connected."""

    worker: str
    pid: int
    group: str = DEFAULT_GROUP
    """The slot sharing group that its slots belong to."""


class Endpoint(Answer, frozen=True):
    """A Prometheus endpoint."""

    process: str
    url: str


class DroppedAnswer(Answer, frozen=True):
    """Records that a step has dropped, by kind."""

    step: str
    kind: str
    count: int
    text: str = ""
    """The number and the kind, in words."""
    fix: str = ""
    """How to keep such records."""


class JobAnswer(Answer, frozen=True):
    """The status of the job. Figures are 0 while the job is INITIALIZING."""

    name: str
    status: str
    run: str = ""
    reason: str = ""
    """Why the job ended."""
    failure: str = ""
    """What went wrong last, though the job may run again; empty: nothing has."""
    parallelism: int = 0
    max_parallelism: int = 0
    generation: int = 0
    attempt: int = 0
    began_ms: int = 0
    uptime_ms: int = 0
    """How long the job has been RUNNING without a break."""
    restarts: int = 0
    restarted_tasks: int = 0
    last_checkpoint: int = 0
    """The newest completed one; 0: none."""
    last_checkpoint_ms: int = 0
    """How long it took."""
    last_checkpoint_at_ms: int = 0
    last_checkpoint_bytes: int = 0
    last_checkpoint_path: str = ""
    """What `headgate run --from` takes, as long as the checkpoint is retained."""
    checkpoints_completed: int = 0
    checkpoints_failed: int = 0
    checkpoints_failed_in_a_row: int = 0
    """Those that failed since the last one completed, across restarts of the job."""
    checkpoint_failure: str = ""
    """Why the last checkpoint failed; empty if it completed."""
    restored_checkpoint: int = 0
    restored_from: str = ""
    restored_bytes: int = 0
    restore_bytes: int = 0
    last_rescale_ms: int = 0
    workers: list[WorkerAnswer] = []
    dropped: list[DroppedAnswer] = []


class VertexAnswer(Answer, frozen=True):
    """A vertex, with the figures of all its subtasks: sums of records, and the rates of the extreme one."""

    id: int
    name: str
    parallelism: int
    records_in: int
    records_out: int
    records_read: int
    records_written: int
    busy: Rate
    full: Rate
    idle: Rate
    backpressured: Rate
    backpressure_level: str
    watermark: Watermark
    backlog: bool
    busy_mean: Rate = 0
    """The mean of its subtasks, as for the next two."""
    idle_mean: Rate = 0
    backpressured_mean: Rate = 0
    records_in_per_second: float = 0
    """Over the last seconds, as the next one."""
    records_out_per_second: float = 0


class EdgeAnswer(Answer, frozen=True):
    """An exchange between two vertices, by their ids, and what it carries; null: that is not counted."""

    source: int
    target: int
    partitioning: str
    side: str | None
    records_per_second: float | None
    bytes_per_second: float | None


class VerticesAnswer(Answer, frozen=True):
    """All vertices of the plan that runs."""

    vertices: list[VertexAnswer]


class SubtaskAnswer(Answer, frozen=True):
    """A subtask. Until it has reported its figures are 0."""

    index: int
    worker: str | None
    attempt: int | None
    reported: bool
    records_in: int = 0
    records_out: int = 0
    records_written: int = 0
    busy: Rate = 0
    full: Rate = 0
    idle: Rate = 0
    backpressured: Rate = 0
    watermark: Watermark = None
    queued: int = 0
    """Buffers that wait in front of it."""
    timers: dict[str, int] = {}
    """Timers that are set and have not fired, by step; steps that set none are left out."""


class HotKeyGroupAnswer(Answer, frozen=True):
    """A key group with far more records than others of its subtask, as sampled in the last minute."""

    key_group: int
    subtask: int
    records_share: float
    """Its share of the records of the vertex, at least; 0 to 1."""
    subtask_share: float
    """Its share of the records of its subtask."""


class SubtasksAnswer(Answer, frozen=True):
    """The subtasks of one vertex."""

    vertex: int
    name: str
    subtasks: list[SubtaskAnswer]
    hot_key_groups: list[HotKeyGroupAnswer] = []


class Alignment(Answer, frozen=True):
    """The events between the first and the last barrier."""

    duration: int
    processed: int
    persisted: int


class CheckpointSubtask(Answer, frozen=True):
    """One subtask's part of a checkpoint; times in ms, sizes in bytes."""

    task: str
    index: int
    end_to_end_duration: int
    start_delay: int
    sync_duration: int
    async_duration: int
    alignment: Alignment
    checkpointed_size: int
    state_size: int
    unaligned_checkpoint: bool
    finished: bool


class SlowestSubtask(Answer, frozen=True):
    """The phases of the subtask that acknowledged a checkpoint last, in ms, one after the other."""

    task: str
    index: int
    start_delay: int
    alignment: int
    sync: int
    async_: int = msgspec.field(name="async")
    publishing: int
    """The time that the coordinator took after that."""


class CheckpointAnswer(Answer, frozen=True):
    """A checkpoint or savepoint; times in ms, sizes in bytes."""

    id: int
    status: str
    is_savepoint: bool
    trigger_timestamp: int
    latest_ack_timestamp: int | None
    end_to_end_duration: float | None
    checkpointed_size: int
    state_size: int
    processed_data: int
    persisted_data: int
    num_subtasks: int
    num_acknowledged_subtasks: int
    unaligned_subtasks: int
    external_path: str
    failure: str
    explanation: str
    slowest: SlowestSubtask | None
    """Null: no subtask has acknowledged it."""


class CheckpointDetail(CheckpointAnswer, frozen=True):
    """One checkpoint, with all its subtasks."""

    subtasks: list[CheckpointSubtask]


class CheckpointsAnswer(Answer, frozen=True):
    """The checkpoints that are remembered, oldest first, and quantiles of the completed ones."""

    history: list[CheckpointAnswer]
    summary: dict[str, dict[str, float]]


class Holder(Answer, frozen=True):
    """The subtask, and the split, that holds event time back."""

    subtask: int
    task: str
    split: str | None
    queued: bool
    for_ms: int


class StepTimeAnswer(Answer, frozen=True):
    """Event time of one step."""

    step: str
    watermark: Watermark
    lag_ms: int | None
    held_by: Holder | None
    idle_subtasks: list[int]
    splits: int
    idle_splits: int
    queued_splits: int
    paused_splits: int


class WatermarksAnswer(Answer, frozen=True):
    """Event time of all steps that make watermarks."""

    event_time: list[StepTimeAnswer]


class Pressed(Answer, frozen=True):
    """A vertex that waits for room downstream."""

    vertex: str
    level: str
    backpressured: Rate


class Suspect(Answer, frozen=True):
    """The subtask that others wait for."""

    vertex: str
    subtask: int
    parallelism: int
    busy: Rate
    full: Rate
    idle: Rate
    busy_subtasks: int
    records_share: float | None
    key_group: int | None
    key_group_share: float | None
    waits_for: str | None


class Cause(Answer, frozen=True):
    """Who waits, and for whom; `cause` is null if nobody downstream is busy."""

    sentence: str
    vertices: list[Pressed]
    cause: Suspect | None
    waiting: list[Suspect]


class BackpressureAnswer(Answer, frozen=True):
    """The cause of a slow job."""

    backpressure: list[Cause]


class Concurrent(Answer, frozen=True):
    """A failure that came with another one."""

    time_ms: int
    kind: str
    where: str
    worker: str
    text: str
    detail: str
    category: str


class RestoreAnswer(Answer, frozen=True):
    """How the state was restored behind a failure; times in ms, sizes in bytes."""

    workers_ms: int = 0
    fetching_ms: int = 0
    opening_ms: int = 0
    local_bytes: int = 0
    """From copies on the workers' machines."""
    storage_bytes: int = 0
    kept_bytes: int = 0
    """Taken over from memory, and not read."""


class ExceptionAnswer(Concurrent, frozen=True):
    """A root failure, and what became of it."""

    attempt: int
    labels: dict[str, str]
    concurrent: list[Concurrent]
    concurrent_dropped: int
    outcome: str
    restored: str
    cancelling_ms: int | None
    waiting_ms: int | None
    deploying_ms: int | None
    down_ms: int | None
    silent_ms: int | None
    restore: RestoreAnswer
    tasks: list[str]
    tasks_total: int


class BusyStepAnswer(Answer, frozen=True):
    """A subtask that has been in one call for more than a second."""

    worker: str
    vertex: int
    task: str
    operator: str
    subtask: int
    busy_ms: int
    attempt: int


class ExceptionsAnswer(Answer, frozen=True):
    """The last failures, oldest first, and calls that have not returned for a while."""

    exceptions: list[ExceptionAnswer]
    busy_steps: list[BusyStepAnswer]


class StatusAnswer(JobAnswer, frozen=True):
    """The status of the job with all parts, as they were at one moment. Empty while it is INITIALIZING."""

    pid: int = 0
    """The process of the coordinator."""
    rest: str = ""
    """The address of this API; empty: it has a Unix socket only."""
    metrics: list[Endpoint] = []
    vertices: list[VertexAnswer] = []
    edges: list[EdgeAnswer] = []
    event_time: list[StepTimeAnswer] = []
    backpressure: list[Cause] = []
    busy_steps: list[BusyStepAnswer] = []
    exceptions: list[ExceptionAnswer] = []


class VertexCurves(Answer, frozen=True):
    """The figures of a vertex, one for each time; null: there is none for this time."""

    vertex: int
    name: str
    records_in_per_second: list[float | None]
    records_out_per_second: list[float | None]
    busy: list[Rate]
    """The mean of its subtasks, as for the next two."""
    backpressured: list[Rate]
    idle: list[Rate]


class CurvesAnswer(Answer, frozen=True):
    """The figures of the last minutes, about one per second while the job runs."""

    span_ms: int
    """How far back they reach at most."""
    at_ms: list[int]
    vertices: list[VertexCurves]


class StackAnswer(Answer, frozen=True):
    """A call stack of a subtask, and how often it was seen."""

    frames: list[int]
    """The calls, outermost first: indices of `ProfileAnswer.functions`."""
    running: int
    """Samples in which the subtask ran."""
    waiting: int
    """Samples in which it waited there: for input, credit, an answer, or its turn."""


class ProfileAnswer(Answer, frozen=True):
    """What a subtask ran and waited for while it was looked at."""

    job: str
    task: str
    """The name of the subtask."""
    worker: str
    hertz: int
    """Samples per second."""
    samples: int
    running: int
    functions: list[str]
    """`function (file:line)` of all calls that were seen."""
    stacks: list[StackAnswer]
    others: dict[str, int]
    """Samples in which another task had the thread of the worker, by the name of the task."""


class OptionAnswer(Answer, frozen=True):
    """An option in effect."""

    value: str
    explicit: bool
    """True if the user set it."""


class ConfigAnswer(Answer, frozen=True):
    """The configuration of the job; values of secrets are masked."""

    options: dict[str, OptionAnswer]
    checkpoint_storage: str | None
    checkpoint_interval_ms: int | None
    checkpoints_retained: int | None


class OperatorAnswer(Answer, frozen=True):
    """An operator in a vertex."""

    name: str
    kind: str
    detail: str
    stateful: bool


class PlanVertex(Answer, frozen=True):
    """A vertex of the plan: operators that run in one subtask."""

    id: int
    name: str
    parallelism: int
    operators: list[OperatorAnswer]
    slot_sharing_group: str = DEFAULT_GROUP


class PlanEdge(Answer, frozen=True):
    """An exchange between two vertices, by their ids."""

    source: int
    target: int
    partitioning: str
    side: str | None


class PlanAnswer(Answer, frozen=True):
    """The physical plan that runs, and what `headgate explain` prints of it."""

    parallelism: int
    max_parallelism: int
    vertices: list[PlanVertex]
    edges: list[PlanEdge]
    text: str


class Sample(Answer, frozen=True):
    """One value of a metric; null: it is not a finite number."""

    name: str
    labels: dict[str, str]
    value: float | None


class MetricsAnswer(Answer, frozen=True):
    """The metrics of the coordinator's process, and where each process serves its own to Prometheus."""

    endpoints: list[Endpoint]
    samples: list[Sample]


class OperationStatus(StrEnum):
    """How far an operation is."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


class OperationAnswer(Answer, frozen=True):
    """An operation that a client began."""

    trigger_id: str = msgspec.field(name="triggerId")
    verb: str
    status: OperationStatus
    began_ms: int
    ended_ms: int | None = None
    result: dict[str, Any] | None = None
    """The result, if it is COMPLETED; it is what the CLI prints."""
    problem: Problem | None = None
    """Why it FAILED."""


class OperationsAnswer(Answer, frozen=True):
    """The operations that the coordinator remembers, oldest first."""

    operations: list[OperationAnswer]


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the bodies of requests that begin an operation."""

    trigger_id: TriggerId = msgspec.field(name="triggerId")


class CancelCommand(Command, frozen=True):
    """End the job at once, without a checkpoint."""


class HandOverCommand(Command, frozen=True):
    """Take a last checkpoint and leave the run to its next start, as SIGTERM does."""


class CheckpointCommand(Command, frozen=True):
    """Take a checkpoint now."""


class StopCommand(Command, frozen=True):
    """Stop with a final checkpoint; `drain`: sources end as if their data had, so that windows fire."""

    drain: bool = False
    savepoint: Directory | None = None
    """Take a savepoint in a new directory below this one; null: none."""
    native: bool = False


class SavepointCommand(Command, frozen=True):
    """Take a savepoint in a new directory below `savepoint`."""

    savepoint: Directory = ""
    native: bool = False
    """Keep the files of the state backend: faster, but only this backend reads them."""


class RescaleCommand(Command, frozen=True):
    """Stop with a checkpoint, and go on at another parallelism."""

    parallelism: Annotated[int, Meta(ge=1, le=32768)]


class DisposeCommand(Command, frozen=True):
    """Delete a savepoint and all its files."""

    path: Annotated[str, Meta(pattern=r"^(/|[a-z][a-z0-9+.-]*://)")]
