"""Lookup join with a static table: each batch is looked up as a whole, in an index made at the start."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, PlanError, UsageError
from ...state.slots.key_index import KeyHasher, stored_keys
from ...state.slots.table import Rows, SlotTable
from ..base import Operator, OperatorContext
from ..elements import Batch, ColumnBatch
from ..graph import Origin
from ..keyed_aggregate import identity_seed
from ..rows import column_batch
from ..schema import unknown_column
from ..stream_base import StreamBase
from .columns import free_name, plain_rows, plain_schema
from .static_table import Duplicates, StaticTable

if TYPE_CHECKING:
    from ..stream import Stream

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


def add_table_lookup(
    stream: StreamBase[Any],
    key: str | tuple[str, ...],
    table: StaticTable,
    how: LookupHow,
    suffix: str | None,
    name: str,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `lookup` with a table.

    Raises:
        PlanError: a column does not exist, key types differ, or names clash.
    """
    own = plain_schema(stream._columns("lookup", origin))
    keys = (key,) if isinstance(key, str) else tuple(key)
    _check_keys(own, keys, table, stream.name, origin)
    if how not in get_args(LookupHow):
        raise PlanError(
            f"a lookup cannot be how=`{how}`", where=str(origin), fix='it can be: "inner" or "left"'
        )
    fields = list(own)
    for column in table.columns:
        field = table.schema.field(column)
        taken, names = [each.name for each in fields], (stream.name, table.describe())
        called = free_name(column, taken, table.columns, suffix, names, origin)
        fields.append(pa.field(called, field.type, field.nullable or how == "left"))
    step = TableLookupStep(table, keys, how, own, pa.schema(fields), origin)
    return stream._add(
        "lookup",
        name,
        origin,
        partial(TableLookup, step),
        schema=step.result,
        detail=f"{how}, {', '.join(keys)} in {table.describe()}",
    )


def _check_keys(
    own: pa.Schema, keys: tuple[str, ...], table: StaticTable, stream: str, origin: Origin
) -> None:
    """Raise PlanError unless the keys have equal types and so can match."""
    for column in keys:
        if column not in own.names:
            raise unknown_column(column, own, "lookup", str(origin))
    fields = [own.field(key) for key in keys], [table.schema.field(key) for key in table.keys]
    if [field.type for field in fields[0]] != [field.type for field in fields[1]]:
        ours, theirs = (", ".join(f"{field.name}: {field.type}" for field in of) for of in fields)
        raise PlanError(
            f"`{stream}` is looked up by ({ours}), and the key of the table is ({theirs}): equal keys "
            "would not match",
            where=str(origin),
            fix="name columns equal in number and types; schema= of the table's source sets the types of "
            "its columns, CAST in select makes the stream's alike",
        )
