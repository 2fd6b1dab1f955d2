"""State that grows from four times the managed memory to eight times: what the process holds stays flat."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.stream import output_of
from headgate.connectors import from_list
from headgate.operators import spilling_space
from headgate.operators.aggregation.aggregates import AggregatePlan, count, sum
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, ObjectBatch
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.windows.counts import CountAggregate
from headgate.operators.windows.kinds import (
    WINDOW_FIELDS,
    CountWindow,
    CumulativeWindow,
    Early,
    GlobalWindow,
    SlidingWindow,
    TumblingWindow,
    tumbling,
)
from headgate.operators.windows.panes.global_windows import GlobalAggregate
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.operators.windows.sessions.operator import SessionAggregate
from headgate.operators.windows.sessions.window import FixedGap
from headgate.state.settings import RunSettings
from headgate.tests.support.operators import operator_context

MIB = 1 << 20
MANAGED_BYTES = 16 * MIB
SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])
ROW_BYTES = 8 * 7
"""The bytes of a key and pane: two lanes of its identity, flags, the key, the pane, count and sum."""
KEYS, PANES = 400_000, 6
BATCH_ROWS = 10_000
PANE_MS = 100
COLUMNS = join_columns(
    (SCHEMA, SCHEMA), (("k",), ("k",)), (False, True), "_2", ("a", "b"), Origin("here")
)
LEFT_JOIN = JoinStep("join", COLUMNS, outer_sides("left"))
AGGREGATES = {"n": count(), "total": sum("n")}
PLAN = AggregatePlan(("k",), AGGREGATES, SCHEMA, WINDOW_FIELDS)
WHOLE_PLAN = AggregatePlan(("k",), AGGREGATES, SCHEMA)
LONG = pytest.mark.skipif(
    not os.environ.get("HEADGATE_THOROUGH"), reason="make test-all, or HEADGATE_THOROUGH=1"
)


def anonymous_bytes() -> int:
    """The memory of this process that is not that of files."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


class Output:
    rows = total = 0

    def emit(self, batch: ColumnBatch) -> None:
        self.rows += len(batch)
        self.total += int(np.sum(batch.data.column("n").to_numpy()))

    def emit_watermark(self, timestamp: int) -> None:
        pass


