"""Windows over runs give what those in memory give, also after snapshots, restores and rescales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.windows import small_windows, tumbling, windowed_aggregate
from headgate.operators.windows.kinds import TumblingWindow
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.tests.support import spilled_windows
from headgate.tests.support.spilled_windows import (
    KEYS,
    ROCKSDB,
    ROOMY,
    SCHEMA,
    batch,
    check_against_memory,
    check_files_fit,
    check_restored_in_a_thread,
    plan,
)

WINDOW = TumblingWindow(100, 7, 150)


@pytest.fixture(autouse=True, params=[0, 20, 512], ids=["own", "mixed", "small"])
def small_rows(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in tables of their own, windows of both kinds, and all in the shared table."""
    monkeypatch.setattr(tumbling, "SMALL_ROWS", request.param)
    monkeypatch.setattr(small_windows, "SMALL_ROWS", request.param)


class Side(spilled_windows.Side):
    """The subtasks of tumbling windows."""

    states = ("windows",)

    def new_operator(self) -> TumblingAggregate:
        return TumblingAggregate(WINDOW, plan(self.keys))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("seed", "options"), [(1, ROCKSDB), (2, ROOMY)])
def test_results_and_snapshots_are_those_of_memory(
    tmp_path: Path, keys: tuple[str, ...], seed: int, options: dict[str, str]
) -> None:
    spilled = check_against_memory(Side, tmp_path, keys, seed, options)
    assert spilled > 5 or options is ROOMY or small_windows.SMALL_ROWS == 512


def test_a_fired_window_comes_in_pieces_and_drops_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tumbling, "EMIT_ROWS_MAX", 500)
    monkeypatch.setattr(windowed_aggregate, "EMIT_ROWS_MAX", 500)
    side = Side(tmp_path, ("number",), 1, **ROCKSDB)
    rows = 5_000
    for low in range(0, rows, 1_000):
        number = pa.array(np.arange(low, low + 1_000))
        columns = [pa.nulls(1_000, pa.string()), number, number]
        columns += [pa.nulls(1_000, type_) for type_ in SCHEMA.types[3:]]
        data = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        side.process(data, np.full(1_000, 10))
    assert list(tmp_path.rglob("*.arrow"))
    side.watermark(WINDOW.due_at(WINDOW.start_of(10)))
    assert len(side.take()) == rows
    assert side.outputs[0].largest <= 500
    side.watermark(WINDOW.due_at(WINDOW.start_of(10)) + WINDOW.allowed_lateness_ms)
    side.watermark(WATERMARK_MAX)
    operator = side.operators[0]
    operator._spilling.settle(operator._small)
    side.close()
    assert not list(tmp_path.rglob("*.arrow"))


def test_deltas_of_all_windows_keep_to_the_budget(tmp_path: Path) -> None:
    side, rng = Side(tmp_path, ("name",), 1, **ROCKSDB), np.random.default_rng(4)
    for step in range(40):
        side.process(*batch(rng, step * 20))
        spilling, small = side.operators[0]._spilling, side.operators[0]._small
        if not spilling._tables:
            continue
        deltas = [table.table.delta.nbytes for table in spilling._tables.values()]
        assert np.sum(deltas) <= 12 << 10
        assert small.nbytes <= 3 << 10 or small_windows.SMALL_ROWS > 0
    side.close()


def test_files_are_read_in_a_thread(tmp_path: Path) -> None:
    check_restored_in_a_thread(
        Side, tmp_path, lambda one: bool(list(one._spilling) or one._small.open)
    )


def test_files_need_their_backend_and_window(tmp_path: Path) -> None:
    check_files_fit(Side, tmp_path, TumblingWindow(50))
