"""The part of a StreamJob that the operator reads: the `kubernetes` section as types, with its defaults.

The tables in `api/manifest/` say which fields there are and check their form. Here they become
objects; a test compares the two, so a field cannot be in one of them only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Literal

import msgspec

from ..api.manifest.document import Entry, Problems, Scalar, Sequence, Value
from ..api.manifest.document import Mapping as MappingValue
from ..api.manifest.fields import INVALID, Listed, Section, Table
from ..api.manifest.groups import GroupWidth, check_worker_groups, group_widths
from ..api.manifest.kubernetes_model import KUBERNETES, check_rules
from ..api.resources import DEFAULT_GROUP
from ..api.resources import Resources as SlotResources
from ..errors import PlanError
from ..operators.durations import parse_duration
from ..runtime.manifest import spec_fields
from ..runtime.options.execution import WORKER_SLOTS
from ..runtime.options.recovery import STANDBY_COORDINATORS
from ..runtime.options.registry import current_key

JOB_NAME_LENGTH_MAX: Final = 45
"""Kubernetes appends to it in labels of at most 63 characters, such as that of a StatefulSet's revision."""
VARIABLE: Final = "${"
CONTAINER: Final = "headgate"
"""The name of our container in a pod; a pod template names it to change it."""
_SECTION: Final = "spec.kubernetes."


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """Base of the sections: field names are snake_case here and camelCase in manifests."""


class Ref(Spec, frozen=True):
    """The name of an object in the same namespace."""

    name: str


class Resources(Spec, frozen=True):
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Coordinator(Spec, frozen=True):
    resources: Resources = Resources()
    pod_template: dict[str, Any] = {}


class Workers(Spec, frozen=True):
    replicas: int | None = None
    slots: int = 1
    resources: Resources = Resources()
    pod_template: dict[str, Any] = {}


class Rollback(Spec, frozen=True):
    enabled: bool = True
    stabilization_period: str = "5m"
    progress_deadline: str = "15m"


class Upgrade(Spec, frozen=True):
    mode: Literal["Checkpoint", "Savepoint", "Stateless"] = "Checkpoint"
    max_checkpoint_age: str | None = None
    fallback: Literal["LastCheckpoint", "Fail"] = "LastCheckpoint"
    timeout: str = "10m"
    allow_non_restored_state: bool = False
    rollback: Rollback = Rollback()


class Restore(Spec, frozen=True):
    path: str | None = None
    snapshot_ref: Ref | None = None
    nonce: int = 0


class Deletion(Spec, frozen=True):
    policy: Literal["SavepointThenStop", "Stop", "Abort"] = "SavepointThenStop"
    state_retention: Literal["Retain", "Delete"] = "Retain"
    timeout: str = "10m"


class Savepoints(Spec, frozen=True):
    every: str | None = None
    schedule: str | None = None
    time_zone: str = "UTC"
    retain: int = 3
    max_age: str | None = None
    directory: str | None = None
    format: Literal["Canonical", "Native"] = "Canonical"


class RestartPolicy(Spec, frozen=True):
    strategy: Literal["Never", "ExponentialDelay"] = "Never"
    initial_backoff: str = "10s"
    max_backoff: str = "10m"
    max_attempts: int = 5
    reset_after: str = "1h"

    def pause_ms(self, attempt: int) -> int:
        """Return the pause before restart number `attempt` (1, 2, ...)."""
        first, longest = milliseconds(self.initial_backoff), milliseconds(self.max_backoff)
        return min(longest, first << min(attempt - 1, 30))


class Code(Spec, frozen=True):
    config_map_ref: Ref | None = None
    archive: str | None = None


class Storage(Spec, frozen=True):
    credentials_secret_ref: Ref | None = None


class Autoscaler(Spec, frozen=True):
    mode: Literal["Off"] = "Off"


class GcsStorage(Spec, frozen=True):
    type: Literal["Memory", "RocksDB"] = "Memory"
    size: str = "1Gi"
    storage_class_name: str | None = None


class Ray(Spec, frozen=True):
    mode: Literal["Managed", "KubeRay", "External"] = "Managed"
    address: str | None = None
    token_secret_ref: Ref | None = None
    version: str | None = None
    gcs_storage: GcsStorage = GcsStorage()


class SecretKey(Spec, frozen=True):
    name: str
    key: str


