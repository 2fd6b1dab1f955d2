"""Variance and standard deviation: count, mean and sum of squared deviations per slot.

Batches, and slots that are merged, are combined as in Chan, Golub, LeVeque: Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances (1979). The mean is kept in two float64 (Dekker), the
second one being what the first rounds away: so deviations from it are as exact as the values, the sum
has only terms that are not negative, and how rows are cut into batches shows in the last bits alone,
also where the mean is large and the deviations are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from .accumulators import QUIET, Accumulator, arrow_of, state_column
from .epochs import Field
from .reserved import SlotArray, entries_of
from .slot_ranks import SlotRanks
from .values import Array, Index, Values


class MomentsAccumulator(Accumulator):
    """Variance, or its root, in float64.

    Args:
        sample: divide by count - 1, so that one value gives null; else by count.
        root: the standard deviation.
    """

    def __init__(self, name: str, *, sample: bool, root: bool) -> None:
        self.name, self.type = name, pa.float64()
        self._sample, self._root = sample, root
        self._counts = SlotArray(np.int64)
        self._means, self._lows = SlotArray(np.float64), SlotArray(np.float64)
        self._squares = SlotArray(np.float64)
        self._ranks = SlotRanks()

    def _parts(self) -> list[SlotArray]:
        return [self._counts, self._means, self._lows, self._squares]

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        for part in self._parts():
            part.reserve(size)
        data, valid = values.data, values.valid
        if valid is not None:
            slots, data = slots[valid], data[valid]
        if not slots.size:
            return
        if data.dtype == object:  # decimals
            data = np.array([float(value) for value in data.tolist()])
        zeros = np.zeros(len(slots))
        data = data.astype(np.float64, copy=False)
        self._combine(slots, np.ones(len(slots), np.int64), data, zeros, zeros)

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        some = self._counts.data.take(from_slots) > 0
        into_slots, from_slots = into_slots[some], from_slots[some]
        if into_slots.size:
            self._combine(into_slots, *(part.data.take(from_slots) for part in self._parts()))

    def _combine(
        self, slots: Index, counts: Array, means: Array, lows: Array, squares: Array
    ) -> None:
        """Add groups of values to slots: of each its count, its mean in two parts, and its squares."""
        unique, rank = self._ranks.of(slots, self._counts.filled)
        groups = len(unique)
        held = self._counts.data.take(unique)
        base, base_low = self._means.data.take(unique), self._lows.data.take(unique)
        first = np.empty(groups, np.intp)
        first[rank[::-1]] = np.arange(len(rank))[::-1]
        fresh = held == 0
        base[fresh], base_low[fresh] = means[first[fresh]], lows[first[fresh]]
        with np.errstate(**QUIET):
            from_base = (means - base[rank]) + (lows - base_low[rank])
            added: Array = np.bincount(rank, counts, groups)
            shift: Array = np.bincount(rank, counts * from_base, groups) / added
            deviations = from_base - shift[rank]
            rounding = np.bincount(rank, counts * deviations, groups) / added
            within: Array = np.bincount(rank, squares + counts * deviations * deviations, groups)
            within = within - added * rounding * rounding
            shift = shift + rounding
            total = held + added
            self._squares.data[unique] += within + shift * shift * (held * added / total)
            step = base_low + shift * (added / total)
            mean = base + step
            moved = mean - base
            self._lows.data[unique] = (base - (mean - moved)) + (step - moved)
        self._means.data[unique] = mean
        self._counts.data[unique] = total.astype(np.int64)

    def result(self, which: Index | slice) -> pa.Array:
        divisors = entries_of(self._counts.data, which) - self._sample
        squares = np.maximum(entries_of(self._squares.data, which), 0.0)
        nothing = divisors <= 0
        found = np.divide(squares, divisors, out=np.zeros(len(squares)), where=~nothing)
        if self._root:
            found = np.sqrt(found)
        return arrow_of(found, self.type, nothing if nothing.any() else None)

    def reset(self, size: int) -> None:
        for part in self._parts():
            part.reset(size)

    def fields(self) -> list[Field]:
        return list(self._parts())

    def state_fields(self) -> list[pa.Field]:
        kinds = ("count", pa.int64()), ("mean", self.type), ("mean_low", self.type)
        return [pa.field(f"{self.name}__{n}", t) for n, t in (*kinds, ("squares", self.type))]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        return [pa.array(part) for part in values]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        for part, field in zip(self._parts(), self.state_fields(), strict=True):
            part.reserve(size)
            values = state_column(table, field.name, field.type)
            if values is not None:
                part.data[slots] = values.data
