"""The views of StreamJobs and StreamSnapshots, made from objects as values and tables, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from ...operators.durations import format_duration
from ..objects import HEAD, JOB, ROLE
from ..pod_troubles import is_ready, trouble
from ..spec import CONTAINER
from ..status import StreamJobStatus, StreamSnapshotStatus, since_1970_ms

Object: TypeAlias = Mapping[str, Any]
MESSAGE_SHOWN_MAX: Final = 80
"""The characters of a message in the table of jobs; the view of one job has the whole message."""


class View(msgspec.Struct, kw_only=True, frozen=True):
    """Base of the views. `-o json` and `-o yaml` use these field names; times are RFC 3339, in UTC."""


class ConditionView(View, frozen=True):
    type: str
    status: str
    reason: str
    message: str
    since: str


class PodView(View, frozen=True):
    """A pod of a job.

    Attributes:
        container: the id of the container that runs, or ran last; another one after a restart.
        trouble: the reason why it does not run, in the words of Kubernetes.
    """

    name: str
    role: str
    phase: str
    ready: bool
    restarts: int
    node: str
    created: str
    container: str
    trouble: str


class SnapshotView(View, frozen=True):
    name: str
    job: str
    type: str
    phase: str
    message: str
    path: str
    size_bytes: int
    created: str
    completed: str


class CheckpointView(View, frozen=True):
    id: int
    completed: str
    size_bytes: int
    path: str


class JobView(View, frozen=True):
    """A StreamJob. Numbers are None while they are unknown."""

    name: str
    namespace: str
    phase: str
    message: str
    ready: bool
    wanted: str
    """`Running` or `Suspended`, as the manifest has it."""
    phase_since: str
    created: str
    generation: int
    observed_generation: int
    run: int | None
    run_reason: str
    revision: str
    parallelism: int | None
    parallelism_wanted: int
    workers_ready: int | None
    workers_wanted: int | None
    restarts: int
    failure: str
    checkpoint: CheckpointView | None
    savepoint: str
    on_deletion: str
    notes: list[str]
    """Notes for readers: changes that are under way, given up, or not seen yet."""
    conditions: list[ConditionView]
    pods: list[PodView] = []
    snapshots: list[SnapshotView] = []


class Table(View, frozen=True):
    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[str, ...] = ()
    """Titles of the columns that are aligned to the right."""


def job_view(job: Object, pods: Iterable[Object] = (), snapshots: Iterable[Object] = ()) -> JobView:
    """Return the view of a StreamJob. The pods and StreamSnapshots may be those of a whole namespace."""
    metadata, spec = job["metadata"], job.get("spec") or {}
    name = str(metadata["name"])
    status = msgspec.convert(job.get("status") or {}, StreamJobStatus)
    run, parallelism, workers = status.run, status.parallelism, status.workers
    checkpoint, kubernetes = status.checkpoint, spec.get("kubernetes") or {}
    conditions = [
        ConditionView(
            type=each.type,
            status=each.status,
            reason=each.reason,
            message=each.message,
            since=each.last_transition_time,
        )
        for each in status.conditions
    ]
    return JobView(
        name=name,
        namespace=str(metadata.get("namespace", "")),
        phase=status.phase,
        message=status.message,
        ready=any(each.type == "Ready" and each.status == "True" for each in conditions),
        wanted=str(kubernetes.get("state") or "Running"),
        phase_since=status.phase_since,
        created=str(metadata.get("creationTimestamp", "")),
        generation=int(metadata.get("generation") or 0),
        observed_generation=status.observed_generation,
        run=run.number if run is not None else None,
        run_reason=run.reason if run is not None else "",
        revision=run.revision if run is not None else "",
        parallelism=parallelism.current if parallelism is not None else None,
        parallelism_wanted=int(spec.get("parallelism") or 1),
        workers_ready=workers.ready if workers is not None else None,
        workers_wanted=workers.desired if workers is not None else None,
        restarts=status.job.restarts if status.job is not None else 0,
        failure=status.job.failure if status.job is not None else "",
        checkpoint=None
        if checkpoint is None
        else CheckpointView(
            id=checkpoint.id,
            completed=checkpoint.completed_at,
            size_bytes=checkpoint.size_bytes,
            path=checkpoint.path,
        ),
        savepoint=status.savepoint.path if status.savepoint is not None else "",
        on_deletion=status.on_deletion,
        notes=_notes(metadata, status),
        conditions=conditions,
        pods=sorted((pod_view(pod) for pod in pods if _is_of(pod, name)), key=_head_first),
        snapshots=[
            view for view in sorted_snapshots(map(snapshot_view, snapshots)) if view.job == name
        ],
    )


def pod_view(pod: Object) -> PodView:
    """Return the view of one pod of a job."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    ending = "deletionTimestamp" in metadata
    containers = status.get("containerStatuses") or ()
    return PodView(
        name=str(metadata["name"]),
        role=str((metadata.get("labels") or {}).get(ROLE, "")),
        phase="Terminating" if ending else str(status.get("phase", "Pending")),
        ready=is_ready(pod),
        restarts=sum(int(each.get("restartCount", 0)) for each in containers),
        node=str((pod.get("spec") or {}).get("nodeName", "")),
        created=str(metadata.get("creationTimestamp", "")),
        container=next(
            (each.get("containerID", "") for each in containers if each.get("name") == CONTAINER),
            "",
        ),
        trouble=trouble(pod),
    )


