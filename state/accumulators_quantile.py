"""quantile: a sketch per slot; see `quantile_sketch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from .accumulators import Accumulator, arrow_of, state_column
from .epochs import Field
from .quantile_sketch import (
    BUCKETS,
    Counts,
    buckets_of,
    collapsed,
    levels_for,
    places_of,
    unplaced,
    values_of_buckets,
)
from .reserved import SlotArray, entries_of
from .slot_lists import list_array, list_column
from .slot_ranks import SlotRanks
from .values import Array, Index, Values

_COUNTERS = np.dtype(f"V{8 * BUCKETS}")
_PLACES_TYPE: Final = pa.large_list(pa.int16())
_COUNTS_TYPE: Final = pa.large_list(pa.int64())
_ODD: Final = ("minus_infinite", "zeros", "infinite", "nan")
"""Numbers without a bucket; each kind has a counter of its own."""
_BLOCK: Final = 256
_LIMITS = np.iinfo(np.int64)


class QuantileAccumulator(Accumulator):
    """The number at place `q` (0 to 1) among all in order; 4 KiB per slot, twice that with negative ones.

    Of n numbers it is that with floor(q (n - 1)) others before it. NaN is greater than any number.
    """

    def __init__(self, name: str, q: float) -> None:
        self.name, self.type, self._q = name, pa.float64(), q
        self._odd = [SlotArray(np.int64) for _ in _ODD]
        self._lowest, self._highest = (
            SlotArray(np.int64, _LIMITS.max),
            SlotArray(np.int64, _LIMITS.min),
        )
        self._counters = [
            _new_counters()
        ]  # of positive, then of negative numbers, if there are some
        self._ranks = SlotRanks()

    # --- numbers -------------------------------------------------------------------------------

    def add(self, slots: Index, values: Values | None, known: int, size: int) -> None:
        assert values is not None
        self._reserve(size)
        data, valid = values.data, values.valid
        if valid is not None:
            slots, data = slots[valid], data[valid]
        if data.dtype == object:  # decimals
            data = np.array([float(value) for value in data.tolist()], np.float64)
        data = data.astype(np.float64, copy=False)
        plain = np.isfinite(data) & (data != 0)
        if not plain.all():
            odd, of = data[~plain], slots[~plain]
            for counts, mine in zip(
                self._odd, (odd == -np.inf, odd == 0, odd == np.inf, np.isnan(odd)), strict=True
            ):
                np.add.at(counts.data, of[mine], 1)
            slots, data = slots[plain], data[plain]
        if not slots.size:
            return
        buckets = buckets_of(np.abs(data))
        levels = self._cover(slots, buckets, buckets)
        negative = data < 0
        places = places_of(collapsed(buckets, levels))
        for sign, mine in enumerate((~negative, negative)):
            if mine.any():
                self._count(sign, slots[mine], places[mine], 1)

    def _count(self, sign: int, slots: Index, places: Index, counts: Array | int) -> None:
        if sign == len(self._counters):
            self._counters.append(_new_counters())
            self._counters[sign].reserve(self._lowest.filled)
        counters = _as_counts(self._counters[sign].data).reshape(-1)
        np.add.at(counters, slots * BUCKETS + places, counts)

    def _cover(self, slots: Index, lowest: Counts, highest: Counts) -> Counts:
        """Make room for finest buckets; returns the level of each row's slot from now on."""
        unique, rank = self._ranks.of(slots, self._lowest.filled)
        low, high = self._lowest.data.take(unique), self._highest.data.take(unique)
        held = np.flatnonzero(low <= high)
        before, held_low = levels_for(low[held], high[held]), low[held]
        np.minimum.at(low, rank, lowest)
        np.maximum.at(high, rank, highest)
        levels = levels_for(low, high)
        wider = levels[held] > before
        if wider.any():
            which = held[wider]
            self._collapse(unique[which], held_low[wider], before[wider], levels[which])
        self._lowest.data[unique], self._highest.data[unique] = low, high
        return levels[rank]

    def _collapse(self, slots: Index, lowest: Counts, before: Counts, after: Counts) -> None:
        """Bring the counters of some slots to a higher level."""
        for field in self._counters:
            counters = _as_counts(field.data)
            held = counters[slots]
            rows, places = np.nonzero(held)
            buckets = unplaced(places, collapsed(lowest, before)[rows])
            fresh = np.zeros_like(held)
            to = places_of(collapsed(buckets, (after - before)[rows]))
            np.add.at(fresh, (rows, to), held[rows, places])
            counters[slots] = fresh

    def merge(self, into_slots: Index, from_slots: Index) -> None:
        for counts in self._odd:
            np.add.at(counts.data, into_slots, counts.data.take(from_slots))
        low, high = self._lowest.data.take(from_slots), self._highest.data.take(from_slots)
        some = low <= high
        into, source, low, high = into_slots[some], from_slots[some], low[some], high[some]
        if not source.size:
            return
        levels, of_source = self._cover(into, low, high), levels_for(low, high)
        for sign, field in enumerate(self._counters):
            held = _as_counts(field.data)[source]
            rows, places = np.nonzero(held)
            buckets = unplaced(places, collapsed(low, of_source)[rows])
            to = places_of(collapsed(buckets, (levels - of_source)[rows]))
            self._count(sign, into[rows], to, held[rows, places])

    # --- results -------------------------------------------------------------------------------

    def result(self, which: Index | slice) -> pa.Array:
        values = [entries_of(field.data, which) for field in self.fields()]
        size = len(values[0])
        found, nothing = np.zeros(size), np.zeros(size, np.bool_)
        for start in range(0, size, _BLOCK):
            block = slice(start, start + _BLOCK)
            found[block], nothing[block] = self._quantiles([value[block] for value in values])
        return arrow_of(found, self.type, nothing if nothing.any() else None)

    def _quantiles(self, values: list[Array]) -> tuple[Array, Array]:
        """The quantiles of some slots, from the values of the fields, and where there is none."""
        odd, (low, high), counters = values[:4], values[4:6], values[6:]
        size = len(low)
        low, high = np.where(low > high, 0, low), np.where(low > high, 0, high)
        levels = levels_for(low, high)
        buckets = collapsed(low, levels)[:, None] + np.arange(BUCKETS)
        signs = [
            np.take_along_axis(_as_counts(part), places_of(buckets), axis=1) for part in counters
        ]
        negative = signs[1][:, ::-1] if len(signs) > 1 else np.zeros((size, 0), np.int64)
        columns = [
            odd[0][:, None],
            negative,
            odd[1][:, None],
            signs[0],
            odd[2][:, None],
            odd[3][:, None],
        ]
        upto = np.cumsum(np.concatenate(columns, axis=1), axis=1)
        total = upto[:, -1]
        rank = np.floor(self._q * np.maximum(total - 1, 0))
        at = (upto > rank[:, None]).argmax(axis=1)
        return self._values_at(at, negative.shape[1], buckets[:, 0], levels), total == 0

    @staticmethod
    def _values_at(at: Index, negatives: int, lowest: Counts, levels: Counts) -> Array:
        """The numbers of some columns: -inf, negative ones, 0, positive ones, inf, NaN."""
        found = np.zeros(len(at))
        below, above = at >= 1, at > negatives + 1
        negative = below & (at <= negatives)
        found[negative] = -values_of_buckets((lowest + BUCKETS - at)[negative], levels[negative])
        positive = above & (at < negatives + 2 + BUCKETS)
        found[positive] = values_of_buckets(
            (lowest + at - negatives - 2)[positive], levels[positive]
        )
        found[at == 0] = -np.inf
        found[at == negatives + 2 + BUCKETS] = np.inf
        found[at == negatives + 3 + BUCKETS] = np.nan
        return found

    # --- state ---------------------------------------------------------------------------------

    def _reserve(self, size: int) -> None:
        for field in self.fields():
            field.reserve(size)

    def reset(self, size: int) -> None:
        del self._counters[1:]
        for field in self.fields():
            field.reset(size)

    def fields(self) -> list[Field]:
        return [*self._odd, self._lowest, self._highest, *self._counters]

    def state_fields(self) -> list[pa.Field]:
        names = [*_ODD, "lowest", "highest"]
        return [
            *(pa.field(f"{self.name}__{name}", pa.int64()) for name in names),
            pa.field(f"{self.name}__places", _PLACES_TYPE),
            pa.field(f"{self.name}__counts", _COUNTS_TYPE),
        ]

    def columns(self, values: Sequence[Array]) -> list[pa.Array]:
        """Counters that have counted only; places from `BUCKETS` on are of negative numbers."""
        counters = np.concatenate([_as_counts(part) for part in values[6:]], axis=1)
        rows, places = np.nonzero(counters)
        lengths = np.bincount(rows, minlength=len(counters))
        return [
            *(pa.array(value) for value in values[:6]),
            list_array(lengths, pa.array(places.astype(np.int16))),
            list_array(lengths, pa.array(counters[rows, places])),
        ]

    def load(self, slots: Index, table: pa.Table, known: int, size: int) -> None:
        self._reserve(size)
        fields = self.state_fields()
        for array, field in zip(self.fields()[:6], fields[:6], strict=True):
            values = state_column(table, field.name, field.type)
            if values is not None:
                array.data[slots] = values.data
        places = list_column(table, fields[6].name, _PLACES_TYPE)
        counts = list_column(table, fields[7].name, _COUNTS_TYPE)
        if places is None or counts is None:
            return
        of = np.repeat(slots, places[0])
        at, numbers = places[1].to_numpy().astype(np.intp), counts[1].to_numpy()
        for sign in range(2):
            mine = at // BUCKETS == sign
            if mine.any():
                self._count(sign, of[mine], at[mine] % BUCKETS, numbers[mine])


def _new_counters() -> SlotArray:
    return SlotArray(_COUNTERS, np.void(bytes(8 * BUCKETS)))


def _as_counts(counters: Array) -> Counts:
    """One row of counts per slot; of the same memory."""
    return counters.view(np.int64).reshape(-1, BUCKETS)
