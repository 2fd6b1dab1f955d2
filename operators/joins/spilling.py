"""Rows of a join that wait and do not fit into memory: sorted runs below the rows in memory.

Rows wait in memory at first, in a `Side` or in `PaneRows`, and move here once these have used up their
part of the budget. From then on they are the delta over the runs. Rows on disk are looked up by the hash of
their key, the first lane of their identity. The second lane is of the key and the row's number. Rows that
were released are left out by merges, which know them by their times.

**Interval joins.** New rows of the other side meet the rows in memory as before, and those on disk, which
are looked up by key. Rows never change, except that outer joins mark those that have matched. A row on disk
that is marked becomes part of the delta again, and its old form is hidden by it. Outer joins look up the
rows on disk whose time has come (`DueRows`), and emit those that are not marked.

**Temporal joins.** Rows that wait for the watermark come out of disk by their time (`DueRows`). They look
up the versions of their keys, of which merges leave out those that are no longer needed (`VersionBound`).

**Windows.** A window that fires reads the rows of both sides from end to end in the order of the hashes of
their keys, and is joined a piece at a time. A piece has all rows of its keys. Rows that come for a window
that has fired look up those of their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.hashing import Hashes, distinct, hash_columns, identity_columns
from ...state.runs.cut import decoded_meta
from ...state.runs.layout import Records, RowLayout
from ...state.runs.merge import Expired
from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import BatchKeys, KeyIndex, plain_column
from ...state.slots.table import Slots, SlotTable
from ...state.snapshot import CollectedFiles, FilesCut, RestoredFiles
from ...state.values import Index
from ..base import OperatorContext
from ..elements import WATERMARK_MAX, WATERMARK_MIN
from ..spilling_space import DueRows, ExpiryBound, SpillingSpace, is_in_portion
from .columns import MATCHED_COLUMN, ROW_COLUMN, TIME_COLUMN
from .pane_rows import PaneRows
from .row_store import HeldRows
from .side import Side
from .tables import ROW_KEYS, row_schema

META_VERSION: Final = 1
_ROW_BYTES: Final = 64
"""The bytes of a row in memory beside its columns: its number, time, chain, order and flags."""


class RowsMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of the files of a cut.

    Attributes:
        next_row: a number above those of all rows.
        runs: the description of the runs.
        panes: the panes that may have rows, in windows.
    """

    version: int
    next_row: int
    runs: bytes
    panes: list[int] = []


class MemoryRows(Protocol):
    """Rows in memory, which become the delta over runs."""

    schema: pa.Schema
    epoch: TableEpoch
    next_id: int

    @property
    def live(self) -> int:
        """The number of rows that wait."""
        ...

    @property
    def size(self) -> int:
        """The number of rows in place."""
        ...

    @property
    def row_bytes(self) -> int:
        """The bytes of the columns of the rows in place."""
        ...

    def held(self) -> HeldRows:
        """Return the rows that wait."""
        ...


R = TypeVar("R", bound=MemoryRows)


def _bytes_of(rows: MemoryRows) -> int:
    return rows.row_bytes + rows.size * _ROW_BYTES


class RowDelta(Generic[R]):
    """The rows of a side that are not in runs.

    Args:
        keys: the key columns.
        new_rows: makes an empty container.
    """

    def __init__(
        self, space: SpillingSpace, keys: tuple[str, ...], new_rows: Callable[[], R]
    ) -> None:
        self._space, self._keys, self._new_rows = space, keys, new_rows
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = self._new_rows()
        self._known = SlotTable()
        """The identities of rows that runs have, too. Lanes are exchanged, as in `CellHasher`."""
        self._written = False

    @property
    def size(self) -> int:
        """The number of rows, including released ones."""
        return self.rows.size

    @property
    def nbytes(self) -> int:
        """The bytes of the rows."""
        return _bytes_of(self.rows)

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
        held = self.rows.held()
        return self._space.identify([*self._key_columns(held, held.places), pa.array(held.ids)])

    def between(self, low: int, high: int) -> tuple[Index, Index, Hashes]:
        """Return the slots of the rows with a time from `low` to `high`, their times, and the hashes of
        their keys.
        """
        held = self.rows.held()
        slots = np.flatnonzero((held.times >= low) & (held.times <= high))
        return slots, held.times[slots], hash_columns(self._key_columns(held, held.places[slots]))

    def _key_columns(self, held: HeldRows, places: Index) -> list[pa.Array]:
        pieces = pa.Table.from_batches(held.store.pieces, self.rows.schema)
        indices = pa.array(places)
        return [plain_column(pieces.column(key)).take(indices) for key in self._keys]

    def table(self, slots: Index) -> pa.Table:
        """Return some of the waiting rows."""
        held, schema = self.rows.held(), self._space.shape.schema
        columns = held.store.take(held.places[slots])
        columns += [pa.array(held.ids[slots]), pa.array(held.times[slots])]
        if held.matched is not None:
            columns.append(pa.array(held.matched[slots]))
        if len(columns) < len(schema):
            columns.append(pa.array(_key_checks(self._key_columns(held, held.places[slots]))))
        return pa.Table.from_arrays(columns, schema=schema)


