"""The custom resource definitions, made from the tables of fields: `python -m headgate.k8s.crds`.

Fields that every job has are typed. The description of the graph (`sources`, `operators`, `sinks`) and
pod templates may have any fields: their schema would be larger than the API server and `kubectl apply`
accept, and the job checks them itself. Defaults are not in the schema, so that a new version of it never
changes a stored object.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import yaml

from ..api.manifest import fields, kubernetes_model
from ..api.manifest.fields import Field, Section
from ..runtime.manifest import spec_fields
from .snapshot_spec import SNAPSHOT_RULES, SNAPSHOT_SPEC
from .spec import JOB_NAME_LENGTH_MAX
from .status import StreamJobStatus, StreamSnapshotStatus

GROUP: Final = "headgate.io"
VERSION: Final = "v1alpha1"
BYTES_MAX: Final = 60_000
INT64_MAX: Final = 2**63 - 1
FOLDER: Final = Path(__file__).resolve().parent.parent / "helm" / "headgate-crds" / "templates"
_ANY: Final = {"x-kubernetes-preserve-unknown-fields": True}
_GUARD: Final = re.compile(r"!has\(self\.(\w+)\) \|\| ")
"""A rule that begins like this only concerns objects with this field."""
_GRAPH: Final = ("sources", "operators", "sinks")


def stream_jobs() -> dict[str, Any]:
    """Return the definition of StreamJob."""
    spec = _section(spec_fields())
    for name in _GRAPH:
        known = spec["properties"][name]
        spec["properties"][name] = {
            "type": "object",
            **_ANY,
            "description": known["description"],
        }
    for rule in kubernetes_model.RULES:
        at = spec["properties"]["kubernetes"]
        for name in rule.section:
            at = at["properties"][name]
        _add_rule(at, rule.cel, rule.message)
    message = "parallelism must not be larger than maxParallelism"
    bounded = "!has(self.parallelism) || !has(self.maxParallelism)"
    _add_rule(spec, f"{bounded} || self.parallelism <= self.maxParallelism", message)
    return _definition(
        kind="StreamJob",
        plural="streamjobs",
        short_names=["sj"],
        spec=spec,
        status=_struct(StreamJobStatus),
        columns=[
            _column("Phase", ".status.phase"),
            _column("Ready", ".status.conditions[?(@.type=='Ready')].status"),
            _column("Parallelism", ".status.parallelism.current", "integer"),
            _column("Checkpoint", ".status.checkpoint.completedAt", "date"),
            _column("Restarts", ".status.job.restarts", "integer"),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("Message", ".status.message", priority=1),
        ],
        scale={
            "specReplicasPath": ".spec.parallelism",
            "statusReplicasPath": ".status.parallelism.current",
            "labelSelectorPath": ".status.selector",
        },
        rules=[
            (
                f"self.metadata.name.size() <= {JOB_NAME_LENGTH_MAX}",
                f"the name must have at most {JOB_NAME_LENGTH_MAX} characters",
            ),
            (
                "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
                "the name must consist of lower-case letters, digits and `-`",
            ),
        ],
    )


def stream_snapshots() -> dict[str, Any]:
    """Return the definition of StreamSnapshot."""
    spec = _section(SNAPSHOT_SPEC)
    for cel, message in SNAPSHOT_RULES:
        _add_rule(spec, cel, message)
    return _definition(
        kind="StreamSnapshot",
        plural="streamsnapshots",
        short_names=["ss"],
        spec=spec,
        status=_struct(StreamSnapshotStatus),
        columns=[
            _column("Job", ".spec.jobRef.name"),
            _column("Type", ".spec.type"),
            _column("Phase", ".status.phase"),
            _column("Completed", ".status.completedAt", "date"),
            _column("Bytes", ".status.sizeBytes", "integer"),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("Path", ".status.path", priority=1),
        ],
    )


def rendered() -> dict[str, str]:
    """Return the files of the chart, by name."""
    definitions = {"streamjobs.yaml": stream_jobs(), "streamsnapshots.yaml": stream_snapshots()}
    head = "# Made by `python -m headgate.k8s.crds` from the tables of fields; do not edit.\n"
    return {
        name: head + yaml.safe_dump(definition, sort_keys=False, width=110)
        for name, definition in definitions.items()
    }


def incompatible(old: Any, new: Any, path: str = "") -> list[str]:
    """List the reasons why objects that `old` accepts may be refused, or lose fields, with `new`."""
    found: list[str] = []
    open_before = old.get("x-kubernetes-preserve-unknown-fields", False)
    if open_before and not new.get("x-kubernetes-preserve-unknown-fields", False):
        found.append(f"{path}: fields were free before")
    for key in ("type", "format", "pattern", "x-kubernetes-int-or-string"):
        if key in new and new[key] != old.get(key):
            found.append(f"{path}: {key} is now `{new[key]}`, was `{old.get(key)}`")
    if "enum" in new and not set(old.get("enum", [None])) <= set(new["enum"]):
        found.append(f"{path}: fewer values are allowed")
    for key, sign in (("minimum", 1), ("minLength", 1), ("minItems", 1), ("minProperties", 1),
                      ("maximum", -1), ("maxLength", -1), ("maxItems", -1)):  # fmt: skip
        bound = new.get(key)
        if bound is not None and (key not in old or sign * bound > sign * old[key]):
            found.append(f"{path}: {key} is tighter: `{bound}`")
    found += [
        f"{path}.{name}: is now required"
        for name in sorted(set(new.get("required", ())) - set(old.get("required", ())))
    ]
    rules = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        guarded = _GUARD.match(rule["rule"])  # by a field that no stored object has
        if rule["rule"] not in rules and not (
            guarded and guarded[1] not in old.get("properties", {})
        ):
            found.append(f"{path}: a new rule: {rule['rule']}")
    for name, below in old.get("properties", {}).items():
        now = new.get("properties", {}).get(name)
        if now is None:
            found.append(f"{path}.{name}: was removed")
        else:
            found += incompatible(below, now, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(old.get(key), dict):
            found += incompatible(old[key], new.get(key, {}), f"{path}[]")
    return found


def schema_of(definition: Mapping[str, Any]) -> Any:
    """Return the schema in a definition with one version."""
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def _definition(
    *,
    kind: str,
    plural: str,
    short_names: list[str],
    spec: dict[str, Any],
    status: dict[str, Any],
    columns: list[dict[str, Any]],
    scale: dict[str, str] | None = None,
    rules: list[tuple[str, str]] | None = None,
) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    for cel, message in rules or ():
        _add_rule(schema, cel, message)
    subresources: dict[str, Any] = {"status": {}}
    if scale is not None:
        subresources["scale"] = scale
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/name": "headgate"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short_names,
                "categories": ["all", "headgate"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _column(name: str, path: str, type_: str = "string", *, priority: int = 0) -> dict[str, Any]:
    return {"name": name, "type": type_, "jsonPath": path, "priority": priority}


def _add_rule(schema: dict[str, Any], cel: str, message: str) -> None:
    schema.setdefault("x-kubernetes-validations", []).append({"rule": cel, "message": message})


def _section(section: Section) -> dict[str, Any]:
    """Return the structural schema of a table of fields."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _field(field) for name, field in section.fields.items()},
    }
    required = [name for name, field in section.fields.items() if field.required]
    if required:
        schema["required"] = required
    return schema