class Kubernetes(Spec, frozen=True):
    """The section `kubernetes`. The meaning of its fields is in `api/manifest/kubernetes_model.py`."""

    image: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: list[Ref] = []
    service_account_name: str | None = None
    state: Literal["Running", "Suspended"] = "Running"
    env: dict[str, str | SecretKey] = {}
    coordinator: Coordinator = Coordinator()
    workers: Workers = Workers()
    worker_groups: dict[str, Workers] = {}
    upgrade: Upgrade = Upgrade()
    restore: Restore | None = None
    deletion: Deletion = Deletion()
    savepoints: Savepoints = Savepoints()
    restart_policy: RestartPolicy = RestartPolicy()
    code: Code = Code()
    storage: Storage = Storage()
    autoscaler: Autoscaler = Autoscaler()
    ray: Ray = Ray()


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The worker pods of a slot sharing group.

    Attributes:
        name: the name of the group.
        workers: the pods.
        slot: the resources of a slot.
        width: the number of slots that the group needs.
    """

    name: str
    workers: Workers
    slot: SlotResources
    width: GroupWidth

    def needed(self, parallelism: int) -> int:
        """Return the number of worker pods for a job of this parallelism."""
        return self.workers.replicas or -(-self.width.at(parallelism) // self.workers.slots)


@dataclass(frozen=True, slots=True)
class Job:
    """A StreamJob whose form is right.

    Attributes:
        spec: `spec` as the user wrote it.
        kubernetes: its section `kubernetes`.
        parallelism: of steps that do not set their own; it changes by a rescale, without a new revision.
        revision: a hash of everything whose change needs new pods.
        groups: the slot sharing groups that have steps, by name, the default one first.
    """

    spec: dict[str, Any]
    kubernetes: Kubernetes
    parallelism: int
    revision: str
    groups: dict[str, WorkerGroup]


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a resource: the YAML path of the field, what is wrong, and what to do."""

    path: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f"; {self.fix}" if self.fix else "")


class _PathProblems(Problems):
    """Problems of a document that has no lines: the number of a "line" is that of a path."""

    def __init__(self) -> None:
        super().__init__("")
        self.paths: list[str] = []

    def number(self, path: str) -> int:
        self.paths.append(path)
        return len(self.paths) - 1

    def listed(self) -> list[Problem]:
        found = sorted(self.found, key=lambda each: each[0])
        return [Problem(self.paths[at], error.message, error.fix) for at, error in found]


def milliseconds(duration: str) -> int:
    """Return the milliseconds of a duration whose form was checked before."""
    return parse_duration(duration)


def parse_job(resource: Mapping[str, Any]) -> Job | list[Problem]:
    """Parse a StreamJob of the API server; return it, or everything that is wrong with its form.

    Values that refer to variables (`${NAME}`) are not checked: the pods know them, but the operator does
    not. Mistakes that only the whole graph shows, such as unknown columns, are found when the job starts.
    """
    problems = _PathProblems()
    name = str(resource.get("metadata", {}).get("name", ""))
    if len(name) > JOB_NAME_LENGTH_MAX:
        at = problems.number("metadata.name")
        problems.add(
            at, f"the name has {len(name)} characters", f"use at most {JOB_NAME_LENGTH_MAX}"
        )
    spec = resource.get("spec", {})
    value = _document(spec, "spec", problems)
    table = spec_fields().read(value, value.line, problems)
    kubernetes = table.get("kubernetes") if isinstance(table, Table) else None
    if isinstance(kubernetes, Table):
        check_rules(kubernetes, problems)
    if isinstance(table, Table):
        check_worker_groups(table, problems)
    if problems.found:
        return problems.listed()
    assert isinstance(table, Table)
    plain = {} if kubernetes is None else _plain(kubernetes)
    section = msgspec.convert(plain, Kubernetes, strict=False)
    checkpoint = table.get("checkpoint")
    storage = "" if checkpoint is None else str(checkpoint.get("storage"))
    _check_options(table, problems)
    groups = _groups(table, section, problems)
    if problems.found:
        return problems.listed()
    if not _outlives_pods(storage, section, groups):
        at = problems.number("spec.checkpoint.storage")
        problems.add(
            at,
            f"the directory `{storage}` is deleted with its pod, and the state of the job with it",
            "write s3://bucket/prefix, or mount a volume there in coordinator.podTemplate and "
            "workers.podTemplate, and in the podTemplate of each of workerGroups",
        )
        return problems.listed()
    return Job(dict(spec), section, table.get("parallelism", 1), revision_of(spec), groups)


def _check_options(spec: Table, problems: _PathProblems) -> None:
    """Note options that have no effect on Kubernetes, with what to write instead."""
    options = spec.get("options")
    for key, value in options.values.items() if isinstance(options, Table) else ():
        current = current_key(key)
        # A text that is no number is reported when the job starts, as that of any other option.
        if current == STANDBY_COORDINATORS.key and value.isdecimal() and int(value) > 0:
            problems.add(
                problems.number(f"spec.options.{key}"),
                f"there is no standby coordinator on Kubernetes, found `{value}`",
                "leave the option out: Kubernetes starts the process of a head that died again at once",
            )
        if current == WORKER_SLOTS.key:
            problems.add(
                problems.number(f"spec.options.{key}"),
                "the slots of a worker belong to its pod on Kubernetes",
                "write workers.slots in the section kubernetes, and leave the option out",
            )


