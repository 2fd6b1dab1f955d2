"""Phase and conditions of a StreamJob, made from what was seen and decided."""

from __future__ import annotations

from typing import Final

from .actions import Requeue
from .context import Context
from .spec import Problem
from .status import RESTING, Phase, Run, Transition, Verb, set_condition, short

PENDING_MS: Final = 300_000
DEGRADED_MS: Final = 300_000
PODS_END_MS: Final = 300_000
"""Added to the time to stop a job, because pods have a grace period, and nodes may be lost."""
_OF_TRANSITION: Final[dict[Verb, Phase]] = {
    "Suspend": "Suspending",
    "Upgrade": "Upgrading",
    "Restore": "Upgrading",
    "Rollback": "RollingBack",
    "Restart": "Restarting",
    "Delete": "Deleting",
}
_OF_OUTCOME: Final[dict[str, Phase]] = {
    "Suspended": "Suspended",
    "Stopped": "Suspended",
    "Finished": "Finished",
    "Failed": "Failed",
}
_OF_REASON: Final[dict[str, Phase]] = {
    "Upgrade": "Upgrading",
    "Restore": "Upgrading",
    "Rollback": "RollingBack",
    "Restart": "Restarting",
}


def report_conditions(context: Context, problems: list[Problem], *, paused: bool) -> None:
    """Set the phase with its message, and all conditions."""
    status = context.status
    phase = phase_of(context)
    if phase != status.phase or not status.phase_since:
        status.phase, status.phase_since = phase, context.now
    if not context.deleted and not paused:
        status.observed_generation = context.generation
    late = _late(context)
    trouble = "" if phase in RESTING else context.pod_trouble()
    status.message = short(context.stalled or late or _message(context, trouble))
    accepted = "; ".join(map(str, problems))
    _set(context, "Accepted", not problems, "Valid", "Invalid", accepted or "the spec is valid")
    ready = phase == "Running"
    _set(context, "Ready", ready, "Running", phase, status.message or f"the phase is {phase}")
    moving = phase not in RESTING or status.transition is not None
    reason = "Paused" if paused else phase
    _set(context, "Progressing", moving and not paused, reason, reason, status.message)
    _degraded(context, phase)
    stuck = context.stalled or late or (status.held.reason if status.held is not None else "")
    if not stuck and problems and phase == "Pending":
        stuck = accepted
    _set(context, "Stalled", bool(stuck), "Held" if status.held else "Stuck", "Moving", stuck)
    _checkpointing(context)
    _state_found(context)


def phase_of(context: Context) -> Phase:
    """Return the phase of the job."""
    status, run, transition = context.status, context.status.run, context.status.transition
    if context.deleted:
        return "Deleting"
    if transition is not None:
        return _OF_TRANSITION.get(transition.verb) or _OF_OUTCOME[transition.outcome]
    if run is None:
        suspended = context.job is not None and context.job.kubernetes.state == "Suspended"
        return "Suspended" if suspended else "Pending"
    if run.ended:
        return _OF_OUTCOME[run.ended]
    if context.healthy:
        return "Running"
    if run.ran:
        return "Degraded"
    if status.job is not None and run.reason not in _OF_REASON:
        return "Restoring"
    return _OF_REASON.get(run.reason, "Deploying")


def deadline_ms(context: Context) -> int:
    """Return how long the phase may last before the condition Stalled becomes true; 0: it has no limit."""
    upgrade, phase = context.kubernetes.upgrade, context.status.phase
    starting = context.duration(upgrade.rollback.progress_deadline)
    stopping = context.duration(upgrade.timeout) + PODS_END_MS
    if phase in RESTING:
        return 0
    if phase in ("Pending", "Degraded"):
        return PENDING_MS if phase == "Pending" else DEGRADED_MS
    if phase in ("Deploying", "Restoring", "RollingBack"):
        return starting + (PODS_END_MS if phase == "RollingBack" else 0)
    if phase == "Upgrading":
        return stopping + starting
    if phase == "Restarting":
        longest = context.duration(context.kubernetes.restart_policy.max_backoff)
        return PODS_END_MS + longest + starting
    if phase == "Deleting":
        return 2 * context.duration(context.deletion.timeout) + PODS_END_MS
    return stopping


