"""Windows that need not fit into memory: each large one is a table of its own over sorted runs.

So a window that fires reads only its own files, and one that expires drops them. The memory budget
is shared: when it is used up, the largest deltas are written, whichever windows they belong to.
Small windows stay in their shared table in memory, within a part of the budget; beyond it those
with the most rows move to tables of their own. Their rows are stored in the description of a
checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ...state.runs.spilling_table import delta_room
from ...state.slots.epochs import TableEpoch
from ...state.snapshot import FilesCut, RestoredFiles, TableCut
from ..aggregation.keyed_aggregate import KeyedGroup
from ..aggregation.spilling_group import SpillingGroup, SpillingSpace
from .kinds import TumblingWindow
from .small_windows import SmallWindows
from .windows_cut import RestoredWindows, WindowPart, restored_windows, windows_cut

_SMALL_PART: Final = 8
"""Small windows may take one part in this many of the budget before some of them move."""
_CHUNK_BYTES_MIN: Final = 1 << 16


class SpillingWindows:
    """The large windows of one subtask.

    All methods run in its mailbox, or in a thread it waits for.
    """

    def __init__(self, space: SpillingSpace, window: TumblingWindow) -> None:
        self._space, self._window = space, window
        self._tables: dict[int, SpillingGroup] = {}
        self._nbytes: dict[int, int] = {}  # of the deltas, by window
        self._index_bytes: dict[int, int] = {}
        self._touched: set[int] = set()
        self._busy: set[int] = set()  # windows for which threads are working
        # dropped but not closed yet, since threads still work for them
        self._gone: list[SpillingGroup] = []
        self._small_left = 0  # bytes of small windows after some of them moved
        self._results = space.plan.new_state(TableEpoch())  # empty, except while `results` runs

    # --- records -------------------------------------------------------------------------------

    def __contains__(self, start: int) -> bool:
        return start in self._tables

    def __iter__(self) -> Iterator[int]:
        """Yield the starts of the windows here."""
        return iter(self._tables)

    def group(self, start: int) -> KeyedGroup:
        """Return the group to which rows of a window are added, until the next `settle`."""
        if start not in self._tables:
            self._tables[start] = SpillingGroup(self._space, self._slice)
        self._touched.add(start)
        return self._tables[start].group

    def _slice(self) -> int:
        """Return the bytes that each window may keep without a check."""
        return self._space.share() // max(1, len(self._tables))

    def rest(self, start: int) -> Iterator[tuple[list[pa.Array], list[pa.Array]]]:
        """Yield key and result columns of the keys of a window that `group` does not have, in pieces.

        No rows may be added meanwhile.
        """
        keys, state = self._space.plan.keys, self._results
        for table in self._tables[start].table.rows_on_disk():
            rows = table.num_rows
            try:
                state.load(np.arange(rows), table, rows)
                results = state.results(slice(0, rows))
            finally:
                state.reset()
            yield [table.column(key).chunk(0) for key in keys], results

    def drop(self, start: int) -> None:
        """Drop a window and its files."""
        table = self._tables.pop(start)
        for of in (self._nbytes, self._index_bytes):
            of.pop(start, None)
        self._touched.discard(start)
        self._busy.discard(start)
        if table.table.stop():
            self._gone.append(table)
        else:
            table.close()

    # --- memory --------------------------------------------------------------------------------

    def settle(self, small: SmallWindows) -> None:
        """Enforce the memory budget; called after each batch.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        self._close_gone()
        memory = self._space.share()
        self._settle_small(small, memory // _SMALL_PART)
        self._touched |= self._busy
        for start in self._touched:
            table = self._tables[start].table
            self._note(start, table.poll())
        self._touched.clear()
        room = delta_room(memory, sum(self._index_bytes.values()) + small.nbytes)
        if sum(self._nbytes.values()) >= room:
            self._flush(room // 2)

    def _note(self, start: int, busy: bool) -> None:
        table = self._tables[start].table
        self._nbytes[start], self._index_bytes[start] = table.delta.nbytes, table.index_bytes
        (self._busy.add if busy else self._busy.discard)(start)

    def _flush(self, kept: int) -> None:
        """Write the largest deltas until the others take at most `kept` bytes."""
        # Half of the memory is for deltas being filled, and half for those being written.
        for start in self._busy:
            self._tables[start].table.wait_for_flush()
        total = sum(self._nbytes.values())
        for start in sorted(self._nbytes, key=self._nbytes.__getitem__, reverse=True):
            if total <= kept:
                break
            total -= self._nbytes[start]
            self._tables[start].table.flush()
            self._note(start, True)

    def _settle_small(self, small: SmallWindows, limit: int) -> None:
        """Move small windows with many rows to tables, if all of them take more than `limit` bytes."""
        nbytes = small.nbytes
        self._small_left = min(self._small_left, nbytes)
        # Windows that cannot move are not checked again with every batch.
        if nbytes > max(limit, self._small_left + self._small_left // 8):
            for start, rows in small.take_largest(nbytes - limit // 2):
                self.load(start, rows)
            self._small_left = small.nbytes

    def load(self, start: int, rows: pa.Table) -> None:
        """Restore the rows of a window that is not here yet, with the columns of a snapshot."""
        self.group(start)
        self._tables[start].restore_table(rows)

    def _close_gone(self) -> None:
        still = [table for table in self._gone if table.table.stop()]
        for table in self._gone:
            if table not in still:
                table.close()
        self._gone = still

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self, small: TableCut) -> FilesCut:
        """Return a cut of all windows, with the rows of the small ones."""
        chunk = self._space.settings.merge_bytes // max(1, len(self._tables))
        parts = [
            WindowPart(start, self._tables[start].table.snapshot(max(chunk, _CHUNK_BYTES_MIN)))
            for start in sorted(self._tables)
        ]
        for start in sorted(self._tables):
            self._note(start, True)
        return windows_cut(self._space.plan, parts, small, self._window)

    def restore_files(self, restored: Sequence[RestoredFiles]) -> RestoredWindows:
        """Restore runs, before anything else. The caller loads the rows of small windows.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
        """
        found = restored_windows(restored, self._space.shape.key_groups)
        for start, files in found.windows.items():
            self.group(start)
            self._tables[start].restore_files(files)
            if not self._tables[start].table.spilled:  # it has rows of other subtasks only
                self.drop(start)
        return found

    def close(self) -> None:
        """Release files, memory and threads. Does not raise."""
        tables = [*self._tables.values(), *self._gone]
        for table in tables:
            table.table.stop()
        for table in tables:
            table.close()
        self._space.close()