def snapshot_view(snapshot: Object) -> SnapshotView:
    """Return the view of one StreamSnapshot."""
    metadata, spec = snapshot["metadata"], snapshot.get("spec") or {}
    status = msgspec.convert(snapshot.get("status") or {}, StreamSnapshotStatus)
    return SnapshotView(
        name=str(metadata["name"]),
        job=str((spec.get("jobRef") or {}).get("name", "")),
        type=str(spec.get("type") or "Savepoint"),
        phase=status.phase,
        message=status.message,
        path=status.path,
        size_bytes=status.size_bytes,
        created=str(metadata.get("creationTimestamp", "")),
        completed=status.completed_at,
    )


def sorted_snapshots(snapshots: Iterable[SnapshotView]) -> list[SnapshotView]:
    """Return StreamSnapshots, the newest first."""
    return sorted(snapshots, key=lambda each: (each.created, each.name), reverse=True)


def _is_of(pod: Object, job: str) -> bool:
    return bool((pod["metadata"].get("labels") or {}).get(JOB) == job)


def _head_first(pod: PodView) -> tuple[bool, str]:
    return (pod.role != HEAD, pod.name)


def _notes(metadata: Object, status: StreamJobStatus) -> list[str]:
    notes = []
    generation = int(metadata.get("generation") or 0)
    if not status.phase_since:
        notes.append("no operator has looked at this StreamJob yet: is one running?")
    elif status.observed_generation < generation and "deletionTimestamp" not in metadata:
        notes.append(
            f"the operator has not acted on the last change yet: generation {generation}, "
            f"observed {status.observed_generation}"
        )
    if (metadata.get("annotations") or {}).get("headgate.io/paused") == "true":
        notes.append("the annotation headgate.io/paused keeps the operator from doing anything")
    transition, held = status.transition, status.held
    if transition is not None:
        words = f": {transition.message}" if transition.message else ""
        notes.append(f"{transition.verb} is at the step {transition.step}{words}")
    if status.rejected is not None:
        notes.append(
            f"revision {status.rejected.revision} was rolled back: {status.rejected.reason}"
        )
    if held is not None:
        notes.append(f"a change was put off after {held.attempts} attempts: {held.reason}")
    if status.rescale is not None:
        notes.append(f"the rescale to {status.rescale.parallelism} failed: {status.rescale.error}")
    return notes


# -- tables -----------------------------------------------------------------------------------------


def jobs_table(jobs: Sequence[JobView], now_ms: int, *, namespaces: bool = False) -> Table:
    """Return a table of all jobs."""
    titles = (
        "name", "phase", "ready", "parallelism", "workers", "restarts", "checkpoint", "age", "message"
    )  # fmt: skip
    rows = [
        (
            job.name,
            job.phase,
            "yes" if job.ready else "no",
            _parallelism(job),
            _workers(job),
            str(job.restarts),
            _checkpoint(job, now_ms),
            _age(job.created, now_ms),
            _cut(job.message),
        )
        for job in jobs
    ]
    right = ("parallelism", "workers", "restarts")
    if not namespaces:
        return Table(titles=titles, rows=rows, right=right)
    named = [(job.namespace, *row) for job, row in zip(jobs, rows, strict=True)]
    return Table(titles=("namespace", *titles), rows=named, right=right)


