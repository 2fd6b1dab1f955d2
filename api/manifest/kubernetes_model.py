"""The fields of a StreamJob's `kubernetes` section: how an operator runs the job in a cluster.

A run outside Kubernetes only validates these fields, so that one file runs everywhere.
`k8s/spec.py` holds their defaults and types, and `k8s/crds.py` makes the custom resource
definitions from the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ...operators.zones import check_zone
from ..cron import check_cron
from ..resources import GROUP_NAME, GROUP_NAME_MEANING
from .document import Problems, Scalar, Value
from .fields import (
    INVALID,
    AnyText,
    Anything,
    BooleanKind,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    ListOf,
    OneOf,
    Parsed,
    Section,
    Table,
    TextKind,
    duration,
    refuse,
)

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
OBJECT_NAME = TextKind(
    rf"{_LABEL}(\.{_LABEL})*",
    "the name of a Kubernetes object",
    "lower-case letters, digits, `-` and `.`",
)
QUANTITY_PATTERN: Final = r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?"
REPLICAS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Quantity:
    """An amount of a resource as Kubernetes writes it: `2`, `500m`, `1.5`, `2Gi`."""

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        known = isinstance(value, Scalar) and not isinstance(value.value, bool | None)
        if not (isinstance(value, Scalar) and known and re.fullmatch(QUANTITY_PATTERN, value.text)):
            return refuse(value, line, problems, "an amount such as `500m` or `2Gi`")
        return INVALID if value.broken else value.text

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"type": "string", "minLength": 1}]}


def _named(what: str, meaning: str) -> Section:
    return Section(what, {"name": Field(OBJECT_NAME, meaning, required=True)})


_AMOUNTS = Items(Quantity())
RESOURCES = Section(
    "resources",
    {
        "requests": Field(_AMOUNTS, "reserved for the container, such as `{cpu: 1, memory: 2Gi}`"),
        "limits": Field(_AMOUNTS, "the most it may use; memory defaults to its request"),
    },
)
_POD_TEMPLATE = Field(
    Anything(),
    "a pod template that is merged over the one headgate makes; the container is named `headgate`",
)
_COORDINATOR = Section(
    "coordinator",
    {
        "resources": Field(RESOURCES, "default: requests of 500m CPU and 1Gi memory"),
        "podTemplate": _POD_TEMPLATE,
    },
)
_WORKER_FIELDS: Final = {
    "replicas": Field(
        IntegerKind(1, REPLICAS_MAX), "number of worker pods; default: parallelism over slots"
    ),
    "slots": Field(IntegerKind(1, 1024), "subtasks of a step in one worker pod; default 1"),
    "resources": Field(
        RESOURCES,
        "default: what its slots take by `spec.resources`, else requests of 1 CPU and 2Gi memory",
    ),
    "podTemplate": _POD_TEMPLATE,
}
_WORKERS = Section("workers", _WORKER_FIELDS)
_WORKER_GROUP = Section("a worker group", _WORKER_FIELDS)
_ROLLBACK = Section(
    "rollback",
    {
        "enabled": Field(
            BooleanKind(), "go back to the last stable revision if a new one fails; default true"
        ),
        "stabilizationPeriod": Field(
            duration(), "a revision that ran this long without a failure is stable; default 5m"
        ),
        "progressDeadline": Field(
            duration(), "a new revision must run within this time; default 15m"
        ),
    },
)
_UPGRADE = Section(
    "upgrade",
    {
        "mode": Field(
            ChoiceKind(("Checkpoint", "Savepoint", "Stateless")),
            "what a new revision starts from: a last checkpoint (default), a savepoint, or nothing",
        ),
        "maxCheckpointAge": Field(
            duration(), "the fallback refuses an older checkpoint; default: any age will do"
        ),
        "fallback": Field(
            ChoiceKind(("LastCheckpoint", "Fail")),
            "if the job cannot be stopped with a new checkpoint or savepoint: use the last completed "
            "checkpoint (default), or leave the job as it is",
        ),
        "timeout": Field(duration(), "how long that checkpoint or savepoint may take; default 10m"),
        "allowNonRestoredState": Field(
            BooleanKind(), "drop state that no step of the new revision claims; default false"
        ),
        "rollback": Field(_ROLLBACK, "what happens if the new revision does not run"),
    },
)
_RESTORE = Section(
    "restore",
    {
        "path": Field(TextKind(), "address of a savepoint or checkpoint to start from"),
        "snapshotRef": Field(
            _named("snapshotRef", "its name"), "instead: a completed StreamSnapshot"
        ),
        "nonce": Field(IntegerKind(), "another value restores once more; default 0"),
    },
)
_DELETION = Section(
    "deletion",
    {
        "policy": Field(
            ChoiceKind(("SavepointThenStop", "Stop", "Abort")),
            "take a savepoint (default), take a last checkpoint, or only kill the pods",
        ),
        "stateRetention": Field(
            ChoiceKind(("Retain", "Delete")),
            "Retain (default) keeps checkpoints; Delete removes them. Savepoints always stay",
        ),
        "timeout": Field(
            duration(), "after this time the pods are removed without a savepoint; default 10m"
        ),
    },
)
_SAVEPOINTS = Section(
    "savepoints",
    {
        "every": Field(duration(), "time between two savepoints; default: none are taken"),
        "schedule": Field(
            Parsed(check_cron, "a cron expression such as `30 3 * * *`"),
            "instead: when savepoints are taken, in the language of cron",
        ),
        "timeZone": Field(
            Parsed(check_zone, "a time zone such as `Europe/Berlin`"),
            "of the schedule, by its IANA name; default UTC",
        ),
        "retain": Field(
            IntegerKind(1, 1000), "number of periodic savepoints that are kept; default 3"
        ),
        "maxAge": Field(duration(), "older periodic savepoints are deleted, except the newest one"),
        "directory": Field(
            TextKind(),
            "where savepoints go; default: the option execution.checkpointing.savepoint-dir, or else "
            "`savepoints` below `checkpoint.storage`",
        ),
        "format": Field(
            ChoiceKind(("Canonical", "Native")), "Canonical (default), or Native, which is quicker"
        ),
    },
)
_RESTART_POLICY = Section(
    "restartPolicy",
    {
        "strategy": Field(
            ChoiceKind(("Never", "ExponentialDelay")),
            "what happens when the job has failed for good: Never (default) leaves it Failed",
        ),
        "initialBackoff": Field(duration(), "the first pause; default 10s"),
        "maxBackoff": Field(duration(), "the longest pause; default 10m"),
        "maxAttempts": Field(
            IntegerKind(1, 1000), "restarts in a row before it stays Failed; default 5"
        ),
        "resetAfter": Field(
            duration(), "a run of this length sets attempts and pause back; default 1h"
        ),
    },
)
_CODE = Section(
    "code",
    {
        "configMapRef": Field(
            _named("configMapRef", "its name"),
            "a ConfigMap whose keys are Python files; they are put on the module path",
        ),
        "archive": Field(
            TextKind(r"(s3|file|https)://.+\.zip", "the address of a `.zip`"),
            "instead: a zip file that is unpacked onto the module path at the start of each pod",
        ),
    },
)
_STORAGE = Section(
    "storage",
    {
        "credentialsSecretRef": Field(
            _named("credentialsSecretRef", "its name"),
            "a Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID; without it "
            "the identity of the service account is used",
        ),
    },
)
_AUTOSCALER = Section(
    "autoscaler",
    {
        "mode": Field(
            ChoiceKind(("Off",)), "Off: there is no autoscaler yet; the field keeps its place"
        )
    },
)
_GCS_STORAGE = Section(
    "gcsStorage",
    {
        "type": Field(
            ChoiceKind(("Memory", "RocksDB")),
            "Memory (default), or RocksDB on a volume: workers outlive a head that starts again",
        ),
        "size": Field(Quantity(), "RocksDB: of the volume; default 1Gi"),
        "storageClassName": Field(
            OBJECT_NAME, "RocksDB: of the volume; default: that of the cluster"
        ),
    },
)
_RAY = Section(
    "ray",
    {
        "mode": Field(
            ChoiceKind(("Managed", "KubeRay", "External")),
            "who makes the Ray cluster: headgate (default), KubeRay's operator, or somebody else",
        ),
        "address": Field(TextKind(), "External: `host:port` of the Ray cluster"),
        "tokenSecretRef": Field(
            _named("tokenSecretRef", "its name"),
            "a Secret whose key `auth_token` is Ray's token; default: one is made for the job",
        ),
        "version": Field(TextKind(), "KubeRay: the version of Ray in the image"),
        "gcsStorage": Field(_GCS_STORAGE, "Managed: where Ray's head keeps its control store"),
    },
)
_SECRET_KEY = Section(
    "secretKeyRef",
    {
        "name": Field(OBJECT_NAME, "of the Secret", required=True),
        "key": Field(TextKind(r"[-._a-zA-Z0-9]+"), "in the Secret", required=True),
    },
)
KUBERNETES = Section(
    "kubernetes",
    {
        "image": Field(
            TextKind(), "container image with headgate and the job's code; default: the operator's"
        ),
        "imagePullPolicy": Field(
            ChoiceKind(("Always", "IfNotPresent", "Never")), "when the image is pulled"
        ),
        "imagePullSecrets": Field(
            ListOf(_named("an entry", "of a Secret")), "Secrets for the registry, `[{name: ...}]`"
        ),
        "serviceAccountName": Field(
            OBJECT_NAME, "service account of the pods; default: that of the namespace"
        ),
        "state": Field(
            ChoiceKind(("Running", "Suspended")), "Suspended stops the job and keeps its state"
        ),
        "env": Field(
            Items(OneOf(_SECRET_KEY, AnyText()), TextKind(r"[A-Za-z_][A-Za-z0-9_]*")),
            "environment variables: a text, or `{name, key}` of a Secret; `${NAME}` reads them",
        ),
        "coordinator": Field(_COORDINATOR, "the pod with the coordinator and the head of Ray"),
        "workers": Field(_WORKERS, "the pods that process records"),
        "workerGroups": Field(
            Items(_WORKER_GROUP, TextKind(GROUP_NAME.pattern, GROUP_NAME_MEANING)),
            "pods of other slot sharing groups, by the group's name; fields as in `workers`",
        ),
        "upgrade": Field(_UPGRADE, "how a changed job takes over from the running one"),
        "restore": Field(_RESTORE, "start from this state, once"),
        "deletion": Field(_DELETION, "what happens when the StreamJob is deleted"),
        "savepoints": Field(_SAVEPOINTS, "periodic savepoints"),
        "restartPolicy": Field(_RESTART_POLICY, "new runs of a job that has failed for good"),
        "code": Field(_CODE, "Python files beside the image"),
        "storage": Field(_STORAGE, "access to the storage of state"),
        "autoscaler": Field(_AUTOSCALER, "not built yet"),
        "ray": Field(_RAY, "the Ray cluster of the job"),
    },
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on several fields of one section.

    Attributes:
        section: names of the fields that lead from `kubernetes` to the section.
        holds: the condition as a function of the section.
        cel: the same in the expression language of CRDs; `self` is the section.
        message: the problem if it does not hold.
        fix: the remedy.
    """

    section: tuple[str, ...]
    holds: Callable[[Table], bool]
    cel: str
    message: str
    fix: str


