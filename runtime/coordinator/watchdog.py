"""Looks every second whether the job gets on, and fails an attempt that does not (features.md REC-19)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ...errors import JobError
from ...operators.durations import format_duration
from ..control.messages import SubtaskStatistics
from ..options.monitoring import JOB_STALL, RECOVERY_STALL, STUCK_TIMEOUT
from ..protocol.backpressure import WaitsFor
from ..protocol.failures import FailureKind
from ..protocol.ids import SubtaskId
from ..protocol.liveness import StallMonitor
from .context import AttemptFailed, Failure, JobContext
from .liveness import describe_busy

NAMED_MAX: Final = 5
"""Subtasks or workers that a failure names."""


class Watchdog:
    """The watchdog of one coordinator; `look` is called every `interval_ms`."""

    def __init__(self, job: JobContext, interval_ms: int) -> None:
        self._job = job
        self._stuck_ms = job.options.get(STUCK_TIMEOUT)
        self._job_stall = _monitor(job.options.get(JOB_STALL), interval_ms)
        self._recovery_stall = _monitor(job.options.get(RECOVERY_STALL), interval_ms)

    def look(self) -> None:
        """Have the attempt fail if it does not get on."""
        failure = self._stuck()
        if self._job.deployment_events is not None:
            failure = failure or self._recovery()
        elif self._job.status == "RUNNING":
            failure = failure or self._running()
        if failure is not None:
            self._job.events.put_nowait(AttemptFailed(self._job.attempt, failure))

    def _stuck(self) -> Failure | None:
        busy = self._busy()
        under_way = self._job.deployment_events is not None or self._job.status == "RUNNING"
        if not (self._stuck_ms and busy and under_way) or busy[0]["busy_ms"] < self._stuck_ms:
            return None
        text = f"it has been in one call for {_one_call(busy[0])}"
        return _failure(FailureKind.STUCK, busy[0]["task"], text, busy[0]["worker"])

    def _recovery(self) -> Failure | None:
        job, monitor = self._job, self._recovery_stall
        restoring = tuple(sorted(job.restoring.items()))
        mark = (job.attempt, job.deployment_events, len(job.pool.live), restoring)
        if monitor is None or not monitor.look(self._now_ms(), mark, pending=True):
            return None
        done = sum(done for done, _ in job.restoring.values())
        total = sum(total for _, total in job.restoring.values())
        doing = [
            f"{step['task']} on {step['worker']} has been in one call for {_one_call(step)}"
            for step in self._busy()[:NAMED_MAX]
        ]
        text = "; ".join(
            [
                f"for {format_duration(job.options.get(RECOVERY_STALL))} no state was read and no "
                f"worker became ready: {done:,} of {total:,} bytes restored, "
                f"{len(job.pool.live)} workers",
                *doing,
            ]
        )
        return _failure(FailureKind.RECOVERY_STALLED, "deployment", text)

    def _running(self) -> Failure | None:
        job, monitor = self._job, self._job_stall
        if monitor is None:
            return None
        subtasks = list(job.statistics.values())
        moved = tuple(sorted(_counts(subtask) for subtask in subtasks))
        mark = (job.attempt, moved, job.checkpoints.last_completed)
        waiting = [subtask for subtask in subtasks if _waits(subtask)]
        # Who waits for the outside, in a call or for calls under way, may do so for as long as it takes.
        outside = bool(self._busy()) or any(
            subtask.waits_for is WaitsFor.CALLS for subtask in subtasks
        )
        if not monitor.look(self._now_ms(), mark, pending=bool(waiting) and not outside):
            return None
        text = (
            f"nothing moved for {format_duration(job.options.get(JOB_STALL))}, though records wait: "
            + "; ".join(_named(job, waiting))
        )
        return _failure(FailureKind.STALLED, "job", text)

    def _busy(self) -> list[dict[str, Any]]:
        """Calls of what runs; a worker may not have told yet that those of the attempt before ended."""
        attempt_of = self._job.executions.attempt_of
        return [
            step
            for step in describe_busy(self._job.pool.live.values())
            if step["attempt"] == attempt_of(SubtaskId(step["vertex"], step["subtask"]))
        ]

    def _now_ms(self) -> int:
        return int(1000 * self._job.clock.monotonic())


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
    """The subtasks with most in front of them first."""
    ranked = sorted(waiting, key=lambda subtask: -subtask.queued)
    named = []
    for subtask in ranked[:NAMED_MAX]:
        vertex = job.plan.vertices[subtask.vertex]
        for_what = {
            WaitsFor.BARRIERS: ", which waits for barriers",
            WaitsFor.NOTHING: "",
        }.get(subtask.waits_for, "")
        state = f"{subtask.queued} buffers wait in front of" if subtask.queued else "no room behind"
        named.append(f"{state} {vertex.name} ({subtask.index + 1}/{vertex.parallelism}){for_what}")
    left = len(ranked) - NAMED_MAX
    return [*named, f"and {left} more"] if left > 0 else named
