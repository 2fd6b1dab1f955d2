"""Wrong little manifests: each mistake is told with its line; and variables in `{...}`, which are none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headgate.errors import ManifestErrors
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job

MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: little}
spec:
  sources:
    numbers: %(source)s
  operators:
    step: %(step)s
  sinks:
    out: %(sink)s
"""
RIGHT = {
    "source": "{generator: {rows: 5, fields: {n: {kind: sequence}, word: {kind: pattern}}}}",
    "step": "{from: numbers, filter: n > 2}",
    "sink": "{from: step, print: {}, guarantee: none}",
}
WRONG: dict[str, tuple[str, str, str]] = {
    "rows as a text": (
        "source",
        "{generator: {rows: five, fields: {n: {kind: sequence}}}}",
        "rows",
    ),
    "a misspelt kind of field": (
        "source",
        "{generator: {fields: {n: {kind: sequnce}}}}",
        "sequnce",
    ),
    "a pattern with a number": (
        "source",
        "{generator: {fields: {n: {kind: pattern, suffix: 50}}}}",
        "expected `str`, got `int`",
    ),
    "no source": ("source", "{}", "source"),
    "a misspelt source": ("source", "{generater: {rows: 5}}", "did you mean `generator`"),
    "a file without columns": ("source", "{csv: {path: in.csv}}", "schema"),
    "an unknown input": ("step", "{from: numbrs, filter: n > 2}", "did you mean `numbers`"),
    "a misspelt column": ("step", "{from: numbers, filter: m > 2}", "unknown column `m`"),
    "a filter that is a number": ("step", "{from: numbers, filter: n + 2}", "filter"),
    "a misspelt operation": ("step", "{from: numbers, fliter: n > 2}", "did you mean `filter`"),
    "two operations": ("step", "{from: numbers, filter: n > 2, select: [n]}", "select"),
    "a function that is not there": ("step", "{from: numbers, map: nowhere:f}", "nowhere"),
    "a misspelt function": ("step", "{from: numbers, map: os.path:jion}", "jion"),
    "a step without an input": ("step", "{filter: n > 2}", "from"),
    "nothing": ("step", "", "step"),
    "a list": ("step", "[1, 2]", "mapping"),
    "a misspelt guarantee": ("sink", "{from: step, print: {}, guarantee: exactly}", "guarantee"),
    "exactly once without checkpoints": (
        "sink",
        "{from: step, json: {path: out}, guarantee: exactly_once}",
        "the job takes no checkpoints",
    ),
    "no path": ("sink", "{from: step, json: {}, guarantee: none}", "path"),
    "two sinks in one": ("sink", "{from: step, print: {}, blackhole: {}}", "blackhole"),
    "an unset variable": (
        "source",
        "{generator: {rows: ${ROWS}}}",
        "variable is not set name=`ROWS`",
    ),
    "a variable in a key": ("source", "{${KIND:-x}: {rows: 1}}", "${KIND:-x}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_mistake_is_told_with_its_line(name: str) -> None:
    part, text, message = WRONG[name]
    with pytest.raises(ManifestErrors) as refused:
        load_job(MANIFEST % {**RIGHT, part: text}, env={})
    first = refused.value.problems[0]
    assert message in str(refused.value)
    line = {"source": 7, "step": 9, "sink": 11}[part]
    assert first.where.startswith("manifest:")
    assert int(first.where.split(":")[1]) in (line, line - 1)


@pytest.mark.parametrize(
    ("rows", "env", "found"),
    [
        ("${ROWS:-0}", {}, 0),
        ("${ROWS:-0}", {"ROWS": "7"}, 7),
        ("${ROWS}", {"ROWS": "7"}, 7),
        ('"${ROWS:-3}"', {}, 3),
    ],
)
def test_variables_in_flow_style(rows: str, env: Mapping[str, str], found: int) -> None:
    source = RIGHT["source"].replace("rows: 5", f"rows: {rows}")
    job = load_job(MANIFEST % {**RIGHT, "source": source}, env=env)
    assert next(runnable(job).graph.sources()).source.rows == found  # type: ignore[union-attr]


def test_a_default_in_flow_style_may_have_commas_and_brackets() -> None:
    step = "{from: numbers, filter: ${ONLY:-n IN (1, 2) AND word <> '[x] # y'}}"
    job = load_job(MANIFEST % {**RIGHT, "step": step}, env={})
    assert "n IN (1, 2) AND word <> '[x] # y'" in job.explain()


def test_characters_that_stand_for_others_are_left_alone() -> None:
    step = "{from: numbers, filter: \"word <> '\uf8e0 ${NONE:-}'\"}"
    job = load_job(MANIFEST % {**RIGHT, "step": step}, env={})
    assert "\uf8e0" in job.explain()
