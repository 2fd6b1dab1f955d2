"""The decisions of the operator about a StreamJob, as a pure function of its spec and the observations.

`reconcile` is level-triggered: it does not get the changes, but decides from the whole state. It is
called again and again, until it has nothing to do. See docs/design/operator.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from .actions import Action, AddFinalizer, CallJob, Object, Observed, Requeue, SetStatus
from .conditions import deadline_ms, report_conditions
from .context import Context, copied, run_number, worker_selector
from .lost_pods import let_go_of_lost
from .modes import workers_of
from .objects import GROUP, REVISION, ROLE, WORKER, Settings, head_name
from .pod_troubles import is_ready
from .savepoint_schedule import keep_savepoints
from .spec import Job, Problem, parse_job
from .status import (
    Checkpoint,
    JobState,
    ParallelismState,
    Rescale,
    Revision,
    Run,
    Start,
    StreamJobStatus,
    WorkersState,
    rfc3339,
    short,
    since_1970_ms,
)
from .transitions import (
    FINALIZER,
    HOLD_ATTEMPTS_MAX,
    HOLD_PAUSE_MS,
    advance,
    latest,
    restore_path,
    target_job,
)
from .upkeep import drain, drop_old_manifests, is_own, keep_up, stored_job

PAUSED: Final = "headgate.io/paused"
RESCALE_ATTEMPTS_MAX: Final = 3
RESCALE_PAUSE_MS: Final = 30_000
"""Before the second attempt at a rescale that failed; it doubles from one to the next."""


@final
@dataclass(frozen=True, slots=True)
class Result:
    """The decisions of a reconciliation.

    Attributes:
        actions: the actions, in the order of their execution. The shell stops at the first that fails.
        status: the status that `SetStatus` writes; equal to the given one if there is no `SetStatus`.
        deadline_ms: the time when its phase will have lasted too long, since 1970; 0: never.
    """

    actions: tuple[Action, ...]
    status: StreamJobStatus
    deadline_ms: int = 0


def reconcile(
    resource: Object,
    status: StreamJobStatus,
    observed: Observed,
    now_ms: int,
    settings: Settings,
) -> Result:
    """Decide on the actions for a StreamJob.

    Args:
        resource: the StreamJob as the API server has it.
        status: its status; an empty one at first.
        observed: the objects and pods around it, and the answer of its coordinator.
        now_ms: milliseconds since 1970.
        settings: the settings with which the operator was installed.
    """
    context = Context(resource, copied(status), observed, now_ms, settings)
    parsed = parse_job(resource)
    problems: list[Problem] = []
    if isinstance(parsed, Job):
        context.job = parsed
    else:
        problems = parsed
    _adopt(context)
    run = context.status.run
    if run is not None and (context.job is None or context.job.revision != run.revision):
        context.stored = stored_job(context, run.revision)
    _observe(context)
    paused = resource["metadata"].get("annotations", {}).get(PAUSED) == "true"
    if paused:
        context.wait(f"nothing is done while the annotation {PAUSED} is true", settings.poll_ms)
    else:
        _decide(context, problems)
    report_conditions(context, problems, paused=paused)
    return _result(context, status)


def _result(context: Context, before: StreamJobStatus) -> Result:
    """Return the result. The status is written first, because the other actions carry out its decisions.

    It is also written unchanged, which fails if the StreamJob has been changed since it was read.
    """
    actions: list[Action] = [each for each in context.actions if not isinstance(each, Requeue)]
    pauses = [each.after_ms for each in context.actions if isinstance(each, Requeue)]
    if actions or context.status != before:
        actions.insert(0, SetStatus(context.status))
    actions.append(Requeue(min(pauses, default=context.settings.poll_ms)))
    lasts_ms = deadline_ms(context)
    deadline = since_1970_ms(context.status.phase_since) + lasts_ms if lasts_ms else 0
    return Result(tuple(actions), context.status, deadline)


def _adopt(context: Context) -> None:
    """Take over the run that exists if the status knows of none, or of an older one."""
    head = context.child("StatefulSet", head_name(context.name))
    if head is None or not is_own(context, head):
        return
    number = run_number(head, context.uid)
    run = context.status.run
    if number is None or (run is not None and run.number >= number):
        return
    revision = head["metadata"]["annotations"][REVISION]
    parallelism = context.job.parallelism if context.job is not None else 1
    context.status.run = Run(number, revision, parallelism, Start("Latest"), context.now)
    context.event("Adopted", f"run {number} was found; the status did not have it")


def _observe(context: Context) -> None:
    """Put the observations into the status. Nothing here is a decision."""
    status, report, run = context.status, context.report, context.status.run
    status.selector = worker_selector(context.name)
    deletion = context.deletion
    verb = "keeps" if deletion.state_retention == "Retain" else "deletes"
    status.on_deletion = f"{deletion.policy}; {verb} checkpoints, keeps savepoints"
    ready, desired = _workers(context)
    status.workers = WorkersState(ready, desired)
    configured = context.job.parallelism if context.job is not None else 0
    current = report.parallelism if report is not None and context.run is not None else 0
    if report is None and status.parallelism is not None and context.run is not None:
        current = status.parallelism.current
    status.parallelism = ParallelismState(configured, current)
    if run is None or report is None:
        if run is not None:
            run.running_since = ""
        return
    status.job = JobState(
        report.run_id, report.state, report.epoch, report.restarts, short(report.failure)
    )
    if report.checkpoint is not None:
        last = report.checkpoint
        status.checkpoint = Checkpoint(
            last.id, rfc3339(last.completed_ms), last.path, last.size_bytes
        )
        if last.completed_ms > since_1970_ms(run.started_at):
            run.checkpointed = True
    if not context.healthy:
        run.running_since = ""
    elif not run.running_since:
        run.running_since = context.now
        if not run.ran:
            run.ran = context.runs_at_last = True
            context.event("Running", f"run {run.number} runs, from {report.restored or 'nothing'}")


def _workers(context: Context) -> tuple[int, int]:
    """Count the ready worker pods of the run, and those that it should have."""
    run = context.status.run
    if run is None:
        return 0, 0
    children = context.observed.children.values()
    desired = sum(workers_of(each) for each in children if is_own(context, each))
    return sum(map(is_ready, _own_workers(context))), desired


def _own_workers(context: Context, group: str | None = None) -> list[Object]:
    """Return the worker pods of the run; if a group is named, those of this slot sharing group."""
    run = context.status.run
    wanted = {ROLE: WORKER} | ({GROUP: group} if group else {})
    return [
        pod
        for pod in context.observed.pods
        if run is not None
        and context.is_of(pod, run)
        and wanted.items() <= pod["metadata"]["labels"].items()
    ]


def _decide(context: Context, problems: list[Problem]) -> None:
    let_go_of_lost(context)
    status = context.status
    finalizers = context.resource["metadata"].get("finalizers", ())
    if context.deleted:
        if FINALIZER in finalizers:
            _delete(context)
        return
    if FINALIZER not in finalizers:
        context.act(AddFinalizer(FINALIZER))
    rejected = status.rejected
    job = context.job
    if rejected is not None and job is not None and job.revision != rejected.revision:
        status.rejected = None
    if status.held is not None and status.held.generation != context.generation:
        status.held = None
    if status.transition is not None:
        advance(context)
    elif problems:
        context.wait("the spec is wrong", context.settings.poll_ms)
    elif context.run is None:
        _decide_start(context)
    else:
        _decide_change(context, context.run)
    if status.transition is None and context.run is not None:
        job = context.running_job
        if job is None:
            context.stalled = "the manifest of the revision that runs is gone"
        else:
            keep_up(context, job, context.run)
        _keep_course(context)


def _delete(context: Context) -> None:
    """Bring the job to its end, as `deletion` says."""
    transition = context.status.transition
    if transition is None or transition.verb != "Delete":
        drained = context.run is None or (transition is not None and transition.step != "Save")
        context.begin("Delete", "the StreamJob is being deleted", drained=drained)
    advance(context)


def _decide_start(context: Context) -> None:
    """Decide whether to start a run, if there is none."""
    status, job = context.status, context.job
    assert job is not None
    run, kubernetes = status.run, job.kubernetes
    if not drain(context):
        return
    if kubernetes.state == "Suspended":
        if run is not None and run.ended in ("Failed", "Stopped"):
            run.ended = "Suspended"
        return
    target = target_job(context)
    if target is None:
        context.stalled = "the manifest of the revision to go back to is gone"
        return
    if _wants_restore(context):
        _begin_restored_run(context, target)
    elif run is None:
        first = Start("Nothing") if kubernetes.upgrade.mode == "Stateless" else Start("Latest")
        context.begin_run(target.revision, job.parallelism, first, "Deploy", "the first one")
    elif run.ended == "Suspended":
        start = Start("Path", run.left) if run.left else latest(run)
        if kubernetes.upgrade.mode == "Stateless":
            start = Start("Nothing")
        context.begin_run(target.revision, job.parallelism, start, "Resume", "the job resumes")
    elif run.revision != target.revision:
        stateless = kubernetes.upgrade.mode == "Stateless"
        start = Start("Nothing") if stateless else latest(run)
        message = f"revision {target.revision} after the job was {run.ended}"
        context.begin_run(target.revision, job.parallelism, start, "Upgrade", message)
    if context.run is not None:
        context.wait("a new run is decided", 0)


def _wants_restore(context: Context) -> bool:
    restore = context.kubernetes.restore
    return restore is not None and restore.nonce != context.status.restore_nonce


def _begin_restored_run(context: Context, target: Job) -> None:
    path, missing = restore_path(context)
    restore = context.kubernetes.restore
    assert restore is not None
    if missing:
        context.wait(missing)
        return
    context.status.restore_nonce = restore.nonce
    start, parallelism = Start("Path", path), target.parallelism
    if context.job is not None:
        parallelism = context.job.parallelism
    context.begin_run(target.revision, parallelism, start, "Restore", f"restored from {path}")


def _decide_change(context: Context, run: Run) -> None:
    """Decide whether the run has to change."""
    status, job, report = context.status, context.job, context.report
    assert job is not None
    held = _is_held(context)
    if job.kubernetes.state == "Suspended":
        if not held:
            context.begin("Suspend", "the StreamJob has to be suspended")
        return
    if _wants_restore(context):
        _begin_restore(context, run)
        if status.transition is not None:
            return
    target = target_job(context)
    if target is not None and target.revision != run.revision:
        if not held:
            context.begin("Upgrade", f"from revision {run.revision} to {target.revision}")
    elif context.over and report is not None:
        _decide_end(context, run, report.state, report.failure)
    elif context.refusal:
        _decide_refused(context, run, f"the job cannot begin: {context.refusal}")
    elif context.healthy:
        _decide_rescale(context, run)


def _is_held(context: Context) -> bool:
    """Return True if a change was put off, and it is not yet time to try it again."""
    held = context.status.held
    if held is None or context.over:
        return False
    later = held.attempts < HOLD_ATTEMPTS_MAX and context.since_ms(held.at) >= HOLD_PAUSE_MS
    return not (later and context.healthy)


def _begin_restore(context: Context, run: Run) -> None:
    restore = context.kubernetes.restore
    assert restore is not None
    path, missing = restore_path(context)
    if missing:
        context.stalled = f"the restore cannot begin: {missing}"
        return
    context.status.restore_nonce = restore.nonce
    if run.start.kind == "Path" and run.start.path == path:
        context.event("RestoreRefused", f"run {run.number} began with {path} already", "Warning")
        return
    context.begin("Restore", f"from {path}")
    assert context.status.transition is not None
    context.status.transition.savepoint = path


def _decide_end(context: Context, run: Run, state: str, failure: str) -> None:
    """Decide about a job that has ended: whether it stays so, or is run again."""
    if state == "FINISHED":
        context.begin("End", "the job has read all its input", outcome="Finished")
    elif state != "FAILED":
        context.begin("End", f"the job was stopped from outside: {state}", outcome="Stopped")
    elif not roll_back(context, run, f"the job failed: {failure}"):
        _decide_restart(context, run, failure)


def _decide_refused(context: Context, run: Run, reason: str) -> None:
    """End a run whose head would fail in the same way each time: it is not tried again."""
    if not roll_back(context, run, reason):
        context.event("JobFailed", reason, "Warning")
        context.begin("End", reason, outcome="Failed")


def _decide_restart(context: Context, run: Run, failure: str) -> None:
    policy, status = context.kubernetes.restart_policy, context.status
    if policy.strategy == "ExponentialDelay":
        if context.since_ms(run.started_at) >= context.duration(policy.reset_after):
            status.restarts = 0
        if status.restarts < policy.max_attempts:
            message = f"restart {status.restarts + 1} of {policy.max_attempts} after: {failure}"
            context.event("JobFailed", message, "Warning")
            context.begin("Restart", message)
            return
    context.event("JobFailed", failure or "the job failed", "Warning")
    context.begin("End", failure or "the job failed", outcome="Failed")


def roll_back(context: Context, run: Run, reason: str) -> bool:
    """Begin to go back to the last stable revision, if there is another one; False if not."""
    status, rollback = context.status, context.kubernetes.upgrade.rollback
    stable = status.stable
    if not rollback.enabled or stable is None or stable.revision == run.revision:
        return False
    if context.config_map(stable.revision) is None:
        return False
    status.rejected = Revision(run.revision, context.now, short(reason))
    message = f"revision {run.revision} is rolled back to {stable.revision}: {reason}"
    context.event("RolledBack", message, "Warning")
    context.begin("Rollback", message)
    return True


def _keep_course(context: Context) -> None:
    """Note when the run becomes stable, and keep savepoints and manifests in order."""
    run, status = context.run, context.status
    if run is None or status.transition is not None:
        return
    rollback = context.kubernetes.upgrade.rollback
    is_stable = status.stable is not None and status.stable.revision == run.revision
    period_ms = context.duration(rollback.stabilization_period)
    if run.running_since and not is_stable and context.since_ms(run.running_since) >= period_ms:
        status.stable = Revision(run.revision, context.now)
        context.event("Stable", f"revision {run.revision} is stable")
    late = context.since_ms(run.started_at) >= context.duration(rollback.progress_deadline)
    if late and not run.running_since and not is_stable and context.job is not None:
        trouble = context.pod_trouble() or "the job does not run"
        roll_back(context, run, f"not stable within {rollback.progress_deadline}: {trouble}")
    if context.healthy and context.job is not None:
        keep_savepoints(context, run)
        drop_old_manifests(context)
    context.wait(context.waits_for, context.settings.poll_ms if context.healthy else None)


def _decide_rescale(context: Context, run: Run) -> None:
    """Change the parallelism of the job while it runs."""
    job, report, status = context.job, context.report, context.status
    assert job is not None
    assert report is not None
    wanted, failed = job.parallelism, status.rescale
    if report.parallelism == wanted:
        if run.parallelism != wanted:
            context.event("Rescaled", f"from {run.parallelism} to {wanted}")
        run.parallelism, status.rescale = wanted, None
        return
    if failed is not None and failed.parallelism != wanted:
        failed = status.rescale = None
    attempts = 0 if failed is None else failed.attempts
    if failed is not None:
        if attempts >= RESCALE_ATTEMPTS_MAX:
            context.stalled = f"the rescale to {wanted} failed: {failed.error}"
            return
        pause_ms = RESCALE_PAUSE_MS << (attempts - 1)
        if context.since_ms(failed.at) < pause_ms:
            context.wait(f"a rescale to {wanted} is tried again")
            return
    trigger = f"{context.run_id(run)}-rescale-{context.generation}-{wanted}-{attempts}"
    operation = report.operations.get(trigger)
    if operation is not None and operation.state == "failed":
        status.rescale = Rescale(wanted, attempts + 1, context.now, short(operation.error))
        context.event("RescaleFailed", operation.error, "Warning")
        return
    if missing := _missing_workers(context, job, run, wanted):
        context.wait(f"the rescale waits for {missing}. {context.pod_trouble()}".strip())
    elif operation is None:
        context.act(CallJob(context.run_id(run), "rescale", trigger, {"parallelism": wanted}))
        context.wait(f"the job has to be rescaled to {wanted}")
    else:
        context.wait(f"the job is being rescaled to {wanted}")


def _missing_workers(context: Context, job: Job, run: Run, parallelism: int) -> str:
    """Describe the needed workers that are not ready; empty if all are ready, or external."""
    if job.kubernetes.ray.mode == "External":
        return ""
    in_groups = context.deployment(job, run).in_groups
    for group in job.groups.values():
        needed = group.needed(parallelism)
        ready = sum(map(is_ready, _own_workers(context, group.name if in_groups else None)))
        if ready < needed:
            of = f" of the group {group.name}" if in_groups else ""
            return f"{needed} workers{of}, {ready} are ready"
    return ""
