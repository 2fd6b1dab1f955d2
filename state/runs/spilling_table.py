"""Keyed state that need not fit into memory: a delta in memory over runs on disk.

Rows are changed in the delta only. A key that is new there is first looked up in the runs, and its state
is loaded (read, modify, write). When the delta has used up its budget, a thread sorts it and writes it as
the newest run, while a second delta takes its place; keys are looked up in the first one until the run is
there. A snapshot does the same; it then consists of the runs. Merges run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..hashing import Hashes
from ..keygroups import KeyGroupRange
from ..queryable import once
from ..settings import RunSettings
from ..slots.arrays import ranges
from ..slots.table import Slots
from ..snapshot import DELETED_COLUMN, FilesCut, RestoredFiles
from ..values import Index
from .cut import RunRestorer, files_cut, rekeyed
from .layout import PackedRows, Records, RowLayout, one_array
from .merge import Expired
from .run_file import FilePool
from .run_set import Found, RunSet, Version

Submit: TypeAlias = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a function in a thread. At most two are needed at a time."""
Identify: TypeAlias = Callable[[pa.Table], tuple[Hashes, Hashes | None]]
"""Computes the two lanes of the identity of each row of a table, from its key columns."""

_PACK_ROWS = 1 << 16
_WALKED = 4_096
"""The rows in one piece of a scan."""
_HELD_FACTOR = 2
"""Arrays grow by doubling, so a delta may hold twice the memory that its rows take."""


