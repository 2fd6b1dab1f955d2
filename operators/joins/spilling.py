"""Rows of a join that wait and do not fit into memory: a `Side` over sorted runs.

Rows wait in a `Side` in memory at first, and move here once it has used up its part of the budget. From
then on such a side is the delta over the runs. New rows of the other side meet the rows in memory as
before, and those on disk, which are looked up by the hash of their key, the first lane of their identity.
The second lane is of the key and the row's number.

Rows never change, except that outer joins mark those that have matched. A row on disk that is marked
becomes part of the delta again, and its old form is hidden by it. Outer joins look up the rows on disk
whose time has come (`DueRows`), and emit those that are not marked; all rows are then left out by merges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.hashing import Hashes, distinct, hash_columns
from ...state.runs.cut import decoded_meta
from ...state.runs.layout import RowLayout
from ...state.slots.key_index import BatchKeys, KeyIndex, plain_column
from ...state.slots.table import Slots, SlotTable
from ...state.snapshot import CollectedFiles, FilesCut, RestoredFiles
from ...state.values import Index
from ..base import OperatorContext
from ..elements import WATERMARK_MIN
from ..spilling_space import DueRows, ExpiryBound, SpillingSpace, is_in_portion
from .columns import MATCHED_COLUMN, ROW_COLUMN, TIME_COLUMN
from .side import Side
from .tables import ROW_KEYS, row_schema

META_VERSION: Final = 1
_ROW_BYTES: Final = 64
"""The bytes of a row in memory beside its columns: its number, time, chain, order and flags."""


class RowsMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the files of a cut.

    Attributes:
        next_row: a number above those of all rows.
        runs: the description of the runs.
    """

    version: int
    next_row: int
    runs: bytes


