"""A checkpoint of windows that lie in files: one cut of all of them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from operator import itemgetter
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import CorruptError, StateError
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    CollectedFiles,
    FilesCut,
    LocalFile,
    RestoredFiles,
    TableCut,
)
from ..aggregation.aggregates import AggregatePlan
from .kinds import TumblingWindow

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
    """Rows of small windows at the cut; made once, by whoever comes first."""

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
    plan: AggregatePlan, parts: Sequence[WindowPart], small: TableCut, window: TumblingWindow
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
        streams = [_by_group(_of_window(plan, part, window)) for part in parts]
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


def _of_window(plan: AggregatePlan, part: WindowPart, window: TumblingWindow) -> Iterator[pa.Table]:
    """The rows of one window, with its bounds."""
    schema = plan.state_schema
    for table in part.cut.tables():
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for field, edge in zip(plan.added, (part.start, part.start + window.size_ms), strict=True):
            columns[field.name] = pa.array(np.full(table.num_rows, edge)).view(field.type)
        arrays = [columns[name] for name in schema.names]
        yield pa.Table.from_arrays(arrays, names=schema.names).cast(schema)


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
        meta = _decode(one)
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


def _decode(one: RestoredFiles) -> WindowsMeta:
    try:
        meta = msgspec.msgpack.decode(one.meta, type=WindowsMeta)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the list of window files is damaged reason=`{error}`") from error
    if meta.version != META_VERSION:
        raise StateError(
            f"the list of window files has a format this version does not know "
            f"found=`{meta.version}` expected=`{META_VERSION}`",
            fix="use the version of headgate that wrote it, or one that is newer",
        )
    return meta