def delta_room(memory_bytes: int, index_bytes: int) -> int:
    """Return the bytes for the delta that is being filled. Another one of this size may be being
    written.
    """
    return max(memory_bytes // 8, (memory_bytes - index_bytes) // 2)


class Delta(Protocol):
    """Rows in memory, one per slot: 0, 1, 2, ... A delta does not change while it is being written."""

    @property
    def size(self) -> int:
        """The number of rows."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes that the rows take; 0 if there are none."""
        ...

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each slot's key; None: all second lanes are 0."""
        ...

    def find(self, hashes: Hashes, checks: Hashes | None) -> Slots:
        """Return the slot of each identity, -1 where there is none. Adds nothing.

        A delta that always has all rows of a first lane, or none of them, may go by that lane alone.
        """
        ...

    def table(self, slots: Index) -> pa.Table:
        """Return keys and state of these slots. A column `deleted` (bool) may mark deleted ones."""
        ...

    @property
    def held_bytes(self) -> int:
        """The bytes that the delta holds, even when it is empty."""
        ...

    def clear(self) -> None:
        """Forget all rows. The memory may be kept."""
        ...


D = TypeVar("D", bound=Delta)


class TableShape(msgspec.Struct, frozen=True):
    """The rows that a table stores, and their owner.

    Attributes:
        schema: the columns of keys and state.
        keys: the names of the key columns.
        wide: True if keys have a check lane. Without one their hash alone is their identity.
        identity: a name for the way in which check lanes are computed, equal for jobs that compute them
            alike.
        identify: computes both lanes.
        key_groups: the key groups of this subtask.
        expired: finds rows that merges leave out, and by default the `tables` of cuts, too; None if
            none expire.
    """

    schema: pa.Schema
    keys: tuple[str, ...]
    wide: bool
    identity: str
    identify: Identify
    key_groups: KeyGroupRange
    max_parallelism: int
    expired: Expired | None = None


@dataclass(slots=True)
class _Flush:
    version: Future[Version]
    owned_by_cut: bool


class SpillingTable(Generic[D]):
    """One state of one subtask. All methods run in its mailbox, or in a thread that it waits for.

    Per batch: find or add the keys in `delta`, `lookup` the new ones, update, then `settle`.

    Args:
        new_delta: makes an empty delta. Two are in use at a time, and they are reused.
        directory: a directory that only this table uses.
        new_id: makes ids of files, unique among all subtasks and attempts of this operator.
        memory_bytes: returns the budget, and is called after every batch; None: the budget is that of the
            settings.
        pool: files to be reused. Other tables of the directory may share it.
    """

    def __init__(
        self,
        shape: TableShape,
        new_delta: Callable[[], D],
        directory: Path,
        new_id: Callable[[], str],
        settings: RunSettings,
        submit: Submit,
        memory_bytes: Callable[[], int] | None = None,
        pool: FilePool | None = None,
    ) -> None:
        self.delta = new_delta()
        """The rows that are new or have changed since the last flush."""
        self._shape, self._settings, self._submit = shape, settings, submit
        self._memory_bytes = memory_bytes or (lambda: settings.memory_bytes)
        self._new_delta, self._directory = new_delta, directory
        self._layout = RowLayout(shape.schema, shape.wide)
        self._pool = pool
        self._runs = RunSet(directory, self._layout, settings, new_id, pool, shape.expired)
        self._frozen: D | None = None  # while it is being written
        self._frozen_order: tuple[Index, Hashes, Hashes | None] | None = None
        """Its slots in the order of their first lanes, and both lanes."""
        self._spare: D | None = None
        self._flush: _Flush | None = None
        self._merge: Future[None] | None = None

    @property
    def spilled(self) -> bool:
        """True if some rows are, or will soon be, on disk only."""
        return bool(self._frozen is not None or self._runs.version.runs)

    @property
    def index_bytes(self) -> int:
        """Memory of the index of rows on disk."""
        return self._runs.index_bytes

    @property
    def rows_in_runs(self) -> int:
        """The number of rows in runs, with those that merges will leave out."""
        return sum(map(len, self._runs.version.runs))

    # --- records -------------------------------------------------------------------------------

    def lookup(self, hashes: Hashes, checks: Hashes | None) -> Found | None:
        """Return the rows of keys that are not in the delta; None if there are none.

        Raises:
            StorageError: a flush or a merge failed.
        """
        self._reap()
        if not len(hashes) or not self.spilled:
            return None
        found: list[Found] = []
        if self._frozen is not None:
            before = self._frozen.find(hashes, checks)
            held, rest = np.flatnonzero(before >= 0), np.flatnonzero(before < 0)
            if held.size:
                found.append(self._living(held, self._frozen.table(before[held].astype(np.intp))))
            some = None if checks is None else checks[rest]
            in_runs = self._runs.lookup(hashes[rest], some)
            found.append(Found(rest[in_runs.positions], in_runs.table))
        else:
            found.append(self._runs.lookup(hashes, checks))
        positions = np.concatenate([one.positions for one in found])
        if not positions.size:
            return None
        return Found(positions, pa.concat_tables([one.table for one in found]))

    def lookup_all(
        self,
        hashes: Hashes,
        number: str | None = None,
        low: int = 0,
        high: int = 0,
    ) -> Found | None:
        """Return all rows with these distinct first lanes that are not in the delta; None if there are
        none.

        Args:
            number: a column of 64-bit numbers, which must lie between `low` and `high`, inclusive; None:
                rows have any numbers.

        Raises:
            StorageError: a flush or a merge failed.
        """
        self._reap()
        if not len(hashes) or not self.spilled:
            return None
        order = np.argsort(hashes)
        hashes = hashes[order]
        found: list[Found] = []
        if self._frozen is not None:
            part = self._all_in_frozen(self._frozen, hashes)
            if number is not None:
                column = one_array(part.table.column(number)).to_numpy()
                chosen = np.flatnonzero((column >= low) & (column <= high))
                part = Found(part.positions[chosen], part.table.take(pa.array(chosen)))
            found.append(part)
        rows = self._runs.lookup_all(hashes)
        if rows is not None:
            kept = self._is_only_in_runs(rows) & ~self._layout.deleted(rows.records)
            if number is not None:
                numbers = self._layout.numbers(rows.records, number)
                kept &= (numbers >= low) & (numbers <= high)
            rows = rows.take(np.flatnonzero(kept))
            positions = np.searchsorted(hashes, rows.hashes)
            found.append(Found(positions, self._layout.unpack(rows)))
        positions = np.concatenate([one.positions for one in found]) if found else order[:0]
        if not positions.size:
            return None
        return Found(order[positions], pa.concat_tables([one.table for one in found]))

    def _all_in_frozen(self, frozen: D, hashes: Hashes) -> Found:
        """Return all rows with these ascending hashes in the delta that is being written."""
        if self._frozen_order is None:
            lanes, checks = frozen.lanes()
            order = np.argsort(lanes)
            self._frozen_order = order, lanes[order], None if checks is None else checks[order]
        slots, lanes, checks = self._frozen_order
        begins = np.searchsorted(lanes, hashes, "left")
        counts = np.searchsorted(lanes, hashes, "right") - begins
        places = ranges(begins, counts)
        newer = self.delta.find(lanes[places], None if checks is None else checks[places]) >= 0
        positions = np.repeat(np.arange(len(hashes)), counts)
        return self._living(positions[~newer], frozen.table(slots[places[~newer]]))

    def _is_only_in_runs(self, rows: PackedRows) -> npt.NDArray[np.bool_]:
        """Return which rows of runs are not in memory in a newer form."""
        checks = self._layout.checks(rows.records)
        kept: npt.NDArray[np.bool_] = self.delta.find(rows.hashes, checks) < 0
        if self._frozen is not None:
            kept &= self._frozen.find(rows.hashes, checks) < 0
        return kept

    def _living(self, positions: Index, table: pa.Table) -> Found:
        """Return the rows of the delta that is being written, without deleted ones."""
        if DELETED_COLUMN in table.column_names:
            living = np.flatnonzero(~table.column(DELETED_COLUMN).to_numpy())
            positions, table = positions[living], table.take(pa.array(living))
        return Found(positions, table.select(self._shape.schema.names))

    def settle(self) -> None:
        """Flush if the budget is used up, and merge if there are many runs. Waits if either falls behind.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        self._reap()
        if self.delta.nbytes >= delta_room(self._memory_bytes(), self._runs.index_bytes):
            self.flush()

    def flush(self) -> None:
        """Begin to write the delta if it has rows. Waits as `settle` does.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        if self.delta.size:
            self._start_flush(owned_by_cut=False)

    def wait_for_flush(self) -> None:
        """Wait until no delta is being written.

        Raises:
            StorageError: the flush failed.
        """
        self._wait_for_flush()

    def poll(self) -> bool:
        """Take over the results of finished threads. Return True while threads work for this table.

        Raises:
            StorageError: a flush or a merge failed.
        """
        self._reap()
        return self._flush is not None or self._merge is not None

    def _start_flush(self, *, owned_by_cut: bool) -> Future[Version]:
        """Hand the delta to a thread. Waits for the previous flush, and for a merge if there are many
        runs.
        """
        self._wait_for_flush()
        while self._runs.has_too_many_runs and self._merge is not None:
            self._merge.result()
            self._reap()
        frozen = self.delta
        # The runs of this moment: a merge that ends before the flush may drop what expires meanwhile.
        onto = self._runs.pin() if owned_by_cut else None
        version: Future[Version] = self._submit(lambda: self._write(frozen, onto))
        self._frozen, self._flush = frozen, _Flush(version, owned_by_cut)
        self.delta = self._spare if self._spare is not None else self._new_delta()
        self._spare = None
        return version

    def _write(self, frozen: D, onto: Version | None) -> Version:
        """Write the rows of a delta as the newest run; runs in a thread. See `RunSet.add`."""
        return self._runs.add(self._sorted_rows(frozen), onto)

    def _sorted_rows(self, frozen: D) -> Iterator[PackedRows]:
        hashes, checks = frozen.lanes()
        order = np.argsort(hashes) if checks is None else np.lexsort((checks, hashes))
        for start in range(0, len(order), _PACK_ROWS):
            part = order[start : start + _PACK_ROWS]
            some = None if checks is None else checks[part]
            yield self._layout.pack(hashes[part], some, frozen.table(part))

    def _wait_for_flush(self) -> None:
        if self._flush is not None:
            self._flush.version.exception()
            self._reap()

    def _reap(self) -> None:
        """Take over the results of finished threads, and start the next merge.

        Raises:
            StorageError: a flush or a merge failed.
        """
        flush = self._flush
        if flush is not None and flush.version.done():
            version = flush.version.result()
            self._flush = None
            if not flush.owned_by_cut:
                version.unpin()
            assert self._frozen is not None
            self._keep_spare(self._frozen)
            self._frozen = self._frozen_order = None
        if self._merge is not None and self._merge.done():
            self._merge.result()
            self._merge = None
        if self._merge is None and self._runs.wants_merge:
            self._merge = self._submit(self._runs.merge_once)

    def _keep_spare(self, written: D) -> None:
        """Keep the delta for reuse, unless its memory has grown beyond the budget."""
        room = delta_room(self._memory_bytes(), 0)
        if written.held_bytes <= _HELD_FACTOR * room:
            written.clear()
            self._spare = written
        if self._runs.buffer_bytes > room:
            self._runs.release_buffer()

    # --- scans, while the table goes on changing -------------------------------------------------

    def in_memory(self) -> list[D]:
        """Return the deltas that are newer than the runs, newest first."""
        return [self.delta] if self._frozen is None else [self.delta, self._frozen]

    def runs_now(
        self, wanted: Callable[[Hashes, Hashes | None], npt.NDArray[np.bool_]]
    ) -> tuple[Iterator[pa.Table], Callable[[], None]]:
        """Return the rows in runs as they are now, and a function that gives up their files.

        `wanted` chooses rows by their identities.
        """
        version = self._runs.pin()

        def tables() -> Iterator[pa.Table]:
            for rows in self._runs.merged(version):
                kept = np.flatnonzero(wanted(rows.hashes, self._layout.checks(rows.records)))
                for low in range(0, kept.size, _WALKED):
                    yield self._layout.unpack(rows.take(kept[low : low + _WALKED]))

        return tables(), once(version.unpin)

    # --- everything ----------------------------------------------------------------------------

    def rows_on_disk(self) -> Iterator[pa.Table]:
        """Yield the rows that are not in the delta, in the order of their hashes.

        The delta must not change meanwhile. Waits if a flush is under way.
        """
        for rows in self.packed_on_disk():
            yield self._layout.unpack(rows)

    def packed_on_disk(
        self, wanted: Callable[[Records], npt.NDArray[np.bool_]] | None = None
    ) -> Iterator[PackedRows]:
        """Yield the rows that are not in the delta as they are stored; None: all are `wanted`.

        All rows of one hash are in one piece. See `rows_on_disk`.
        """
        self._wait_for_flush()
        version = self._runs.pin()
        try:
            for rows in self._runs.merged(version):
                kept = self._is_only_in_runs(rows)
                if wanted is not None:
                    kept &= wanted(rows.records)
                if kept.any():
                    yield rows.take(np.flatnonzero(kept))
        finally:
            version.unpin()

    def scan(
        self,
        held: Index,
        hashes: Hashes,
        wanted: Callable[[Records], npt.NDArray[np.bool_]],
    ) -> Iterator[pa.Table]:
        """Yield these rows of the delta, and those on disk that are `wanted`, in the order of hashes.

        All rows of one hash are in one piece. The delta must not change meanwhile. Waits if a flush
        is under way.
        """
        order = np.argsort(hashes)
        hashes, held = hashes[order], held[order]
        at = 0
        for rows in self.packed_on_disk(wanted):
            upto = int(np.searchsorted(hashes, rows.hashes[-1], "right"))
            while upto - at > _PACK_ROWS:
                stop = int(np.searchsorted(hashes, hashes[at + _PACK_ROWS - 1], "right"))
                split = int(np.searchsorted(rows.hashes, hashes[stop - 1], "right"))
                yield self._together(held[at:stop], rows.slice(0, split))
                at, rows = stop, rows.slice(split, len(rows))
            if len(rows):  # otherwise all rows up to the last hash have been yielded
                yield self._together(held[at:upto], rows)
            at = upto
        while at < len(held):
            last = min(at + _PACK_ROWS, len(held)) - 1
            stop = int(np.searchsorted(hashes, hashes[last], "right"))
            yield self.delta.table(held[at:stop])
            at = stop

    def _together(self, held: Index, rows: PackedRows) -> pa.Table:
        on_disk = self._layout.unpack(rows)
        return pa.concat_tables([self.delta.table(held), on_disk]) if held.size else on_disk

    def snapshot(self, chunk_bytes: int | None = None, expired: Expired | None = None) -> FilesCut:
        """Return a cut of the present state. Waits only if an earlier flush is still under way.

        Args:
            chunk_bytes: bounds the rows that its `tables` handle at a time; None: as many as a merge.
            expired: finds the rows that its `tables` leave out; None: those of the shape.
        """
        return files_cut(
            self._runs,
            self._flushed(),
            chunk_bytes=chunk_bytes,
            expired=expired or self._shape.expired,
            identity=self._shape.identity,
            keys=self._shape.keys,
            max_parallelism=self._shape.max_parallelism,
        )

    def _flushed(self) -> Future[Version]:
        """Return a version with all present rows, pinned for the caller."""
        self._wait_for_flush()
        if self.delta.size:
            return self._start_flush(owned_by_cut=True)
        version: Future[Version] = Future()
        version.set_result(self._runs.pin())
        return version

    def restore_files(self, restored: Sequence[RestoredFiles]) -> None:
        """Take over the rows of own key groups from an earlier `snapshot`, into an empty table.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        range_ = self._shape.key_groups
        restorer = RunRestorer(
            self._directory,
            self._layout,
            identity=self._shape.identity,
            range_=(range_.first, range_.last),
            max_parallelism=self._shape.max_parallelism,
            pool=self._pool,
        )
        runs, same_identity = restorer.runs(restored)
        if same_identity:
            self._runs.adopt(runs)
            return
        old = Version(tuple(runs))
        pieces = rekeyed(self._runs.merged(old), self._layout, self._shape.identify)
        self._runs.add(pieces).unpin()
        old.unpin()

    def stop(self) -> bool:
        """Make a merge end early. Return True while threads still work for this table: `close` waits for
        them.
        """
        self._runs.stop()
        under_way = [self._merge, None if self._flush is None else self._flush.version]
        return any(work is not None and not work.done() for work in under_way)

    def close(self) -> None:
        """Give up the files, except those that a cut has pinned. Does not raise."""
        self._runs.stop()
        if self._merge is not None:
            self._merge.exception()
        flush, self._flush = self._flush, None
        if flush is not None and flush.version.exception() is None and not flush.owned_by_cut:
            flush.version.result().unpin()
        self._runs.clear()
        # Deltas, and the function that makes them, may refer to the owner of this table.
        for name in ("delta", "_new_delta", "_frozen", "_spare"):
            vars(self).pop(name, None)