def _late(context: Context) -> str:
    """Say what the phase still waits for when its deadline is over, with the messages of the pods."""
    status, deadline = context.status, deadline_ms(context)
    since_ms = context.since_ms(status.phase_since)
    if not deadline:
        return ""
    if since_ms < deadline:
        context.act(Requeue(min(context.settings.poll_ms, deadline - since_ms)))
        return ""
    waits = context.waits_for or "the job does not run yet"
    trouble = context.pod_trouble()
    said = f"{status.phase} for more than {deadline // 60_000} min: {waits}"
    return f"{said}; {trouble}" if trouble else said


def _message(context: Context, trouble: str) -> str:
    status = context.status
    transition, run = status.transition, status.run
    if trouble:
        return trouble
    if transition is not None:
        return _of_transition(context, transition)
    if run is not None and not run.ended and not context.healthy:
        return _of_start(context, run)
    if run is not None and run.failure and not context.waits_for:
        return run.failure
    return context.waits_for


def _of_transition(context: Context, transition: Transition) -> str:
    return f"{transition.message}; {context.waits_for}" if context.waits_for else transition.message


def _of_start(context: Context, run: Run) -> str:
    report = context.report
    if report is None:
        state = "its coordinator does not answer yet"
    else:
        state = f"the job is {report.state}" + (f": {report.failure}" if report.failure else "")
    return context.waits_for or f"run {run.number}: {state}"


def _degraded(context: Context, phase: Phase) -> None:
    rejected = context.status.rejected
    job = context.job
    back = rejected is not None and job is not None and job.revision == rejected.revision
    if phase == "Degraded":
        message = context.pod_trouble() or context.status.message
        _set(context, "Degraded", True, "JobNotRunning", "", message)
    elif back and rejected is not None:
        _set(context, "Degraded", True, "RolledBack", "", rejected.reason)
    else:
        _set(context, "Degraded", phase == "Failed", "Failed", "AsWanted", context.status.message)


def _checkpointing(context: Context) -> None:
    report, job = context.report, context.running_job
    if job is not None and "checkpoint" not in job.spec and not job.spec.get("options"):
        message = "the job takes no checkpoints, so it begins again if its head is lost"
        _set(context, "CheckpointingHealthy", None, "", "", message)
    elif report is None or context.run is None:
        _set(context, "CheckpointingHealthy", None, "", "", "the job does not answer")
    elif report.failed_checkpoints:
        message = f"{report.failed_checkpoints} checkpoints in a row have failed"
        message += f", the last one: {report.checkpoint_failure}" * bool(report.checkpoint_failure)
        _set(context, "CheckpointingHealthy", False, "", "Failing", message)
    else:
        last = report.checkpoint
        message = "no checkpoint yet" if last is None else f"checkpoint {last.id} is complete"
        _set(context, "CheckpointingHealthy", True, "Completing", "", message)


def _state_found(context: Context) -> None:
    """Report that the first run of a StreamJob began with the state of an earlier one of the same name.

    This is reported when the run is first seen to run. Later it may have continued from a checkpoint of
    its own after a failure.
    """
    run, report = context.status.run, context.report
    if run is None or run.number != 1 or report is None or run.start.kind == "Path":
        return
    if not context.runs_at_last or (run.checkpointed and report.restarts):
        return
    if not report.restored or any(each.type == "StateFound" for each in context.status.conditions):
        return
    message = (
        f"the storage had state of an earlier job of this name, and the job goes on with it: "
        f"{report.restored}. With upgrade.mode Stateless it would have begun without state"
    )
    _set(context, "StateFound", True, "Resumed", "", message)
    context.event("StateFound", message)


def _set(
    context: Context, type_: str, value: bool | None, if_true: str, if_false: str, message: str
) -> None:
    """Set a condition, whose reason depends on its value."""
    reason = {True: if_true, False: if_false, None: "Unknown"}[value]
    context.status.conditions = set_condition(
        context.status.conditions,
        type_,
        value,
        reason,
        message,
        now_ms=context.now_ms,
        generation=context.generation,
    )