class VersionBound(ExpiryBound):
    """The bound of versions, of which a key needs the newest one up to a time, and all later ones.

    Older versions have expired where a newer one is among the same records, which are all rows of their
    keys in the runs that are merged.

    Args:
        check: the column that tells keys with the same hash apart.

    Attributes:
        passed: the bound of the times up to which a key needs only its newest version.
    """

    def __init__(self, check: str, max_parallelism: int) -> None:
        super().__init__(TIME_COLUMN, max_parallelism)
        self.passed = ExpiryBound(TIME_COLUMN, max_parallelism)
        self._check = check

    def now(self) -> Expired:
        """Return a function that finds the rows that have expired by now."""
        expired, passed = super().now(), self.passed.now()
        return lambda records: expired(records) | self._replaced(records, passed(records))

    def __call__(self, records: Records) -> Mask:
        return self.now()(records)

    def _replaced(self, records: Records, passed: Mask) -> Mask:
        """Return which of the passed records are not the newest one of their key."""
        replaced = np.zeros(len(records), np.bool_)
        hashes = records["hash"]
        again = np.append(hashes[1:] == hashes[:-1], False)
        again[1:] |= again[:-1]
        which = np.flatnonzero(again & passed)
        if which.size:
            keys, times, ids = (
                RowLayout.numbers(records[which], column)
                for column in (self._check, TIME_COLUMN, ROW_COLUMN)
            )
            order = np.lexsort((ids, times, keys, hashes[which]))
            same = keys[order][1:] == keys[order][:-1]
            same &= hashes[which[order]][1:] == hashes[which[order]][:-1]
            replaced[which[order[:-1][same]]] = True
        return replaced


