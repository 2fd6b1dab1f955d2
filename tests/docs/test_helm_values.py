"""Goal: every value of the chart has a comment, a place in the schema and a row in docs/helm.md."""

from __future__ import annotations

import json
import runpy
from typing import Any

import yaml

from headgate.tests.docs.test_docs import ROOT

CHART = ROOT / "helm" / "headgate"
OPEN = ("operator.resources",)
"""Mappings with keys of the user's own."""


def leaves(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> list[str]:
    """The paths of all values; each mapping on the way refuses what it does not know."""
    assert schema["additionalProperties"] is False, path
    found = []
    for name, value in values.items():
        place, inner = schema["properties"][name], f"{path}{name}"
        if isinstance(value, dict) and "properties" in place and inner not in OPEN:
            found += leaves(value, place, f"{inner}.")
        else:
            found.append(inner)
    return found


def test_every_value_is_described_and_in_the_schema() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "helm_values.py"))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert leaves(values, schema) == [one.path for one in script["settings"]()]


def test_the_table_of_values_is_up_to_date() -> None:
    """If not: python docs/helm_values.py, and put its output into the page."""
    table = runpy.run_path(str(ROOT / "docs" / "helm_values.py"))["table"]()
    assert table in (ROOT / "docs" / "helm.md").read_text()
