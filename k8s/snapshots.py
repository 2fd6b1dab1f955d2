"""The decisions of the operator about a StreamSnapshot: take it, try again, delete its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import msgspec

from .actions import (
    RUNNING,
    Action,
    AddFinalizer,
    CallJob,
    Create,
    Delete,
    EmitEvent,
    JobReport,
    Object,
    Operation,
    RemoveFinalizer,
    Requeue,
    SetStatus,
)
from .objects import Settings, owned_by
from .pods import runtime_of, savepoint_cleaning_job
from .snapshot_spec import Snapshot, parse_snapshot
from .spec import Job, milliseconds, parse_job
from .status import (
    SnapshotPhase,
    StreamJobStatus,
    StreamSnapshotStatus,
    paths_in_use,
    rfc3339,
    set_condition,
    short,
    since_1970_ms,
)

FINALIZER: Final = "headgate.io/snapshot"
RETRY_MS: Final = 10_000
"""Before the second attempt; it doubles from one to the next."""
_ENDED: Final[frozenset[SnapshotPhase]] = frozenset(("Completed", "Failed", "Abandoned"))


@final
@dataclass(frozen=True, slots=True)
class SnapshotView:
    """The objects around a StreamSnapshot.

    Attributes:
        job: the StreamJob; None if there is none of this name.
        report: its coordinator's answer; None if it gave none.
        cleaning: the Kubernetes Job that deletes the files; None if there is none.
        jobs: all StreamJobs of the namespace: any of them may begin with the snapshot.
    """

    job: Object | None = None
    report: JobReport | None = None
    cleaning: Object | None = None
    jobs: tuple[Object, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """As `Result` of a StreamJob."""

    actions: tuple[Action, ...]
    status: StreamSnapshotStatus


def reconcile_snapshot(
    resource: Object,
    status: StreamSnapshotStatus,
    view: SnapshotView,
    now_ms: int,
    settings: Settings,
) -> SnapshotResult:
    """Decide on the actions for a StreamSnapshot. The contract is that of `reconcile`."""
    copied = msgspec.convert(msgspec.to_builtins(status), StreamSnapshotStatus)
    work = _Work(resource, copied, view, now_ms, settings, [])
    work.decide()
    actions: list[Action] = [each for each in work.actions if not isinstance(each, Requeue)]
    pauses = [each.after_ms for each in work.actions if isinstance(each, Requeue)]
    if actions or copied != status:
        actions.insert(0, SetStatus(copied))
    if pauses:
        actions.append(Requeue(min(pauses)))
    return SnapshotResult(tuple(actions), copied)


@dataclass(slots=True)
class _Work:
    """One reconciliation of a snapshot."""

    resource: Object
    status: StreamSnapshotStatus
    view: SnapshotView
    now_ms: int
    settings: Settings
    actions: list[Action]

    @property
    def _metadata(self) -> Any:
        return self.resource["metadata"]

    def decide(self) -> None:
        parsed = parse_snapshot(self.resource)
        finalizers = self._metadata.get("finalizers", ())
        if "deletionTimestamp" in self._metadata:
            if FINALIZER in finalizers:
                self._delete(parsed if isinstance(parsed, Snapshot) else None)
            return
        if FINALIZER not in finalizers:
            self.actions.append(AddFinalizer(FINALIZER))
        if isinstance(parsed, list):
            self._end("Failed", "; ".join(map(str, parsed)))
        elif self.status.phase in _ENDED:
            self._expire(parsed)
        elif self.status.phase == "Running":
            self._follow(parsed)
        else:
            self._begin(parsed)
        self._conditions()

    def _begin(self, spec: Snapshot) -> None:
        """Wait until the job runs and the pause after a failure is over; then record the attempt."""
        status, report = self.status, self.view.report
        left = since_1970_ms(status.attempt_at) - self.now_ms
        if left > 0:
            self._wait(status.message, left)
        elif self.view.job is None:
            self._wait(f"there is no StreamJob {spec.job_ref.name}", self.settings.poll_ms)
        elif report is None or report.state != RUNNING:
            state = "does not answer" if report is None else f"is {report.state}"
            self._wait(f"the job {state}")
        else:
            status.phase, status.attempts = "Running", status.attempts + 1
            status.attempt_at = rfc3339(self.now_ms)
            status.started_at = status.started_at or status.attempt_at
            status.runtime = self._runtime()
            self._wait(f"attempt {status.attempts}", 0)

    def _runtime(self) -> Any:
        assert self.view.job is not None
        parsed = parse_job(self.view.job)
        if isinstance(parsed, Job):
            return runtime_of(parsed, self.settings)
        return self.status.runtime

    @property
    def _trigger(self) -> str:
        return f"{self._metadata['uid']}-{self.status.attempts}"

    def _follow(self, spec: Snapshot) -> None:
        """Request the snapshot until the job knows of it, and then follow its progress."""
        report = self.view.report
        if report is None:
            if self.view.job is None:
                self._end("Abandoned", "the StreamJob was deleted meanwhile")
            else:
                self._wait("the job does not answer")
            return
        operation = report.operations.get(self._trigger)
        if operation is None and report.state == RUNNING:
            self.actions.append(self._call(spec, report.run_id))
            self._wait(f"attempt {self.status.attempts} will begin")
        elif operation is None:
            self._wait_or_abandon(report)
        elif operation.state == "running":
            self._wait(f"attempt {self.status.attempts} is under way")
        elif operation.state == "failed":
            self._retry(spec, operation)
        else:
            self.status.path, self.status.size_bytes = operation.path, operation.size_bytes
            self.status.checkpoint_id = operation.checkpoint_id
            self._end("Completed", operation.path)

    def _wait_or_abandon(self, report: JobReport) -> None:
        if report.state in ("CREATED", "RESTORING", "RESTARTING"):
            self._wait(f"the job is {report.state}")
        else:
            self._end("Abandoned", f"the job is {report.state}")

    def _call(self, spec: Snapshot, run_id: str) -> CallJob:
        place = spec.directory or self._usual_directory()
        directory = {"directory": place} if place else {}
        if spec.type == "Checkpoint":
            return CallJob(run_id, "checkpoint", self._trigger, {})
        arguments: dict[str, Any] = {"native": spec.format == "Native", **directory}
        if spec.stop_job:
            return CallJob(run_id, "stop", self._trigger, {"savepoint": True, **arguments})
        return CallJob(run_id, "savepoint", self._trigger, arguments)

    def _usual_directory(self) -> str:
        """Return the directory of savepoints that the StreamJob names; empty if it names none."""
        parsed = parse_job(self.view.job) if self.view.job is not None else None
        return (parsed.kubernetes.savepoints.directory or "") if isinstance(parsed, Job) else ""

    def _retry(self, spec: Snapshot, failed: Operation) -> None:
        status, error = self.status, failed.error
        if failed.lasting or status.attempts > spec.backoff_limit:
            self._end("Failed", error)
            return
        pause_ms = RETRY_MS << (status.attempts - 1)
        status.phase = "Pending"
        status.attempt_at = rfc3339(self.now_ms + pause_ms)
        self._wait(f"attempt {status.attempts} failed: {error}", pause_ms)

    def _expire(self, spec: Snapshot) -> None:
        if spec.ttl_after_finished is None:
            return
        age_ms = self.now_ms - since_1970_ms(self.status.completed_at)
        left = milliseconds(spec.ttl_after_finished) - age_ms
        if left > 0:
            self.actions.append(Requeue(left))
        else:
            uid, name = self._metadata["uid"], self._metadata["name"]
            self.actions.append(Delete("StreamSnapshot", name, uid))

    def _delete(self, spec: Snapshot | None) -> None:
        """Delete the files if the policy says so, without the job; then release the object."""
        status, cleaning = self.status, self.view.cleaning
        disposes = spec is not None and spec.deletion_policy == "Delete"
        if not disposes or not status.path or spec is None or spec.type != "Savepoint":
            self.actions.append(RemoveFinalizer(FINALIZER))
            return
        if status.runtime is None:
            self._event("NotDeleted", f"no image is known to delete {status.path} with", "Warning")
            self.actions.append(RemoveFinalizer(FINALIZER))
        elif user := self._user():
            self._wait(f"the job {user} may still begin with {status.path}", self.settings.poll_ms)
        elif cleaning is None or not owned_by(cleaning, str(self._metadata["uid"])):
            self.actions.append(Create(self._cleaning(spec.job_ref.name, status.path)))
            self._wait(f"{status.path} has to be deleted")
        elif cleaning.get("status", {}).get("succeeded"):
            self._event("Deleted", f"{status.path} is deleted")
            self.actions.append(RemoveFinalizer(FINALIZER))
        elif _failed(cleaning):
            # The object stays, because the files still exist.
            name = cleaning["metadata"]["name"]
            self._wait(
                f"Job {name} could not delete {status.path}: delete that Job to try again, or set "
                f"deletionPolicy: Retain",
                self.settings.poll_ms,
            )
        else:
            self._wait(f"{status.path} is being deleted")
        self._conditions()

    def _user(self) -> str:
        """Return the name of a job that may need the savepoint to begin its run; empty if there is none."""
        users = (each["metadata"]["name"] for each in self.view.jobs if self._is_used_by(each))
        return str(next(users, ""))

    def _is_used_by(self, job: Object) -> bool:
        status = msgspec.convert(job.get("status", {}), StreamJobStatus)
        restore = job["spec"].get("kubernetes", {}).get("restore", {})
        if restore and restore.get("nonce", 0) != status.restore_nonce:
            named = restored_snapshot(job) == self._metadata["name"]
            if named or restore.get("path") == self.status.path:
                return True
        return self.status.path in paths_in_use(status)

    def _cleaning(self, job: str, path: str) -> dict[str, Any]:
        metadata = self._metadata
        reference = {
            "apiVersion": self.resource["apiVersion"],
            "kind": self.resource["kind"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        assert self.status.runtime is not None
        return savepoint_cleaning_job(
            cleaning_name(str(metadata["name"])),
            str(metadata["namespace"]),
            job,
            reference,
            self.status.runtime,
            path,
        )

    def _end(self, phase: SnapshotPhase, message: str) -> None:
        self.status.phase, self.status.message = phase, short(message)
        self.status.completed_at = rfc3339(self.now_ms)
        well = phase == "Completed"
        self._event(phase, message, "Normal" if well else "Warning")
        self.actions.append(Requeue(0))

    def _wait(self, message: str, after_ms: int | None = None) -> None:
        self.status.message = short(message)
        soon_ms = self.settings.poll_changing_ms
        self.actions.append(Requeue(soon_ms if after_ms is None else after_ms))

    def _event(self, reason: str, message: str, type_: Any = "Normal") -> None:
        self.actions.append(EmitEvent(type_, reason, short(message)))

    def _conditions(self) -> None:
        status = self.status
        status.observed_generation = int(self._metadata.get("generation", 0))
        status.conditions = set_condition(
            status.conditions,
            "Ready",
            status.phase == "Completed",
            status.phase,
            status.message,
            now_ms=self.now_ms,
            generation=status.observed_generation,
        )


def is_at_rest(resource: Object) -> bool:
    """Return True if no change of the job matters to this StreamSnapshot any more."""
    ended = resource.get("status", {}).get("phase") in _ENDED
    return ended and "deletionTimestamp" not in resource["metadata"]


def restored_snapshot(job: Object) -> str:
    """Return the name of the StreamSnapshot that a StreamJob should restore; empty if there is none.

    The spec may be wrong; it is read as far as possible.
    """
    found: Any = job["spec"]
    for name in ("kubernetes", "restore", "snapshotRef", "name"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""


def cleaning_name(snapshot: str) -> str:
    """Return the name of the Kubernetes Job that deletes the files of a snapshot."""
    return f"{snapshot[:55]}-dispose"


def _failed(cleaning: Object) -> bool:
    conditions = cleaning.get("status", {}).get("conditions", ())
    return any(each["type"] == "Failed" and each["status"] == "True" for each in conditions)
