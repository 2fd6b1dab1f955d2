"""Vectorised hash table: the 64-bit hashes of a batch of keys -> dense slot numbers.

Slots are given out 0, 1, 2, … and index the arrays that hold a key's state. A cell of the open-addressing
index holds only slot + 1 (0: empty); the hashes lie densely, by slot, where snapshots and growth read
them. Identity is the 64-bit hash, which is exact where the hash is a bijection (one integer column),
and otherwise that hash plus a second one, the *check* lane.

A whole batch probes at once: in each round the rows that have not met their key yet move on, by a
step of their own (double hashing), so rounds stay few. Growth is spread over the batches that follow:
keys are moved in steps from the dense arrays into the larger index, while the old one is still asked.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import StateError
from .hashing import Hashes

Slots: TypeAlias = npt.NDArray[np.int32]
Rows: TypeAlias = npt.NDArray[np.intp]

_INITIAL_CELLS = 1_024
_CELLS_PER_KEY = 4
"""A cell is 4 bytes, so the index is kept sparse: nine of ten keys are met in the first probe."""
_FIRST_GUESS = 1 / 32
_MOVE_AT_LEAST = 16_384
_STEP_SHIFT = np.uint64(20)
MAX_SLOTS = 2**30
"""Keys one table can hold, as slots are int32."""


class SlotTable:
    """Maps keys, given by their hashes, to dense slots. Not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        """Slots given out so far."""
        self._cells: Slots = np.zeros(_INITIAL_CELLS, np.int32)
        self._old: Slots | None = None  # the smaller index while its keys are being moved
        self._moved = 0
        self._to_move = 0
        self._hashes: Hashes = np.zeros(_INITIAL_CELLS // _CELLS_PER_KEY, np.uint64)
        self._checks: Hashes | None = None  # None: all are 0

    @property
    def hashes(self) -> Hashes:
        """The hash of each slot's key (a view)."""
        return self._hashes[: self.size]

    def clear(self) -> None:
        """Forget all keys; keeps the memory."""
        self._cells.fill(0)
        self._old = None
        self._moved = self._to_move = self.size = 0
        if self._checks is not None:
            self._checks.fill(0)

    def lookup(self, hashes: Hashes, checks: Hashes | None = None) -> tuple[Slots, Rows]:
        """The slot of each row's key; new keys get the next slots.

        Args:
            hashes: first lane of the identity.
            checks: second lane; None stands for all zeros.

        Returns:
            The slots, and for each new slot, in order, a row that holds its key.
        """
        if checks is not None and self._checks is None:
            self._checks = np.zeros(len(self._hashes), np.uint64)
        self._move(2 * len(hashes))
        if self.size:
            slots, missed = self._find(self._cells, hashes, checks)
        else:
            slots, missed = np.empty(len(hashes), np.int32), np.arange(len(hashes))
        if missed.size and self._old is not None:
            missed = self._find_again(self._old, slots, missed, hashes, checks)
        fresh: list[Rows] = []
        distinct = _FIRST_GUESS
        while missed.size:
            # Insert a block at a time: the misses may repeat few keys, which need little room. How
            # many of them were distinct is the guess for the next block.
            room = self._make_room(int(missed.size * distinct) + 1)
            block, missed = missed[:room], missed[room:]
            fresh.append(self._insert(slots, block, hashes, checks))
            distinct = len(fresh[-1]) / len(block)
            if missed.size:
                missed = self._find_again(self._cells, slots, missed, hashes, checks)
        return slots, np.concatenate(fresh) if fresh else missed

    def fill(self, hashes: Hashes, checks: Hashes | None = None) -> None:
        """Take over distinct keys as slots 0, 1, 2, …; only into an empty table."""
        self._make_room(len(hashes))
        self.size = len(hashes)
        self._hashes[: self.size] = hashes
        if checks is not None:
            self._checks = np.zeros(len(self._hashes), np.uint64)
            self._checks[: self.size] = checks
        self._old, self._moved, self._to_move = self._cells, 0, self.size
        self._cells = np.zeros(len(self._cells), np.int32)
        self._move(self.size)

    # --- probing -------------------------------------------------------------------------------

    def _find(self, cells: Slots, hashes: Hashes, checks: Hashes | None) -> tuple[Slots, Rows]:
        """The slot of each row, -1 where its key is absent; and the rows of absent keys."""
        mask = len(cells) - 1
        at = hashes.view(np.int64) & mask
        slots = cells.take(at, mode="wrap")
        slots -= 1
        ok = self._matches(slots, hashes, checks)
        rest = np.flatnonzero(~ok)
        missed: list[Rows] = []
        if rest.size:
            at, steps = at[rest], _steps(hashes[rest])
        while rest.size:
            empty = slots[rest] < 0
            missed.append(rest[empty])
            keep = ~empty
            rest, at, steps = rest[keep], at[keep], steps[keep]
            at = (at + steps) & mask
            found = cells.take(at) - 1
            slots[rest] = found
            ok = self._matches(found, hashes[rest], None if checks is None else checks[rest])
            keep = ~ok
            rest, at, steps = rest[keep], at[keep], steps[keep]
        if not missed:
            return slots, rest
        rows = np.concatenate(missed)
        rows.sort()
        return slots, rows

    def _matches(
        self, slots: Slots, hashes: Hashes, checks: Hashes | None
    ) -> npt.NDArray[np.bool_]:
        """True where the slot holds the row's key; there must be a key.

        An empty cell, -1, is read as slot 0. That never matches: slot 0 is the first to be in any
        index, so a row with its key meets it before it meets an empty cell.
        """
        ok: npt.NDArray[np.bool_] = self._hashes.take(slots, mode="clip") == hashes
        if self._checks is not None:
            ok &= self._checks.take(slots, mode="clip") == (0 if checks is None else checks)
        return ok

    def _find_again(
        self, cells: Slots, slots: Slots, rows: Rows, hashes: Hashes, checks: Hashes | None
    ) -> Rows:
        """Look for `rows` in one index: fills in their slots, returns those still absent."""
        found, absent = self._find(cells, hashes[rows], None if checks is None else checks[rows])
        slots[rows] = found
        return rows[absent]

    def _insert(self, slots: Slots, rows: Rows, hashes: Hashes, checks: Hashes | None) -> Rows:
        """Give slots to the absent keys of `rows`, which may repeat; returns the row of each."""
        cells, mask = self._cells, len(self._cells) - 1
        h = hashes[rows]
        at, steps = h.view(np.int64) & mask, _steps(h)
        fresh: list[Rows] = []
        while rows.size:
            found = cells.take(at) - 1
            empty = np.flatnonzero(found < 0)
            if empty.size:
                # Each row at an empty cell claims it; the first row wins, the others look again.
                claims = np.arange(empty.size, dtype=np.int32)
                cells[at[empty[::-1]]] = claims[::-1]
                won = empty[cells.take(at[empty]) == claims]
                new = np.arange(self.size, self.size + won.size, dtype=np.int32)
                cells[at[won]] = new + 1
                self._hashes[new] = hashes[rows[won]]
                if self._checks is not None:
                    self._checks[new] = 0 if checks is None else checks[rows[won]]
                self.size += won.size
                fresh.append(rows[won])
                found = cells.take(at) - 1
            ok = self._matches(found, hashes[rows], None if checks is None else checks[rows])
            slots[rows[ok]] = found[ok]
            keep = ~ok
            rows, at, steps = rows[keep], at[keep], steps[keep]
            at = (at + steps) & mask
        return np.concatenate(fresh)

    # --- growth --------------------------------------------------------------------------------

    def _make_room(self, wanted: int) -> int:
        """How many keys may be inserted now, at least `wanted`; starts to grow if they are too many."""
        room = len(self._cells) // _CELLS_PER_KEY - self.size
        if room < wanted:
            self._move(self._to_move)
            if self.size + wanted > MAX_SLOTS:
                raise StateError(
                    f"too many keys in one subtask keys=`{self.size}`", fix="raise the parallelism"
                )
            cells = 1 << (_CELLS_PER_KEY * (self.size + wanted) - 1).bit_length()
            self._old, self._moved, self._to_move = self._cells, 0, self.size
            self._cells = np.zeros(cells, np.int32)
            self._move(0)
            room = cells // _CELLS_PER_KEY - self.size
        if self.size + room > len(self._hashes):
            self._hashes = _grown(self._hashes, self.size + room)
            if self._checks is not None:
                self._checks = _grown(self._checks, self.size + room)
        return room

    def _move(self, at_least: int) -> None:
        """Move some keys from the old index to the new one; twice as many as can come in new."""
        if self._old is None:
            return
        stop = min(self._to_move, self._moved + max(at_least, _MOVE_AT_LEAST))
        new = np.arange(self._moved, stop, dtype=np.int32)
        h = self._hashes[self._moved : stop]
        cells, mask = self._cells, len(self._cells) - 1
        at, steps = h.view(np.int64) & mask, _steps(h)
        while new.size:
            empty = np.flatnonzero(cells.take(at) == 0)
            cells[at[empty]] = new[empty] + 1
            lost = cells.take(at) != new + 1
            new, at, steps = new[lost], at[lost], steps[lost]
            at = (at + steps) & mask
        self._moved = stop
        if stop == self._to_move:
            self._old = None


def _steps(hashes: Hashes) -> npt.NDArray[np.int64]:
    """Each row's own odd step, from bits that the first probe did not use."""
    steps = (hashes >> _STEP_SHIFT) | np.uint64(1)
    return steps.view(np.int64)


def _grown(array: Hashes, size: int) -> Hashes:
    """A copy with room for `size` entries and at least twice as many as before; the rest is zero."""
    larger = np.zeros(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger
