"""The way from one run of a job to the next, step by step: save the state, drain the pods, pause.

Each step is decided from the current observations, and from the decisions in the status. So an operator
may die at any point, and any answer may be lost.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from .actions import CallJob, Create, Operation, RemoveFinalizer
from .context import Context
from .pods import state_cleaning_job
from .spec import Job, Ref
from .status import Held, LastSavepoint, Run, Start, Transition, rfc3339, short, since_1970_ms
from .upkeep import drain, is_own, stored_job

FINALIZER: Final = "headgate.io/state"
UNHEALTHY_MS: Final = 60_000
"""The time that a stop waits for the recovery of a job that does not run."""
HOLD_ATTEMPTS_MAX: Final = 3
"""The number of attempts at a change that needs a checkpoint or savepoint."""
HOLD_PAUSE_MS: Final = 60_000
"""The least time between two of these attempts; the job also has to run."""


def advance(context: Context) -> None:
    """Carry out the current step of the transition, and the following ones if it is done."""
    transition = context.status.transition
    assert transition is not None
    if transition.step == "Save" and _save(context, transition):
        _next(context, transition, "Drain")
    elif transition.step == "Drain" and drain(context):
        _drained(context, transition)
    elif transition.step == "Wait":
        left = since_1970_ms(transition.until) - context.now_ms
        if left > 0:
            context.wait(f"the pause before a new run ends at {transition.until}", left)
        else:
            _start_next(context, transition)
    elif transition.step == "Clean" and _clean(context):
        _gone(context)


def saving(context: Context, transition: Transition) -> str:
    """Return the way in which the job is stopped: with a `savepoint`, a `checkpoint`, or at once."""
    kubernetes = context.kubernetes
    if transition.verb == "Delete":
        policies = {"SavepointThenStop": "savepoint", "Stop": "checkpoint", "Abort": ""}
        return policies[context.deletion.policy]
    savepoint = kubernetes.upgrade.mode == "Savepoint" and transition.verb != "Restore"
    return "savepoint" if savepoint else "checkpoint"


def _next(
    context: Context, transition: Transition, step: Literal["Drain", "Wait", "Clean"]
) -> None:
    transition.step = step
    transition.step_started_at = context.now
    context.wait(transition.message, 0)


def _save(context: Context, transition: Transition) -> bool:
    """Stop the job with a savepoint or a last checkpoint; return True once that is done, or given up."""
    how = saving(context, transition)
    run = context.status.run
    if run is None or not how or not (run.ran or context.healthy):
        return True  # a run that never ran has no state
    report, trigger = context.report, trigger_of(context, transition)
    operation = report.operations.get(trigger) if report is not None else None
    if operation is not None and operation.state == "completed":
        _saved(context, transition, operation)
    if report is not None and context.over:
        if report.state == "FINISHED" and transition.verb == "Suspend":
            transition.verb, transition.outcome = "End", "Finished"
        return True
    if operation is not None and operation.state == "failed":
        return _without(context, transition, operation.error or "the job refused to stop")
    waited_ms = context.since_ms(transition.step_started_at)
    if operation is None and not context.healthy and waited_ms >= UNHEALTHY_MS:
        trouble = context.pod_trouble() or "the coordinator does not answer"
        state = trouble if report is None else f"the job is {report.state}"
        return _without(context, transition, f"the job does not run: {state}")
    if waited_ms >= _timeout_ms(context, transition):
        return _without(context, transition, f"no {how} within {waited_ms // 1000} s")
    if operation is None and context.healthy:
        _call_stop(context, trigger, how)
    context.wait(f"the job has to stop with a {how}")
    return False


def trigger_of(context: Context, transition: Transition) -> str:
    """Return the trigger id of the stop, which is the same in the whole transition, for every operator."""
    run = context.status.run
    assert run is not None
    started_ms = since_1970_ms(transition.started_at)
    return f"{context.run_id(run)}-{transition.verb.lower()}-{started_ms}"


def _call_stop(context: Context, trigger: str, how: str) -> None:
    run, savepoints = context.status.run, context.kubernetes.savepoints
    assert run is not None
    arguments: dict[str, Any] = {"savepoint": how == "savepoint"}
    if how == "savepoint":
        arguments["native"] = savepoints.format == "Native"
        if savepoints.directory:
            arguments["directory"] = savepoints.directory
    context.act(CallJob(context.run_id(run), "stop", trigger, arguments))


def _saved(context: Context, transition: Transition, operation: Operation) -> None:
    """Record the path of a savepoint, once."""
    if operation.path and not transition.savepoint:
        transition.savepoint = operation.path
        context.status.savepoint = LastSavepoint(operation.path, context.now)
        context.event("SavepointTaken", f"the job stops with the savepoint {operation.path}")


def _timeout_ms(context: Context, transition: Transition) -> int:
    deleting = transition.verb == "Delete"
    timeout = context.deletion.timeout if deleting else context.kubernetes.upgrade.timeout
    return context.duration(timeout)


def _without(context: Context, transition: Transition, reason: str) -> bool:
    """Go on with the last checkpoint because the state cannot be saved, or leave the job as it is."""
    status, upgrade = context.status, context.kubernetes.upgrade
    if transition.verb in ("Delete", "Restore"):
        context.event("NoSavepoint", f"{reason}; the pods are taken away", "Warning")
        return True
    refused = ""
    if transition.verb == "Upgrade" and upgrade.mode == "Stateless":
        pass  # no state is needed
    elif upgrade.fallback == "Fail":
        refused = "upgrade.fallback is Fail"
    elif upgrade.max_checkpoint_age is not None:
        last = status.checkpoint
        age_ms = None if last is None else context.since_ms(last.completed_at)
        if age_ms is None or age_ms > context.duration(upgrade.max_checkpoint_age):
            age = "unknown" if age_ms is None else f"{age_ms // 1000} s"
            refused = f"the age of the last checkpoint is {age}, upgrade.maxCheckpointAge is "
            refused += upgrade.max_checkpoint_age
    if not refused:
        context.event("NoSavepoint", f"{reason}; the last checkpoint is used", "Warning")
        return True
    message = f"{transition.verb} is put off: {reason}, and {refused}"
    attempts = status.held.attempts + 1 if status.held is not None else 1
    status.held = Held(context.generation, attempts, context.now, short(message))
    status.transition = None
    more = "it is tried again" if attempts < HOLD_ATTEMPTS_MAX else "change the StreamJob to go on"
    context.event("Held", f"{message}; {more}", "Warning")
    return False


def _drained(context: Context, transition: Transition) -> None:
    """Choose the next step, after the last pod has gone."""
    status = context.status
    run = status.run
    match transition.verb:
        case "Delete":
            keeps = context.deletion.state_retention == "Retain"
            if keeps or run is None:
                _gone(context)
            else:
                _next(context, transition, "Clean")
        case "Suspend" | "End":
            assert run is not None
            run.ended = "Suspended" if transition.verb == "Suspend" else transition.outcome
            run.left = transition.savepoint
            run.failure = transition.message if run.ended == "Failed" else ""
            status.transition = None
            context.event(run.ended, transition.message or f"the job is {run.ended}")
        case "Restart":
            assert run is not None
            attempt = status.restarts + 1
            pause_ms = context.kubernetes.restart_policy.pause_ms(attempt)
            status.restarts = attempt
            transition.until = rfc3339(context.now_ms + pause_ms)
            _next(context, transition, "Wait")
        case _:
            _start_next(context, transition)


def _start_next(context: Context, transition: Transition) -> None:
    """Decide on the next run. From the next reconciliation on, the upkeep of children makes its objects."""
    status = context.status
    if context.kubernetes.state == "Suspended" and status.run is not None:
        status.run.ended, status.run.left = "Suspended", transition.savepoint
        status.transition = None
        context.event("Suspended", "the StreamJob was suspended meanwhile")
        return
    job = target_job(context)
    if job is None:
        context.stalled = (
            "the spec is wrong, and the manifest of the revision to go back to is gone"
        )
        context.wait(context.stalled)
        return
    start = _start_of(context, transition)
    parallelism = context.job.parallelism if context.job is not None else job.parallelism
    status.transition = None
    context.begin_run(job.revision, parallelism, start, transition.verb, transition.message)
    context.wait("a new run is decided", 0)


def target_job(context: Context) -> Job | None:
    """Return the spec that should run: that of the StreamJob, unless its revision was rolled back."""
    status = context.status
    rejected = status.rejected.revision if status.rejected is not None else None
    if context.job is not None and context.job.revision != rejected:
        return context.job
    back = status.stable or status.run
    return stored_job(context, back.revision) if back is not None else None


def _start_of(context: Context, transition: Transition) -> Start:
    """Return the state that the next run begins with."""
    run, upgrade = context.status.run, context.kubernetes.upgrade
    if transition.verb == "Restore":
        return Start("Path", transition.savepoint)
    if transition.verb == "Upgrade":
        if upgrade.mode == "Stateless":
            return Start("Nothing")
        if transition.savepoint:
            return Start("Path", transition.savepoint)
    return latest(run) if run is not None else Start("Latest")


def latest(before: Run) -> Start:
    """Return a start from the newest checkpoint in the log, or else from the start of the former run."""
    return Start("Latest", "" if before.checkpointed else before.start.path)


def restore_path(context: Context) -> tuple[str, str]:
    """Return the path that `restore` names, and the reason if there is none."""
    restore = context.kubernetes.restore
    assert restore is not None
    if restore.path:
        return restore.path, ""
    assert isinstance(restore.snapshot_ref, Ref)
    name = restore.snapshot_ref.name
    snapshot = context.observed.restored
    if snapshot is None or snapshot["metadata"]["name"] != name:
        return "", f"there is no StreamSnapshot {name}"
    status = snapshot.get("status", {})
    if status.get("phase") == "Completed":
        return str(status["path"]), ""
    return "", f"the StreamSnapshot {name} is {status.get('phase', 'Pending')}"


def _clean(context: Context) -> bool:
    """Delete the job's state, as the policy says; return True once that is done, or given up."""
    status, transition = context.status, context.status.transition
    job = context.running_job
    assert status.run is not None
    assert transition is not None
    if job is None:
        context.event("StateNotDeleted", "the manifest that names the storage is gone", "Warning")
        return True
    name = f"{context.name}-clean"
    cleaning = context.child("Job", name)
    if cleaning is None or not is_own(context, cleaning):
        context.act(Create(state_cleaning_job(context.deployment(job, status.run), name)))
    elif cleaning.get("status", {}).get("succeeded"):
        context.event("StateDeleted", "the checkpoints of the job are deleted")
        return True
    if context.since_ms(transition.step_started_at) >= _timeout_ms(context, transition):
        message = f"Job {name} did not end in time; the remaining files stay in the storage"
        context.event("StateNotDeleted", message, "Warning")
        return True
    context.wait("the checkpoints of the job are being deleted")
    return False


def _gone(context: Context) -> None:
    context.act(RemoveFinalizer(FINALIZER))
