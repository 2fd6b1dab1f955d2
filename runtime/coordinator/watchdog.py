"""Looks every second whether the job makes progress, and fails an attempt that does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

from ...errors import JobError
from ...operators.durations import format_duration
from ..control.messages import StepStuck, SubtaskStatistics
from ..options.monitoring import JOB_STALL, RECOVERY_STALL, STUCK_TIMEOUT
from ..protocol.backpressure import WaitsFor
from ..protocol.failures import FailureKind
from ..protocol.ids import SubtaskId
from ..protocol.liveness import StallMonitor
from .context import JobContext
from .environment import AttemptFailed, JobEnvironment
from .failures import Failure
from .workers import busy_steps

NAMED_MAX: Final = 5
"""The most subtasks or workers that a failure names."""


@final
class Watchdog:
    """The watchdog of one coordinator; `look` is called every `interval_ms`."""

    def __init__(self, job: JobContext, interval_ms: int) -> None:
        self._job = job
        self._env = job.env
        self._attempt = job.attempt
        self._stuck_ms = job.env.options.get(STUCK_TIMEOUT)
        self._job_stall = _monitor(job.env.options.get(JOB_STALL), interval_ms)
        self._recovery_stall = _monitor(job.env.options.get(RECOVERY_STALL), interval_ms)

    def look(self) -> None:
        """Fail the attempt if it makes no progress."""
        failure = self._stuck()
        if self._attempt.deployment_events is not None:
            failure = failure or self._recovery()
        elif self._job.lifecycle.status == "RUNNING":
            failure = failure or self._running()
        if failure is not None:
            self._env.events.put_nowait(AttemptFailed(self._attempt.number, failure))

    def _stuck(self) -> Failure | None:
        busy = self._busy()
        under_way = (
            self._attempt.deployment_events is not None or self._job.lifecycle.status == "RUNNING"
        )
        if not (self._stuck_ms and busy and under_way) or busy[0]["busy_ms"] < self._stuck_ms:
            return None
        text = f"it has been in one call for {_one_call(busy[0])}"
        return _failure(FailureKind.STUCK, busy[0]["task"], text, busy[0]["worker"])

    def _recovery(self) -> Failure | None:
        attempt, workers, monitor = self._attempt, len(self._job.pool.live), self._recovery_stall
        restoring = tuple(sorted(attempt.restoring.items()))
        mark = (attempt.number, attempt.deployment_events, workers, restoring)
        if monitor is None or not monitor.look(self._now_ms(), mark, pending=True):
            return None
        done, total = attempt.restored_bytes
        doing = [
            f"{step['task']} on {step['worker']} has been in one call for {_one_call(step)}"
            for step in self._busy()[:NAMED_MAX]
        ]
        text = "; ".join(
            [
                f"for {format_duration(self._env.options.get(RECOVERY_STALL))} no state was read and no "
                f"worker became ready: {done:,} of {total:,} bytes restored, "
                f"{workers} workers",
                *doing,
            ]
        )
        return _failure(FailureKind.RECOVERY_STALLED, "deployment", text)

    def _running(self) -> Failure | None:
        job, monitor = self._job, self._job_stall
        if monitor is None:
            return None
        subtasks = list(job.attempt.statistics.values())
        moved = tuple(sorted(_counts(subtask) for subtask in subtasks))
        mark = (job.attempt.number, moved, job.checkpoints.last_completed)
        waiting = [subtask for subtask in subtasks if _waits(subtask)]
        # A subtask may wait for an external system, in a call or for calls under way, without a limit.
        outside = bool(self._busy()) or any(
            subtask.waits_for is WaitsFor.CALLS for subtask in subtasks
        )
        if not monitor.look(self._now_ms(), mark, pending=bool(waiting) and not outside):
            return None
        text = (
            f"nothing moved for {format_duration(job.env.options.get(JOB_STALL))}, though records wait: "
            + "; ".join(_named(job, waiting))
        )
        return _failure(FailureKind.STALLED, "job", text)

    def _busy(self) -> list[dict[str, Any]]:
        """Return calls of the present attempt; a worker may still report those of the attempt before."""
        attempt_of = self._attempt.executions.attempt_of
        return [
            step
            for step in busy_steps(self._job.pool.live.values())
            if step["attempt"] == attempt_of(SubtaskId(step["vertex"], step["subtask"]))
        ]

    def _now_ms(self) -> int:
        return int(1000 * self._env.clock.monotonic())


def _monitor(timeout_ms: int, interval_ms: int) -> StallMonitor | None:
    return StallMonitor(timeout_ms, interval_ms) if timeout_ms else None


def _failure(kind: FailureKind, where: str, text: str, worker: str = "") -> Failure:
    return Failure(text, where, kind, JobError(text, where=where), worker=worker)


def _one_call(step: dict[str, Any]) -> str:
    operator = f" operator=`{step['operator']}`" if step["operator"] else ""
    return f"{format_duration(step['busy_ms'])}{operator}"


def _counts(subtask: SubtaskStatistics) -> tuple[int, ...]:
    return (
        subtask.vertex,
        subtask.index,
        subtask.records_in,
        subtask.records_out,
        subtask.watermark,
    )


def _waits(subtask: SubtaskStatistics) -> bool:
    return subtask.queued > 0 or subtask.backpressured_ms_per_second > 0


def _named(job: JobContext, waiting: Iterable[SubtaskStatistics]) -> list[str]:
    """Describe the subtasks, the one with the longest queue first."""
    ranked = sorted(waiting, key=lambda subtask: -subtask.queued)
    named = []
    for subtask in ranked[:NAMED_MAX]:
        vertex = job.attempt.plan.vertices[subtask.vertex]
        for_what = {
            WaitsFor.BARRIERS: ", which waits for barriers",
            WaitsFor.NOTHING: "",
        }.get(subtask.waits_for, "")
        state = f"{subtask.queued} buffers wait in front of" if subtask.queued else "no room behind"
        named.append(f"{state} {vertex.name} ({subtask.index + 1}/{vertex.parallelism}){for_what}")
    left = len(ranked) - NAMED_MAX
    return [*named, f"and {left} more"] if left > 0 else named


def publish_stuck(env: JobEnvironment, worker_id: str, stuck: StepStuck) -> None:
    """Publish that a call does not return, also for an attempt that is over."""
    step = stuck.step
    operator = f" in `{step.operator}`" if step.operator else ""
    env.publish(
        "stuck",
        f"{step.task_name} has been in one call{operator} for {format_duration(step.busy_ms)}",
        worker=worker_id,
        task=step.task_name,
        operator=step.operator,
        subtask=step.index,
        busy_ms=step.busy_ms,
        attempt=step.attempt,
        stack=stuck.stack,
    )
