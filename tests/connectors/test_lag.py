"""The lag that sources report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headgate.connectors import (
    csv_source,
    from_list,
    hybrid_source,
    numbers,
    parquet_source,
    throttle,
)
from headgate.operators.source import SourceReader
from headgate.testing.connectors import make_context, open_reader


def opened(source: Any, clock: Any = None) -> SourceReader:
    context = make_context()
    if clock is not None:
        context.clock = clock
    return open_reader(source, source.splits(1), context, lambda batch: None)


def test_what_is_left_of_a_list() -> None:
    reader = opened(from_list(list(range(10)), batch_rows=4, splits=2))
    assert reader.lag_records() == {"split 0": 5, "split 1": 5}
    reader.poll()
    assert reader.lag_records() == {"split 0": 1, "split 1": 5}
    while reader.poll() is not None:
        pass
    assert reader.lag_records() == {}
    assert reader.lag_s() is None


def test_what_is_left_of_generated_rows() -> None:
    reader = opened(numbers(10, batch_rows=4, splits=2))
    assert reader.lag_records() == {"split 0": 6, "split 1": 4}
    reader.poll()
    assert reader.lag_records() == {"split 0": 2, "split 1": 4}


def test_rows_with_a_rate_are_behind_once_they_are_due() -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], now_ms=lambda: 0)
    reader = opened(numbers(rate=10, batch_rows=1, splits=2), clock)
    assert reader.lag_records() == {"split 0": 1, "split 1": 0}
    assert reader.lag_s() == 0
    now[0] += 0.95
    assert sum((reader.lag_records() or {}).values()) == 10
    assert reader.lag_s() == pytest.approx(0.95)
    while reader.poll() is not None:
        pass
    assert sum((reader.lag_records() or {}).values()) == 0
    assert reader.lag_s() == 0


def test_rows_without_end_and_rate_are_never_behind() -> None:
    assert opened(numbers()).lag_records() is None


def test_rows_and_bytes_of_files(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(7))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    rows = opened(parquet_source(str(tmp_path / "a.parquet")))
    assert rows.lag_records() == {str(tmp_path / "a.parquet"): 7}
    assert rows.lag_bytes() is None
    text = tmp_path / "a.csv"
    text.write_text("n\n1\n2\n3\n")
    lines = opened(csv_source(str(text), {"n": "int64"}))
    assert lines.lag_records() is None
    assert lines.lag_bytes() == 6, "the header is read"


def test_those_around_others_pass_it_on(tmp_path: Path) -> None:
    history = from_list([1, 2, 3], batch_rows=1)
    assert opened(hybrid_source(history, numbers(rate=1))).lag_records() == {"split 0": 3}
    throttled = throttle(history, 5)
    assert opened(throttled).lag_records() == {"split 0": 3}
