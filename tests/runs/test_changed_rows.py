"""The rows that have changed since early results were last emitted: in the delta, in memory, in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.aggregation.aggregates import AggregatePlan, sum
from headgate.operators.aggregation.keyed_aggregate import KeyedRows
from headgate.operators.aggregation.spilling_group import AggregateSpace, SpillingGroup
from headgate.operators.windows.panes import early
from headgate.operators.windows.panes.early import ChangedRows
from headgate.tests.support.operators import operator_context
from headgate.tests.support.spilled_windows import ROCKSDB

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])


class Table:
    """A table of sums on disk, and what has changed in it."""

    def __init__(self, directory: Path) -> None:
        self.plan = AggregatePlan(("k",), {"n": sum("n")}, SCHEMA)
        context = operator_context(options=ROCKSDB, local_directory=lambda: directory)
        self.space = AggregateSpace(self.plan, context, "sums")
        self.group = SpillingGroup(self.space)
        self.changed = ChangedRows(self.group.table, self.space)
        self.sums: dict[int, int] = {}
        self.wanted: set[int] = set()

    def add(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.sums[key] = self.sums.get(key, 0) + key
        self.wanted.update(keys)
        data = pa.RecordBatch.from_arrays([pa.array(keys, pa.int64())] * 2, schema=SCHEMA)
        rows = KeyedRows(self.plan, self.space.hasher, data)
        slots = self.group.group.add(rows, None)
        assert slots is not None
        self.changed.note(slots)
        delta = self.group.table.delta
        self.group.settle()
        self.changed.after_write(delta)

    def check(self) -> None:
        """Check that each changed row comes once, as it is now."""
        found = pa.concat_tables(list(self.changed.take()))
        sums = dict(zip(found["k"].to_pylist(), found["n"].to_pylist(), strict=True))
        assert len(sums) == found.num_rows
        assert sums == {key: self.sums[key] for key in self.wanted}
        self.wanted.clear()

    def files(self) -> list[Path]:
        return list(self.space.directory.glob("*.changed"))

    def close(self) -> None:
        self.changed.close()
        self.group.close()
        self.space.close()


@pytest.fixture
def table(tmp_path: Path):
    table = Table(tmp_path)
    yield table
    table.close()
    assert not table.files()


def test_each_changed_row_comes_once_as_it_is_now(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "_PORTION", 100)
    rng, most = np.random.default_rng(3), 0
    for step in range(60):
        table.add(rng.integers(0, rng.choice([50, 4_000]), 300).tolist())
        most = np.maximum(most, len(table.files()))
        if step % 20 == 13:
            table.check()
            assert not table.files()
    assert most > 1
    table.check()
    assert not list(table.changed.take())


def test_files_take_no_more_than_the_changed_rows(table: Table) -> None:
    """The same rows change all the time, and no results are emitted."""
    for low in [*range(0, 3_000, 300)] * 12:
        table.add(range(low, low + 300))
    assert 0 < np.sum([file.stat().st_size for file in table.files()]) < 5 * 16 * 3_000
    table.check()


def test_a_full_disk_is_told(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.space.directory.rename(table.space.directory.with_name("elsewhere"))
    with pytest.raises(early.StorageError, match="local disk"):
        table.changed.add(np.arange(10_000, dtype=np.uint64), None)
    table.space.directory.with_name("elsewhere").rename(table.space.directory)