def _groups(spec: Table, kubernetes: Kubernetes, problems: Problems) -> dict[str, WorkerGroup]:
    """Return the slot sharing groups that have steps, and note impossible amounts of resources."""
    declared = spec.get("resources")
    groups = {}
    for name, width in group_widths(spec).items():
        slot = declared.get(name) if isinstance(declared, Table) else None
        slot = slot or Table(spec.line)
        try:
            taken = SlotResources(**_plain(slot))
        except PlanError as error:
            problems.add(slot.line, error.message, error.fix)
            continue
        default = name == DEFAULT_GROUP
        workers = kubernetes.workers if default else kubernetes.worker_groups.get(name, Workers())
        groups[name] = WorkerGroup(name, workers, taken, width)
    return groups


def _outlives_pods(storage: str, kubernetes: Kubernetes, groups: Mapping[str, WorkerGroup]) -> bool:
    """Return False for a directory that is not on a volume of the user, in the head and in the workers."""
    if not storage or VARIABLE in storage:
        return True
    scheme, separator, rest = storage.partition("://")
    if separator and scheme != "file":
        return scheme != "memory"
    templates = [kubernetes.coordinator.pod_template]
    if kubernetes.ray.mode != "External":
        templates += [group.workers.pod_template for group in groups.values()]
    path = PurePosixPath(rest if separator else storage)
    return all(
        any(path.is_relative_to(mount) for mount in _mounts(template)) for template in templates
    )


def _mounts(template: Mapping[str, Any]) -> list[str]:
    """Return the paths at which a pod template mounts volumes into the container of headgate."""
    containers = (template.get("spec") or {}).get("containers") or ()
    return [
        str(mount.get("mountPath", ""))
        for container in containers
        if container.get("name") == CONTAINER
        for mount in container.get("volumeMounts") or ()
    ]


def parse_deletion(resource: Mapping[str, Any]) -> Deletion:
    """Parse the effect of deleting a StreamJob, even if other parts of its spec are wrong.

    If this part is wrong as well, the defaults hold, which keep all state.
    """
    said = (resource.get("spec", {}).get("kubernetes") or {}).get("deletion") or {}
    section = KUBERNETES.fields["deletion"].kind
    assert isinstance(section, Section)
    read = read_section(section, said, f"{_SECTION}deletion")
    return Deletion() if isinstance(read, list) else msgspec.convert(read, Deletion, strict=False)


def read_section(section: Section, said: Any, path: str) -> dict[str, Any] | list[Problem]:
    """Read the value `said` at `path` as `section`; return plain values, or what is wrong with it."""
    problems = _PathProblems()
    value = _document(said, path, problems)
    table = section.read(value, value.line, problems)
    if problems.found or not isinstance(table, Table):
        return problems.listed()
    return dict(_plain(table))


_NOT_OF_THE_REVISION: Final = (
    "state", "upgrade", "restore", "deletion", "savepoints", "restartPolicy", "autoscaler",
)  # fmt: skip
"""Fields of `kubernetes` that change what the operator does, and nothing in the pods."""


def revision_of(spec: Mapping[str, Any]) -> str:
    """Return a hash, of ten characters, of everything in `spec` that pods depend on."""
    said = {name: value for name, value in spec.items() if name != "parallelism"}
    section = dict(said.pop("kubernetes", None) or {})
    for name in _NOT_OF_THE_REVISION:
        section.pop(name, None)
    if isinstance(section.get("workers"), dict):
        section["workers"] = _without_replicas(section["workers"])
    if isinstance(groups := section.get("workerGroups"), dict):
        section["workerGroups"] = {name: _without_replicas(each) for name, each in groups.items()}
    text = json.dumps([said, section], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _without_replicas(workers: Any) -> Any:
    if not isinstance(workers, dict):
        return workers
    return {name: value for name, value in workers.items() if name != "replicas"}


def _document(value: Any, path: str, problems: _PathProblems) -> Value:
    """Convert a JSON value for the reader of manifests; values that refer to variables are skipped."""
    at = problems.number(path)
    if isinstance(value, Mapping):
        entries = {}
        for name, below in value.items():
            inside = _document(below, f"{path}.{name}", problems)
            entries[str(name)] = Entry(inside.line, inside)
        return MappingValue(at, entries)
    if isinstance(value, list):
        items = (_document(item, f"{path}[{index}]", problems) for index, item in enumerate(value))
        return Sequence(at, tuple(items))
    if isinstance(value, bool):
        return Scalar(at, "true" if value else "false", value)
    text = "" if value is None else str(value)
    unknown = VARIABLE in text and ".podTemplate" not in path
    if unknown and path.startswith(_SECTION):
        message = f"variables cannot be used in the section kubernetes, found `{text}`"
        problems.add(at, message, "write the value: only the pods of the job know its variables")
    return Scalar(at, text, value, broken=unknown)


def _plain(value: Any) -> Any:
    """Return the values that were read, as dicts and lists; values that were skipped are left out."""
    match value:
        case Table():
            return {name: _plain(item) for name, item in value.values.items()}
        case Listed():
            return [_plain(item) for item in value if item is not INVALID]
    return value
