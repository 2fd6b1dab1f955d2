"""The status of both resources, as types; `k8s/crds.py` and docs/kubernetes.md are made from them.

The truth about state is the job log in the job's storage, and not a status. A status holds information
for people, and the decisions that the operator records before it acts on them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

MESSAGE_MAX: Final = 1024
"""Characters of a message in a condition or an event."""

Phase: TypeAlias = Literal[
    "Pending", "Deploying", "Restoring", "Running", "Degraded", "Suspending", "Suspended", "Upgrading",
    "RollingBack", "Restarting", "Failed", "Finished", "Deleting",
]  # fmt: skip
RESTING: Final[frozenset[Phase]] = frozenset(("Running", "Suspended", "Failed", "Finished"))
"""Phases that may last for ever; each of the others has a deadline."""
SnapshotPhase: TypeAlias = Literal["Pending", "Running", "Completed", "Failed", "Abandoned"]
Time: TypeAlias = Annotated[str, Meta(extra={"format": "date-time"})]
Outcome: TypeAlias = Literal["", "Suspended", "Stopped", "Finished", "Failed"]
Verb: TypeAlias = Literal["Suspend", "Upgrade", "Rollback", "Restart", "Restore", "Delete", "End"]
Step: TypeAlias = Literal["Save", "Drain", "Wait", "Clean"]


class Status(msgspec.Struct, rename="camel", omit_defaults=True):
    """Base of all parts of a status: names are camelCase, and fields without a value are absent."""


class Condition(Status, omit_defaults=False):
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: Time
    observed_generation: int


class Start(Status):
    """The state that a run begins with."""

    kind: Annotated[
        Literal["Latest", "Path", "Nothing"],
        Meta(description="the newest checkpoint in the job log, a path, or no state"),
    ]
    path: Annotated[
        str,
        Meta(
            description="of Path; with Latest: used if the last run began with it and has no checkpoint"
        ),
    ] = ""


class Run(Status):
    """One run of the job: a coordinator that takes over continues the run of the one before."""

    number: Annotated[int, Meta(description="1, 2, ...; the run id is the uid with this number")]
    revision: Annotated[str, Meta(description="of the spec that runs")]
    parallelism: Annotated[int, Meta(description="the run was started with, or rescaled to")]
    start: Annotated[Start, Meta(description="the state it began with")]
    started_at: Annotated[Time, Meta(description="when the operator decided to start it")]
    running_since: Annotated[
        Time, Meta(description="since when its job is seen running; absent while it is not")
    ] = ""
    ran: Annotated[bool, Meta(description="its job was seen running")] = False
    checkpointed: Annotated[
        bool,
        Meta(description="it has completed a checkpoint, and does not need its start any more"),
    ] = False
    ended: Annotated[
        Outcome, Meta(description="why there is no such run any more; Stopped: from outside")
    ] = ""
    failure: Annotated[str, Meta(description="why it failed, if it has ended so")] = ""
    left: Annotated[str, Meta(description="path of the savepoint that it was stopped with")] = ""
    generation: Annotated[int, Meta(description="of the spec that it belongs to")] = 0
    reason: Annotated[str, Meta(description="why it was started")] = ""


class Transition(Status):
    """The way from one run to the next, or to none."""

    verb: Annotated[Verb, Meta(description="what is being done")]
    step: Annotated[Step, Meta(description="what it waits for")]
    started_at: Annotated[Time, Meta(description="of the transition")]
    step_started_at: Annotated[Time, Meta(description="of the step")]
    message: Annotated[str, Meta(description="in words")] = ""
    savepoint: Annotated[str, Meta(description="path of the savepoint that was taken")] = ""
    until: Annotated[Time, Meta(description="Wait: the pause ends")] = ""
    outcome: Annotated[Outcome, Meta(description="End: how the run ended")] = ""


class Checkpoint(Status):
    id: int
    completed_at: Time
    path: Annotated[str, Meta(description="a run can begin with it while it is retained")] = ""
    size_bytes: Annotated[int, Meta(description="of the state in it")] = 0


class LastSavepoint(Status):
    path: str
    completed_at: Time


class JobState(Status):
    """The answer of the coordinator."""

    id: Annotated[str, Meta(description="the run id")] = ""
    state: Annotated[str, Meta(description="the job's own state, such as RUNNING")] = ""
    epoch: Annotated[int, Meta(description="generation of the coordinator in the job log")] = 0
    restarts: Annotated[int, Meta(description="restarts by the job itself in this run")] = 0
    failure: Annotated[str, Meta(description="the last failure")] = ""


class WorkersState(Status):
    ready: int = 0
    desired: int = 0


class ParallelismState(Status):
    configured: Annotated[int, Meta(description="as `spec` has it")] = 0
    current: Annotated[int, Meta(description="as the job runs; the scale subresource reads it")] = 0


class Revision(Status):
    revision: str
    at: Time
    reason: str = ""


class Held(Status):
    """A change that was put off, because the state could not be saved; it is tried again a few times."""

    generation: Annotated[int, Meta(description="of the spec that asks for it")]
    attempts: int
    at: Time
    reason: str


class Rescale(Status):
    """A rescale that failed; it is tried again a few times, with growing pauses."""

    parallelism: int
    attempts: int
    at: Time
    error: str


class StreamJobStatus(Status):
    """`status` of a StreamJob."""

    observed_generation: Annotated[
        int, Meta(description="the newest `metadata.generation` that was reconciled")
    ] = 0
    phase: Annotated[Phase, Meta(description="where the job is in its life")] = "Pending"
    message: Annotated[str, Meta(description="what the phase waits for, or why it ended")] = ""
    phase_since: Annotated[Time, Meta(description="since when it is in this phase")] = ""
    selector: Annotated[str, Meta(description="label selector of the worker pods")] = ""
    on_deletion: Annotated[str, Meta(description="what deleting the StreamJob does")] = ""
    run: Annotated[Run | None, Meta(description="the run that is, or was last, to exist")] = None
    transition: Annotated[
        Transition | None, Meta(description="the change that is being made, step by step")
    ] = None
    stable: Annotated[
        Revision | None, Meta(description="the last revision that ran without failing")
    ] = None
    rejected: Annotated[
        Revision | None, Meta(description="a revision that was rolled back; it is not tried again")
    ] = None
    held: Annotated[
        Held | None, Meta(description="a change that was put off: the state could not be saved")
    ] = None
    job: Annotated[JobState | None, Meta(description="as the coordinator answered last")] = None
    checkpoint: Annotated[Checkpoint | None, Meta(description="the last completed checkpoint")] = (
        None
    )
    savepoint: Annotated[
        LastSavepoint | None, Meta(description="the last savepoint the operator took")
    ] = None
    parallelism: Annotated[ParallelismState | None, Meta(description="of the job")] = None
    workers: Annotated[WorkersState | None, Meta(description="worker pods")] = None
    rescale: Annotated[Rescale | None, Meta(description="the last failed rescale")] = None
    restore_nonce: Annotated[
        int | None, Meta(description="of the restore that was acted on last")
    ] = None
    restarts: Annotated[int, Meta(description="new runs in a row after the job had failed")] = 0
    conditions: Annotated[list[Condition], Meta(description="see the table of conditions")] = []


class Runtime(Status):
    """The settings that a pod needs to reach the storage of a job when the StreamJob no longer exists.

    Attributes:
        env: the variables, as in the section `kubernetes` of the StreamJob.
        pod_template: the template of the coordinator, for its volumes, its identity and its node.
        options: the options of the storage, such as `s3.endpoint`; they may have variables.
    """

    image: str = ""
    image_pull_policy: str = ""
    image_pull_secrets: list[str] = []
    service_account_name: str = ""
    credentials_secret: str = ""
    env: dict[str, Any] = {}
    pod_template: dict[str, Any] = {}
    options: dict[str, Any] = {}


class StreamSnapshotStatus(Status):
    """`status` of a StreamSnapshot."""

    observed_generation: Annotated[int, Meta(description="as for a StreamJob")] = 0
    phase: Annotated[SnapshotPhase, Meta(description="where the snapshot is")] = "Pending"
    message: Annotated[str, Meta(description="what it waits for, or why it failed")] = ""
    path: Annotated[str, Meta(description="where it lies, once it is complete")] = ""
    started_at: Annotated[Time, Meta(description="of the first attempt")] = ""
    attempt_at: Annotated[Time, Meta(description="of the attempt that runs, or the next")] = ""
    completed_at: Annotated[Time, Meta(description="when it ended, well or not")] = ""
    size_bytes: Annotated[int, Meta(description="of its files")] = 0
    checkpoint_id: Annotated[int, Meta(description="of the job's checkpoint")] = 0
    attempts: Annotated[int, Meta(description="attempts that were begun")] = 0
    runtime: Annotated[
        Runtime | None, Meta(description="with which the snapshot is deleted without its job")
    ] = None
    conditions: Annotated[list[Condition], Meta(description="Ready")] = []


def paths_in_use(status: StreamJobStatus) -> set[str]:
    """Return the paths that a run of the job may have to begin with, and that must not be deleted."""
    found = set()
    if status.run is not None:
        found.add(status.run.left)
        if not status.run.checkpointed:
            found.add(status.run.start.path)
    if status.transition is not None:
        found.add(status.transition.savepoint)
    return found - {""}


def rfc3339(now_ms: int) -> Time:
    """Write milliseconds since 1970 in the form of Kubernetes."""
    text = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def since_1970_ms(time: Time) -> int:
    """Return the milliseconds of such a time; 0 if it is absent."""
    return round(datetime.fromisoformat(time).timestamp() * 1000) if time else 0


def short(message: str) -> str:
    """Cut a message to the allowed length."""
    return message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 1] + "…"


def set_condition(
    conditions: list[Condition],
    type_: str,
    value: bool | None,
    reason: str,
    message: str,
    *,
    now_ms: int,
    generation: int,
) -> list[Condition]:
    """Return the conditions with this one set; its time changes only if its status does."""
    status: Literal["True", "False", "Unknown"]
    status = "Unknown" if value is None else "True" if value else "False"
    before = next((each for each in conditions if each.type == type_), None)
    kept = before is not None and before.status == status
    since = before.last_transition_time if before is not None and kept else rfc3339(now_ms)
    made = Condition(type_, status, reason, short(message), since, generation)
    return sorted(
        [*(each for each in conditions if each.type != type_), made], key=lambda each: each.type
    )


def condition(conditions: list[Condition], type_: str) -> Condition | None:
    """Return the condition of this type, if there is one."""
    return next((each for each in conditions if each.type == type_), None)
