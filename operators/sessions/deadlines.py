"""When to look at which session again: numbers of slots in buckets of time.

A slot lies in the bucket of a time that was its deadline once. Records move deadlines on all the time;
here that costs nothing: only when event time reaches the bucket the slot is looked at, and put into the
bucket of its deadline of then. So a session that lives on is touched about once per gap.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from ...state.reserved import SlotArray
from ...state.values import Index
from .intervals import Times

_NOWHERE = np.iinfo(np.int64).max


class Deadlines:
    """Slots by the time at which they must be looked at.

    Args:
        width_ms: of a bucket; the finer, the fewer slots are looked at in vain.
    """

    def __init__(self, width_ms: int) -> None:
        self._width = width_ms
        self._buckets: dict[int, list[Index]] = {}
        self._order: list[int] = []
        self._bucket_of = SlotArray(np.int64, _NOWHERE)

    def add(self, slots: Index, times: Times) -> None:
        """Look at each slot once `times` (ms) has come; a slot that will be looked at before stays."""
        if not slots.size:
            return
        self._bucket_of.reserve(int(slots.max()) + 1)
        buckets = times // self._width
        sooner = buckets < self._bucket_of.data[slots]
        slots, buckets = slots[sooner], buckets[sooner]
        if not slots.size:
            return
        self._bucket_of.data[slots] = buckets
        if int(buckets.min()) == int(buckets.max()):
            self._put(int(buckets[0]), slots)
            return
        order = np.argsort(buckets, kind="stable")
        slots, buckets = slots[order], buckets[order]
        cuts = np.flatnonzero(buckets[1:] != buckets[:-1]) + 1
        bounds = [0, *cuts.tolist(), len(slots)]
        for low, high in pairwise(bounds):
            self._put(int(buckets[low]), slots[low:high])

    def pop(self, until: int) -> Index:
        """Remove and return the slots that may be due at `until` (ms), each once, ascending."""
        last = until // self._width
        found: list[Index] = []
        while self._order and self._order[0] <= last:
            number = heappop(self._order)
            for slots in self._buckets.pop(number):
                # others have moved to an earlier bucket since
                found.append(slots[self._bucket_of.data[slots] == number])
        if not found:
            return np.zeros(0, np.intp)
        slots = np.sort(np.concatenate(found))
        slots = slots[np.append(True, slots[1:] != slots[:-1])] if slots.size else slots
        self._bucket_of.data[slots] = _NOWHERE
        return slots

    def _put(self, number: int, slots: Index) -> None:
        held = self._buckets.get(number)
        if held is None:
            self._buckets[number] = [slots]
            heappush(self._order, number)
        else:
            held.append(slots)