def _field(field: Field) -> dict[str, Any]:
    return {"description": field.doc, **_kind(field.kind)}


def _kind(kind: fields.Kind) -> dict[str, Any]:
    """Return the structural schema of a kind of value. Only strings may have variables (`${NAME}`)."""
    match kind:
        case Section():
            return _section(kind)
        case fields.ChoiceKind():
            return {"type": "string", "enum": list(kind.words)}
        case fields.IntegerKind():
            bounds = {"minimum": kind.at_least, "maximum": kind.at_most}
            if kind.at_most == INT64_MAX:  # the format says so; as a float it would be rounded
                del bounds["maximum"]
            return {"type": "integer", "format": "int64", **bounds}
        case fields.NumberKind():
            return {"type": "number", "minimum": kind.at_least}
        case fields.BooleanKind():
            return {"type": "boolean"}
        case fields.TextKind(pattern=pattern) if pattern:
            return {"type": "string", "pattern": f"^(?:{pattern})$"}
        case fields.TextKind() | fields.Parsed():
            return {"type": "string", "minLength": 1}
        case kubernetes_model.Quantity():
            return {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "x-kubernetes-int-or-string": True,
            }
        case fields.ListOf():
            return {"type": "array", "minItems": 1, "items": _kind(kind.item)}
        case fields.Items():
            return {"type": "object", "additionalProperties": _kind(kind.item)}
        case fields.Anything():
            return {"type": "object", **_ANY}
        case fields.AnyText() | fields.OneOf():
            return dict(_ANY)
    raise TypeError(f"no structural schema for {kind}")


def _struct(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the structural schema of a status. No field is required, so that an older status is valid."""
    hints = typing.get_type_hints(struct, include_extras=True)
    properties = {
        field.encode_name: _hint(hints[field.name]) for field in msgspec.structs.fields(struct)
    }
    return {"type": "object", "properties": properties}


def _hint(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        schema = _hint(arguments[0])
        for meta in arguments[1:]:
            if meta.description:
                schema = {"description": meta.description, **schema}
            schema.update(meta.extra or {})
        return schema
    if origin is types.UnionType or origin is typing.Union:
        (some,) = (each for each in arguments if each is not type(None))
        return _hint(some)
    if origin is list:
        return _list(arguments[0])
    if origin is dict:
        return {"type": "object", **_ANY}
    if origin is Literal:
        # A newer operator may use more words than an older definition has.
        return {"type": "string"}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint)
    return {
        str: {"type": "string"},
        bool: {"type": "boolean"},
        int: {"type": "integer", "format": "int64"},
    }[hint].copy()


def _list(item: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _hint(item)}
    if "type" in schema["items"].get("properties", {}):
        schema["items"]["required"] = ["type"]
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return schema


def main(arguments: list[str]) -> int:
    """Write the files of the chart, unless stored objects could then be refused."""
    parser = argparse.ArgumentParser(prog="python -m headgate.k8s.crds", description=__doc__)
    parser.add_argument("--incompatible", action="store_true", help="write them anyway")
    forced = parser.parse_args(arguments).incompatible
    FOLDER.mkdir(parents=True, exist_ok=True)
    refused: list[str] = []
    for name, text in rendered().items():
        path = FOLDER / name
        if path.exists() and not forced:
            before, now = yaml.safe_load(path.read_text(encoding="utf-8")), yaml.safe_load(text)
            refused += [f"{name}{each}" for each in incompatible(schema_of(before), schema_of(now))]
    if refused:
        print("not written, because existing objects may be refused", *refused, sep="\n")
        return 1
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
