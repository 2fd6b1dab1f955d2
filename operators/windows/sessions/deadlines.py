"""The deadlines of sessions: slot numbers in buckets of time.

A slot is in the bucket of a former deadline. Records move deadlines all the time, which costs
nothing here: only when event time reaches the bucket is the slot looked at, and put into the bucket
of its current deadline. So a session that stays active is touched about once per gap.
"""

from __future__ import annotations

import numpy as np

from ....state.slots.arrays import SlotArray
from ....state.values import Index
from .intervals import Times

_NOWHERE = np.iinfo(np.int64).max


class Deadlines:
    """Slots by the time at which they must be looked at.

    Buckets have few slots, so they are no objects: slots added together are one run, ordered by
    bucket. Each run is at least as long as the next one was, or else they are merged.

    Args:
        width_ms: of a bucket; the finer, the fewer slots are looked at in vain.
    """

    def __init__(self, width_ms: int) -> None:
        self._width = width_ms
        self._runs: list[tuple[Index, Times]] = []
        """The runs: slots and their buckets."""
        self._bucket_of = SlotArray(np.int64, _NOWHERE)

    def add(self, slots: Index, times: Times) -> None:
        """Schedule each slot for `times` (ms); a slot with an earlier time keeps it."""
        if not slots.size:
            return
        self._bucket_of.reserve(int(slots.max()) + 1)
        buckets = times // self._width
        sooner = np.flatnonzero(buckets < self._bucket_of.data[slots])
        if not sooner.size:
            return
        slots, buckets = slots[sooner], buckets[sooner]
        self._bucket_of.data[slots] = buckets
        while self._runs and len(self._runs[-1][0]) < len(slots):
            before, its_buckets = self._runs.pop()
            kept = np.flatnonzero(self._bucket_of.data[before] == its_buckets)
            slots = np.concatenate([before[kept], slots])
            buckets = np.concatenate([its_buckets[kept], buckets])
        order = np.argsort(buckets, kind="stable")
        self._runs.append((slots[order], buckets[order]))

    def pop(self, until: int) -> Index:
        """Remove and return the slots that may be due at `until` (ms), each once, ascending."""
        last = until // self._width
        found: list[Index] = []
        for number, (slots, buckets) in enumerate(self._runs):
            due = int(np.searchsorted(buckets, last, "right"))
            if due:
                # others have moved to an earlier bucket since
                here = self._bucket_of.data[slots[:due]] == buckets[:due]
                found.append(slots[:due][here])
                self._runs[number] = slots[due:], buckets[due:]
        if not found:
            return np.zeros(0, np.intp)
        self._runs = [run for run in self._runs if len(run[0])]
        slots = np.unique(np.concatenate(found))
        self._bucket_of.data[slots] = _NOWHERE
        return slots
