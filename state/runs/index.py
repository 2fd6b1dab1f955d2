"""The index that a run keeps in memory to find hashes: 2 to 3 bytes a row.

Hashes are uniform and sorted, so the distance of a hash from the first one, shifted, is nearly its row: the
*fence* has the first row of each bucket of 2 to 4 rows. Beside it lies one byte of each row's hash, its
*fingerprint*. A lookup compares the eight fingerprints from the start of the bucket, as one word; so of the
hashes that a run does not hold 99 in 100 are turned away without touching a page of its files, and of
those it holds the row is known before the first page is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..hashing import Hashes
from ..values import Index

_ROWS_PER_BUCKET = 2
_CHUNK_ROWS = 1 << 16
_WINDOW = 8
"""Fingerprints in a word."""
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_WITHIN = np.array([(1 << 8 * rows) - 1 for rows in range(_WINDOW + 1)], np.uint64)
"""The bytes of a window that belong to a bucket of so many rows."""
_ONE, _THREE, _SEVEN = np.uint64(1), np.uint64(3), np.uint64(7)


Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)
class Candidates:
    """Rows that may hold what is looked for.

    Attributes:
        positions: of the hashes among those asked for; one may come more than once.
        bases: first row of the window that was compared.
        matches: the top bit of each byte of the window that agrees.
    """

    positions: Index
    bases: Rows
    matches: Hashes

    def rows(self) -> Rows:
        """The first candidate of each."""
        lowest = self.matches & (~self.matches + _ONE)
        return self.bases + (np.bitwise_count(lowest - _ONE) >> 3)

    def take(self, which: Index) -> Candidates:
        """Some of them, in that order."""
        return Candidates(self.positions[which], self.bases[which], self.matches[which])

    def others(self, which: Index) -> Candidates:
        """The candidates behind the first ones of `which`."""
        rest = self.take(which)
        rest.matches &= rest.matches - _ONE
        return rest.take(np.flatnonzero(rest.matches))


class RunIndex:
    """Index of the rows of a run, given as ascending pieces of ascending hashes; at least one row."""

    def __init__(self, pieces: Sequence[Hashes]) -> None:
        rows = sum(map(len, pieces))
        self._first, self._last = np.uint64(pieces[0][0]), np.uint64(pieces[-1][-1])
        span = int(self._last - self._first)
        buckets = rows // _ROWS_PER_BUCKET + 1
        # The least shift that leaves no more buckets than that.
        self._shift = np.uint64(max(0, span.bit_length() - buckets.bit_length() + 1))
        self._fence = np.zeros((span >> int(self._shift)) + 2, np.uint32)
        self._words = np.zeros(rows // 8 + 2, np.uint64)
        start = 0
        for piece in pieces:
            for low in range(0, len(piece), _CHUNK_ROWS):
                chunk = piece[low : low + _CHUNK_ROWS]
                self._add(start, chunk)
                start += len(chunk)
        np.cumsum(self._fence, out=self._fence)

    @property
    def nbytes(self) -> int:
        """Memory of the index."""
        return self._words.nbytes + self._fence.nbytes

    def _add(self, start: int, hashes: Hashes) -> None:
        self._words.view(np.uint8)[start : start + len(hashes)] = hashes.astype(np.uint8)
        buckets = ((hashes - self._first) >> self._shift).view(np.int64)
        counts = np.bincount(buckets - buckets[0])
        at = int(buckets[0]) + 1
        self._fence[at : at + len(counts)] += counts.astype(np.uint32)

    def probe(self, hashes: Hashes) -> Candidates:
        """Where each of ascending `hashes` may be."""
        low = int(np.searchsorted(hashes, self._first, "left"))
        high = int(np.searchsorted(hashes, self._last, "right"))
        hashes = hashes[low:high]
        buckets = ((hashes - self._first) >> self._shift).view(np.int64)
        bases = self._fence.take(buckets).astype(np.int64)
        buckets += 1
        sizes = self._fence.take(buckets).astype(np.int64)
        sizes -= bases
        positions = np.arange(low, high)
        found = [self._compare(hashes, bases, sizes, positions)]
        while (crowded := np.flatnonzero(sizes > _WINDOW)).size:
            hashes, positions = hashes[crowded], positions[crowded]
            bases, sizes = bases[crowded] + _WINDOW, sizes[crowded] - _WINDOW
            found.append(self._compare(hashes, bases, sizes, positions))
        if len(found) == 1:
            return found[0]
        return Candidates(
            np.concatenate([one.positions for one in found]),
            np.concatenate([one.bases for one in found]),
            np.concatenate([one.matches for one in found]),
        )

    def _compare(
        self,
        hashes: Hashes,
        bases: Rows,
        sizes: Rows,
        positions: Index,
    ) -> Candidates:
        """Compare the fingerprints of rows base to base + min(size, 8)."""
        index = bases >> 3
        shift = (bases.view(np.uint64) & _SEVEN) << _THREE
        window = self._words.take(index)
        window >>= shift
        index += 1
        high = self._words.take(index)
        high <<= _ONE  # a shift by 64 is undefined: in two steps
        high <<= np.uint64(63) - shift
        window |= high
        window ^= (hashes & np.uint64(0xFF)) * _ONES
        # The lowest zero byte, and perhaps bytes above it, get their top bit set.
        matches: Hashes = window - _ONES
        matches &= ~window
        matches &= _TOPS
        matches &= _WITHIN.take(sizes, mode="clip")
        some = np.flatnonzero(matches)
        return Candidates(positions[some], bases[some], matches[some])
