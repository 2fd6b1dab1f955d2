"""The first record of each key, under both state backends, against a dict with times."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import Crash, collect, from_list
from headgate.errors import PlanError
from headgate.runtime.manifest import load_job
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
TTL_MS = 1_000
SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])


def of_tuples(ttl: Any) -> Any:
    return streams()[0].key_with(lambda record: record[0]).deduplicate(name="first", ttl=ttl)


def of_columns(ttl: Any) -> Any:
    columns = streams()[0].map(lambda record: record, into=SCHEMA)
    return columns.key_by("user").deduplicate(name="first", ttl=ttl)


def push(step: Step, records: list[tuple[str, int]], *, columns: bool) -> list[tuple[str, int]]:
    """Send records to the step; return its results."""
    if not columns:
        step.push(records, key=lambda record: record[0])
        return sorted(value for value, _ in step.take())
    arrays = [pa.array([r[i] for r in records], field.type) for i, field in enumerate(SCHEMA)]
    step.push_columns(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA), key="user")
    return sorted((row["user"], row["n"]) for row, _ in step.take())


@pytest.mark.parametrize("ttl", [None, "1s"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_results_are_those_of_a_model(
    steps: Steps, columns: bool, ttl: str | None, seed: int
) -> None:
    """Through restarts at other parallelisms, and as time passes."""
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    step = steps((of_columns if columns else of_tuples)(ttl), rng.randint(1, 3))
    for turn in range(50):
        records = [(f"k{rng.randrange(12)}", 100 * turn + n) for n in range(rng.randint(1, 6))]
        expected = []
        for record in records:
            first = seen.get(record[0])
            if first is None or (ttl and first <= step.clock.ms - TTL_MS):
                seen[record[0]] = step.clock.ms
                expected.append(record)
        assert push(step, records, columns=columns) == sorted(expected)
        step.clock.advance(rng.choice([0, 1, 300, 999, 1_000]))
        if rng.random() < 0.15:
            step.restart(rng.randint(1, 3))


def test_a_key_made_by_a_function_keeps_the_columns() -> None:
    columns = streams()[0].map(lambda record: record, into=SCHEMA)
    made = columns.key_with(lambda row: row.user.lower()).deduplicate(name="first")
    assert made.schema == SCHEMA


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_crash_neither_forgets_nor_repeats(tmp_path: Path, parallelism: int) -> None:
    words = [word for n in range(40) for word in (f"w{n}", f"w{n // 2}")]
    items = [*words[:30], Crash(), *words[30:60], Crash(), *words[60:]]
    job = hg.Job("words", parallelism=parallelism)
    job.checkpoint(every="10ms", storage=str(tmp_path))
    found = collect(guarantee="exactly_once")
    firsts = job.read(from_list(items, batch_rows=3), name="words").key_with(str)
    firsts.deduplicate(name="first").write(found, name="found")
    job.run()
    assert sorted(found.rows) == sorted(set(words))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: firsts}}
spec:
  sources:
    numbers:
      generator:
        fields: {{n: sequence, user: {{kind: pattern, prefix: u, distinct: 7}}}}
        rows: 500
  operators:
    first:
      from: numbers
      keyBy: user
      deduplicate: {section}
  sinks:
    out:
      from: first
      parquet: {{path: {path}/out}}
      guarantee: none
"""


@pytest.mark.parametrize("section", ["{}", "{ttl: 1d}", ""])
def test_a_manifest_says_it_too(tmp_path: Path, section: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(MANIFEST.format(section=section, path=tmp_path))
    load_job(file).run()
    tables = [pq.read_table(file) for file in (tmp_path / "out").glob("*.parquet")]
    users = [user for table in tables for user in table.column("user").to_pylist()]
    assert len(users) == len(set(users)) == 7


def test_a_time_to_live_that_is_none() -> None:
    with pytest.raises(PlanError, match="ttl"):
        of_columns("soon")
