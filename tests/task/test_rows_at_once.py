"""How many rows a source is asked for at once depends on how fast the chain behind it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
from headgate.connectors import blackhole
from headgate.connectors.rows import RowSource
from headgate.operators.elements import ColumnBatch


class NotingSource(RowSource):
    """Writes down how many rows of each batch are wanted."""

    schema = pa.schema([("n", pa.int64())])

    def __init__(self, rows: int, notes: Path) -> None:
        super().__init__(rows, None, 32_768, splits=1)
        self.notes = notes

    def make(self, first: int, count: int) -> ColumnBatch:
        with self.notes.open("a") as file:
            file.write(f"{count}\n")
        return ColumnBatch(pa.record_batch([np.arange(first, first + count)], self.schema))

    def describe(self) -> str:
        return "noting()"


def slow(batch: Any) -> Any:
    time.sleep(2e-6 * len(batch))
    return batch


def wanted(tmp_path: Path, rows: int, step: Any) -> list[int]:
    notes = tmp_path / "notes"
    job = hg.Job("wanted", options={"headgate.task.slice": "5ms"})
    job.read(NotingSource(rows, notes), name="in").map_batches(step).write(blackhole(), name="out")
    job.run()
    found = [int(line) for line in notes.read_text().split()]
    assert sum(found) == rows
    return found


def test_a_fast_chain_gets_whole_batches(tmp_path: Path) -> None:
    assert max(wanted(tmp_path, 500_000, lambda batch: batch)) == 32_768


def test_a_slow_chain_gets_small_batches_so_that_barriers_do_not_wait_long(tmp_path: Path) -> None:
    assert max(wanted(tmp_path, 60_000, slow)) == 8_192
