"""Partial results per integer key, for keys that lie close together: no key has to be looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...state.slots.epochs import TableEpoch
from ...state.slots.key_index import KeyHasher
from ...state.values import PARTIAL_ROWS, Values
from ..aggregation.aggregates import AggregatePlan

SLOTS_PER_RECORD = 4
"""Keys are close together if their range has at most this many numbers per record, or per key."""
SLOTS_MAX = 1 << 17
"""The most numbers in the range of the keys of one group."""
_KINDS = {"count", "sum", "min", "max"}

Keys = npt.NDArray[np.int64]


class DensePartials:
    """The partial results of one pane. The slot of a key is its distance from the first number of a range.

    Args:
        plan: of the partial results; it `fits`.
        epoch: of all groups of the operator.
    """

    def __init__(self, plan: AggregatePlan, epoch: TableEpoch) -> None:
        values = {name: one for name, one in plan.aggregates.items() if name != PARTIAL_ROWS}
        self._state = replace(plan, aggregates=values).new_state(epoch) if values else None
        self._type = plan.key_fields[0].type
        self._first = 0
        self._slots = 0
        self._counts = np.zeros(0, np.int64)
        """The number of records by slot."""
        self._keys = 0

    @staticmethod
    def fits(plan: AggregatePlan) -> bool:
        """Return True for plans with one integer as key, whose aggregates note no slots without a value."""
        kinds = all(one.kind in _KINDS and one.by is None for one in plan.specs)
        return kinds and KeyHasher([field.type for field in plan.key_fields], 0).dense

    @staticmethod
    def suits(values: Mapping[str, Values]) -> bool:
        """Return True for values of which none is missing."""
        return all(one.valid is None and one.data.dtype != np.object_ for one in values.values())

    @property
    def size(self) -> int:
        """The number of keys; more if they are so far apart that their slots take the memory of more."""
        return max(self._keys, self._slots // SLOTS_PER_RECORD)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._counts.nbytes + (0 if self._state is None else self._state.nbytes)

    def add(self, keys: Keys, values: Mapping[str, Values]) -> bool:
        """Add records; return False, and add none, if their keys are too far apart."""
        low, high = int(keys.min()), int(keys.max())
        first = self._first if self._slots else low
        slots = max(self._slots, high - first + 1)
        if low < first or slots > min(SLOTS_MAX, SLOTS_PER_RECORD * (self._keys + len(keys))):
            return False
        self._first, self._slots = first, slots
        at = keys - first
        if slots > len(self._counts):
            counts = np.zeros(max(slots, 2 * len(self._counts)), np.int64)
            counts[: len(self._counts)] = self._counts
            self._counts = counts
        new = np.bincount(at)
        self._counts[: len(new)] += new
        self._keys = int(np.count_nonzero(self._counts[:slots]))
        if self._state is not None:
            self._state.add(at, values, slots)
        return True

    def columns(self) -> list[pa.Array]:
        """Return the keys and their partial results."""
        found = np.flatnonzero(self._counts[: self._slots] > 0)
        keys = pa.array(found + self._first).cast(self._type)
        state = [] if self._state is None else self._state.columns(found)
        return [keys, pa.array(self._counts[found]), *state]

    def clear(self) -> None:
        """Forget everything; keeps the memory."""
        self._counts[: self._slots] = 0
        self._slots = self._keys = 0
        if self._state is not None:
            self._state.reset()