class SpillingRows(Generic[R]):
    """The rows of one side. All methods run in the mailbox, or in a thread that it waits for.

    Args:
        schema: the schema of the rows.
        keys: the key columns.
        new_rows: makes an empty container for rows in memory.
        marks: whether rows can be marked as matched.
        newest: whether of the rows of a key, up to a time, only the newest one waits; see
            `VersionBound`.

    Attributes:
        active: rows are here, and no longer in memory alone.
    """

    def __init__(
        self,
        context: OperatorContext,
        name: str,
        schema: pa.Schema,
        keys: tuple[str, ...],
        new_rows: Callable[[], R],
        *,
        marks: bool = False,
        newest: bool = False,
    ) -> None:
        self.active = False
        self._marks, self._schema = marks, schema
        self._expiry = ExpiryBound(TIME_COLUMN, context.max_parallelism)
        added = [pa.field(ROW_COLUMN, pa.int64(), False), pa.field(TIME_COLUMN, pa.int64(), False)]
        if marks:
            added.append(pa.field(MATCHED_COLUMN, pa.bool_(), False))
        if newest:
            check = "_key"
            while check in schema.names:
                check += "_"
            added.append(pa.field(check, pa.uint64(), False))
            self._expiry = VersionBound(check, context.max_parallelism)
        self._space = space = SpillingSpace(
            context,
            name,
            pa.schema([field.remove_metadata() for field in [*schema, *added]]),
            [schema.field(key) for key in keys],
            ROW_COLUMN,
            self._expiry,
        )
        self._table = space.new_table(lambda: RowDelta(space, keys, new_rows))
        self._next_row = 0

    # --- rows ----------------------------------------------------------------------------------

    @property
    def rows(self) -> R:
        """The rows in memory, to which new ones are added until `settle`."""
        return self._table.delta.rows

    @property
    def rows_on_disk(self) -> int:
        """The number of rows on disk, including released ones that merges have not left out yet."""
        return self._table.rows_in_runs

    def settle(self, rows: R) -> R:
        """Enforce the memory budget after each batch; return the rows in memory.

        Args:
            rows: those in memory until now.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        if not self.active:
            if _bytes_of(rows) <= self._space.room:
                return rows
            self.take_over(rows)
        delta = self._table.delta
        self._table.settle()
        return self._after_write(delta)

    def take_over(self, rows: R) -> None:
        """Take over the rows in memory, unless they are here."""
        self.active, self._table.delta.rows = True, rows

    def _after_write(self, delta: RowDelta[R]) -> R:
        if self._table.delta is not delta:
            self._next_row = max(self._next_row, delta.rows.next_id)
            delta.freeze()
            self._note_written(delta)
        self.rows.next_id = max(self.rows.next_id, self._next_row)
        return self.rows

    def _note_written(self, delta: RowDelta[R]) -> None:
        """Note when the rows of a delta that is being written are needed."""

    def _batch(self, rows: pa.Table) -> pa.RecordBatch:
        columns = [plain_column(rows.column(name)) for name in self._schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _rows_of(self, hashes: Hashes, low: int, high: int) -> pa.Table | None:
        """Return the waiting rows on disk with these hashes and times; None if there are none."""
        found = self._table.lookup_all(hashes, TIME_COLUMN, low, high)
        if found is None:
            return None
        times = numbers(found.table, TIME_COLUMN)
        expired = self._expiry.has_expired(hashes[found.positions], times)
        rows = found.table.take(pa.array(np.flatnonzero(~expired)))
        return rows if rows.num_rows else None

    def released(self, before: int, further: Index | None = None) -> None:
        """Note that rows before a time were released, of some key groups also `further` ones."""
        self._expiry.move(*_behind(before, further))

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self) -> tuple[FilesCut, R]:
        """Return a cut of all waiting rows, and the rows in memory from now on."""
        delta = self._table.delta
        cut = self._table.snapshot(expired=self._expiry.now())
        rows = self._after_write(delta)
        next_row, panes = rows.next_id, self._panes_in_runs()

        def collect() -> CollectedFiles:
            collected = cut.collect()
            meta = RowsMeta(
                version=META_VERSION, next_row=next_row, runs=collected.meta, panes=panes
            )
            return CollectedFiles(collected.files, msgspec.msgpack.encode(meta))

        def tables() -> Iterator[pa.Table]:
            schema = row_schema(self._schema, marks=self._marks)
            for table in cut.tables():
                yield table.select(schema.names).cast(schema)

        return msgspec.structs.replace(cut, collect=collect, tables=tables, keys=ROW_KEYS), rows

    def restore_files(self, restored: Sequence[RestoredFiles]) -> R:
        """Restore runs, before anything else; return the rows in memory.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        self.active = True
        runs, panes = [], set[int]()
        for one in restored:
            meta = decoded_meta(one.meta, RowsMeta, META_VERSION, "row")
            runs.append(msgspec.structs.replace(one, meta=meta.runs))
            self._next_row = max(self._next_row, meta.next_row)
            panes.update(meta.panes)
        self._table.restore_files(runs)
        self._note_restored(panes)
        return self._after_write(self._table.delta)

    def _panes_in_runs(self) -> list[int]:
        """Return the panes that may have rows in runs, if rows have panes."""
        return []

    def _note_restored(self, panes: set[int]) -> None:
        """Note that rows of these panes were restored."""

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        self._table.close()
        self._space.close()


