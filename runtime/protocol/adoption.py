"""Decides whether a new coordinator may adopt the running attempt: facts in, a verdict out.

A coordinator that takes over asks the workers of the deployment in the log what they run. Only if
all of them run exactly that, and no part of it has failed or was about to end, is the attempt
*adopted*: nothing is restored, no source is rewound. In doubt the job is restarted, which is always
correct.

What the old coordinator had started is settled by the log alone, which has a start entry of the new
one: a checkpoint before that entry is complete, and no other will ever be. So the workers are told
again that the newest is complete (they may not have heard; commits are idempotent), and that later
ones are aborted, since some subtasks may wait for their barriers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeAlias, final

import msgspec

from .joblog import DeploymentRecord, LogView

NOTICES_MAX = 64
"""The number of checkpoints that are reported as aborted: no more can be in progress."""
IN_PARTS = "some of its regions were restarted, and run in attempts of their own"
"""The reason for a refusal if the running job differs from the deployment in the log."""
Subtask: TypeAlias = tuple[int, int]
"""A vertex and the index of a subtask."""


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one worker on what it runs."""

    attempt: int = 0
    """The attempt that it runs; 0: nothing."""
    plan: str = ""
    """Fingerprint of the plan of that attempt."""
    restored_checkpoint: int = 0
    running: bool = False
    """Whether the attempt was started."""
    subtasks: tuple[Subtask, ...] = ()
    """All subtasks on this worker."""
    finished: tuple[Subtask, ...] = ()
    """The subtasks that have reached the end of their data."""
    failure: str = ""
    """The failure that happened on this worker; empty: none."""
    ending: str = ""
    """The operation that the last coordinator had begun and no other can continue; empty: none."""
    last_checkpoint: int = 0
    """The highest checkpoint id that this worker has heard of."""
    completed_checkpoint: int = 0
    """The highest id that it was told is complete."""
    uncommitted_checkpoints: tuple[int, ...] = ()
    """Ids that subtasks here acknowledged and that were not reported complete: their sinks wait."""
    orphaned_ms: int = 0
    """The time in ms that it has been without a coordinator."""


@final
class Adopted(msgspec.Struct, frozen=True):
    """The verdict to adopt the attempt.

    Attributes:
        finished: subtasks that have reached the end of their data.
        last_checkpoint: no id up to this one may be used again.
        completed: the checkpoint to report as complete again; 0: there is none of this attempt.
        aborted: ids to report as aborted, in order.
        base: the checkpoint that the next one may build on; 0: none.
        committed: the checkpoint that its state follows: the newest complete one, or the one that it
            restored; 0: none.
        orphaned_ms: how long the workers were without a coordinator.
    """

    finished: frozenset[Subtask]
    last_checkpoint: int
    completed: int
    aborted: tuple[int, ...]
    base: int
    committed: int
    orphaned_ms: int


@final
class Refused(msgspec.Struct, frozen=True):
    """The verdict to restart the job; `reason` explains it to a person."""

    reason: str


def refusal_by_log(view: LogView, run: str, plan: str) -> str:
    """Return why the log alone rules out an adoption; empty if it does not.

    Args:
        view: before the new coordinator's start entry.
        run: of the new coordinator.
        plan: fingerprint of the plan it would run at the parallelism of the deployment.
    """
    deployment, newest = view.deployment, view.newest
    if deployment is None:
        return "the log has no deployment"
    if view.deployed_run != run:
        return "the deployment belongs to another run"
    if view.parallelism != deployment.parallelism:
        return "the job was being rescaled"
    if deployment.in_parts:
        return IN_PARTS
    if newest is not None and newest.is_final:
        return "the job had taken its last checkpoint"
    if deployment.plan != plan:
        return "another plan runs"
    return ""


def decide(
    view: LogView, subtasks: Collection[Subtask], reports: Mapping[str, WorkerReport]
) -> Adopted | Refused:
    """Adopt the running attempt, or restart.

    Args:
        view: `refusal_by_log` has found no objection in it.
        subtasks: all of the plan.
        reports: of the workers that could be reached, by their ids.
    """
    deployment = view.deployment
    if deployment is None:
        return Refused("the log has no deployment")
    missing = sorted(set(deployment.workers) - reports.keys())
    if missing:
        return Refused(
            f"{len(missing)} of {len(deployment.workers)} workers are gone: {missing[0]}"
        )
    for worker, report in sorted(reports.items()):
        wrong = _wrong_with(report, deployment.attempt, deployment.plan)
        if wrong:
            return Refused(f"{wrong} worker=`{worker}`")
    found = Counter(subtask for report in reports.values() for subtask in report.subtasks)
    if found != Counter(subtasks):
        return Refused("the running subtasks are not those of the plan")
    return _settled(view, deployment, list(reports.values()))


def _wrong_with(report: WorkerReport, attempt: int, plan: str) -> str:
    if not report.attempt:
        return "a worker runs nothing"
    if report.attempt != attempt or report.plan != plan:
        return f"a worker runs another attempt attempt=`{report.attempt}`"
    if report.failure:
        return f"a subtask failed meanwhile: {report.failure}"
    if report.ending:
        return f"only the last coordinator can continue it: {report.ending}"
    return "" if report.running else "a worker had not begun"


def _settled(view: LogView, deployment: DeploymentRecord, reports: list[WorkerReport]) -> Adopted:
    completed, restored = view.deployment_completed, deployment.restored_checkpoint
    newest = view.newest.checkpoint_id if view.newest is not None else 0
    last = max(view.last_checkpoint_id, restored, *(report.last_checkpoint for report in reports))
    # Including those that some were told are aborted: others may not have heard, and wait for
    # barriers.
    oldest = max(completed, restored, last - NOTICES_MAX)
    return Adopted(
        finished=frozenset(subtask for report in reports for subtask in report.finished),
        last_checkpoint=last,
        completed=completed,
        aborted=tuple(range(oldest + 1, last + 1)),
        # If it restored an older one, as the user may allow, that is not built on.
        base=completed or (restored if restored == newest else 0),
        committed=completed or restored,
        orphaned_ms=max(report.orphaned_ms for report in reports),
    )
