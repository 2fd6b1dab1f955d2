"""stop_after_idle: a source ends when none of its subtasks has had anything to read for long enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.api.job_definition import definition_of
from headgate.connectors import (
    collect,
    from_list,
    hybrid_source,
    json_source,
    numbers,
    parquet_sink,
    stop_after_idle,
    throttle,
    with_position,
)
from headgate.errors import UsageError
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.source import Source, SourceReader
from headgate.runtime.control.messages import QUIET_FOR_GOOD
from headgate.runtime.coordinator.sources import quiet_sources
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context, open_reader

MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: idle}
spec:
  sources:
    rows:
      generator: {fields: {n: {kind: sequence}}, rate: 10, stopAfterIdle: 5m}
  sinks:
    out: {from: rows, print: {}}
"""


class Endless(Source[Any]):
    """Each of two splits has some numbers, and goes on without any more."""

    def splits(self, parallelism: int) -> list[bytes]:
        return [b"3", b"5"]

    def reader(self) -> SourceReader:
        return EndlessReader()


class EndlessReader(SourceReader):
    finished = False

    def __init__(self) -> None:
        self.left: list[int] = []

    def add_splits(self, splits: Sequence[bytes]) -> None:
        self.left = [int(split) for split in splits]

    def poll(self) -> Batch | None:
        for place, left in enumerate(self.left):
            if left:
                self.left[place] -= 1
                return ObjectBatch([left])
        return None

    def snapshot(self) -> list[bytes]:
        return [str(left).encode() for left in self.left]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_job_ends_when_nothing_comes(tmp_path: Path, parallelism: int) -> None:
    """Also if a subtask has no split."""
    job, rows = hg.Job("idle", parallelism=parallelism), collect()
    job.checkpoint(every="1h", storage=str(tmp_path / "state"))
    job.read(stop_after_idle(Endless(), "50ms"), name="rows").write(rows, name="out")
    job.run()
    assert sorted(rows.rows) == [1, 1, 2, 2, 3, 3, 4, 5]


def test_a_pause_that_is_short_ends_nothing(tmp_path: Path) -> None:
    """A directory is read on as long as files come, through a failure, and then the job ends."""
    (tmp_path / "in").mkdir()
    mark = tmp_path / "failed"

    class Next:
        """Adds the next file when the one before is read."""

        def __call__(self, record: Any) -> Any:
            if record.n == 2 and not mark.exists():
                mark.touch()
                raise RuntimeError("planted")
            following = tmp_path / "in" / str(record.n + 1)
            if record.n < 4 and not following.exists():
                hidden = following.with_name(f".{following.name}")
                hidden.write_text(f'{{"n": {following.name}}}\n')
                hidden.rename(following)
            return record

    (tmp_path / "in" / "0").write_text('{"n": 0}\n')
    job = hg.Job("idle", parallelism=2)
    job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
    job.restart(hg.fixed_delay(attempts=3, delay="10ms"))
    source = json_source(tmp_path / "in", {"n": "long"}, discover_every="20ms")
    read = job.read(stop_after_idle(source, "10s"), name="files")
    seen = read.map(Next(), into=pa.schema([("n", pa.int64())]), name="next")
    seen.write(parquet_sink(tmp_path / "out", guarantee="exactly_once"), name="out")
    job.run()
    files = (tmp_path / "out").glob("[!.]*.parquet")
    found = sorted(row["n"] for file in files for row in pq.read_table(file).to_pylist())
    assert found == [0, 1, 2, 3, 4]
    assert mark.exists()


@pytest.mark.parametrize(
    ("quiet_ms", "ends"),
    [
        ([None, 9_000], False),
        ([4_999, 9_000], False),
        ([5_000, 9_000], True),
        ([5_000, QUIET_FOR_GOOD], True),
        ([QUIET_FOR_GOOD, QUIET_FOR_GOOD], False),
    ],
)
def test_all_subtasks_have_to_be_quiet(quiet_ms: list[int | None], ends: bool) -> None:
    """One that has not reported may have something to read, and one that has ended has nothing."""
    stops, goes_on = stop_after_idle(Endless(), "5s"), Endless()
    plan: Any = SimpleNamespace(
        vertices=[
            SimpleNamespace(id=id_, parallelism=2, head=SimpleNamespace(source=source))
            for id_, source in enumerate([goes_on, stops, None])
        ]
    )
    statistics: Any = {
        (vertex, index): SimpleNamespace(quiet_ms=each)
        for vertex in (0, 1)
        for index, each in enumerate(quiet_ms)
        if each is not None
    }
    assert [vertex.id for vertex in quiet_sources(plan, statistics)] == [1] * ends


def test_a_source_that_is_slowed_down_is_not_idle() -> None:
    source = throttle(numbers(10, batch_rows=2), 0.01)
    reader = open_reader(source, source.splits(1), make_context())
    assert [reader.poll() is None, reader.held_back] == [False, False]
    assert [reader.poll() is None, reader.held_back] == [True, True]
    reader.close()


def test_a_file_that_is_being_read_is_not_idle(tmp_path: Path) -> None:
    """A storage that takes its time for a block would end the source in the middle of the file."""
    (tmp_path / "a").write_text('{"n": 1}\n{"n": 2}\n')
    source = throttle(json_source(tmp_path, {"n": "long"}, discover_every="1s"), 1e9)

    async def read() -> None:
        reader = open_reader(source, [])
        assert [reader.poll() is None, reader.held_back] == [True, False]
        reader.add_splits(source.discover({}))
        assert [reader.poll() is None, reader.held_back] == [True, True]
        while not reader.finished:
            await reader.wait()
            reader.poll()
        assert [reader.poll() is None, reader.held_back] == [True, False]
        reader.close()

    asyncio.run(read())


def test_other_wrappers_keep_it() -> None:
    files = json_source("in", {"n": "long"}, discover_every="1s")
    idle = with_position(throttle(stop_after_idle(files, "5m"), 10))
    assert idle.stop_after_idle_ms == 300_000
    assert idle.with_columns(["n"]).configure({}).stop_after_idle_ms == 300_000
    assert idle.discovers
    assert "until idle for 5m" in idle.describe()


def test_a_manifest_can_say_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    (source,) = [node.source for node in definition_of(load_job(path)).graph.sources()]
    assert source is not None
    assert source.stop_after_idle_ms == 300_000


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="idle"):
        stop_after_idle(numbers(), "0s")
    with pytest.raises(UsageError, match="takes a source"):
        stop_after_idle(3, "1s")  # type: ignore[type-var]
    with pytest.raises(UsageError, match="cannot end when it is idle"):
        hybrid_source(from_list([1]), stop_after_idle(from_list([2]), "1s"))
