"""The JSON schema for editors: current, and of one mind with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import headgate
from headgate.api.manifest.settings import OPTION_OF
from headgate.runtime import manifest
from headgate.runtime.options.registry import OPTIONS, find_option

ROOT = Path(headgate.__file__).parent


def test_the_schema_is_current() -> None:
    """If not: python -m headgate.runtime.manifest > docs/streamjob.schema.json"""
    written = (ROOT / "docs" / "streamjob.schema.json").read_text()
    assert json.loads(written) == manifest.schema()


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
