"""Rows that keys had before they changed, kept so that clients can read them as of a checkpoint.

An *entry* is what is kept at once: a key, or a key in a window. It is identified by two lanes, as keys
are, and had any number of rows. Nothing is kept twice: the first old rows of an entry are those at the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from ...state.hashing import Hashes
from ...state.slots.arrays import ranges
from ...state.slots.table import SlotTable
from ...state.values import Index

_ENTRY_BYTES: Final = 48
"""Roughly the memory of an entry beside its rows."""
ReadOld: TypeAlias = Callable[[Index], tuple[Index, list[pa.Array]]]
"""Reads the rows of some of the entries that were given to `OldRows.keep`.

It takes the places of the entries, and returns the columns of all their rows, and for each row which of
these entries it belongs to, as numbers from 0 that ascend.
"""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of consecutive entries.

    Attributes:
        first: the number of the first entry.
        begins: for each entry its first row; and the number of all rows.
        columns: of the rows.
    """

    first: int
    begins: Index
    columns: list[pa.Array]


class OldRows:
    """The old rows of entries since one cut; see `CommittedPoints`."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._index = SlotTable()
        self._pieces: list[_Piece] = []

    def expect_as_many(self, before: OldRows | None) -> None:
        """Make room for as many entries as there were since the cut before; only while there are none."""
        if before is not None:
            self._index.expect(before._index.size)

    def keep(self, hashes: Hashes, checks: Hashes | None, read: ReadOld) -> bool:
        """Keep the rows of those entries that are not here yet; return True if there are such entries.

        Args:
            hashes: the first lane of the identity of each entry; entries may repeat.
            checks: the second one.
            read: called with the places of new entries.
        """
        before = self._index.size
        places = self._index.lookup(hashes, checks, mostly_new=True)[1]
        if not len(places):
            return False
        owners, columns = read(places)
        begins = np.searchsorted(owners, np.arange(len(places) + 1))
        self._pieces.append(_Piece(before, begins, columns))
        self.nbytes += len(places) * _ENTRY_BYTES + sum(column.nbytes for column in columns)
        return True

    def find(
        self, hashes: Hashes, checks: Hashes | None
    ) -> tuple[Index, list[tuple[Index, list[pa.Array]]]]:
        """Return the places of the entries that are here, and their rows with the place of each."""
        numbers = self._index.find(hashes, checks).astype(np.intp)
        known = np.flatnonzero(numbers >= 0)
        firsts = np.array([piece.first for piece in self._pieces], np.intp)
        pieces = np.searchsorted(firsts, numbers[known], side="right") - 1
        found: list[tuple[Index, list[pa.Array]]] = []
        for number in sorted(set(pieces.tolist())):
            piece, at = self._pieces[number], known[pieces == number]
            entries = numbers[at] - piece.first
            counts = piece.begins[entries + 1] - piece.begins[entries]
            rows = ranges(piece.begins[entries], counts)
            if rows.size:
                taken = pa.array(rows)
                columns = [column.take(taken) for column in piece.columns]
                found.append((np.repeat(at, counts), columns))
        return known, found

    def rows(self) -> Iterator[list[pa.Array]]:
        """Yield the columns of all rows, in pieces."""
        return (piece.columns for piece in self._pieces)

    def absorb(self, later: OldRows) -> None:
        """See `OldValues`."""
        if not later._pieces:
            return
        columns = zip(*(piece.columns for piece in later._pieces), strict=True)
        joined = [pa.concat_arrays(list(column)) for column in columns]
        counts = np.concatenate([np.diff(piece.begins) for piece in later._pieces])
        begins = np.cumsum(counts) - counts

        def read(places: Index) -> tuple[Index, list[pa.Array]]:
            taken = pa.array(ranges(begins[places], counts[places]))
            owners = np.repeat(np.arange(len(places)), counts[places])
            return owners, [column.take(taken) for column in joined]

        self.keep(*later._index.lanes(), read)
