"""The custom resource definitions: current, structural, small, and compatible with what was released."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headgate.k8s import crds

RELEASED = Path(__file__).with_name("released")
"""The definitions as of the last release."""
FILES = ("streamjobs.yaml", "streamsnapshots.yaml")
NUMBERS_OR_TEXTS = [{"type": "integer"}, {"type": "string"}]


def parts(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all schemas in it."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from parts(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from parts(schema[key], f"{path}[]")


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_the_chart_are_current(name: str) -> None:
    """If not: python -m headgate.k8s.crds"""
    text = (crds.FOLDER / name).read_text()
    assert text == crds.rendered()[name]
    assert len(text.encode()) < crds.BYTES_MAX
    assert yaml.safe_load(text)["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "{{" not in text  # Helm would take it for a template


@pytest.mark.parametrize("name", FILES)
def test_what_was_released_is_still_accepted(name: str) -> None:
    """No field is gone, no type is tighter, nothing new is required."""
    before = yaml.safe_load((RELEASED / name).read_text())
    now = yaml.safe_load(crds.rendered()[name])
    assert crds.incompatible(crds.schema_of(before), crds.schema_of(now)) == []
    assert before["spec"]["names"] == now["spec"]["names"]
    assert before["spec"]["scope"] == now["spec"]["scope"]


@pytest.mark.parametrize("name", FILES)
def test_the_schemas_are_structural(name: str) -> None:
    """Rules of the API server: a type everywhere, no logic around types, patterns that Go understands."""
    for path, schema in parts(crds.schema_of(yaml.safe_load(crds.rendered()[name]))):
        free = schema.get("x-kubernetes-preserve-unknown-fields")
        mixed = schema.get("x-kubernetes-int-or-string")
        assert schema.get("type") or free or mixed, path
        assert set(schema) & {"oneOf", "allOf", "not", "$ref", "default"} == set(), path
        assert schema.get("anyOf") == (NUMBERS_OR_TEXTS if mixed else None), path
        assert "properties" not in schema or "additionalProperties" not in schema, path
        assert not re.search(r"\(\?[^:]|\\[dsw]", schema.get("pattern", "")), path
        assert set(schema.get("required", ())) <= set(schema.get("properties", ())), path


def test_every_field_says_what_it_means() -> None:
    for definition in (crds.stream_jobs(), crds.stream_snapshots()):
        for path, schema in parts(crds.schema_of(definition)["properties"]["spec"]):
            assert not path or path.endswith("[]") or schema.get("description"), path


def test_a_status_of_an_older_operator_stays_valid() -> None:
    for definition in (crds.stream_jobs(), crds.stream_snapshots()):
        for path, schema in parts(crds.schema_of(definition)["properties"]["status"]):
            assert schema.get("required", []) == (["type"] if path == ".conditions[]" else []), path


def test_scale_and_status_are_subresources() -> None:
    (version,) = crds.stream_jobs()["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    assert version["subresources"]["status"] == {}
    paths = [*version["subresources"]["scale"].values()]
    paths += [
        column["jsonPath"]
        for column in version["additionalPrinterColumns"]
        if column["jsonPath"].startswith(".status.") and "?" not in column["jsonPath"]
    ]
    for path in paths:
        at = schema
        for name in path.strip(".").split("."):
            at = at["properties"][name]
        assert at["type"] in ("string", "integer"), path


INCOMPATIBLE = {
    "was removed": lambda spec: spec["properties"].pop("parallelism"),
    "is now required": lambda spec: spec["required"].append("parallelism"),
    "type is now": lambda spec: spec["properties"]["parallelism"].update(type="string"),
    "maximum is tighter": lambda spec: spec["properties"]["parallelism"].update(maximum=7),
    "pattern is now": lambda spec: spec["properties"]["kubernetes"]["properties"]["image"].update(
        pattern="x"
    ),
    "fewer values": lambda spec: spec["properties"]["restart"]["properties"]["strategy"][
        "enum"
    ].pop(),
    "a new rule": lambda spec: spec["x-kubernetes-validations"].append({"rule": "false"}),
    "fields were free before": lambda spec: spec["properties"]["sources"].pop(
        "x-kubernetes-preserve-unknown-fields"
    ),
}


@pytest.mark.parametrize("said", INCOMPATIBLE)
def test_an_incompatible_change_is_seen(said: str) -> None:
    old = crds.schema_of(crds.stream_jobs())
    new = copy.deepcopy(old)
    INCOMPATIBLE[said](new["properties"]["spec"])
    (found,) = crds.incompatible(old, new)
    assert said in found
    assert crds.incompatible(old, copy.deepcopy(old)) == []


def test_what_is_added_or_wider_is_compatible() -> None:
    old = crds.schema_of(crds.stream_jobs())
    new = copy.deepcopy(old)
    spec = new["properties"]["spec"]
    spec["properties"]["more"] = {"type": "string"}
    spec["properties"]["parallelism"]["maximum"] += 1
    spec["properties"]["restart"]["properties"]["strategy"]["enum"].append("other")
    spec["x-kubernetes-validations"].pop()
    assert crds.incompatible(old, new) == []


def test_a_rule_about_a_new_field_alone_is_compatible() -> None:
    old = crds.schema_of(crds.stream_jobs())
    new = copy.deepcopy(old)
    section = new["properties"]["spec"]["properties"]["kubernetes"]["properties"]["savepoints"]
    section["properties"]["more"] = {"type": "string"}
    rules = section.setdefault("x-kubernetes-validations", [])
    rules.append({"rule": "!has(self.more) || has(self.every)"})
    assert crds.incompatible(old, new) == []
    rules.append({"rule": "!has(self.retain) || has(self.every)"})
    (found,) = crds.incompatible(old, new)
    assert "self.retain" in found


def test_the_generator_refuses_to_write_an_incompatible_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crds, "FOLDER", tmp_path)
    before = crds.stream_jobs()
    crds.schema_of(before)["properties"]["spec"]["properties"]["old"] = {"type": "string"}
    (tmp_path / "streamjobs.yaml").write_text(yaml.safe_dump(before))
    assert crds.main([]) == 1
    assert ".spec.old: was removed" in capsys.readouterr().out
    assert "old" in (tmp_path / "streamjobs.yaml").read_text()
    assert crds.main(["--incompatible"]) == 0
    assert (tmp_path / "streamjobs.yaml").read_text() == crds.rendered()["streamjobs.yaml"]