class SpillingSide(SpillingRows[Side]):
    """The rows of one side that are found by key and time, and may be marked as matched.

    Args:
        sent: whether rows are sent when they are released, unless they are marked.
    """

    def __init__(
        self,
        context: OperatorContext,
        name: str,
        schema: pa.Schema,
        keys: tuple[str, ...],
        *,
        marks: bool = False,
        sent: bool = False,
        newest: bool = False,
    ) -> None:
        new_rows = partial(Side, schema, marks=marks)
        super().__init__(context, name, schema, keys, new_rows, marks=marks, newest=newest)
        self._sent = sent
        self._due = DueRows(
            self._table, lambda records: RowLayout.numbers(records, TIME_COLUMN), self._space.share
        )
        self._released_before = WATERMARK_MIN + 1

    def _note_written(self, delta: RowDelta[Side]) -> None:
        if self._sent:
            self._due.add(*delta.between(WATERMARK_MIN, WATERMARK_MAX)[1:])

    def _note_restored(self, panes: set[int]) -> None:
        self._due.forget()

    def meeting(
        self, keys: list[pa.Array], low: int, high: int
    ) -> tuple[Side, pa.Table, KeyIndex] | None:
        """Return rows on disk with these keys and a time from `low` to `high`; None if there are none.

        They come as a side whose slots are of the index, and as they are stored.
        """
        rows = self._rows_of(distinct(hash_columns(keys)), low, high)
        if rows is None:
            return None
        rows = rows.take(pa.array(np.argsort(numbers(rows, ROW_COLUMN), kind="stable")))
        index, slots = self._space.key_index(self._space.keys_of(rows))
        side = Side(self._schema, marks=self._marks)
        side.load(self._batch(rows), *self._described(rows, slots, index.size))
        return side, rows, index

    def slots(self, index: KeyIndex, keys: list[pa.Array]) -> Index:
        """Return the slots of keys in an index that `meeting` returned; new keys are added to it."""
        return index.lookup(BatchKeys(self._space.key_hasher, keys)).astype(np.int64)

    def latest(self, keys: list[pa.Array], times: Index) -> tuple[Side, Index] | None:
        """Return rows on disk, and for each of these keys and times the latest one that is not after it,
        -1 where there is none; None if there are no rows.
        """
        found = self.meeting(keys, WATERMARK_MIN, int(times.max()))
        if found is None:
            return None
        side, _, index = found
        slots = self.slots(index, keys)
        return side, side.chains.latest(slots, times, index.size)

    def passed(self, before: int, further: Index | None = None) -> None:
        """Note that of the rows of a key before a time only the newest one waits; see `released`."""
        assert isinstance(self._expiry, VersionBound)
        self._expiry.passed.move(*_behind(before, further))

    def take_back(self, rows: pa.Table, slots: Index, keys: int) -> None:
        """Make rows from disk that have now matched part of the delta, with these slots of `keys`."""
        at = rows.schema.get_field_index(MATCHED_COLUMN)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(np.ones(len(slots), np.bool_)))
        self.rows.load(self._batch(rows), *self._described(rows, slots, keys))
        self._table.delta.hide(rows)

    def keys_of(self, rows: pa.Table) -> list[pa.Array]:
        """Return the key columns of stored rows."""
        return self._space.keys_of(rows)

    def _described(
        self, rows: pa.Table, slots: Index, keys: int
    ) -> tuple[Index, Index, int, Index, Mask | None]:
        matched = _marks_of(rows) if self._marks else None
        return numbers(rows, TIME_COLUMN), slots, keys, numbers(rows, ROW_COLUMN), matched

    # --- time ----------------------------------------------------------------------------------

    def release(self, before: int) -> Iterator[tuple[list[pa.Array], Index]]:
        """Release the rows before a time; yield columns and times of those that are sent, in order of time.

        Those in memory are not among them. All must be taken.
        """
        if self._sent:
            for times, hashes in self._due.due(self._released_before - 1, before - 1):
                rows = self._rows_of(distinct(hashes), int(times[0]), int(times[-1]))
                if rows is None:
                    continue
                own = hash_columns(self._space.keys_of(rows))
                alone = is_in_portion((times, hashes), numbers(rows, TIME_COLUMN), own)
                if self._marks:
                    alone &= ~_marks_of(rows)
                chosen = np.flatnonzero(alone)
                if chosen.size:
                    chosen = chosen[np.argsort(numbers(rows, TIME_COLUMN)[chosen], kind="stable")]
                    rows = rows.take(pa.array(chosen))
                    yield list(self._batch(rows).columns), numbers(rows, TIME_COLUMN)
        self.released(before)

    def released(self, before: int, further: Index | None = None) -> None:
        super().released(before, further)
        self._released_before = max(WATERMARK_MIN + 1, before)