class RowDelta:
    """The rows of a side that are not in runs."""

    def __init__(
        self, space: SpillingSpace, schema: pa.Schema, keys: tuple[str, ...], *, marks: bool
    ) -> None:
        self._space, self._schema, self._keys, self._marks = space, schema, keys, marks
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.side = Side(self._schema, marks=self._marks)
        self._known = SlotTable()
        """The identities of rows that runs have, too. Lanes are exchanged, as in `CellHasher`."""
        self._written = False

    @property
    def size(self) -> int:
        """The number of rows, including released ones."""
        return self.side.size

    @property
    def nbytes(self) -> int:
        """The bytes of the rows."""
        return self.side.store.nbytes + self.side.size * _ROW_BYTES

    @property
    def held_bytes(self) -> int:
        """The bytes that are left after `clear`."""
        return 0

    def hide(self, rows: pa.Table) -> None:
        """Note that rows from runs are here from now on."""
        hashes, checks = self._space.identify_rows(rows)
        assert checks is not None
        self._known.lookup(checks, hashes)

    def freeze(self) -> None:
        """Note that this delta is being written: any of its rows may be in runs at any time."""
        self._written = True

    def find(self, hashes: Hashes, checks: Hashes | None) -> Slots:
        """Return a number that is not negative for each row that is here, and may be in runs, too."""
        assert checks is not None
        if self._written:
            self._written = False
            own_hashes, own_checks = self.lanes()
            assert own_checks is not None
            self._known.lookup(own_checks, own_hashes)
        return self._known.find(checks, hashes)

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each waiting row."""
        rows = self.side.alive()
        ids, _, _ = self.side.described(rows)
        return self._space.identify([*self._key_columns(rows), pa.array(ids)])

    def times_and_hashes(self) -> tuple[Index, Hashes]:
        """Return the times of the waiting rows, and the hashes of their keys."""
        rows = self.side.alive()
        _, times, _ = self.side.described(rows)
        return times, hash_columns(self._key_columns(rows))

    def _key_columns(self, rows: Index) -> list[pa.Array]:
        pieces = pa.Table.from_batches(self.side.store.pieces, self._schema)
        indices = pa.array(rows)
        return [plain_column(pieces.column(key)).take(indices) for key in self._keys]

    def table(self, slots: Index) -> pa.Table:
        """Return some of the waiting rows."""
        rows = self.side.alive()[slots]
        ids, times, matched = self.side.described(rows)
        columns = [*self.side.store.take(rows), pa.array(ids), pa.array(times)]
        if self._marks:
            columns.append(pa.array(matched))
        return pa.Table.from_arrays(columns, schema=self._space.shape.schema)


class SpillingSide:
    """The rows of one side. All methods run in the mailbox, or in a thread that it waits for.

    Args:
        schema: the schema of the rows.
        keys: the key columns.
        marks: whether rows can be marked as matched.

    Attributes:
        active: rows are here, and no longer in a side in memory.
    """

    def __init__(
        self,
        context: OperatorContext,
        name: str,
        schema: pa.Schema,
        keys: tuple[str, ...],
        *,
        marks: bool,
    ) -> None:
        self.active = False
        self._marks, self._schema = marks, schema
        self._expiry = ExpiryBound(TIME_COLUMN, context.max_parallelism)
        added = [pa.field(ROW_COLUMN, pa.int64(), False), pa.field(TIME_COLUMN, pa.int64(), False)]
        if marks:
            added.append(pa.field(MATCHED_COLUMN, pa.bool_(), False))
        self._space = space = SpillingSpace(
            context,
            name,
            pa.schema([field.remove_metadata() for field in [*schema, *added]]),
            [schema.field(key) for key in keys],
            ROW_COLUMN,
            self._expiry,
        )
        self._table = space.new_table(lambda: RowDelta(space, schema, keys, marks=marks))
        self._due = DueRows(
            self._table, lambda records: RowLayout.numbers(records, TIME_COLUMN), space.share
        )
        self._released_before = WATERMARK_MIN + 1
        self._next_row = 0

    # --- rows ----------------------------------------------------------------------------------

    @property
    def side(self) -> Side:
        """The rows in memory, to which new ones are added until `settle`."""
        return self._table.delta.side

    @property
    def rows_on_disk(self) -> int:
        """The number of rows on disk, including released ones that merges have not left out yet."""
        return self._table.rows_in_runs

    def settle(self, side: Side) -> Side:
        """Enforce the memory budget after each batch; return the rows in memory.

        Args:
            side: the rows in memory until now.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        delta = self._table.delta
        if not self.active:
            if side.nbytes <= self._space.room:
                return side
            self.active, delta.side = True, side
        self._table.settle()
        return self._after_write(delta)

    def _after_write(self, delta: RowDelta) -> Side:
        if self._table.delta is not delta:
            self._next_row = max(self._next_row, delta.side.next_id)
            delta.freeze()
            if self._marks:
                self._due.add(*delta.times_and_hashes())
        self.side.next_id = max(self.side.next_id, self._next_row)
        return self.side

    def meeting(
        self, keys: list[pa.Array], low: int, high: int
    ) -> tuple[Side, pa.Table, KeyIndex] | None:
        """Return rows on disk with these keys and a time from `low` to `high`; None if there are none.

        They come as a side whose slots are of the index, and as they are stored.
        """
        rows = self._rows_of(distinct(hash_columns(keys)), low, high)
        if rows is None:
            return None
        rows = rows.take(pa.array(np.argsort(_numbers(rows, ROW_COLUMN), kind="stable")))
        index, slots = self._space.key_index(self._space.keys_of(rows))
        side = Side(self._schema, marks=self._marks)
        side.load(self._batch(rows), *self._described(rows, slots, index.size))
        return side, rows, index

    def slots(self, index: KeyIndex, keys: list[pa.Array]) -> Index:
        """Return the slots of keys in an index that `meeting` returned; new keys are added to it."""
        return index.lookup(BatchKeys(self._space.key_hasher, keys)).astype(np.int64)

    def take_back(self, rows: pa.Table, slots: Index, keys: int) -> None:
        """Make rows from disk that have now matched part of the delta, with these slots of `keys`."""
        at = rows.schema.get_field_index(MATCHED_COLUMN)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(np.ones(len(slots), np.bool_)))
        self.side.load(self._batch(rows), *self._described(rows, slots, keys))
        self._table.delta.hide(rows)

    def keys_of(self, rows: pa.Table) -> list[pa.Array]:
        """Return the key columns of stored rows."""
        return self._space.keys_of(rows)

    def _batch(self, rows: pa.Table) -> pa.RecordBatch:
        columns = [plain_column(rows.column(name)) for name in self._schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _described(
        self, rows: pa.Table, slots: Index, keys: int
    ) -> tuple[Index, Index, int, Index, Mask | None]:
        matched = None
        if self._marks:
            matched = plain_column(rows.column(MATCHED_COLUMN)).to_numpy(zero_copy_only=False)
        return _numbers(rows, TIME_COLUMN), slots, keys, _numbers(rows, ROW_COLUMN), matched

    def _rows_of(self, hashes: Hashes, low: int, high: int) -> pa.Table | None:
        """Return the waiting rows on disk with these hashes and times; None if there are none."""
        found = self._table.lookup_all(hashes, TIME_COLUMN, low, high)
        if found is None:
            return None
        times = _numbers(found.table, TIME_COLUMN)
        expired = self._expiry.has_expired(hashes[found.positions], times)
        rows = found.table.take(pa.array(np.flatnonzero(~expired)))
        return rows if rows.num_rows else None

    # --- time ----------------------------------------------------------------------------------

    def release(self, before: int) -> Iterator[tuple[list[pa.Array], Index]]:
        """Release the rows before a time; yield columns and times of those that never matched, if marked.

        Those in memory are not among them. All must be taken.
        """
        if self._marks:
            for times, hashes in self._due.due(self._released_before - 1, before - 1):
                rows = self._rows_of(distinct(hashes), int(times[0]), int(times[-1]))
                if rows is None:
                    continue
                own = hash_columns(self._space.keys_of(rows))
                alone = is_in_portion((times, hashes), _numbers(rows, TIME_COLUMN), own)
                alone &= ~plain_column(rows.column(MATCHED_COLUMN)).to_numpy(zero_copy_only=False)
                chosen = np.flatnonzero(alone)
                if chosen.size:
                    chosen = chosen[np.argsort(_numbers(rows, TIME_COLUMN)[chosen], kind="stable")]
                    rows = rows.take(pa.array(chosen))
                    yield list(self._batch(rows).columns), _numbers(rows, TIME_COLUMN)
        self.released(before)

    def released(self, before: int, further: Index | None = None) -> None:
        """Note that rows before a time were released, of some key groups also `further` ones."""
        self._released_before = max(WATERMARK_MIN + 1, before)
        behind = None if further is None else np.maximum(further, WATERMARK_MIN + 1) - 1
        self._expiry.move(self._released_before - 1, behind)

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self) -> tuple[FilesCut, Side]:
        """Return a cut of all waiting rows, and the rows in memory from now on."""
        delta = self._table.delta
        cut = self._table.snapshot(expired=self._expiry.now())
        side = self._after_write(delta)
        next_row = side.next_id

        def collect() -> CollectedFiles:
            collected = cut.collect()
            meta = RowsMeta(version=META_VERSION, next_row=next_row, runs=collected.meta)
            return CollectedFiles(collected.files, msgspec.msgpack.encode(meta))

        def tables() -> Iterator[pa.Table]:
            schema = row_schema(self._schema, marks=self._marks)
            for rows in cut.tables():
                yield rows.select(schema.names).cast(schema)

        return replace(cut, collect=collect, tables=tables, keys=ROW_KEYS), side

    def restore_files(self, restored: Sequence[RestoredFiles]) -> Side:
        """Restore runs, before anything else; return the rows in memory.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        self.active = True
        runs = []
        for one in restored:
            meta = decoded_meta(one.meta, RowsMeta, META_VERSION, "row")
            runs.append(replace(one, meta=meta.runs))
            self._next_row = max(self._next_row, meta.next_row)
        self._table.restore_files(runs)
        self._due.forget()
        return self._after_write(self._table.delta)

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self._table.close()
        self._space.close()


def _numbers(rows: pa.Table, column: str) -> Index:
    numbers: Index = plain_column(rows.column(column)).to_numpy()
    return numbers
