"""Early results of windows: when they are emitted, and what has changed since the last ones.

Changes before a restore are not known any more: those results are emitted at the next change, and
at the end.

State on disk has changed rows, too, which need not fit into memory. `ChangedRows` notes changes by
slot while rows are in the delta. When the delta is written it notes the identity of each changed row,
16 bytes, which lie in sorted files once they take more than their part of the memory. Early results
then look up the rows by their identities, a portion at a time.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....errors import StorageError
from ....state.hashing import Hashes
from ....state.runs.spilling_table import Delta, SpillingTable
from ....state.slots.arrays import SlotArray
from ....state.values import Index
from ...base import OperatorContext
from ...spilling_space import SpillingSpace
from ..kinds import Early

Identities: TypeAlias = npt.NDArray[np.uint64]
"""A row per row of state: both lanes of its identity."""
_MEMORY_PART: Final = 8
"""Identities may take one part in this many of the budget before they are written to a file."""
_IDENTITY_BYTES: Final = 8 + 8
_IDENTITIES_MIN: Final = 64
_PORTION: Final = 1 << 14
"""The rows that are looked up at a time."""


class EarlyResults:
    """Calls `show` in time, which emits the results of what has changed since its last call."""

    def __init__(self, early: Early, context: OperatorContext, show: Callable[[], None]) -> None:
        self._early, self._context, self._show = early, context, show
        self._rows = 0
        self._cancel: Callable[[], None] | None = None

    def note(self, rows: int) -> None:
        """Note that rows were added; may emit results."""
        if not self._early:
            return
        self._rows += rows
        if self._early.rows and self._rows >= self._early.rows:
            self._now()
        elif self._early.every_ms and self._cancel is None:
            self._cancel = self._context.timers.call_later(self._early.every_ms, self._tick)

    def _tick(self) -> None:
        self._cancel = None
        self._now()

    def _now(self) -> None:
        self._rows = 0
        self._show()

    def stop(self) -> None:
        """Emit no more early results."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None


class ChangedCells:
    """The cells that have changed since `take`, by slot."""

    def __init__(self) -> None:
        self._changed = SlotArray(np.bool_)
        self._size = 0

    def note(self, cells: Index) -> None:
        """Note that these cells (at least one) have changed."""
        self._size = max(self._size, int(cells.max()) + 1)
        self._changed.reserve(self._size)
        self._changed.data[cells] = True

    def take(self) -> Index:
        """Forget and return the changed cells, each once, ascending."""
        cells = np.flatnonzero(self._changed.data[: self._size])
        self._changed.reset(self._size)
        return cells

    def moved(self, cells: Index) -> None:
        """Renumber the cells: cell i is what was cell `cells[i]`."""
        self._changed.reserve(int(cells.max()) + 1 if cells.size else 0)
        changed = self._changed.data.take(cells)
        self._changed.reset(self._size)
        self._changed.reserve(len(cells))
        self._changed.data[: len(cells)] = changed
        self._size = len(cells)