class SpillingPaneRows(SpillingRows[PaneRows]):
    """The rows of one side that are found by their panes.

    Attributes:
        panes: the panes that may have rows on disk.
    """

    def __init__(
        self, context: OperatorContext, name: str, schema: pa.Schema, keys: tuple[str, ...]
    ) -> None:
        super().__init__(context, name, schema, keys, lambda: PaneRows(schema))
        self.panes = set[int]()

    def _note_written(self, delta: RowDelta[PaneRows]) -> None:
        self.panes.update(delta.rows.panes)

    def _panes_in_runs(self) -> list[int]:
        return sorted(self.panes)

    def _note_restored(self, panes: set[int]) -> None:
        self.panes = panes

    def drop(self, before: int) -> None:
        """Drop the panes before `before`; their rows have been released."""
        self.panes = {pane for pane in self.panes if pane >= before}

    def between(self, low: int, high: int) -> Iterator[tuple[Hashes, pa.Table]]:
        """Yield the rows with a time from `low` to `high`, in memory and on disk, and the hashes of their
        keys.

        They come in the order of hashes, and all rows of one hash are in one piece. No rows may be added
        meanwhile.
        """

        def wanted(records: Records) -> Mask:
            times = RowLayout.numbers(records, TIME_COLUMN)
            return (times >= low) & (times <= high)

        slots, _, hashes = self._table.delta.between(low, high)
        for rows in self._table.scan(slots, hashes, wanted):
            yield hash_columns(self._space.keys_of(rows)), rows

    def of_keys(self, keys: list[pa.Array], low: int, high: int) -> pa.Table:
        """Return the rows with a time from `low` to `high` in memory, and those of these keys on disk."""
        delta = self._table.delta
        held = delta.table(delta.between(low, high)[0])
        found = self._rows_of(distinct(hash_columns(keys)), low, high)
        return held if found is None else pa.concat_tables([found, held])

    def batch(self, rows: pa.Table | None, panes_of: Callable[[Index], Index]) -> pa.RecordBatch:
        """Return stored rows as they were added, by pane, then in order of arrival."""
        if rows is None:
            return self.rows.none()
        order = np.lexsort((numbers(rows, ROW_COLUMN), panes_of(numbers(rows, TIME_COLUMN))))
        return self._batch(rows.take(pa.array(order)))


def side_by_side(
    streams: Sequence[Iterator[tuple[Hashes, pa.Table]]],
) -> Iterator[list[pa.Table | None]]:
    """Yield the rows of streams in the order of hashes, all rows of one hash at once; None for no rows.

    Args:
        streams: as from `SpillingPaneRows.between`.
    """
    heads = [next(stream, None) for stream in streams]
    while any(head is not None for head in heads):
        upto = min(head[0].max() for head in heads if head is not None)
        parts: list[pa.Table | None] = []
        for at, head in enumerate(heads):
            if head is None:
                parts.append(None)
                continue
            hashes, rows = head
            inside = hashes <= upto
            parts.append(rows.filter(pa.array(inside)))
            if inside.all():
                heads[at] = next(streams[at], None)
            else:
                heads[at] = hashes[~inside], rows.filter(pa.array(~inside))
        yield parts


def _behind(before: int, further: Index | None) -> tuple[int, Index | None]:
    """Return the last times before these."""
    by_group = None if further is None else np.maximum(further, WATERMARK_MIN + 1) - 1
    return max(WATERMARK_MIN, before - 1), by_group


def _key_checks(keys: list[pa.Array]) -> Hashes:
    """Return numbers that tell keys with the same hash apart, in every job alike."""
    return identity_columns(keys, 0)


def _marks_of(rows: pa.Table) -> Mask:
    marks: Mask = plain_column(rows.column(MATCHED_COLUMN)).to_numpy(zero_copy_only=False)
    return marks


def numbers(rows: pa.Table, column: str) -> Index:
    """Return a column of numbers without nulls."""
    found: Index = plain_column(rows.column(column)).to_numpy()
    return found
