"""Windows that need not fit into memory: each large one is a table of its own over sorted runs.

So a window that fires reads only its own files, and one that expires drops them. The memory budget
is shared: when it is used up, the largest deltas are written, whichever windows they belong to.
Small windows stay in their shared table in memory, within a part of the budget; beyond it those
with the most rows move to tables of their own. A checkpoint has one cut of all windows; the rows of
small ones are stored in the description of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from operator import itemgetter
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from ...state.keygroups import KeyGroupRange
from ...state.runs.cut import decoded_meta
from ...state.runs.spilling_table import delta_room
from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    CollectedFiles,
    FilesCut,
    LocalFile,
    RestoredFiles,
    TableCut,
)
from ..aggregation.keyed_aggregate import KeyedGroup
from ..aggregation.spilling_group import AggregateSpace, SpillingGroup
from .kinds import TumblingWindow
from .small_windows import SmallWindows

META_VERSION: Final = 1
_TABLE_ROWS: Final = 1 << 16


class WindowsMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a cut are.

    Attributes:
        size_ms: of each window.
        windows: start of each window with files, and the description of its runs.
        small: the rows of all others, an Arrow IPC stream; empty if there are none.
    """

    version: int
    size_ms: int
    windows: list[tuple[int, bytes]]
    small: bytes


@dataclass(frozen=True, slots=True)
class WindowPart:
    """The cut of one window."""

    start: int
    cut: FilesCut


class _SmallRows:
    """Rows of small windows at the cut; made once, by the first caller."""

    def __init__(self, cut: TableCut) -> None:
        self._cut, self._made = cut, False
        self._table: pa.Table = None

    def table(self) -> pa.Table:
        if not self._made:
            self._made = True
            self._table = self._cut.make(None)
        return self._table

    def release(self) -> None:
        if not self._made and self._cut.discard is not None:
            self._cut.discard()


def windows_cut(
    space: AggregateSpace, parts: Sequence[WindowPart], small: TableCut, window: TumblingWindow
) -> FilesCut:
    """The cuts of all windows, and the rows of the small ones, as one."""
    rest = _SmallRows(small)

    def collect() -> CollectedFiles:
        files: list[LocalFile] = []
        described: list[tuple[int, bytes]] = []
        for part in parts:
            collected = part.cut.collect()
            if collected.files:
                files += collected.files
                described.append((part.start, collected.meta))
        meta = WindowsMeta(
            version=META_VERSION,
            size_ms=window.size_ms,
            windows=described,
            small=_written(rest.table()),
        )
        return CollectedFiles(files, msgspec.msgpack.encode(meta))

    def tables() -> Iterator[pa.Table]:
        streams = [_by_group(_of_window(space, part, window)) for part in parts]
        streams.append(_by_group(iter([rest.table()])))
        yield from _joined(part for _, part in merge(*streams, key=itemgetter(0)))

    def release() -> None:
        rest.release()
        for part in parts:
            part.cut.release()

    return FilesCut(collect=collect, tables=tables, keys=small.keys, release=release)


def _written(table: pa.Table) -> bytes:
    if not table.num_rows:
        return b""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


# --- canonical tables --------------------------------------------------------------------------


def _of_window(
    space: AggregateSpace, part: WindowPart, window: TumblingWindow
) -> Iterator[pa.Table]:
    """The rows of one window, with its bounds."""
    for table in part.cut.tables():
        edges = (part.start, part.start + window.size_ms)
        yield space.canonical(table, [np.full(table.num_rows, edge) for edge in edges])


