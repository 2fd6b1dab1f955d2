"""HyperLogLog: registers by slot, and estimates from them.

Flajolet, Fusy, Gandouet, Meunier: HyperLogLog (2007), with 64-bit hashes; estimates as in Ertl: New
cardinality estimation algorithms for HyperLogLog sketches (2017), section 4, which need no correction for
few or many values.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .hashing import Hashes
from .values import Array, Index

INDEX_BITS: Final = 11
REGISTERS: Final = 1 << INDEX_BITS
"""Bytes of a sketch. The standard error is 1.04 / sqrt(REGISTERS): 2.3 %."""
_RANKS: Final = 64 - INDEX_BITS
_BLOCK: Final = 1_024

Floats = npt.NDArray[np.float64]


def places_of(hashes: Hashes) -> tuple[Index, npt.NDArray[np.uint8]]:
    """Which register each value goes to, and its rank there: the place of the lowest 1 among other bits."""
    rest = (hashes >> np.uint64(INDEX_BITS)) | np.uint64(1 << _RANKS)
    lowest = rest & (~rest + np.uint64(1))
    # a power of 2, which a float holds exactly
    ranks = np.frexp(lowest.astype(np.float64))[1]
    return (hashes & np.uint64(REGISTERS - 1)).astype(np.intp), ranks.astype(np.uint8)


def estimates(registers: Array) -> npt.NDArray[np.int64]:
    """Estimate the number of different values that sketches have seen; one row of `registers` each."""
    found = np.empty(len(registers), np.int64)
    for low in range(0, len(registers), _BLOCK):
        block = registers[low : low + _BLOCK]
        width = _RANKS + 2
        cells = np.arange(len(block))[:, None] * width + block
        counts = np.bincount(cells.ravel(), minlength=len(block) * width).reshape(-1, width)
        found[low : low + _BLOCK] = _estimates(counts)
    return found


def _estimates(counts: Array) -> Floats:
    """From how many registers have each rank."""
    z = REGISTERS * _tau(1 - counts[:, -1] / REGISTERS)
    for rank in range(_RANKS, 0, -1):
        z = 0.5 * (z + counts[:, rank])
    empty = counts[:, 0] == REGISTERS
    z = z + REGISTERS * _sigma(np.where(empty, 0.0, counts[:, 0] / REGISTERS))
    full = REGISTERS * REGISTERS / (2 * np.log(2))
    found: Floats = np.where(empty, 0.0, np.rint(full / np.where(empty, 1.0, z)))
    return found


def _sigma(x: Floats) -> Floats:
    """x + the sum of x^(2^k) 2^(k-1) over k >= 1, for x below 1."""
    total, factor = x.copy(), 1.0
    while True:
        x = x * x
        before = total
        total = total + x * factor
        factor *= 2
        if (total == before).all():
            return total


def _tau(x: Floats) -> Floats:
    """(1 - x - the sum of (1 - x^(2^-k))^2 2^-k over k >= 1) / 3."""
    total, factor = 1 - x, 1.0
    x = np.where(x == 0, 1.0, x)
    total = np.where(x == 1, 0.0, total)
    while True:
        x = np.sqrt(x)
        before = total
        factor *= 0.5
        total = total - (1 - x) ** 2 * factor
        if (total == before).all():
            return total / 3
