"""The distinct slots of a batch, numbered, so that what is per slot of a batch is a short array."""

from __future__ import annotations

import numpy as np

from .reserved import SlotArray
from .values import Index


class SlotRanks:
    """Numbers slots without sorting; keeps scratch memory by slot."""

    def __init__(self) -> None:
        self._seen = SlotArray(np.int32)

    def of(self, slots: Index, size: int) -> tuple[Index, Index]:
        """The slots, each once, and for each row the number of its slot among them; all below `size`."""
        self._seen.reserve(size)
        seen, order = self._seen.data, np.arange(len(slots), dtype=np.int32)
        seen[slots] = order
        unique = slots[seen.take(slots) == order]
        seen[unique] = order[: len(unique)]
        return unique, seen.take(slots).astype(np.intp)
