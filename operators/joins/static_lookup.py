"""Lookup join with a static table: each batch is looked up as a whole, in an index made at the start."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, UsageError
from ...state.slots.key_index import KeyHasher, stored_keys
from ...state.slots.table import Rows, SlotTable
from ..aggregation.keyed_aggregate import identity_seed
from ..base import Operator, OperatorContext
from ..elements import Batch, ColumnBatch
from ..origin import Origin
from ..rows import column_batch
from .columns import plain_rows
from .static_table import Duplicates, StaticTable

if TYPE_CHECKING:
    pass

LookupHow: TypeAlias = Literal["inner", "left"]


class TableIndex:
    """Rows of a table by their keys, which are identified by 128-bit hashes.

    Raises:
        UsageError: two rows have the same key, and `duplicates` is `fail`.
    """

    def __init__(self, keys: Sequence[pa.Array], seed: int, duplicates: Duplicates) -> None:
        self._hasher = KeyHasher([key.type for key in keys], seed, dense=False)
        self._slots = SlotTable()
        slots, _ = self._slots.lookup(*self._hasher.identify(keys))
        rows = np.arange(len(slots), dtype=np.int64)
        # Of several values for one slot numpy keeps the last.
        order = slice(None, None, -1) if duplicates == "first" else slice(None)
        self._rows = np.empty(self._slots.size + 1, np.int64)
        self._rows[slots[order]] = rows[order]
        self._rows[-1] = -1  # slot -1 (no such key) leads here
        if duplicates == "fail" and self._slots.size < len(rows):
            first = int(np.flatnonzero(self._rows[slots] != rows)[0])
            raise UsageError(
                "a static table has two rows of the same key "
                f"key=`{', '.join(str(key[first].as_py()) for key in keys)}`",
                fix='correct the file, or choose the row with duplicates="first" or "last"',
            )

    def rows_of(self, keys: Sequence[pa.Array]) -> Rows:
        """Return the row of each key, -1 where there is none."""
        columns = [stored_keys(key) for key in keys]
        found: Rows = self._rows[self._slots.find(*self._hasher.identify(columns))]
        return found


@dataclass(frozen=True)
class TableLookupStep:
    """The parts of the lookup step. Picklable.

    Attributes:
        keys: the stream's columns that are looked up, in the order of the table's keys.
        own: the stream's columns.
        result: these, followed by those of the table.
    """

    table: StaticTable
    keys: tuple[str, ...]
    how: LookupHow
    own: pa.Schema
    result: pa.Schema
    origin: Origin


class TableLookup(Operator):
    """Looks up each batch in a table held from start to end; there is no state."""

    def __init__(self, step: TableLookupStep) -> None:
        self._step = step

    def open(self, context: OperatorContext) -> Awaitable[None]:
        super().open(context)
        return self._load()

    async def _load(self) -> None:
        # The subtask, and with it the job, starts once the whole table is read.
        self._index, self._columns = await self.context.run_in_thread(self._read)

    def _read(self) -> tuple[TableIndex, list[pa.Array]]:
        """Read the table, in a thread. Key columns are kept only if they are part of the result."""
        table = self._step.table
        try:
            rows = table.read(self.context.options)
            keys = [rows.column(name) for name in table.keys]
            index = TableIndex(keys, identity_seed(self.context.job_name), table.duplicates)
        except HeadgateError as error:
            error.where = "\n  for ".join(filter(None, (error.where, str(self._step.origin))))
            raise
        self.context.logger.info(
            "static table read table=`%s` rows=`%d` bytes=`%d`",
            table.describe(), rows.num_rows, rows.nbytes,
        )  # fmt: skip
        return index, [rows.column(name) for name in table.columns]

    def process(self, batch: Batch, input_index: int) -> None:
        step, came = self._step, column_batch(batch)
        rows = self._index.rows_of([came.data.column(name) for name in step.keys])
        missing = rows < 0
        if step.how == "inner" and missing.any():
            met = np.flatnonzero(~missing)
            came, rows = came.take(met), rows[met]
            missing = missing[met]
        own = plain_rows(came.data, step.own).columns
        which = pa.array(rows, mask=missing)
        found = [column.take(which) for column in self._columns]
        data = pa.RecordBatch.from_arrays([*own, *found], schema=step.result)
        self.output.emit(ColumnBatch(data, came.timestamps))
