"""The input and the actions of a reconciliation, as data only. The shell around it does the I/O.

The shell's contract, which the model test (`tests/k8s/model`) holds it to:

* `Observed` may lag behind the API server, but the StreamJob and its status may not be older than the
  operator's own last write of them.
* Actions are executed in their order, and the first one that fails ends the list: the next reconciliation
  decides again, from what it then sees.
* `SetStatus` comes before anything that changes the world, and is refused if the StreamJob has changed
  since it was read. So a decision is written down before it is acted on, and an operator that has been
  replaced, but does not know it yet, does nothing.
* `Create` refuses to replace an object; it is not a failure if the object exists. `Replace`, `Scale` and
  `Delete` are refused if the object is not the one that was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, final

from .status import StreamJobStatus, StreamSnapshotStatus

Object: TypeAlias = Mapping[str, Any]
"""An object of the API server, as JSON has it."""

ENDED: Final = frozenset(("FINISHED", "SUSPENDED", "CANCELED", "FAILED"))
"""States of a job that is over; its coordinator answers until its pod is gone."""
RUNNING: Final = "RUNNING"


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """The progress of a request to the coordinator, which is known by its trigger id."""

    state: Literal["running", "completed", "failed"]
    path: str = ""
    error: str = ""
    lasting: bool = False
    """The request itself is wrong: it would fail in the same way again."""
    size_bytes: int = 0
    checkpoint_id: int = 0


@final
@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    id: int
    completed_ms: int
    path: str = ""
    size_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class JobReport:
    """The answer of the coordinator's REST API.

    Attributes:
        run_id: the run that the answer is about. An answer about another run does not count.
        state: `CREATED`, `RESTORING`, `RUNNING`, `RESTARTING`, or one of `ENDED`.
        epoch: the coordinator's generation in the job log.
        restarts: the number of restarts by the job itself in this run.
        failure: the last failure, in words.
        checkpoint: the last completed checkpoint.
        failed_checkpoints: the number of checkpoints in a row that have failed until now.
        checkpoint_failure: the reason of the last failed checkpoint.
        restored: the state that the run began with, in words; empty if it began without state.
        operations: by trigger id. After a restart of the coordinator earlier ones may be missing.
    """

    run_id: str
    state: str
    parallelism: int
    epoch: int = 0
    restarts: int = 0
    failure: str = ""
    checkpoint: CompletedCheckpoint | None = None
    failed_checkpoints: int = 0
    checkpoint_failure: str = ""
    restored: str = ""
    operations: Mapping[str, Operation] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Observed:
    """The world around a StreamJob.

    Attributes:
        children: objects with the job's label, by kind and name.
        pods: all pods with the job's label.
        snapshots: StreamSnapshots of the job.
        restored: the StreamSnapshot that `restore.snapshotRef` names, possibly of another job.
        job: the coordinator's answer; None if it gave none.
        refusals: events that say why StatefulSets of the job cannot make their pods.
    """

    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    pods: tuple[Object, ...] = ()
    snapshots: tuple[Object, ...] = ()
    restored: Object | None = None
    job: JobReport | None = None
    refusals: tuple[Object, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class SetStatus:
    """Write the status, if the resource still has the version that was read."""

    status: StreamJobStatus | StreamSnapshotStatus


@final
@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Keep the resource until `RemoveFinalizer`."""

    name: str


@final
@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    name: str


@final
@dataclass(frozen=True, slots=True)
class Create:
    """Make an object. With `token_key` the shell puts 256 random bits under this key of a Secret."""

    object: Object
    token_key: str = ""


@final
@dataclass(frozen=True, slots=True)
class Replace:
    """Apply an object over the one of this version."""

    object: Object
    resource_version: str


@final
@dataclass(frozen=True, slots=True)
class Scale:
    """Set the replicas of a StatefulSet, Deployment or RayCluster of this version.

    Attributes:
        spec: the fields of its spec with the number of pods.
    """

    kind: str
    name: str
    spec: Object
    resource_version: str


@final
@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid; with `force` a pod at once, without waiting for its node."""

    kind: str
    name: str
    uid: str
    force: bool = False


@final
@dataclass(frozen=True, slots=True)
class CallJob:
    """Send a request to the coordinator of a run. The same trigger id is the same request."""

    run_id: str
    verb: Literal["stop", "savepoint", "checkpoint", "rescale"]
    trigger_id: str
    arguments: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Publish an event about the resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@final
@dataclass(frozen=True, slots=True)
class Requeue:
    """Reconcile again after this time, even if nothing has changed."""

    after_ms: int


Action: TypeAlias = (
    SetStatus
    | AddFinalizer
    | RemoveFinalizer
    | Create
    | Replace
    | Scale
    | Delete
    | CallJob
    | EmitEvent
    | Requeue
)


class Coordinators(Protocol):
    """The way of the shell to the coordinators of jobs; `CallJob` and `Observed.job` go through it."""

    async def report(self, namespace: str, job: str) -> JobReport | None:
        """Return the answer of the coordinator; None if it cannot be reached."""
        ...

    async def call(self, namespace: str, job: str, call: CallJob) -> None:
        """Make a request. Raises HeadgateError if it is refused or there is no answer."""
        ...