class ChangedRows:
    """The rows of a table that have changed since `take`.

    Args:
        table: of the rows.
        space: has the memory, and the directory of the files.
    """

    def __init__(self, table: SpillingTable[Any], space: SpillingSpace) -> None:
        self._table, self._share, self._new_id = table, space.share, space.new_id
        self._directory = space.directory
        self._in_delta = ChangedCells()
        self._held: list[Identities] = []
        self._files: list[Path] = []
        self._written = self._merged = 0
        """The identities in files, and those that the last merge of files left."""

    def note(self, slots: Index) -> None:
        """Note that these slots of the delta (at least one) have changed."""
        self._in_delta.note(slots)

    def after_write(self, delta: Delta) -> None:
        """Call this after the table was settled or cut; `delta` is the one before."""
        if self._table.delta is not delta:
            self._add_delta(delta)

    def _add_delta(self, delta: Delta) -> None:
        slots = self._in_delta.take()
        if slots.size:
            hashes, checks = delta.lanes()
            self.add(hashes[slots], None if checks is None else checks[slots])

    def add(self, hashes: Hashes, checks: Hashes | None) -> None:
        """Note that rows with these identities have changed."""
        checks = np.zeros(len(hashes), np.uint64) if checks is None else checks
        self._held.append(np.column_stack([hashes, checks]))
        room = max(_IDENTITIES_MIN, self._share() // _MEMORY_PART // _IDENTITY_BYTES)
        if sum(map(len, self._held)) > room:
            self._held = [_distinct(self._held)]
            if len(self._held[0]) > room // 2:
                self._write(self._held)
                self._held = []

    def take(self) -> Iterator[pa.Table]:
        """Forget and yield the changed rows that there are, in the order of hashes.

        All rows of a hash are in one piece. The table must not change meanwhile.

        Raises:
            StorageError: the local disk failed.
        """
        self._add_delta(self._table.delta)
        held, files = self._held, self._files
        self._held, self._files, self._written, self._merged = [], [], 0, 0
        try:
            for part in _portions([*map(_read, files), *filter(len, map(_sorted, held))]):
                yield from self._rows_of(part)
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def _rows_of(self, identities: Identities) -> Iterator[pa.Table]:
        hashes, checks = identities[:, 0].copy(), identities[:, 1].copy()
        delta = self._table.delta
        slots = delta.find(hashes, checks)
        in_delta = slots >= 0
        rows = [delta.table(slots[in_delta].astype(np.intp))]
        found = self._table.lookup(hashes[~in_delta], checks[~in_delta])
        if found is not None:
            rows.append(found.table)
        table = pa.concat_tables(rows)
        if table.num_rows:
            yield table

    def _write(self, sources: Sequence[Identities]) -> None:
        """Write the identities to a file. Files are merged when there are many identities in them."""
        try:
            self._files.append(self._directory / f"{self._new_id()}.changed")
            with self._files[-1].open("wb") as file:
                for part in _portions(sources):
                    file.write(part.tobytes())
                    self._written += len(part)
        except OSError as error:
            raise StorageError(
                f"cannot write to the local disk file=`{self._files[-1]}` reason=`{error}`",
                fix="check the free space and the state of the disk",
            ) from error
        if self._written > 2 * (self._merged + len(sources[0])) and len(self._files) > 1:
            files, self._files, self._written = self._files, [], 0
            self._write([_read(file) for file in files])
            self._merged = self._written
            for path in files:
                path.unlink()

    def close(self) -> None:
        """Delete the files."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files = []


def _read(file: Path) -> Identities:
    with file.open("rb") as source:
        memory = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, np.uint64).reshape(-1, 2)


def _sorted(identities: Identities) -> Identities:
    return identities[np.lexsort((identities[:, 1], identities[:, 0]))]


def _distinct(sources: Sequence[Identities]) -> Identities:
    """Return identities in order, each once."""
    found = _sorted(np.concatenate(sources))
    return found[np.append(True, (found[1:] != found[:-1]).any(axis=1))] if len(found) else found


def _portions(sources: Sequence[Identities]) -> Iterator[Identities]:
    """Yield the identities in order, each once; all of one hash in one portion.

    `sources` are in order and have at least one each. Hashes are spread alike in all of them, so
    portions are about equally large.
    """
    if not sources:
        return
    largest = max(sources, key=len)
    number = -(-sum(map(len, sources)) // _PORTION)
    steps = np.linspace(0, len(largest), number + 1).astype(np.intp)[1:-1]
    cuts = [[0] * len(sources)]
    for bound in largest[steps, 0]:
        # `searchsorted` would copy a whole column of a file.
        cuts.append([bisect_right(source[:, 0], bound) for source in sources])
    cuts.append([len(source) for source in sources])
    for lows, highs in pairwise(cuts):
        part = [s[low:high] for s, low, high in zip(sources, lows, highs, strict=True)]
        if any(map(len, part)):
            yield _distinct(part)
