"""Windows as of checkpoints: what keys had in their windows before it changed.

It is kept by entries. Where windows have fixed bounds, an entry is a *cell*: a key, and the number of a
window or pane. A session may become part of another one, so there all sessions of a key are one entry.
Whatever is about to change or to expire for the first time since the newest cut is kept before. What a
key had at a cut is therefore what has been kept since, and what the windows have now of all other entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.hashing import distinct
from ...state.queryable import CommittedPoints
from ...state.slots.key_index import KeyHasher, taken_keys
from ...state.values import Index
from ..aggregation.aggregates import AggregatePlan
from ..aggregation.keyed_aggregate import identity_seed
from ..aggregation.old_rows import OldRows, ReadOld
from ..base import OperatorContext
from ..queries import old_values_max
from ..time_progress import TimeProgress

Found = tuple[Index, list[pa.Array]]
"""The place of the key of each row, and columns."""
Numbers = npt.NDArray[np.int64]


@final
class OldCells(OldRows):
    """Old rows since one cut.

    Attributes:
        numbers: the numbers of the cells; none where entries are keys.
        progress: the progress of event time at the cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: set[int] = set()
        self.progress: TimeProgress | None = None

    def absorb(self, later: OldRows) -> None:
        """See `OldValues`."""
        super().absorb(later)
        assert isinstance(later, OldCells)
        self.numbers |= later.numbers


@dataclass(frozen=True, slots=True)
class OldFound:
    """The rows of some keys that have been kept since a cut.

    Attributes:
        rows: the kept rows, with the places of their keys.
        numbers: the numbers of the cells that were looked for, ascending.
        kept: by number and place of the key: True if that cell was kept, with rows or without.
    """

    rows: list[Found]
    numbers: Numbers
    kept: npt.NDArray[np.bool_]

    def is_kept(self, places: Index, numbers: Index) -> Mask:
        """Return which of some cells were kept, by the places of their keys."""
        if not len(self.numbers):
            return np.zeros(len(places), np.bool_)
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        kept: Mask = (self.numbers[at] == numbers) & self.kept[at, places]
        return kept


class CommittedWindows:
    """The windows of one subtask as of checkpoints.

    Args:
        plan: of the aggregates.
        context: of the operator.
        cells: entries are cells, and not keys.

    Attributes:
        points: one for each cut that may still be asked for.
        cuts: the number of cuts so far.
    """

    def __init__(self, plan: AggregatePlan, context: OperatorContext, *, cells: bool) -> None:
        self.points = CommittedPoints(OldCells, old_values_max(context.options))
        self.cuts = 0
        self._keys, self._cells = len(plan.keys), cells
        types: list[Any] = [plan.schema.field(key).type for key in plan.keys]
        if cells or not types:
            types.insert(0, pa.int64())
        self._hasher = KeyHasher(types, identity_seed(context.job_name), dense=False)

    @property
    def keeps(self) -> bool:
        """True if what changes has to be kept."""
        return self.points.newest is not None

    def cut(self, checkpoint_id: int, progress: TimeProgress) -> None:
        """Note that the windows as they are now are those that a checkpoint will have."""
        before = self.points.newest
        self.points.cut(checkpoint_id)
        self._note(progress).expect_as_many(before)

    def restored(self, checkpoint_id: int, progress: TimeProgress) -> None:
        """Note that the windows as they are now are those of a checkpoint."""
        self.points.restored(checkpoint_id)
        self._note(progress)

    def _note(self, progress: TimeProgress) -> OldCells:
        newest = self.points.newest
        assert newest is not None
        self.cuts += 1
        newest.progress = progress.copied()
        return newest

    # --- before a change -----------------------------------------------------------------------

    def keep(self, keys: list[pa.Array], numbers: Index | None, read: ReadOld) -> None:
        """Keep entries before they change.

        Args:
            keys: the columns of their keys.
            numbers: the number of each cell; None where entries are keys.
            read: reads the rows of some of them, without the columns of keys.
        """
        old = self.points.newest
        if old is None:
            return
        if numbers is not None:
            old.numbers.update(distinct(numbers).tolist())

        def with_keys(places: Index) -> Found:
            owners, found = read(places)
            at = places[owners]
            return owners, [*(taken_keys(key, at) for key in keys), *found]

        if old.keep(*self._hasher.identify(_identity(keys, numbers)), with_keys):
            self.points.grew()

    def keep_all(self, keys: list[pa.Array], numbers: Index, values: list[pa.Array]) -> None:
        """Keep cells that are about to be dropped, each with the row of these columns."""
        self.keep(
            keys,
            numbers,
            lambda places: (
                np.arange(len(places)),
                [column.take(pa.array(places)) for column in values],
            ),
        )

    # --- queries -------------------------------------------------------------------------------

    def progress_at(self, checkpoint_id: int) -> TimeProgress:
        """Return the progress of event time at a checkpoint.

        Raises:
            NotKept: that is not known.
        """
        progress = self.points.since(checkpoint_id)[0].progress
        assert progress is not None
        return progress

    def find(self, keys: list[pa.Array], checkpoint_id: int) -> OldFound:
        """Return what has been kept of some keys since a checkpoint.

        `keys` are the columns of the keys; without columns there is one key.

        Raises:
            NotKept: that is not known.
        """
        olds, count = self.points.since(checkpoint_id), len(keys[0]) if keys else 1
        numbers = np.zeros(1, np.int64)
        if self._cells:
            numbers = np.array(sorted(set().union(*(old.numbers for old in olds))), np.int64)
        places = np.tile(np.arange(count), len(numbers))
        taken = [taken_keys(key, places) for key in keys]
        of_cells = np.repeat(numbers, count) if self._cells else None
        hashes, checks = self._hasher.identify(_identity(taken, of_cells))
        kept, rest = np.zeros(len(places), np.bool_), np.arange(len(places))
        rows: list[Found] = []
        for old in olds:
            known, found = old.find(hashes[rest], None if checks is None else checks[rest])
            for at, values in found:
                if self._cells:
                    values = [pa.array(numbers[rest[at] // count]), *values[self._keys :]]
                else:
                    values = values[self._keys :]
                rows.append((places[rest[at]], values))
            kept[rest[known]] = True
            rest = np.delete(rest, known)
        return OldFound(rows, numbers, kept.reshape(len(numbers), count))

    def keys_since(self, checkpoint_id: int) -> Iterator[list[pa.Array]]:
        """Return the keys of which rows have been kept since a checkpoint, in pieces, as they are now.

        Raises:
            NotKept: that is not known.
        """
        olds = self.points.since(checkpoint_id)
        return iter([columns[: self._keys] for old in olds for columns in old.rows()])


def _identity(keys: list[pa.Array], numbers: Index | None) -> list[pa.Array]:
    """Return the columns that identify entries; without any keys a single entry has the number 0."""
    if numbers is None:
        return keys or [pa.array([0], pa.int64())]
    return [pa.array(numbers, pa.int64()), *keys]