def opened(operator: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """Open an operator on disk with small files: a flush and a merge buffer one each, by default 64 MiB."""
    small = partial(RunSettings, file_bytes=MIB, merge_bytes=MIB)
    monkeypatch.setattr(spilling_space, "RunSettings", small)
    operator.output = Output()
    operator.open(
        operator_context(
            options={
                "state.backend.type": "rocksdb",
                "taskmanager.memory.managed.size": f"{MANAGED_BYTES // MIB}mb",
            },
            local_directory=lambda: directory,
        )
    )
    return operator.output  # type: ignore[no-any-return]


def feed(operator: Any, keys: Any, time: int, input_index: int = 0) -> list[int]:
    """A record of each key at a time; the memory after each batch."""
    held = []
    for low in range(0, len(keys), BATCH_ROWS):
        part = keys[low : low + BATCH_ROWS]
        columns = [pa.array(part), pa.array(np.ones(len(part), np.int64))]
        data = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        operator.process(ColumnBatch(data, np.full(len(part), time, np.int64)), input_index)
        held.append(anonymous_bytes())
    return held


def assert_flat(held: list[int]) -> None:
    half = len(held) // 2
    assert max(held[half:]) - max(held[:half]) <= MANAGED_BYTES


@pytest.mark.parametrize(
    "window",
    [SlidingWindow(PANES * PANE_MS, PANE_MS), CumulativeWindow(PANES * PANE_MS, PANE_MS)],
    ids=["sliding", "cumulative"],
)
def test_panes_of_eight_times_the_managed_memory(
    tmp_path: Path, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PANES * KEYS * ROW_BYTES >= 8 * MANAGED_BYTES
    operator = PaneAggregate(window, PLAN)
    output = opened(operator, tmp_path, monkeypatch)
    rng, held = np.random.default_rng(1), []
    for pane in range(PANES):
        held += feed(operator, rng.permutation(KEYS), pane * PANE_MS + 5)
    operator.on_watermark(PANES * PANE_MS - 1)
    held.append(anonymous_bytes())
    assert output.rows == PANES * KEYS
    assert output.total == KEYS * PANES * (PANES + 1) // 2
    operator.close()
    assert_flat(held)


@pytest.mark.alone
def test_sessions_of_eight_times_the_managed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session is extended once, from disk. All of them fire at the end, in order of their ends."""
    keys, steps = 2_100_000, 8
    assert keys * (ROW_BYTES + 8) >= 8 * MANAGED_BYTES
    operator = SessionAggregate(FixedGap(steps * PANE_MS), 0, PLAN, "sessions")
    output = opened(operator, tmp_path, monkeypatch)
    rng, held = np.random.default_rng(1), []
    for part in np.array_split(rng.permutation(keys), steps) * 2:
        held += feed(operator, part, len(held))
    operator.on_watermark(WATERMARK_MAX)
    held.append(anonymous_bytes())
    assert output.rows == keys
    assert output.total == 2 * keys
    operator.close()
    assert_flat(held)


@LONG
def test_cells_of_count_windows_of_eight_times_the_managed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell is completed from disk."""
    keys, steps = 2_100_000, 8
    assert keys * (ROW_BYTES + 8) >= 8 * MANAGED_BYTES
    operator = CountAggregate(CountWindow(2, 2), WHOLE_PLAN)
    output = opened(operator, tmp_path, monkeypatch)
    rng, held = np.random.default_rng(1), []
    for part in np.array_split(rng.permutation(keys), steps) * 2:
        held += feed(operator, part, len(held))
    assert output.rows == keys
    assert output.total == 2 * keys
    operator.close()
    assert_flat(held)


@LONG
@pytest.mark.parametrize(
    "operator",
    [
        GlobalAggregate(GlobalWindow(Early(rows=1_500_000)), WHOLE_PLAN),
        PaneAggregate(TumblingWindow(60_000, early=Early(rows=1_500_000)), PLAN),
    ],
    ids=["global", "tumbling"],
)
def test_early_results_of_eight_times_the_managed_memory(
    tmp_path: Path, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early results come once, of most keys; the results of all come at the end."""
    keys = 2_100_000
    assert keys * ROW_BYTES >= 7 * MANAGED_BYTES
    output = opened(operator, tmp_path, monkeypatch)
    held = feed(operator, np.random.default_rng(1).permutation(keys), 5)
    early = output.rows
    assert early == 1_500_000
    operator.on_watermark(WATERMARK_MAX)
    held.append(anonymous_bytes())
    assert output.rows == output.total == keys + early
    operator.close()
    assert_flat(held)


def test_rows_of_a_join_of_eight_times_the_managed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row in eight meets another. All others leave alone, in the order of their times."""
    keys, steps = 2_100_000, 8
    assert keys * (ROW_BYTES + 8) >= 8 * MANAGED_BYTES
    operator = IntervalJoin(LEFT_JOIN, Interval(-steps * PANE_MS, steps * PANE_MS))
    output = opened(operator, tmp_path, monkeypatch)
    rng, held = np.random.default_rng(1), []
    parts = np.array_split(rng.permutation(keys), steps)
    for part in parts:
        held += feed(operator, part, len(held))
    held += feed(operator, parts[2], len(held), 1)
    operator.on_watermark(WATERMARK_MAX)
    held.append(anonymous_bytes())
    assert output.rows == output.total == keys
    operator.close()
    assert_flat(held)


def test_versions_of_eight_times_the_managed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of each key, half of them replaced once, and rows for one key in sixteen each time.

    Versions are replaced in both halves, as the first ones that are replaced take memory once.
    """
    keys, steps = 2_100_000, 8
    assert keys * (ROW_BYTES + 8) >= 8 * MANAGED_BYTES
    operator = AsOfJoin(LEFT_JOIN)
    output = opened(operator, tmp_path, monkeypatch)
    rng, held = np.random.default_rng(1), []
    parts = np.array_split(rng.permutation(keys), steps)
    rows = 0
    for part in (parts[n] for n in (0, 1, 0, 2, 3, 1, 4, 5, 2, 6, 7, 3)):
        held += feed(operator, part, len(held), 1)
        held += feed(operator, part[::16], len(held))
        operator.on_watermark(len(held))
        held.append(anonymous_bytes())
        rows += len(part[::16])
        assert output.rows == output.total == rows
    operator.close()
    assert_flat(held)


def test_a_window_of_a_join_of_eight_times_the_managed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of one window. One on the left in eight meets another."""
    keys, steps = 2_100_000, 8
    assert keys * (ROW_BYTES + 8) >= 8 * MANAGED_BYTES
    operator = WindowJoin(LEFT_JOIN, tumbling("1m"))
    output = opened(operator, tmp_path, monkeypatch)
    rng, held = np.random.default_rng(1), []
    parts = np.array_split(rng.permutation(keys), steps)
    for part in parts:
        held += feed(operator, part, len(held))
    held += feed(operator, parts[2], len(held), 1)
    operator.on_watermark(WATERMARK_MAX)
    held.append(anonymous_bytes())
    assert output.rows == output.total == keys
    operator.close()
    assert_flat(held)


class Remind(hg.KeyedProcess[int, Any, int]):
    """Sets a timer for each key, at one of few times."""

    def on_record(self, record: Any, ctx: hg.Context[int]) -> None:
        assert ctx.timestamp is not None
        ctx.event_time.at(ctx.timestamp * 1_000 + record.k % 997)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[int]:
        yield ctx.key


@LONG
def test_timers_of_eight_times_the_managed_memory(tmp_path: Path) -> None:
    """Half of the timers are moved once, on disk. All fire at the end, in the order of time."""
    keys, steps = 360_000, 8
    assert keys * 375 >= 8 * MANAGED_BYTES  # as they are in memory
    rows = hg.Job("timers").read(from_list([], schema={"k": "long", "n": "long"}), name="in")
    stream = rows.event_time("n").key_by("k").process(Remind(), name="timers")
    operator, held = output_of(stream).node.factory(), list[int]()
    fired, latest = 0, 0

    def emit(batch: ObjectBatch) -> None:
        nonlocal fired, latest
        assert batch.timestamps is not None
        assert latest <= batch.timestamps[0]
        assert (np.diff(batch.timestamps) >= 0).all()
        fired, latest = fired + len(batch), batch.timestamps[-1]
        held.append(anonymous_bytes())

    operator.output = SimpleNamespace(emit=emit, emit_watermark=lambda timestamp: None)  # type: ignore[assignment]
    operator.open(
        operator_context(
            options={
                "state.backend.type": "rocksdb",
                "taskmanager.memory.managed.size": f"{MANAGED_BYTES // MIB}mb",
                "headgate.task.slice": "1d",
            },
            local_directory=lambda: tmp_path,
        )
    )
    parts = np.array_split(np.random.default_rng(1).permutation(keys), steps)
    for number, part in enumerate([*parts, *parts[:4]]):
        held += feed(operator, part, number)
    operator.on_watermark(WATERMARK_MAX)
    assert fired == keys
    operator.close()
    assert_flat(held)


def test_reduced_values_of_eight_times_the_managed_memory(tmp_path: Path) -> None:
    keys, size = 200_000, 700
    assert keys * size >= 8 * MANAGED_BYTES
    operator = ReduceOperator(longer, lambda record: record[0])
    operator.output = SimpleNamespace(emit=lambda batch: None)  # type: ignore[assignment]
    operator.open(
        operator_context(
            options={
                "state.backend.type": "rocksdb",
                "taskmanager.memory.managed.size": f"{MANAGED_BYTES // MIB}mb",
            },
            local_directory=lambda: tmp_path,
        )
    )
    rng, held = np.random.default_rng(1), []
    for low in range(0, keys, BATCH_ROWS):
        records = [(key, rng.bytes(size)) for key in range(low, low + BATCH_ROWS)]
        operator.process(ObjectBatch(records), 0)
        held.append(anonymous_bytes())
    operator.close()
    assert_flat(held)


def longer(value: tuple[int, bytes], record: tuple[int, bytes]) -> tuple[int, bytes]:
    return max(value, record, key=lambda one: len(one[1]))