def _one_of(table: Table, *names: str) -> bool:
    return len(table.present(names)) == 1


def _external(table: Table) -> bool:
    return bool(table.get("mode") == "External")


RULES: Final = (
    Rule(
        ("savepoints",),
        lambda table: not (table.tried("schedule") and table.tried("every")),
        "!has(self.schedule) || !has(self.every)",
        "savepoints takes schedule or every, and not both",
        "keep one of them",
    ),
    Rule(
        ("savepoints",),
        lambda table: table.tried("schedule") or not table.tried("timeZone"),
        "!has(self.timeZone) || has(self.schedule)",
        "savepoints.timeZone belongs to a schedule",
        "write a schedule, or remove timeZone",
    ),
    Rule(
        ("restore",),
        lambda table: _one_of(table, "path", "snapshotRef"),
        "has(self.path) != has(self.snapshotRef)",
        "restore needs path or snapshotRef, and not both",
        "keep one of them",
    ),
    Rule(
        ("code",),
        lambda table: _one_of(table, "configMapRef", "archive"),
        "has(self.configMapRef) != has(self.archive)",
        "code needs configMapRef or archive, and not both",
        "keep one of them",
    ),
    Rule(
        ("ray",),
        lambda table: _external(table) == table.tried("address"),
        "(has(self.mode) && self.mode == 'External') == has(self.address)",
        "ray.address belongs to mode External, which needs it",
        "set mode: External with an address, or remove the address",
    ),
    Rule(
        ("ray",),
        lambda table: table.get("mode") == "KubeRay" or not table.tried("version"),
        "!has(self.version) || (has(self.mode) && self.mode == 'KubeRay')",
        "ray.version belongs to mode KubeRay",
        "set mode: KubeRay, or remove the version",
    ),
    Rule(
        ("ray",),
        lambda table: not table.tried("gcsStorage") or table.get("mode") in (None, "Managed"),
        "!has(self.gcsStorage) || !has(self.mode) || self.mode == 'Managed'",
        "ray.gcsStorage belongs to mode Managed",
        "remove one of them: in other modes somebody else starts the head of Ray",
    ),
    Rule(
        ("ray", "gcsStorage"),
        lambda table: (
            table.get("type") == "RocksDB"
            or not (table.tried("size") or table.tried("storageClassName"))
        ),
        "(has(self.type) && self.type == 'RocksDB') || !(has(self.size) || has(self.storageClassName))",
        "ray.gcsStorage has a volume with type RocksDB only",
        "set type: RocksDB, or remove size and storageClassName",
    ),
)


def check_rules(kubernetes: Table, problems: Problems) -> None:
    """Report the rules that the section `kubernetes` breaks."""
    for rule in RULES:
        table: Any = kubernetes
        for name in rule.section:
            table = table.get(name) if isinstance(table, Table) else None
        if isinstance(table, Table) and not table.wrong and not rule.holds(table):
            problems.add(table.line, rule.message, rule.fix)
