"""The spec of a StreamSnapshot: a requested savepoint or checkpoint, as an object of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from ..api.manifest.fields import (
    BooleanKind,
    ChoiceKind,
    Field,
    IntegerKind,
    Section,
    TextKind,
    duration,
)
from ..api.manifest.kubernetes_model import OBJECT_NAME
from .spec import Problem, Ref, Spec, read_section

_JOB_REF = Section(
    "jobRef", {"name": Field(OBJECT_NAME, "a StreamJob of the same namespace", required=True)}
)
SNAPSHOT_SPEC: Final = Section(
    "spec",
    {
        "jobRef": Field(_JOB_REF, "the job", required=True),
        "type": Field(
            ChoiceKind(("Savepoint", "Checkpoint")),
            "Savepoint (default) stays until it is deleted; Checkpoint is one of the job's own",
        ),
        "format": Field(ChoiceKind(("Canonical", "Native")), "of a savepoint; default Canonical"),
        "directory": Field(
            TextKind(),
            "where the savepoint goes; default: as `kubernetes.savepoints.directory` says",
        ),
        "stopJob": Field(BooleanKind(), "the job ends with this savepoint; default false"),
        "deletionPolicy": Field(
            ChoiceKind(("Retain", "Delete")),
            "what deleting this object does to the files; default Retain",
        ),
        "backoffLimit": Field(
            IntegerKind(0, 100), "attempts after the first that may fail; default 3"
        ),
        "ttlAfterFinished": Field(
            duration(), "this object is deleted so long after its end; default: never"
        ),
    },
)
SNAPSHOT_RULES: Final = (
    (
        "!has(self.type) || self.type != 'Checkpoint' || !has(self.deletionPolicy)"
        " || self.deletionPolicy != 'Delete'",
        "a checkpoint belongs to its job, which deletes it; set deletionPolicy: Retain",
    ),
    (
        "!has(self.type) || self.type != 'Checkpoint' || !has(self.stopJob) || !self.stopJob",
        "a job stops with a savepoint; set type: Savepoint",
    ),
    ("self.jobRef == oldSelf.jobRef", "a snapshot cannot change its job"),
)


class Snapshot(Spec, frozen=True):
    """`spec` of a StreamSnapshot; the table above says what its fields mean."""

    job_ref: Ref
    type: Literal["Savepoint", "Checkpoint"] = "Savepoint"
    format: Literal["Canonical", "Native"] = "Canonical"
    directory: str | None = None
    stop_job: bool = False
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    backoff_limit: int = 3
    ttl_after_finished: str | None = None


def parse_snapshot(resource: Mapping[str, Any]) -> Snapshot | list[Problem]:
    """Parse a StreamSnapshot of the API server; return it, or everything that is wrong with it."""
    read = read_section(SNAPSHOT_SPEC, resource.get("spec", {}), "spec")
    return read if isinstance(read, list) else msgspec.convert(read, Snapshot, strict=False)