def _by_group(tables: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each key group."""
    for table in tables:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
        for low, high in pairwise(cuts):
            if low < high:
                yield int(groups[low]), table.slice(low, high - low)


def _joined(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Tables of many rows out of those of few."""
    held: list[pa.Table] = []
    rows = 0
    for part in parts:
        held.append(part)
        rows += part.num_rows
        if rows >= _TABLE_ROWS:
            yield pa.concat_tables(held)
            held, rows = [], 0
    if held:
        yield pa.concat_tables(held)


# --- restoring ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoredWindows:
    """What the files of a cut hold.

    Attributes:
        windows: by start, the files of each subtask that had the window.
        small: rows of the other windows, with key groups; None if there are none.
        size_ms: of the windows.
    """

    windows: dict[int, list[RestoredFiles]]
    small: pa.Table | None
    size_ms: int


def restored_windows(restored: Sequence[RestoredFiles], own: KeyGroupRange) -> RestoredWindows:
    """What subtasks (at least one) that wrote a checkpoint had, of own key groups.

    Raises:
        StateError: the description is damaged, or of another version.
    """
    windows: dict[int, list[RestoredFiles]] = {}
    small: list[pa.Table] = []
    size_ms = 0
    for one in restored:
        meta = decoded_meta(one.meta, WindowsMeta, META_VERSION, "window")
        size_ms = meta.size_ms
        for start, runs in meta.windows:
            files = RestoredFiles(runs, one.files, one.first_key_group, one.last_key_group)
            windows.setdefault(start, []).append(files)
        if meta.small:
            small.append(_owned(pa.ipc.open_stream(meta.small).read_all(), own))
    rows = pa.concat_tables(small) if small else None
    return RestoredWindows(windows, rows, size_ms)


def _owned(table: pa.Table, own: KeyGroupRange) -> pa.Table:
    groups = table.column(KEY_GROUP_COLUMN).to_numpy()
    low, high = np.searchsorted(groups, [own.first, own.last + 1])
    return table.slice(low, high - low)


_SMALL_PART: Final = 8
"""Small windows may take one part in this many of the budget before some of them move."""
_CHUNK_BYTES_MIN: Final = 1 << 16


class SpillingWindows:
    """The large windows of one subtask.

    All methods run in its mailbox, or in a thread it waits for.
    """

    def __init__(self, space: AggregateSpace, window: TumblingWindow) -> None:
        self._space, self._window = space, window
        self._tables: dict[int, SpillingGroup] = {}
        self._nbytes: dict[int, int] = {}  # of the deltas, by window
        self._index_bytes: dict[int, int] = {}
        self._touched: set[int] = set()
        self._busy: set[int] = set()  # windows for which threads are working
        # dropped but not closed yet, since threads still work for them
        self._dropped: list[SpillingGroup] = []
        self._small_left = 0  # bytes of small windows after some of them moved

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
        for table in self._tables[start].table.rows_on_disk():
            yield self._space.keys_of(table), self._space.results(table)

    def results_of(self, start: int, columns: list[pa.Array]) -> list[pa.Array] | None:
        """Return the results of one key in a window; None: it has none."""
        return self._tables[start].results_of(columns, None)

    def keys_now(self, start: int) -> tuple[Iterator[list[pa.Array]], Callable[[], None]]:
        """Return the keys of a window, in pieces, and a function that ends their reading."""
        return self._tables[start].keys_now()

    def drop(self, start: int) -> None:
        """Drop a window and its files."""
        table = self._tables.pop(start)
        for of in (self._nbytes, self._index_bytes):
            of.pop(start, None)
        self._touched.discard(start)
        self._busy.discard(start)
        if table.table.stop():
            self._dropped.append(table)
        else:
            table.close()

    # --- memory --------------------------------------------------------------------------------

    def settle(self, small: SmallWindows) -> None:
        """Enforce the memory budget; called after each batch.

        Raises:
            StorageError: a flush or a merge failed, now or earlier.
        """
        self._close_dropped()
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

    def _close_dropped(self) -> None:
        still = [table for table in self._dropped if table.table.stop()]
        for table in self._dropped:
            if table not in still:
                table.close()
        self._dropped = still

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
        return windows_cut(self._space, parts, small, self._window)

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
        tables = [*self._tables.values(), *self._dropped]
        for table in tables:
            table.table.stop()
        for table in tables:
            table.close()
        self._space.close()
