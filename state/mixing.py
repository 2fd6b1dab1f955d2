"""A bijection of 64-bit numbers whose bits look random."""

from __future__ import annotations

import numpy as np

from .hashing import Hashes

_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mixed(words: Hashes) -> Hashes:
    """splitmix64's step (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    found = words + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in _STEPS:
        found ^= found >> np.uint64(shift)
        found *= np.uint64(factor)
    found ^= found >> np.uint64(31)
    return found
