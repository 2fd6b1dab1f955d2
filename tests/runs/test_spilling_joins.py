"""Rows of joins over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.elements import Batch, ColumnBatch
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.co_group import CoGroup, CoGroupStep
from headgate.operators.joins.columns import LEFT, RIGHT, ROW_COLUMN, join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.rows import RowReader
from headgate.operators.windows.kinds import cumulative, sliding, tumbling
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
    SCHEMA,
    batch,
    canonical_rows,
    check_against_memory,
    check_files_fit,
    check_restored_in_a_thread,
)

MIDDLE = {**ROCKSDB, "taskmanager.memory.managed.size": "150kb"}
"""Rows begin in memory, and move to disk after some batches."""
INTERVALS = {"before": (-60, 0), "around": (-40, 70), "behind": (5, 90)}
WINDOWS = {
    "tumbling": tumbling("50ms", offset="7ms"),
    "tumbling, lateness": tumbling("50ms", allowed_lateness="200ms"),
    "sliding": sliding("90ms", "40ms"),
    "sliding, lateness": sliding("90ms", "30ms", allowed_lateness="100ms"),
    "cumulative": cumulative("120ms", "30ms", allowed_lateness="50ms"),
}


class Output(spilled_windows.Output):
    """Rows of both sides, in any order of time; also those of a function."""

    def emit(self, batch: Batch) -> None:
        records = batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records
        self.rows += [f"result {row}" for row in records]

    def emit_side(self, tag: str, batch: ColumnBatch) -> None:
        self.rows += [f"{tag} {row}" for row in batch.data.to_pylist()]

    def emit_watermark(self, timestamp: int) -> None:
        self.rows.append(f"watermark {timestamp}")


class Side(spilled_windows.Side):
    """The subtasks of an interval join."""

    states = ("left", "right")
    output = Output
    how: Any = "full"
    interval = "around"

    def new_operator(self) -> Any:
        return IntervalJoin(self.step(), Interval(*INTERVALS[self.interval]))

    def step(self) -> JoinStep:
        outer = outer_sides(self.how)
        nullable = (outer[1], outer[0])
        columns = join_columns(
            (SCHEMA, SCHEMA), (self.keys, self.keys), nullable, "_2", ("a", "b"), Origin("here")
        )
        return JoinStep("join", columns, outer)

    @classmethod
    def told_apart(cls, table: pa.Table) -> pa.Table:
        """Rows without their numbers."""
        assert table.column_names[:3] == ["key_group", ROW_COLUMN, "_time"]
        return table.drop_columns([ROW_COLUMN])

    def process(self, data: pa.RecordBatch, times: Any, input_index: int = 0) -> None:
        half = len(times) // 2
        super().process(data.slice(0, half), times[:half], 0)
        super().process(data.slice(half), times[half:], 1)


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("seed", "options"), [(1, ROCKSDB), (2, ROOMY), (3, MIDDLE)])
def test_results_and_snapshots_are_those_of_memory(
    tmp_path: Path,
    keys: tuple[str, ...],
    how: str,
    interval: str,
    seed: int,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Side, "how", how)
    monkeypatch.setattr(Side, "interval", interval)
    spilled = check_against_memory(Side, tmp_path, keys, seed, options)
    assert (spilled > 2) == (options is not ROOMY)


class AsOfSide(Side):
    """The subtasks of a temporal join."""

    def new_operator(self) -> Any:
        return AsOfJoin(self.step())


@pytest.mark.parametrize(
    ("keys", "how", "options"),
    [
        (("name",), "left", ROCKSDB),
        (("number",), "inner", ROCKSDB),
        (("name", "number"), "left", MIDDLE),
        (("number",), "left", ROOMY),
    ],
)
def test_versions_give_the_results_and_snapshots_of_memory(
    tmp_path: Path,
    keys: tuple[str, ...],
    how: str,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AsOfSide, "how", how)
    spilled = check_against_memory(AsOfSide, tmp_path, keys, len(keys[0]), options)
    assert (spilled > 2) == (options is not ROOMY)


def test_versions_stay_where_only_the_rows_that_meet_them_are_on_disk(tmp_path: Path) -> None:
    """A canonical savepoint with many rows that wait, and with one version for each of a few keys."""
    keys = ("number",)
    memory, again, disk = (AsOfSide(tmp_path, keys, 1, **o) for o in ({}, {}, ROCKSDB))
    for side, size, at in ((1, 8, 10), (0, 900, 100)):
        data = batch(np.random.default_rng(side), 0)[0]
        data = pa.Table.from_batches([data] * size).slice(0, size).combine_chunks().to_batches()[0]
        data = data.set_column(1, SCHEMA.field(1), pa.array(np.arange(size) % 8))
        memory.operators[0].process(ColumnBatch(data, np.full(size, at)), side)
    memory.watermark(50)
    parts = memory.snapshots(tmp_path, canonical=True)
    for side in (again, disk):
        side.restore(parts)
    (operator,) = disk.operators
    assert [one.active for one in operator._disk] == [True, False]
    both = [side.snapshots(tmp_path, canonical=True) for side in (again, disk)]
    assert canonical_rows(AsOfSide, both[1]) == canonical_rows(AsOfSide, both[0])
    for side in (again, disk):
        side.watermark(200)
    found = disk.take()
    assert found == again.take()
    assert len(found) == 900
    for side in (memory, again, disk):
        side.close()


@pytest.mark.parametrize("canonical", [True, False])
def test_key_groups_that_are_further_after_a_rescale_have_their_own_bounds(
    tmp_path: Path, canonical: bool
) -> None:
    """Of two subtasks one had a later watermark; their key groups come together in one."""
    keys, size = ("number",), 600

    def feed(sides: list[AsOfSide], side: int, time: int) -> None:
        data = pa.Table.from_batches([batch(np.random.default_rng(time), 0)[0]] * size)
        data = data.slice(0, size).combine_chunks().to_batches()[0]
        data = data.set_column(1, SCHEMA.field(1), pa.array(np.arange(size)))
        data = data.set_column(2, SCHEMA.field(2), pa.array(np.full(size, time)))
        for one in sides:
            spilled_windows.Side.process(one, data, np.full(size, time), side)

    def start(parallelism: int) -> list[AsOfSide]:
        return [AsOfSide(tmp_path, keys, parallelism, **options) for options in (ROCKSDB, {})]

    apart = start(2)
    for time in (30, 50, 90):
        feed(apart, RIGHT, time)
    for side in apart:
        side.watermark(40)
        side.operators[1].on_watermark(100)
    together = start(1)
    for before, side in zip(apart, together, strict=True):
        side.restore(before.snapshots(tmp_path, canonical=canonical))
    found = []
    feed(together, RIGHT, 70)  # late where 90 has been reached
    feed(together, LEFT, 60)  # late where 100 has been reached
    feed(together, LEFT, 95)
    feed(together, LEFT, 130)
    for watermark in (65, 80, 99, 150):
        for side in together:
            side.watermark(watermark)
        found.append(together[0].take())
        assert found[-1] == together[1].take()
    late = [row for row in found[0] if row.startswith("late")]
    assert 0 < len(late) < 2 * size
    assert len({row for row in found[0] if row.startswith("result")}) > 0
    for side in apart + together:
        side.close()


class WindowSide(Side):
    """The subtasks of a window join."""

    window: Any = "tumbling"

    def new_operator(self) -> Any:
        return WindowJoin(self.step(), WINDOWS[self.window])


def together(key: Any, left: list[Any], right: list[Any]) -> Any:
    yield key, [(row.x, row.text) for row in left], [(row.x, row.price) for row in right]


class CoGroupSide(WindowSide):
    """The subtasks of a co-group."""

    def new_operator(self) -> Any:
        user = UserFunction(together, "join", Origin("here"), RowReader(None, None, together))
        step = CoGroupStep(self.step(), together, user, (None, None))
        return CoGroup(step, WINDOWS[self.window])


@pytest.mark.parametrize(
    ("kind", "window", "keys", "how", "options"),
    [
        (WindowSide, "tumbling", ("number",), "inner", ROCKSDB),
        (WindowSide, "tumbling, lateness", ("name",), "full", MIDDLE),
        (WindowSide, "sliding", ("name", "number"), "left", ROCKSDB),
        (WindowSide, "sliding, lateness", ("number",), "right", MIDDLE),
        (CoGroupSide, "sliding, lateness", ("number",), "inner", ROCKSDB),
        (CoGroupSide, "cumulative", ("name", "number"), "inner", ROCKSDB),
    ],
)
def test_windows_give_the_results_and_snapshots_of_memory(
    tmp_path: Path,
    kind: type[WindowSide],
    window: str,
    keys: tuple[str, ...],
    how: str,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kind, "how", how)
    monkeypatch.setattr(kind, "window", window)
    spilled = check_against_memory(kind, tmp_path, keys, len(window), options)
    assert spilled > 2


@pytest.mark.parametrize("kind", [Side, AsOfSide, WindowSide])
def test_files_are_read_in_a_thread(tmp_path: Path, kind: type[Side]) -> None:
    check_restored_in_a_thread(kind, tmp_path, lambda one: one._disk[0].active)


@pytest.mark.parametrize("kind", [Side, AsOfSide, WindowSide])
def test_files_need_their_backend(tmp_path: Path, kind: type[Side]) -> None:
    check_files_fit(kind, tmp_path)
