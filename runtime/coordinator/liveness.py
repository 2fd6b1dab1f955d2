"""Reports calls that do not return, which the threads of workers have told the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...operators.durations import format_duration
from ..control.messages import StepStuck, Watching
from ..options.monitoring import (
    CANCELLATION_INTERVAL,
    CANCELLATION_TIMEOUT,
    STUCK_AFTER,
    UNREACHABLE_AFTER,
)
from ..options.registry import Options

if TYPE_CHECKING:
    from .context import JobContext
    from .workers import Worker


def watching(options: Options) -> Watching:
    """The settings of a worker's watch over its own calls, from the options."""
    return Watching(
        unreachable_after=options.get(UNREACHABLE_AFTER),
        stuck_after_ms=options.get(STUCK_AFTER),
        cancellation_interval_ms=options.get(CANCELLATION_INTERVAL),
        cancellation_timeout_ms=options.get(CANCELLATION_TIMEOUT),
    )


def publish_stuck(job: JobContext, worker_id: str, stuck: StepStuck) -> None:
    """Tell all who look on that a call does not return; of attempts that are over too."""
    step = stuck.step
    operator = f" in `{step.operator}`" if step.operator else ""
    job.publish(
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


def describe_busy(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """The steps that have been in one call for more than a second, the longest first."""
    found = [
        {
            "worker": worker.worker_id,
            "vertex": step.vertex,
            "task": step.task_name,
            "operator": step.operator,
            "subtask": step.index,
            "busy_ms": step.busy_ms,
            "attempt": step.attempt,
        }
        for worker in workers
        for step in worker.pulse.steps
    ]
    return sorted(found, key=lambda each: -int(str(each["busy_ms"])))
