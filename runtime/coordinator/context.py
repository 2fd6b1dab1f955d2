"""The context that all states of a job share: its spec, workers, log, and queue of events."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from ...errors import HeadgateError
from ...operators.base import ATTEMPTS_PER_GENERATION
from ...operators.clock import Clock
from ...operators.drops import dropped_text, how_to_keep
from ...operators.splits import History
from ..control.job_client import WARNINGS, Event
from ..control.messages import SubtaskStatistics, Warm
from ..job_spec import JobSpec
from ..observe.figures import JobFigures
from ..observe.spans import NoSpans, Spans
from ..options.recovery import FAILOVER_STRATEGY
from ..options.registry import Options
from ..plan import PhysicalPlan, Vertex
from ..protocol.backpressure import RecentRecords, level_of
from ..protocol.drops import DropLedger
from ..protocol.failover import RegionId
from ..protocol.failure_history import FailureEntry, FailureHistory, RestoreFigures
from ..protocol.failures import FailureKind
from ..protocol.ids import SubtaskId
from ..protocol.restart import RestartStrategy
from ..savepoint.locate import Located
from ..shipping import ship
from ..storage.base import AddressOpener, CheckpointStore
from ..storage.joblog_store import JobLog
from .backpressure import describe_backpressure
from .checkpointing import CheckpointDriver, PublishResult
from .enrichers import FailureEnrichers
from .event_time import describe_event_time
from .job_spans import started
from .liveness import describe_busy
from .placement import Seats
from .regions import Executions
from .replacing import OutputReplacer
from .restored import Restored
from .states import End
from .steady_clock import SteadyClock
from .workers import FromWorker, WorkerLost, WorkerPool

_log = logging.getLogger("headgate.job")
"""The number of failures that the status shows (Flink `web.exception-history-size`)."""


@dataclass(slots=True)
class ClientWish:
    """Event: a client asked for something; `answer` is settled with the result or an error."""

    verb: str
    answer: asyncio.Future[dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)

    def done(self, **body: Any) -> None:
        """Answer with `body`."""
        if not self.answer.done():
            self.answer.set_result(body)

    def refuse(self, error: HeadgateError) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: the checkpoint coordinator wanted to be called at this time."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Event: the workers of an attempt have been told what to deploy, or could not be."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RoomMade:
    """Event: the workers for a higher parallelism are there beside a running attempt, or are not."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FinalAgain:
    """Event: the final checkpoint of this attempt failed a moment ago, without harm."""

    attempt: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """Event: a coordinator that hands its run over leaves now, with a last checkpoint or without."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt is over."""

    text: str
    where: str
    kind: FailureKind
    error: HeadgateError
    detail: str = ""
    worker: str = ""
    """Where it happened, if that is known."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Event: somebody who watches over this attempt has found that it does not get on."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class RegionsReady:
    """Event: the regions that restart in this attempt are deployed, or could not be."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """Event: nobody has said why a connection of these regions broke, in the time there was for it."""

    failure: Failure
    attempt: int
    regions: frozenset[RegionId]


JobEvent: TypeAlias = (
    AttemptFailed
    | FromWorker
    | WorkerLost
    | ClientWish
    | PublishResult
    | Tick
    | Prepared
    | RoomMade
    | FinalAgain
    | GraceOver
    | RegionsReady
    | Suspected
)


@dataclass(slots=True)
class Rescale:
    """A change of parallelism under way; `wish` is answered when the job runs again."""

    wish: ClientWish
    before: int
    after: int
    began: float
    """When the sources fell silent, on the monotonic clock."""


@dataclass(slots=True)
class JobContext:
    """The job as its states see it."""

    spec: JobSpec
    options: Options
    clock: Clock
    steady_clock: SteadyClock
    """For restarts: durations, which do not change when somebody sets the machine's clock."""
    pool: WorkerPool
    events: asyncio.Queue[JobEvent]
    strategy: RestartStrategy
    log: JobLog | None
    store: CheckpointStore | None
    checkpoints: CheckpointDriver
    old_output: OutputReplacer
    open_at: AddressOpener
    generation: int
    plan: PhysicalPlan
    """The plan of the current attempt: that of the spec, until the job is rescaled."""
    parallelism: int
    plan_blob: bytes
    subscribers: list[Callable[[Event], None]] = field(default_factory=list)
    metrics_url: str = ""
    """Where the Prometheus endpoint of this process is, if it has one."""
    status: str = "INITIALIZING"
    status_since_ms: int = 0
    status_total_ms: dict[str, int] = field(default_factory=dict)
    """By status, without the time in the present one."""
    attempt: int = 0
    attempts_started: int = 0
    restarts: int = 0
    restarted_tasks: int = 0
    """By all restarts together."""
    late_messages: int = 0
    """The number of messages of attempts that were over; they had no effect."""
    statistics: dict[tuple[int, int], SubtaskStatistics] = field(default_factory=dict)
    recent: RecentRecords = field(default_factory=RecentRecords)
    dropped: DropLedger = field(default_factory=DropLedger)
    failures: FailureHistory = field(default_factory=lambda: FailureHistory(1))
    judge: Callable[[Failure], Failure] = lambda failure: failure
    """Makes of a failure one that is not to be tried again, if it has come too often."""
    enrichers: FailureEnrichers = field(default_factory=lambda: FailureEnrichers(()))
    splits: dict[str, list[bytes]] = field(default_factory=dict)
    """Fresh splits of each source, by its name, made once."""
    seats: Seats = field(default_factory=Seats)
    restored: Restored | None = None
    """The state that the current attempt began with."""
    located: Located | None = None
    """The place of the state that the user told the run to restore."""
    unreadable: set[int] = field(default_factory=set)
    """Checkpoints that could not be restored, where the user allows an older one instead."""
    deployment_events: int | None = None
    """The number of messages of workers about the deployment under way; None: none is under way."""
    restoring: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By worker and region: bytes of state read, and to read, while an attempt is deployed."""
    spans: Spans = field(default_factory=NoSpans)
    observed: JobFigures = field(default_factory=JobFigures)
    """For metrics."""
    figures: RestoreFigures = field(default_factory=RestoreFigures)
    """Figures of the deployment under way, or of the last one."""
    rescale: Rescale | None = None
    rescaled_ms: int = 0
    """The time in ms that the last rescale kept the job from working."""
    restored_at_ms: int = 0
    orphaned_ms: int = 0
    """For how long the attempt may go on without a coordinator; 0: not at all."""
    adopted_after_ms: int = -1
    """The time in ms without a coordinator before this one adopted what the workers run; -1: it did not."""
    end: End | None = None
    handed_over: bool = False
    """This coordinator is through, and its run goes on under the next one."""
    began_ms: int = 0
    """When the run began, in ms since the epoch."""
    ended_ms: int = 0
    """When it ended; 0: it has not."""
    restarting: frozenset[RegionId] = frozenset()
    """Regions that restart while the others run."""
    executions: Executions = field(init=False)

    def __post_init__(self) -> None:
        self.executions = self._executions()

    def _executions(self) -> Executions:
        return Executions(self.plan, self.options.get(FAILOVER_STRATEGY))

    @property
    def restored_checkpoint(self) -> int:
        """Id of the checkpoint or savepoint that the attempt began with; 0: none."""
        return self.restored.manifest.checkpoint_id if self.restored is not None else 0

    @property
    def keeps_checkpoints(self) -> bool:
        """False for a job without checkpoint storage: savepoints are all it can take."""
        return self.log is not None

    def report(self, attempt: int, statistics: Iterable[SubtaskStatistics]) -> None:
        """Take in what subtasks of an attempt did; but of those that run in another one by now."""
        for subtask in statistics:
            own = self.executions.attempt_of(SubtaskId(subtask.vertex, subtask.index))
            if own != attempt:
                continue
            self.statistics[subtask.vertex, subtask.index] = subtask
            self.recent.report(subtask.vertex, subtask.index, subtask.records_in)
            self.dropped.report(subtask.vertex, subtask.index, subtask.dropped)
        self.announce_dropped()

    def announce_dropped(self, *, at_the_end: bool = False) -> None:
        """Warn of what steps have dropped, as far as it is due."""
        now_ms = round(1_000 * self.clock.monotonic())
        for each in self.dropped.due(now_ms, at_the_end=at_the_end):
            keep = how_to_keep(each.kind)
            self.publish(
                "dropped",
                f"step `{each.step}` has dropped {dropped_text(each.kind, each.count)}"
                + (f"; to keep them: {keep}" if keep else ""),
                step=each.step,
                reason=each.kind,
                count=each.count,
                keep=keep,
            )

    def adopt(self, plan: PhysicalPlan, parallelism: int) -> None:
        """Run another plan from the next attempt on."""
        if plan is not self.plan:
            self.plan = plan
            self.executions = self._executions()
            self.executions.begin(self.executions.failover.everything, self.attempt)
            self.parallelism = parallelism
            self.plan_blob = ship(plan)

    def next_attempt(self) -> int:
        """A number no attempt of this job ever had, in any generation. Its subtasks count from 0."""
        self.statistics.clear()
        self.recent.clear()
        self.dropped.attempt_over()
        return self._begin(self.executions.failover.everything)

    def next_attempt_of(self, regions: frozenset[RegionId]) -> int:
        """Such a number for some regions; the others keep theirs."""
        for subtask in self.executions.failover.subtasks_of(regions):
            self.statistics.pop((subtask.vertex, subtask.index), None)
            self.recent.forget(subtask.vertex, subtask.index)
            self.dropped.attempt_over([(subtask.vertex, subtask.index)])
        return self._begin(regions)

    def _begin(self, regions: frozenset[RegionId]) -> int:
        self.attempts_started += 1
        self.attempt = self.generation * ATTEMPTS_PER_GENERATION + self.attempts_started
        self.executions.begin(regions, self.attempt)
        return self.attempt

    def tell(self, message: Any) -> None:
        """Send a message to all that run, whatever their attempt."""
        for attempt in self.executions.attempts:
            own = msgspec.structs.replace(message, attempt=attempt)
            for worker in self.pool.live.values():
                worker.send(own)

    @property
    def works(self) -> bool:
        """At least a part of the job runs."""
        return self.status == "RUNNING" or bool(self.restarting)

    def warm_spares(self) -> None:
        """From now on workers without subtasks are told to get ready for some of this plan."""
        checkpoint = self.spec.checkpoint
        storage = checkpoint.storage if checkpoint else ""
        self.pool.warm_up = Warm(job=self.plan_blob, settings=self.spec.options, storage=storage)

    def publish(self, kind: str, text: str, **body: Any) -> None:
        """Log something and tell all subscribers."""
        level = logging.WARNING if kind in WARNINGS else logging.INFO
        if kind != "progress":
            fields = {"job": self.spec.name, "attempt": self.attempt or None}
            _log.log(level, "%s", text, extra={**fields, "detail": body.get("detail", "")})
        event = Event(kind=kind, text=text, body=json.dumps(body).encode())
        for subscriber in list(self.subscribers):
            subscriber(event)

    def set_status(self, status: str) -> None:
        """Move to another status (names as Flink's JobStatus)."""
        if status != self.status:
            self.status_total_ms[self.status] = self.time_in(self.status)[1]
            before, since_ms = self.status, self.status_since_ms
            self.status_since_ms = self.clock.now_ms()
            self.status = status
            if status == "RUNNING":
                started(self, before, since_ms)
            self.publish("status", f"job {self.spec.name} is {status}", status=status)

    def count_restart(self) -> None:
        """One more restart of tasks; the entries of the job log repeat how many there were in this run."""
        self.restarts += 1
        if self.log is not None:
            self.log.restarts = self.restarts

    def time_in(self, status: str) -> tuple[int, int]:
        """The time in ms that the job has been in a status: now without a break, and in all."""
        now_ms = 0
        if self.status == status:
            now_ms = max(0, self.clock.now_ms() - self.status_since_ms)
        return now_ms, self.status_total_ms.get(status, 0) + now_ms

    def record(self, failure: Failure, *, merged: bool = False) -> None:
        """Remember a failure and tell the world; `merged`: it belongs to the one before."""
        self.observed.failures[failure.kind.category.value] += 1
        entry = self.entry(failure)
        if merged:
            self.failures.also(entry)
        else:
            lost, silent_ms = self.pool.last_lost
            record = self.failures.failed(
                entry, self.attempt, silent_ms if failure.worker == lost != "" else None
            )
            self.enrichers.enrich(record, entry)
        self.publish(
            "failure",
            f"{failure.where}: {failure.text} ({failure.kind.sentence})",
            failure=failure.kind.value,
            category=failure.kind.category.value,
            where=failure.where,
            detail=failure.detail,
            attempt=self.attempt,
        )

    def entry(self, failure: Failure) -> FailureEntry:
        """A failure as a line of the history."""
        return FailureEntry(
            time_ms=self.clock.now_ms(),
            kind=failure.kind.value,
            where=failure.where,
            worker=failure.worker,
            text=failure.text,
            detail=failure.detail,
            category=failure.kind.category.value,
        )

    def describe(self) -> dict[str, Any]:
        """The status as JSON, for clients."""
        checkpoints = self.checkpoints
        return {
            "name": self.spec.name,
            "status": self.status,
            "parallelism": self.parallelism,
            "max_parallelism": self.plan.max_parallelism,
            "generation": self.generation,
            "run": self.spec.run,
            "pid": os.getpid(),
            "began_ms": self.began_ms,
            "uptime_ms": self.time_in("RUNNING")[0],
            "reason": "" if self.end is None else self.end.reason,
            "failure": self._last_failure(),
            "attempt": self.attempt,
            "restarts": self.restarts,
            "restarted_tasks": self.restarted_tasks,
            "restored_checkpoint": self.restored_checkpoint,
            "restored_from": self.restored.text if self.restored is not None else "",
            "restored_bytes": sum(done for done, _ in self.restoring.values()),
            "restore_bytes": sum(total for _, total in self.restoring.values()),
            "last_rescale_ms": self.rescaled_ms,
            "last_checkpoint": checkpoints.last_completed,
            "checkpoints_completed": checkpoints.completed,
            "checkpoints_failed": checkpoints.failed,
            "last_checkpoint_ms": checkpoints.last_duration_ms,
            "last_checkpoint_at_ms": checkpoints.last_completed_at_ms,
            "last_checkpoint_bytes": checkpoints.last_size_bytes,
            "last_checkpoint_path": checkpoints.path_of(checkpoints.last_completed),
            "checkpoints_failed_in_a_row": checkpoints.failed_in_a_row,
            "checkpoint_failure": checkpoints.last_failure,
            "workers": self.pool.describe(),
            "metrics": self._metrics_endpoints(),
            "vertices": [self._describe_vertex(vertex) for vertex in self.plan.vertices],
            "event_time": describe_event_time(self.plan, self.statistics, self.clock.now_ms()),
            "backpressure": self._describe_backpressure(),
            "dropped": [
                {"step": each.step, "kind": each.kind, "count": each.count}
                for each in self.dropped.totals
            ],
            "busy_steps": describe_busy(self.pool.live.values()),
            "exceptions": [record.as_json() for record in self.failures.records],
        }

    def _last_failure(self) -> str:
        """The text of the last failure, though the job may run again; empty: there was none."""
        if not self.failures.records:
            return ""
        root = self.failures.records[-1].root
        return f"{root.where}: {root.text}"

    def _describe_backpressure(self) -> list[dict[str, Any]]:
        """The backpressure by task; empty unless the job runs, because the last reports are old then."""
        if not self.works:
            return []
        return describe_backpressure(self.plan, self.statistics, self.recent)

    def _metrics_endpoints(self) -> list[dict[str, str]]:
        """Every endpoint of the job's processes, the coordinator's first."""
        workers = sorted(self.pool.live.values(), key=lambda worker: worker.worker_id)
        found = [
            ("coordinator", self.metrics_url),
            *((w.worker_id, w.metrics_url) for w in workers),
        ]
        return [{"process": process, "url": url} for process, url in found if url]

    def _describe_vertex(self, vertex: Vertex) -> dict[str, Any]:
        subtasks = [self.statistics.get((vertex.id, index)) for index in range(vertex.parallelism)]
        known = [subtask for subtask in subtasks if subtask is not None]
        records_in = sum(subtask.records_in for subtask in known)
        pressure = max((subtask.backpressured_ms_per_second for subtask in known), default=0)
        return {
            "id": vertex.id,
            "name": vertex.name,
            "parallelism": vertex.parallelism,
            "records_in": records_in,
            "records_read": records_in if vertex.head.source is not None else 0,
            "records_written": sum(subtask.records_written for subtask in known),
            "records_out": sum(subtask.records_out for subtask in known),
            "busy": max((subtask.busy_ms_per_second for subtask in known), default=0),
            "full": max((subtask.full_ms_per_second for subtask in known), default=0),
            "idle": min((subtask.idle_ms_per_second for subtask in known), default=0),
            "backpressured": pressure,
            "backpressure_level": level_of(pressure).value,
            "watermark": min((subtask.watermark for subtask in known), default=None),
            "backlog": any(subtask.history is History.BEING_READ for subtask in known),
        }
