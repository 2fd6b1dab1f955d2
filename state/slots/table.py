"""Two indexes from the keys of a batch to dense slot numbers: a vectorised hash table, and a plain array.

Both give out the slots 0, 1, 2, … which index the arrays that hold the state of the keys.

**SlotTable** is an open-addressing index over 64-bit hashes. A cell holds only slot + 1 (0: empty); the
hashes lie densely, by slot, where snapshots and growth read them. The identity of a key is its 64-bit
hash, which is exact where the hash is a bijection (one integer column), and otherwise that hash plus a
second one, the *check* lane. A whole batch probes at once: in each round the rows that have not met their
key yet move on, by a step of their own (double hashing), so there are few rounds. Growth is spread over
the batches that follow: keys are moved in steps from the dense arrays into the larger index, while the
old one is still searched.

**DenseSlots** serves integer keys that lie close together, as identifiers often do. An array indexed by
key - base is the best index there is: one gather per batch, no hash, no probing. Its `lookup` answers None
as soon as the keys spread too far for that; the caller then moves on to the hash table.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import StateError
from ..hashing import Hashes
from ..values import Array
from .arrays import RESERVE_FROM, RESERVED_ENTRIES, SlotArray, large_zeros, reserved_zeros

Slots: TypeAlias = npt.NDArray[np.int32]
Rows: TypeAlias = npt.NDArray[np.intp]

_INITIAL_CELLS = 1_024
_CELLS_PER_KEY = 4
"""A cell takes only 4 bytes, so the index is kept sparse: nine in ten keys are met in the first probe."""
_SMALL_CELLS_MAX = 1 << 15
_SMALL_CELLS_PER_KEY = 16
"""An index that fits the nearest caches is sparser still: there the number of rounds decides the cost of
a batch.
"""
_FIRST_GUESS = 1 / 32
_MOVE_AT_LEAST = 16_384
_STEP_SHIFT = np.uint64(20)
_PREPARE_FROM = 1 << 20
_PAGE_CELLS = 1_024
_ROOM_MAX = 1 << 16
MAX_SLOTS = 2**30
"""The number of keys that one table can hold, as slots are int32."""


class SlotTable:
    """Maps keys, given by their hashes, to dense slots. Not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        """The number of slots given out so far."""
        self._cells: Slots = np.zeros(_INITIAL_CELLS, np.int32)
        self._old: Slots | None = None  # the smaller index, while its keys are being moved
        self._moved = 0
        self._to_move = 0
        self._settled = 0  # the number of keys when the last one was moved from an old index
        self._next: Slots | None = (
            None  # the next, larger index, and how many of its cells have memory
        )
        self._backed = 0
        self._hashes = SlotArray(np.uint64)
        self._checks: SlotArray | None = None  # None: all checks are 0

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        cells = [self._cells, self._old, self._next]
        lanes = self._hashes.nbytes + (0 if self._checks is None else self._checks.nbytes)
        return lanes + sum(part.nbytes for part in cells if part is not None)

    def memory(self) -> list[Array]:
        """Return the arrays of the table."""
        parts = [self._cells, self._old, self._next, self._hashes.data]
        checks = [] if self._checks is None else [self._checks.data]
        return [part for part in (*parts, *checks) if part is not None]

    def clear(self) -> None:
        """Forget all keys; keeps the memory."""
        self._cells.fill(0)
        self._old = self._next = None
        self._moved = self._to_move = self._settled = self.size = self._backed = 0
        self._checks = None

    def lookup(
        self, hashes: Hashes, checks: Hashes | None = None, *, mostly_new: bool = False
    ) -> tuple[Slots, Rows]:
        """Return the slot of each row's key; new keys get the next slots.

        Args:
            hashes: the first lane of the identity.
            checks: the second lane; None stands for all zeros.
            mostly_new: most keys are not here yet; the result is the same.

        Returns:
            The slots, and for each new slot, in order, a row that holds its key.
        """
        if checks is not None and self._checks is None:
            self._checks = SlotArray(np.uint64)
            self._checks.reserve(self.size)
        self._move(2 * len(hashes))
        has_room = _most_keys(len(self._cells)) - self.size >= len(hashes)
        # An insertion meets a key that is here as well, if it is in this index.
        inserts = mostly_new and self._old is None and has_room
        if self.size and not inserts:
            slots, missed = self._find(self._cells, hashes, checks)
        else:
            slots, missed = np.empty(len(hashes), np.int32), np.arange(len(hashes))
        if missed.size and self._old is not None:
            missed = self._find_again(self._old, slots, missed, hashes, checks)
        fresh: list[Rows] = []
        distinct = _FIRST_GUESS
        while missed.size:
            # Insert a block at a time: the misses may repeat few keys, which need little room. The share
            # of distinct keys in a block is the guess for the next one.
            room = self._make_room(int(missed.size * distinct) + 1)
            block, missed = missed[:room], missed[room:]
            fresh.append(self._insert(slots, block, hashes, checks))
            distinct = len(fresh[-1]) / len(block)
            if missed.size:
                missed = self._find_again(self._cells, slots, missed, hashes, checks)
        if fresh:
            self._prepare()
        return slots, np.concatenate(fresh) if fresh else missed

    def expect(self, keys: int) -> None:
        """Make the index large enough for this many keys; only of an empty table."""
        cells = len(self._cells)
        while _most_keys(cells) < keys:
            cells *= 2
        if cells > len(self._cells):
            self._cells = large_zeros(cells, np.int32)

    def fill(self, hashes: Hashes, checks: Hashes | None = None) -> None:
        """Take over distinct keys as slots 0, 1, 2, …; only into an empty table."""
        self._make_room(len(hashes))
        self.size = len(hashes)
        self._hashes.data[: self.size] = hashes
        if checks is not None:
            self._checks = SlotArray(np.uint64)
            self._checks.reserve(self.size)
            self._checks.data[: self.size] = checks
        self._rebuild()

    def forget(self, size: int) -> None:
        """Forget all keys but those in the first `size` slots. It looks at all cells."""
        if size == self.size:
            return
        self.size = size
        if self._old is None and self._settled <= size:
            # The way to the cell of a key leads past keys with smaller slots, and those that moved.
            self._cells[self._cells > size] = 0
        else:
            self._rebuild()

    def _rebuild(self) -> None:
        """Make the index again from the hashes."""
        self._old, self._moved, self._to_move = self._cells, 0, self.size
        self._cells = large_zeros(len(self._cells), np.int32)
        self._move(self.size)

    def find(self, hashes: Hashes, checks: Hashes | None = None) -> Slots:
        """Return the slot of each row's key, -1 where it is absent. Changes nothing."""
        if not self.size:
            return np.full(len(hashes), -1, np.int32)
        slots, missed = self._find(self._cells, hashes, checks)
        if missed.size and self._old is not None:
            self._find_again(self._old, slots, missed, hashes, checks)
        return slots

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each slot's key (views); None: all second lanes are 0."""
        checks = None if self._checks is None else self._checks.data[: self.size]
        return self._hashes.data[: self.size], checks

    # --- probing -------------------------------------------------------------------------------

    def _find(self, cells: Slots, hashes: Hashes, checks: Hashes | None) -> tuple[Slots, Rows]:
        """Return the slot of each row, -1 where its key is absent, and the rows of absent keys."""
        mask = len(cells) - 1
        at = hashes.view(np.int64) & mask
        slots = cells.take(at, mode="wrap")
        slots -= 1
        rest = np.flatnonzero(self._differs(slots, hashes, checks))
        missed: list[Rows] = []
        if rest.size:
            found, at, left = slots.take(rest), at.take(rest), hashes.take(rest)
            steps = _steps(left)
        while rest.size:
            empty = found < 0
            if empty.any():
                missed.append(rest[empty])
                keep = np.flatnonzero(~empty)
                if not keep.size:
                    break
                rest, at = rest.take(keep), at.take(keep)
                steps, left = steps.take(keep), left.take(keep)
            at += steps
            at &= mask
            found = cells.take(at) - 1
            slots[rest] = found
            differs = self._differs(found, left, None if checks is None else checks.take(rest))
            keep = np.flatnonzero(differs)
            found, rest, at = found.take(keep), rest.take(keep), at.take(keep)
            steps, left = steps.take(keep), left.take(keep)
        if not missed:
            return slots, rest
        if len(missed) == 1:
            return slots, missed[0]
        rows = np.concatenate(missed)
        rows.sort()
        return slots, rows

    def _differs(
        self, slots: Slots, hashes: Hashes, checks: Hashes | None
    ) -> npt.NDArray[np.bool_]:
        """Return True where the slot does not hold the row's key; the table must not be empty.

        An empty cell, -1, is read as slot 0, which always differs: slot 0 is the first to enter any
        index, so a row with its key meets it before it meets an empty cell.
        """
        differs: npt.NDArray[np.bool_] = self._hashes.data.take(slots, mode="clip") != hashes
        if self._checks is not None:
            known = self._checks.data.take(slots, mode="clip")
            differs |= known != (0 if checks is None else checks)
        return differs

    def _find_again(
        self, cells: Slots, slots: Slots, rows: Rows, hashes: Hashes, checks: Hashes | None
    ) -> Rows:
        """Look for `rows` in one index: fill in their slots, and return the rows that are still absent."""
        found, absent = self._find(cells, hashes[rows], None if checks is None else checks[rows])
        slots[rows] = found
        return rows[absent]

    def _insert(self, slots: Slots, rows: Rows, hashes: Hashes, checks: Hashes | None) -> Rows:
        """Give slots to the absent keys of `rows`, which may repeat, and return the row of each new key.

        The other keys of `rows` are in this index, too.
        """
        cells, mask = self._cells, len(self._cells) - 1
        h = hashes.take(rows)
        c = None if checks is None else checks.take(rows)
        at, steps = h.view(np.int64) & mask, _steps(h)
        fresh: list[Rows] = []
        while rows.size:
            found = cells.take(at)
            found -= 1
            empty = np.flatnonzero(found < 0)
            if empty.size:
                # Each row at an empty cell claims it; the first row wins, the others look again.
                where = at.take(empty)
                claims = np.arange(empty.size, dtype=np.int32)
                cells[where[::-1]] = claims[::-1]
                first = np.flatnonzero(cells.take(where) == claims)
                won, size = empty.take(first), self.size + first.size
                new = np.arange(self.size, size, dtype=np.int32)
                cells[where.take(first)] = new + 1
                self._hashes.data[self.size : size] = h.take(won)
                if self._checks is not None:
                    self._checks.data[self.size : size] = 0 if c is None else c.take(won)
                self.size = size
                fresh.append(rows.take(won))
                slots[fresh[-1]] = new
                if won.size == rows.size:
                    break
                others = np.ones(rows.size, np.bool_)
                others[won] = False
                keep = np.flatnonzero(others)
                rows, at, steps, h = rows.take(keep), at.take(keep), steps.take(keep), h.take(keep)
                c = None if c is None else c.take(keep)
                found = cells.take(at)
                found -= 1
            differs = self._differs(found, h, c)
            met = ~differs
            slots[rows[met]] = found[met]
            keep = np.flatnonzero(differs)
            rows, at, steps, h = rows.take(keep), at.take(keep), steps.take(keep), h.take(keep)
            c = None if c is None else c.take(keep)
            at += steps
            at &= mask
        return np.concatenate(fresh) if fresh else rows

    # --- growth --------------------------------------------------------------------------------

    def _make_room(self, wanted: int) -> int:
        """Return how many keys may be inserted now, at least `wanted`. Starts to grow the index if it is
        too small.
        """
        room = _most_keys(len(self._cells)) - self.size
        if room < wanted:
            self._move(self._to_move)
            if self.size + wanted > MAX_SLOTS:
                raise StateError(
                    f"too many keys in one subtask keys=`{self.size}`", fix="raise the parallelism"
                )
            cells = len(self._cells)
            while _most_keys(cells) < self.size + wanted:
                cells *= 2
            self._old, self._moved, self._to_move = self._cells, 0, self.size
            ready = self._next is not None and len(self._next) == cells
            self._cells = self._next if ready else large_zeros(cells, np.int32)  # type: ignore[assignment]
            self._next, self._backed = None, 0
            self._move(0)
            room = _most_keys(cells) - self.size
        # Reserve only a part of the room, which may be many pages; the caller comes again.
        room = min(room, max(wanted, _ROOM_MAX))
        self._hashes.reserve(self.size + room)
        if self._checks is not None:
            self._checks.reserve(self.size + room)
        return room

    def _prepare(self) -> None:
        """Give the next index its memory little by little, while the last eighth of this one fills.

        Its cells are written at random: without this the first batches after growth would touch a new
        page for nearly every key.
        """
        cells = len(self._cells)
        if cells < _PREPARE_FROM:
            return
        most = _most_keys(cells)
        over = self.size - (most - most // 8)
        if over <= 0:
            return
        if self._next is None:
            self._next, self._backed = large_zeros(2 * cells, np.int32), 0
        upto = min(len(self._next), over * (16 * _CELLS_PER_KEY))
        if upto > self._backed:
            self._next[self._backed : upto : _PAGE_CELLS] = 0
            self._backed = upto

    def _move(self, at_least: int) -> None:
        """Move some keys from the old index to the new one, twice as many as can be added meanwhile."""
        if self._old is None:
            return
        stop = min(self._to_move, self._moved + max(at_least, _MOVE_AT_LEAST))
        new = np.arange(self._moved, stop, dtype=np.int32)
        h = self._hashes.data[self._moved : stop]
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
            self._old, self._settled = None, self.size


def _most_keys(cells: int) -> int:
    """Return the number of keys that an index of this size takes."""
    return cells // (_SMALL_CELLS_PER_KEY if cells <= _SMALL_CELLS_MAX else _CELLS_PER_KEY)


def _steps(hashes: Hashes) -> npt.NDArray[np.int64]:
    """Return an odd step for each row, from bits that the first probe did not use."""
    steps = (hashes >> _STEP_SHIFT) | np.uint64(1)
    return steps.view(np.int64)


SPAN_ALWAYS = 1 << 18
"""Keys within a span of this many numbers are always close enough (1 MiB of slots)."""
SPAN_PER_KEY = 16
"""Beyond that span the array may have this many entries per key, or per row of the batch."""


class DenseSlots:
    """Maps int64 keys to dense slots 0, 1, 2, …. Not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        self._base = 0
        self._low = self._high = 0  # the least and the greatest key so far
        self._slots: Slots = np.empty(0, np.int32)  # slot + 1 of key - base; 0: absent

    @property
    def nbytes(self) -> int:
        """The most memory that may be in use."""
        return min(len(self._slots), self._high - self._low + 1) * self._slots.itemsize

    @property
    def memory(self) -> Slots:
        """The array of the slots."""
        return self._slots

    def clear(self) -> None:
        """Forget all keys. A small array is kept."""
        if len(self._slots) > SPAN_ALWAYS:
            self._slots = np.empty(0, np.int32)
        else:
            self._slots.fill(0)
        self.size = 0

    def forget(self, size: int) -> None:
        """Forget all keys but those in the first `size` slots. It looks at the whole array."""
        if size < self.size:
            held = self._slots[self._low - self._base : self._high - self._base + 1]
            held[held > size] = 0
            self.size = size

    def lookup(self, keys: npt.NDArray[np.int64]) -> tuple[Slots, Rows] | None:
        """Return the slot of each row's key, and for each new slot, in order, a row that holds its key.

        If the keys spread too far, return None and change nothing.
        """
        if not len(keys):
            return np.empty(0, np.int32), np.empty(0, np.intp)
        if not self._cover(int(keys.min()), int(keys.max()), len(keys)):
            return None
        at = keys - self._base
        slots = self._slots.take(at)
        slots -= 1
        missing = np.flatnonzero(slots < 0)
        if not missing.size:
            return slots, missing
        where = at[missing]
        # Each row claims its key's entry, backwards, so that the first row of a key has it.
        claims = np.arange(missing.size, dtype=np.int32)
        self._slots[where[::-1]] = claims[::-1]
        won = self._slots.take(where) == claims
        fresh = missing[won]
        new = np.arange(self.size + 1, self.size + 1 + fresh.size, dtype=np.int32)
        self._slots[where[won]] = new
        self.size += fresh.size
        slots[missing] = self._slots.take(where)
        slots[missing] -= 1
        return slots, fresh

    def find(self, keys: npt.NDArray[np.int64]) -> Slots:
        """Return the slot of each row's key, -1 where it is absent. Changes nothing."""
        if self.size and len(keys) and self._low <= keys.min() and keys.max() <= self._high:
            slots = self._slots.take(keys - self._base)
            slots -= 1
            return slots
        slots = np.full(len(keys), -1, np.int32)
        if self.size:
            known = np.flatnonzero((keys >= self._low) & (keys <= self._high))
            slots[known] = self._slots.take(keys[known] - self._base) - 1
        return slots

    def _cover(self, low: int, high: int, rows: int) -> bool:
        """Make room for keys from `low` to `high`; return False if that would be too much."""
        if self.size:
            low, high = min(low, self._low), max(high, self._high)
        span, room = high - low + 1, len(self._slots)
        if span > max(SPAN_ALWAYS, SPAN_PER_KEY * max(self.size, rows)):
            return False
        if not self.size and span <= room:
            self._base = _centred(low, span, room)
        elif low < self._base or high >= self._base + room:
            self._make_room(low, span)
        self._low, self._high = low, high
        return True

    def _make_room(self, low: int, span: int) -> None:
        """Move to a larger array that covers `span` keys from `low` on and the old keys."""
        # Half as much again, so that slowly growing keys do not cause a copy per batch. A large array
        # lies in reserved address space, where unused entries cost nothing.
        larger = None
        if span > RESERVE_FROM:
            larger = reserved_zeros(max(RESERVED_ENTRIES, 8 * span), np.int32)
        if larger is None:
            larger = np.zeros(max(span + span // 2, 1024), np.int32)
        base = _centred(low, span, len(larger))
        if self.size:
            held = self._slots[self._low - self._base : self._high - self._base + 1]
            larger[self._low - base : self._low - base + len(held)] = held
        self._base, self._slots = base, larger


def _centred(low: int, span: int, room: int) -> int:
    """Return a base that leaves a quarter of the free room below `low` and the rest above, as keys mostly
    grow.
    """
    base = low - (room - span) // 4
    smallest, largest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return int(max(smallest, min(base, largest - room + 1)))
