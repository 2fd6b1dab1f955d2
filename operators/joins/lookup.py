"""Lookup joins: each record with the entry for its key, of a function or of a static table.

A coroutine function is called behind a cache. A static table has an index that is made at the
start, in which each batch is looked up as a whole.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
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

CACHE_ROWS: Final = 10_000
CACHE_FOR: Final = "1m"
LookupFunction: TypeAlias = Callable[[Any], Awaitable[Any]]
"""A function from a key to a record with the columns of `into`, or None."""


class LookupService(Protocol):
    """A lookup function that says which columns it finds, such as that of a connector."""

    into: pa.Schema

    async def __call__(self, key: Any) -> Any:
        """Return a record with the columns of `into`, or None."""
        ...


class Cache:
    """An LRU cache of answers by key, each for a limited time. Times are those of the event loop."""

    def __init__(self, rows: int, keep_s: float) -> None:
        self._rows, self._keep_s = rows, keep_s
        self._found: OrderedDict[Any, tuple[float, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Any) -> tuple[Any] | None:
        """Return the value in a tuple, or None if there is none or it has expired."""
        known = self._found.get(key)
        if known is None:
            return None
        since, value = known
        if asyncio.get_running_loop().time() - since >= self._keep_s:
            del self._found[key]
            return None
        self._found.move_to_end(key)
        return (value,)

    def put(self, key: Any, value: Any) -> None:
        """Store a value; if there are too many, the least recently used key is dropped."""
        self._found[key] = (asyncio.get_running_loop().time(), value)
        self._found.move_to_end(key)
        if len(self._found) > self._rows:
            self._found.popitem(last=False)


class LookUp:
    """The coroutine function of the step: it returns a record's values followed by those found.

    A copy for another process begins with an empty cache.
    """

    def __init__(
        self,
        function: LookupFunction,
        key: tuple[str, ...],
        own: tuple[str, ...],
        found: tuple[str, ...],
        cache_rows: int,
        keep_s: float,
    ) -> None:
        self._function, self._key, self._own, self._found = function, key, own, found
        self._cache_rows, self._keep_s = cache_rows, keep_s
        self.cache = Cache(cache_rows, keep_s)

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self._function, self._key, self._own, self._found, self._cache_rows, self._keep_s)
        return LookUp, values

    async def __call__(self, record: Any) -> tuple[Any, ...]:
        values = [_value(record, name) for name in self._key]
        key = values[0] if len(values) == 1 else tuple(values)
        known = self.cache.get(key)
        if known is None:
            found = await self._function(key)
            self.cache.put(key, found)
        else:
            (found,) = known
        added = [None if found is None else _value(found, name) for name in self._found]
        return (*(_value(record, name) for name in self._own), *added)


def _value(record: Any, name: str) -> Any:
    """Return a column of a record: a mapping, a generated row, or an object of the user's."""
    if isinstance(record, Mapping):
        return record[name]
    try:
        return getattr(record, name)
    except AttributeError:
        return record[name]  # a generated row, and a name that is no attribute


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
        # If a slot has several values, numpy keeps the last one.
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


class TableLookupStep(msgspec.Struct, frozen=True):
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
