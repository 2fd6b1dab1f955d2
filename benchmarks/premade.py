"""Batches made before the clock starts, and a source that hands them out as they are, without a copy.

Keys are drawn uniformly, values are whole numbers, event time ascends. A window's worth of keys and values
is made and used for each window again, with timestamps of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.connectors.rows import RowSource
from headgate.operators.elements import ColumnBatch

WINDOW, WINDOW_MS = "10s", 10_000
_SCATTER = 0x9E3779B97F4A7C15
"""Times this, numbers of close-together keys are spread over all of int64; no two become one."""
_START_MS = 1_735_689_600_000  # a multiple of the window


@dataclass(frozen=True)
class Premade:
    """The records to make.

    Attributes:
        keys: how many different ones.
        scattered: keys lie anywhere in int64; else they are 0 to `keys` - 1.
        window_rows: rows per window of `WINDOW`; a multiple of `batch_rows`.
        windows: how many windows there are.
        batch_rows: rows per batch.
    """

    keys: int
    scattered: bool
    window_rows: int
    windows: int
    batch_rows: int

    @property
    def rows(self) -> int:
        """Rows of all windows."""
        return self.windows * self.window_rows

    @property
    def schema(self) -> pa.Schema:
        """Columns key, price and ts."""
        stamp = pa.timestamp("ms", tz="UTC")
        return pa.schema([("key", pa.int64()), ("price", pa.int64()), ("ts", stamp)])


@lru_cache(maxsize=1)
def made(plan: Premade) -> list[ColumnBatch]:
    """All batches, in order."""
    rng = np.random.default_rng(7)
    keys = rng.integers(0, plan.keys, plan.window_rows)
    if plan.scattered:
        keys = (keys.astype(np.uint64) * np.uint64(_SCATTER)).view(np.int64)
    prices = rng.integers(1, 10_000, plan.window_rows)
    within = np.arange(plan.window_rows) * WINDOW_MS // plan.window_rows
    batches = []
    for window in range(plan.windows):
        stamps = within + (_START_MS + window * WINDOW_MS)
        columns = [pa.array(keys), pa.array(prices), pa.array(stamps).view(plan.schema[2].type)]
        whole = pa.RecordBatch.from_arrays(columns, schema=plan.schema)
        for low in range(0, plan.window_rows, plan.batch_rows):
            batches.append(ColumnBatch(whole.slice(low, plan.batch_rows)))
    return batches


def columns_of(batch: ColumnBatch) -> tuple[Any, Any, Any]:
    """Keys, prices and timestamps (ms) as numpy, without a copy."""
    key, price, stamp = (batch.data.column(name) for name in ("key", "price", "ts"))
    return key.to_numpy(), price.to_numpy(), stamp.view(pa.int64()).to_numpy()


class PremadeSource(RowSource):
    """Hands out `made(plan)`; only for jobs in this process."""

    def __init__(self, plan: Premade, columns: Sequence[str] | None = None) -> None:
        super().__init__(plan.rows, None, plan.batch_rows, splits=1)
        self._plan, self._columns = plan, columns
        self._batches: list[ColumnBatch] | None = None
        names = plan.schema.names if columns is None else columns
        self.schema = pa.schema([plan.schema.field(name) for name in names])

    def with_columns(self, columns: Sequence[str]) -> PremadeSource:
        return PremadeSource(self._plan, list(columns))

    def make(self, first: int, count: int) -> ColumnBatch:
        if self._batches is None:
            # The class came by value with the job: the batches are where the process made them.
            batches = sys.modules["premade"].made(self._plan)
            if self._columns is not None:
                batches = [ColumnBatch(batch.data.select(self._columns)) for batch in batches]
            self._batches = batches
        block, offset = divmod(first, self._plan.batch_rows)
        batch = self._batches[block]
        return batch if count == len(batch) else batch.slice(offset, count)

    def describe(self) -> str:
        return "premade()"
