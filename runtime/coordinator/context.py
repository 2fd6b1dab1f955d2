"""The states of a job: how one leads to the next, and what they share.

    Adopting ──> Running    (a takeover; otherwise, or if nothing can be adopted: Deploying)

    Deploying ──> Running ──> Ended
        ^          │   │
        ├─ Failing <┘   │   (also from Deploying; Failing may give up: Ended)
        │               │   (a failure of some regions only is handled within Running: `regional.py`)
        └─ Rescaling <──┘

A state does one thing (`adopting.py`, `deploying.py`, `running.py`, `restarting.py`, `ending.py`). What
it returns is one of the transitions below, from which `job.py` makes the next state. So no state
knows the others. All of them work with one `JobContext`: the job's environment, its parts, and its course
so far.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias, final

import msgspec

from ...operators.clock import Clock
from ..job_settings import checkpoint_rules
from ..observe.figures import JobFigures
from ..options.network import REST_CURVES
from ..protocol.adoption import Adopted
from ..protocol.checkpoints.coordinator import CheckpointCoordinator
from ..protocol.curves import Curves
from ..protocol.joblog import JobStatus
from ..protocol.restart import RestartDecision
from .attempt import Attempt
from .checkpointing import CheckpointDriver
from .discovery import SplitDiscovery
from .environment import HAND_OVER, ClientCommand, JobEnvironment, Tick
from .failures import Failure, Failures
from .global_commit import GlobalCommitter
from .output import OutputReplacer
from .placement import SlotAffinity
from .restore import RestorePoints, dispose_claimed
from .sources import FreshSplits
from .workers import AttemptWorkers, LiveWorker, WorkerPool


@final
class ToAdopting(msgspec.Struct, frozen=True):
    """An earlier coordinator ran the job; perhaps its attempt goes on."""


@final
class ToDeploying(msgspec.Struct, frozen=True):
    """The next attempt begins."""


@final
class ToRunning(msgspec.Struct, frozen=True):
    """All subtasks are ready; or they are at work already, if `adopted`."""

    workers: list[LiveWorker]
    adopted: Adopted | None = None


@final
class ToFailing(msgspec.Struct, frozen=True):
    """The attempt is over, for the whole job.

    Attributes:
        failure: the failure that ended it.
        decision: what follows, if that was decided already.
        merged: it happened while regions restart after another failure, and belongs to that one.
        why: the reason why the whole job restarts and not only a part of it, if it has parts.
    """

    failure: Failure
    decision: RestartDecision | None = None
    merged: bool = False
    why: str = ""


@final
class ToRescaling(msgspec.Struct, frozen=True):
    """The job stopped with a checkpoint, to go on at another parallelism."""


@final
class ToHandingOver(msgspec.Struct, frozen=True):
    """The run is left to its next coordinator, as a client commanded."""

    command: ClientCommand


@final
class EndOfJob(msgspec.Struct, frozen=True):
    """The job is over.

    Attributes:
        status: how it ended.
        reason: why, for the user.
        failure: the failure that ended it, if one did.
        command: the command of the client that ended it.
        savepoint: the address of the savepoint that the client wanted with the end.
        savepoint_bytes: its size.
    """

    status: JobStatus
    reason: str = ""
    failure: Failure | None = None
    command: ClientCommand | None = None
    savepoint: str = ""
    savepoint_bytes: int = 0


Transition: TypeAlias = (
    ToAdopting | ToDeploying | ToRunning | ToFailing | ToRescaling | ToHandingOver | EndOfJob
)


def ends_at_once(command: ClientCommand) -> bool:
    """Return True for a command that can be carried out while no attempt runs."""
    wants_more = "savepoint" in command.arguments or command.arguments.get("drain")
    return command.verb in ("cancel", HAND_OVER) or (command.verb == "stop" and not wants_more)


def end_by(command: ClientCommand) -> Transition:
    """End the job, or this coordinator, while no attempt runs: the last checkpoint is the newest state."""
    if command.verb == HAND_OVER:
        return ToHandingOver(command)
    status = JobStatus.CANCELED if command.verb == "cancel" else JobStatus.STOPPED
    return EndOfJob(status, f"{command.verb} by a client", command=command)


@final
class OngoingRescale(msgspec.Struct):
    """A change of parallelism under way; `command` is answered when the job runs again."""

    command: ClientCommand
    before: int
    after: int
    began: float
    """When the sources fell silent, on the monotonic clock."""


@final
class Lifecycle:
    """The course of a job under one coordinator: its status, and what has happened so far."""

    def __init__(self, clock: Clock, began_ms: int) -> None:
        self._clock = clock
        self.began_ms = began_ms
        """When the run began, in ms since the epoch."""
        self.status = "INITIALIZING"
        self.since_ms = clock.now_ms()
        """When the present status began."""
        self._totals_ms: dict[str, int] = {}
        """The time in each status, without that in the present one."""
        self.restarts = 0
        self.restarted_tasks = 0
        """The number of tasks that all restarts together restarted."""
        self.restored_at_ms = 0
        """When an attempt restored state last; 0: none did."""
        self.rescale: OngoingRescale | None = None
        self.rescaled_ms = 0
        """The time in ms for which the last rescale kept the job from working."""
        self.adopted_after_ms = -1
        """The time in ms without a coordinator, before this one adopted the attempt; -1: it did not."""
        self.end: EndOfJob | None = None
        self.ended_ms = 0
        """When the job ended; 0: it has not."""
        self.handed_over = False
        """Whether this coordinator has left, and the run goes on under the next one."""

    def time_in(self, status: str) -> tuple[int, int]:
        """Return the time in ms that the job has been in a status: without a break, and in total."""
        present_ms = 0
        if self.status == status:
            present_ms = max(0, self._clock.now_ms() - self.since_ms)
        return present_ms, self._totals_ms.get(status, 0) + present_ms

    def change(self, status: str) -> None:
        """Begin another status."""
        self._totals_ms[self.status] = self.time_in(self.status)[1]
        self.status, self.since_ms = status, self._clock.now_ms()


@final
class JobContext:
    """Has the parts of a coordinator that its states work with, and what concerns several of them."""

    def __init__(self, env: JobEnvironment, pool: WorkerPool) -> None:
        self.env = env
        self.pool = pool
        self.attempt = Attempt(env)
        self.workers = AttemptWorkers(pool, self.attempt)
        log, clock = env.log, env.clock
        began_ms = clock.now_ms() if log is None else log.view.history.began_ms
        self.lifecycle = Lifecycle(clock, began_ms)
        self.failures = Failures.of(env.spec, env.options)
        rules = checkpoint_rules(env.spec.checkpoint, env.options)
        self.commits = GlobalCommitter(env)
        self.checkpoints = CheckpointDriver(
            CheckpointCoordinator(rules), env, self.workers, self, self.commits
        )
        self.old_output = OutputReplacer(env)
        self.restore_points = RestorePoints(env)
        self.splits = FreshSplits(env)
        self.discovery = SplitDiscovery(env)
        self.affinity = SlotAffinity()
        self.observed = JobFigures()
        """For metrics."""
        self.curves = Curves(env.options.get(REST_CURVES) // 1000)
        """For the web UI."""
        self._tick: asyncio.TimerHandle | None = None
        self._claims = env.spec.claim
        """Whether the savepoint that the run began with is still to be deleted."""

    @property
    def works(self) -> bool:
        """True if at least a part of the job runs."""
        return self.lifecycle.status == "RUNNING" or bool(self.attempt.restarting)

    def set_status(self, status: str) -> None:
        """Move to another status (names as Flink's JobStatus)."""
        env, lifecycle = self.env, self.lifecycle
        if status != lifecycle.status:
            before, since_ms = lifecycle.status, lifecycle.since_ms
            lifecycle.change(status)
            if status == "RUNNING":
                env.spans.add(
                    "headgate.job.start",
                    since_ms,
                    lifecycle.since_ms,
                    {
                        "headgate.job.state_before": before.lower(),
                        "headgate.job.attempt": self.attempt.number,
                        "headgate.job.parallelism": self.attempt.parallelism,
                        "headgate.checkpoint.id": self.attempt.restored_checkpoint,
                    },
                )
            env.publish("status", f"job {env.spec.name} is {status}", status=status)

    def count_restart(self) -> None:
        """Count a restart of tasks; entries of the job log repeat the number of them in this run."""
        self.lifecycle.restarts += 1
        if self.env.log is not None:
            self.env.log.restarts = self.lifecycle.restarts

    def record(self, failure: Failure, *, merged: bool = False) -> None:
        """Add a failure to the history and publish it; `merged`: it belongs to the one before."""
        category = failure.kind.category.value
        self.observed.failures[category] += 1
        lost, silent_ms = self.pool.last_lost
        self.failures.record(
            failure.entry(self.env.clock.now_ms()),
            self.attempt.number,
            silent_ms if failure.worker == lost != "" else None,
            merged=merged,
        )
        self.env.publish(
            "failure",
            f"{failure.where}: {failure.text} ({failure.kind.sentence})",
            failure=failure.kind.value,
            category=category,
            where=failure.where,
            detail=failure.detail,
            attempt=self.attempt.number,
        )

    def checked(self, failure: Failure) -> Failure:
        """Return the failure; as one that is not tried again, if it has happened too often."""
        now_ms = self.env.clock.now_ms()
        return self.failures.repeated.check(failure, now_ms, self.checkpoints.last_completed)

    def warm_spares(self) -> None:
        """Let workers without subtasks prepare for some of the present plan, from now on."""
        self.pool.warm_up = self.attempt.warm_up

    # -- what the checkpoint driver asks for (`CheckpointHost`) -------------------------------------

    def wake_at(self, at_ms: int) -> None:
        """Put a `Tick` into the queue of events at this time; replaces the one before."""
        if self._tick is not None:
            self._tick.cancel()
        delay = max(0, at_ms - self.env.steady_clock.now_ms()) / 1000
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(delay, self.env.events.put_nowait, Tick())

    def checkpoint_completed(self) -> None:
        """Delete the savepoint that the run claimed and began with: it has a checkpoint of its own."""
        if self._claims:
            self._claims = False
            self.checkpoints.clean_up(dispose_claimed(self.env))

    async def close(self) -> None:
        """Give up what goes on in the background."""
        if self._tick is not None:
            self._tick.cancel()
        await self.commits.close()
        await self.old_output.close()
        await self.failures.enrichers.close()
