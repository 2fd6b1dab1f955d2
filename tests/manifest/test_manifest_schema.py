"""The JSON schema for editors: current, and of one mind with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import headgate
from headgate.api.manifest.model import manifest_section
from headgate.api.manifest.settings import OPTION_OF
from headgate.connectors.registry import SINKS, SOURCES
from headgate.runtime import manifest
from headgate.runtime.options.registry import OPTIONS, find_option

ROOT = Path(headgate.__file__).parent


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(manifest.schema())


def test_the_schema_is_current() -> None:
    """If not: python -m headgate.runtime.manifest > docs/streamjob.schema.json"""
    written = (ROOT / "docs" / "streamjob.schema.json").read_text()
    assert json.loads(written) == manifest.schema()


def test_definitions_say_the_same_as_the_parts_that_they_stand_for() -> None:
    schema = manifest.schema()
    definitions, used = schema.pop("$defs"), set()

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" not in part:
            return {key: resolved(value) for key, value in part.items()}
        name = part["$ref"].removeprefix("#/$defs/")
        used.add(name)
        # Editors show the description beside the reference.
        return {**resolved(definitions[name]), **{k: v for k, v in part.items() if k != "$ref"}}

    written = manifest_section(SOURCES, SINKS).schema()
    assert {key: resolved(schema[key]) for key in written} == written
    assert used == set(definitions)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name
)
def test_manifests_of_examples_are_valid(
    path: Path, validator: jsonschema.Draft202012Validator
) -> None:
    for found in yaml.safe_load_all(path.read_text()):
        if isinstance(found, dict) and found.get("kind") == "StreamJob":
            validator.validate(found)


def test_mistakes_below_a_definition_are_found(
    validator: jsonschema.Draft202012Validator,
) -> None:
    def problems(source: dict[str, Any]) -> list[str]:
        job = {
            "apiVersion": "headgate.io/v1alpha1",
            "kind": "StreamJob",
            "metadata": {"name": "a"},
            "spec": {"sources": {"a": source}, "sinks": {"b": {"from": "a", "print": {}}}},
        }
        return [error.message for error in validator.iter_errors(job)]

    kafka = {"topics": "a", "bootstrap": "b:9092"}
    assert problems({"hybrid": {"history": {"kafka": kafka}, "live": {"kafka": kafka}}}) == []
    wrong = {**kafka, "security": {"mechanisms": "PLAIN"}}
    (found,) = problems({"hybrid": {"history": {"kafka": wrong}, "live": {"kafka": kafka}}})
    assert "'mechanisms' was unexpected" in found


def test_unknown_fields_are_refused_wherever_fields_are_known() -> None:
    def objects(schema: Any) -> list[dict[str, Any]]:
        if isinstance(schema, list):
            return [found for item in schema for found in objects(item)]
        if not isinstance(schema, dict):
            return []
        # The fields of a section are a mapping, too, and one may be called `properties`.
        own = [schema] if "object" in schema.get("type", ()) and "properties" in schema else []
        return own + [found for item in schema.values() for found in objects(item)]

    sections = objects(manifest.schema())
    assert len(sections) > 15
    assert all(section["additionalProperties"] is False for section in sections)


def test_every_field_says_what_it_means() -> None:
    spec = manifest.schema()["properties"]["spec"]["properties"]
    operators = spec["operators"]["additionalProperties"]["properties"]
    assert all(field["description"] for field in {**spec, **operators}.values())


def test_fields_that_say_the_same_as_an_option_name_one_that_exists() -> None:
    assert {find_option(key) for key in OPTION_OF.values()} <= set(OPTIONS)