def job_lines(job: JobView, now_ms: int) -> list[str]:
    """Return the first lines of the view of one job."""
    lines = [f"{job.name} in namespace {job.namespace}: {job.phase}{_since(job, now_ms)}"]
    lines += [f"  {line}" for line in job.message.splitlines()]
    run = "-"
    if job.run is not None:
        run = f"{job.run}, revision {job.revision}" + (
            f", because of {job.run_reason}" if job.run_reason else ""
        )
    facts = {
        "state wanted": job.wanted,
        "run": run,
        "parallelism": _parallelism(job),
        "workers ready": _workers(job),
        "restarts": str(job.restarts),
        "last failure": job.failure,
        "checkpoint": _checkpoint_in_full(job, now_ms),
        "savepoint": job.savepoint,
        "on deletion": job.on_deletion,
    }
    width = max(map(len, facts))
    lines += [f"{name:<{width}}  {value}" for name, value in facts.items() if value]
    return [*lines, *(f"note: {note}" for note in job.notes)]


def conditions_table(conditions: Iterable[ConditionView], now_ms: int) -> Table:
    """Return a table of the conditions of a job."""
    rows = [
        (each.type, each.status, each.reason, _age(each.since, now_ms), each.message)
        for each in conditions
    ]
    return Table(titles=("condition", "status", "reason", "for", "message"), rows=rows)


def pods_table(pods: Iterable[PodView], now_ms: int) -> Table:
    """Return a table of the pods of a job. Their troubles are too long for it: see `trouble_lines`."""
    rows = [
        (
            pod.name,
            pod.role,
            pod.phase,
            "yes" if pod.ready else "no",
            str(pod.restarts),
            pod.node or "-",
            _age(pod.created, now_ms),
        )
        for pod in pods
    ]
    titles = ("pod", "role", "phase", "ready", "restarts", "node", "age")
    return Table(titles=titles, rows=rows, right=("restarts",))


def trouble_lines(pods: Iterable[PodView]) -> list[str]:
    """Return a line for each pod that does not run, with the reason."""
    return [f"{pod.name}: {pod.trouble}" for pod in pods if pod.trouble]


def snapshots_table(snapshots: Iterable[SnapshotView], now_ms: int) -> Table:
    """Return a table of StreamSnapshots, with the reasons of those that are not complete."""
    rows = [
        (
            each.name,
            each.job,
            each.type,
            each.phase,
            f"{each.size_bytes:,} B" if each.size_bytes else "-",
            _age(each.created, now_ms),
            (each.path or "-") if each.phase == "Completed" else each.message or "-",
        )
        for each in snapshots
    ]
    titles = ("snapshot", "job", "type", "phase", "size", "age", "path or message")
    return Table(titles=titles, rows=rows, right=("size",))


def has_come_to(job: JobView, phase: str) -> bool:
    """Return True if the job is in this phase, and the operator has seen the last change of its spec."""
    return job.phase == phase and job.observed_generation >= job.generation


def _since(job: JobView, now_ms: int) -> str:
    return f" for {_age(job.phase_since, now_ms)}" if job.phase_since else ""


def _parallelism(job: JobView) -> str:
    now, wanted = job.parallelism, job.parallelism_wanted
    return str(wanted) if now in (None, 0, wanted) else f"{now} of {wanted}"


def _workers(job: JobView) -> str:
    if job.workers_ready is None or job.workers_wanted is None:
        return "-"
    return f"{job.workers_ready}/{job.workers_wanted}"


def _checkpoint(job: JobView, now_ms: int) -> str:
    if job.checkpoint is None:
        return "-"
    return f"{job.checkpoint.id} ({_age(job.checkpoint.completed, now_ms)} ago)"


def _checkpoint_in_full(job: JobView, now_ms: int) -> str:
    text, checkpoint = _checkpoint(job, now_ms), job.checkpoint
    if checkpoint is None or not checkpoint.path:
        return text
    return f"{text}, {checkpoint.size_bytes:,} B, {checkpoint.path}"


def _age(time: str, now_ms: int) -> str:
    """Return the time since then, in its largest units; `-` if there is no such time."""
    if not time:
        return "-"
    age_ms = max(0, now_ms - since_1970_ms(time))
    for unit in (86_400_000, 3_600_000, 60_000):
        if age_ms >= 10 * unit:
            return format_duration(age_ms // unit * unit)
    return format_duration(age_ms // 1000 * 1000)


def _cut(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= MESSAGE_SHOWN_MAX else line[: MESSAGE_SHOWN_MAX - 1] + "…"
