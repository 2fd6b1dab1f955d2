"""The common parts of the manifest tests: loading texts, and describing graphs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.api.job_definition import WrittenJob, definition_of
from headgate.errors import ManifestErrors
from headgate.runtime.manifest import load_job

USER_CODE = """
import pyarrow as pa
import msgspec

class Total(msgspec.Struct):
    id: int
    text: str

def add_country(batch):
    return batch.append_column("country", pa.array(["NL"] * batch.num_rows))

def to_total(record):
    return Total(record.id, str(record.price))

def twice(record):
    return [record, record]

def larger(left, right):
    return left if left.price >= right.price else right

def make(number):
    return number

not_a_function = 5
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user, importable as `user_jobs`."""
    (tmp_path / "user_jobs.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "user_jobs"
    sys.modules.pop("user_jobs", None)


@pytest.fixture
def problems_of(tmp_path: Path) -> Callable[..., list[str]]:
    """The mistakes of a manifest, each as `line: message | fix`."""

    def load(text: str, **variables: str) -> list[str]:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        with pytest.raises(ManifestErrors) as caught:
            load_job(path, env={}, variables=variables)
        prefix = f"{path}:"
        assert all(problem.where.startswith(prefix) for problem in caught.value.problems)
        return [
            f"{problem.where.removeprefix(prefix)}: {problem.message} | {problem.fix}"
            for problem in caught.value.problems
        ]

    return load


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the user's functions."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import twin_steps

    yield twin_steps
    sys.modules.pop("twin_steps", None)


HEAD = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: test}
spec:
"""
SOURCES = """\
  sources:
    orders:
      generator:
        fields:
          id: sequence
          price: float
          qty: {kind: int, high: 10}
          at: timestamp
        rows: 100
      eventTime: {column: at, maxOutOfOrder: 1s}
"""


@pytest.fixture
def manifest() -> Callable[..., str]:
    """A manifest around some operators: they begin in line 16, sinks are blackholes of `reads`."""

    def make(
        operators: str = "", *reads: str, spec: str = "", sources: str = SOURCES, sinks: str = ""
    ) -> str:
        text = HEAD + textwrap.indent(textwrap.dedent(spec), "  ") + sources
        if operators:
            text += "  operators:\n" + textwrap.indent(
                textwrap.dedent(operators).strip("\n"), "    "
            )
        text += "\n  sinks:\n"
        text += "".join(f"    out{n}: {{from: {at}, blackhole: }}\n" for n, at in enumerate(reads))
        return text + textwrap.indent(textwrap.dedent(sinks), "    ")

    return make


@pytest.fixture
def shape() -> Callable[[WrittenJob], list[Any]]:
    """Return all that matters of a graph, which is everything but where it was written."""

    def describe(job: WrittenJob) -> list[Any]:
        return [
            {
                "name": node.name,
                "kind": node.kind,
                "inputs": [(i.node.name, i.partitioning, i.side) for i in node.inputs],
                "schema": None if node.schema is None else node.schema.to_string(),
                "parallelism": node.parallelism,
                "chaining": node.chaining,
                "stateful": node.stateful,
                "sides": sorted(node.sides),
                "detail": node.detail,
                "columns": node.columns_read,
                "guarantee": None if node.sink is None else node.sink.guarantee,
            }
            for node in definition_of(job).graph.nodes
        ]

    return describe
