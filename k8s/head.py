"""`headgate k8s head`: the start of a run and its settings, without Ray and without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ..api.resources import DEFAULT_GROUP
from ..errors import HeadgateError, MissingFileError, StateError, UsageError
from ..runtime.options.state import SAVEPOINT_DIR
from . import ports
from .objects import TOKEN_KEY, head_name
from .pod_troubles import REFUSED
from .pods import TOKEN_PATH
from .ray_node import SLOT_RESOURCE, group_resource

POD_IP: Final = "env:HEADGATE_POD_IP"
"""Each process reads it from its own environment, and a worker from that of its pod."""
LEAVE_S: Final = 45
"""Pods get `pods.GRACE_S`, and `headgate k8s worker` gives its workers five seconds more than they take."""
CONSOLE: Final = "/tmp/headgate-console"
"""The directory of the pipes through which workers print to the log of their pod."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """The run that a head is started for.

    Attributes:
        name, namespace: of the StreamJob.
        run_id: the uid of the StreamJob and a number, see docs/design/operator.md.
        parallelism: of the run.
        start: `latest` is the newest checkpoint in the log.
        path: the savepoint or checkpoint to begin with. With `latest` it counts only if the newest run
        in
        the log was to begin with it too, and has completed no checkpoint.
        mode: the way in which the Ray cluster is made.
        slots: the number of subtasks of a step that a worker hosts, by slot sharing group.
    """

    name: str
    namespace: str
    run_id: str
    parallelism: int
    start: Literal["latest", "path", "nothing"] = "latest"
    path: str = ""
    allow_non_restored_state: bool = False
    mode: Literal["Managed", "KubeRay", "External"] = "Managed"
    slots: dict[str, int] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        """The uid of the StreamJob, from the run id."""
        return self.run_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Logged:
    """The content of the job log before a run begins.

    Attributes:
        run: the id of the newest run; empty if there is no log.
        began_with: the path that this run began with, if it has completed no checkpoint since.
    """

    run: str = ""
    began_with: str = ""


def beginning(run: HeadRun, logged: Logged) -> dict[str, Any]:
    """Return the start of the run, as arguments of `Job.run`.

    The operator removes all pods of one run before it starts the next. So a run of the same StreamJob
    that the log shows as unfinished is dead, and is taken over without watching for signs of its life.
    """
    with_path = run.start == "path" or (run.start == "latest" and run.path == logged.began_with)
    return {
        "fresh": run.start == "nothing",
        "restore_from": run.path if run.path and with_path else None,
        "allow_non_restored_state": run.allow_non_restored_state,
        "take_over": bool(run.uid) and logged.run.rpartition("-")[0] == run.uid,
    }


def settings(run: HeadRun) -> dict[str, str]:
    """Return the options that the pods need; they win over those of the manifest."""
    service = f"{head_name(run.name)}.{run.namespace}.svc"
    own = {
        "headgate.control.token-file": f"{TOKEN_PATH}/{TOKEN_KEY}",
        # A worker that leaves waits for the pod that takes its place, which has to start first.
        "headgate.shutdown.grace": f"{LEAVE_S} s",
        "jobmanager.bind-host": "0.0.0.0",
        "jobmanager.rpc.address": POD_IP,
        "jobmanager.rpc.port": str(ports.CONTROL.number),
        "metrics.bind-host": "0.0.0.0",
        "metrics.port": str(ports.METRICS.number),
        "rest.address": service,
        "rest.bind-address": "0.0.0.0",
        "rest.port": str(ports.REST.number),
    }
    if run.mode == "External":
        return own  # the nodes belong to others, and other jobs may have ports there
    return own | {
        "headgate.ray.slot-resource": SLOT_RESOURCE,
        "headgate.ray.workers-on-head": "never",
        "taskmanager.bind-host": "0.0.0.0",
        "taskmanager.data.port": str(ports.EXCHANGE.number),
        "taskmanager.host": POD_IP,
    }


def exit_code(error: HeadgateError) -> int:
    """Return the exit code of a head that cannot begin, or go on, because of this error.

    `REFUSED` says that its next start would end in the same way, because the manifest or the stored state
    is wrong. Any other error may pass, such as a storage that does not answer. Kubernetes then starts the
    head again, after a pause that grows.
    """
    return REFUSED if isinstance(error, UsageError | StateError | MissingFileError) else 1


def node_resource_of(run: HeadRun, group: str) -> str:
    """Return the custom resource of Ray that marks nodes of a slot sharing group, in pods that we make."""
    return SLOT_RESOURCE if list(run.slots) == [DEFAULT_GROUP] else group_resource(group)


def with_place_for_savepoints(options: Mapping[str, str], storage: str) -> dict[str, str]:
    """The options of the job; savepoints go beside its checkpoints unless an option says where.

    The operator also takes savepoints for which no place is named, by default before a StreamJob is
    deleted.
    """
    return {SAVEPOINT_DIR.key: f"{storage.rstrip('/')}/savepoints", **options}
