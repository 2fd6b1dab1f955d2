"""Groups the rows of a batch by pane or window number."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .calendar import Numbers

Part: TypeAlias = tuple[int, slice | npt.NDArray[np.intp]]
"""A number and its rows."""


def split(numbers: Numbers) -> Iterator[Part]:
    """Yield the rows of each number, ascending, in order of arrival; slices if the numbers ascend."""
    low, high = int(numbers.min()), int(numbers.max())
    if low == high:
        yield low, slice(0, len(numbers))
        return
    order = None
    if not (numbers[1:] >= numbers[:-1]).all():
        # 16-bit numbers are sorted by radix
        order = np.argsort(
            (numbers - low).astype(np.uint16) if high - low < 2**16 else numbers, kind="stable"
        )
        numbers = numbers[order]
    cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    for start, stop in pairwise(cuts):
        yield int(numbers[start]), slice(start, stop) if order is None else order[start:stop]
