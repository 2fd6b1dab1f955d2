"""Random numbers by counter: draw number n is a pure function of (seed, n). Vectorised.

The numbers must never change between versions: a restored job regenerates its rows with them.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Uint64s: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_seed(seed: int, name: str) -> int:
    """Return the seed of a named stream of draws, so that leaving one out does not change the others."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode())


def draws(seed: int, first: int, count: int) -> Uint64s:
    """Return draws `first` to `first + count - 1` of the stream (splitmix64 of the counter)."""
    x = np.arange(first, first + count, dtype=np.uint64)
    x *= _GOLDEN
    x += np.uint64(seed)
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def uniform(seed: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """Return the same draws as floats in [0, 1)."""
    return (draws(seed, first, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(seed: int, first: int, count: int, bound: int) -> npt.NDArray[np.int64]:
    """Return the same draws as whole numbers in [0, bound); for bound < 2^32 the bias is below bound /
    2^32.
    """
    values = draws(seed, first, count)
    if bound < 1 << 32:
        return ((values >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)
    return (values % np.uint64(bound)).astype(np.int64)
