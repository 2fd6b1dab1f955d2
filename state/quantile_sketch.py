"""Quantiles with a bounded relative error: numbers counted in buckets whose bounds grow by a factor.

Masson, Rim, Lee: DDSketch (2019), with a fixed number of buckets as in Epicoco et al.: UDDSketch (2020):
where the values of a sketch span more buckets than there are, pairs of buckets become one, which squares
the factor. How often follows from the smallest and the largest magnitude alone, and counts are integers:
so a sketch does not depend on the order of values, nor on how they were cut into batches or merged.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .values import Array, Index

BUCKETS: Final = 512
"""Per sketch and sign."""
ACCURACY: Final = 0.01
"""Relative error of quantiles while the magnitudes of a sketch span a factor of 27,000; 2 % up to 7e8."""
_LOG_FACTOR: Final = float(np.log((1 + ACCURACY) / (1 - ACCURACY)))
Counts = npt.NDArray[np.int64]


def buckets_of(magnitudes: Array) -> Counts:
    """The finest bucket of each positive, finite number: factor^(bucket - 1) < number <= factor^bucket."""
    found: Counts = np.ceil(np.log(magnitudes) / _LOG_FACTOR).astype(np.int64)
    return found


def collapsed(buckets: Counts, levels: Counts) -> Counts:
    """The same after pairs of buckets became one so many times."""
    found: Counts = -(-buckets >> levels)
    return found


def levels_for(lowest: Counts, highest: Counts) -> Counts:
    """How many times at least, so that these finest buckets lie within `BUCKETS` of each other."""
    levels = np.zeros(len(lowest), np.int64)
    while True:
        wide = collapsed(highest, levels) - collapsed(lowest, levels) >= BUCKETS
        if not wide.any():
            return levels
        levels += wide


def values_of_buckets(buckets: Counts, levels: Counts) -> npt.NDArray[np.float64]:
    """The number that is within the relative error of all numbers of a bucket."""
    log_factor = _LOG_FACTOR * np.exp2(levels)
    # the least of numbers has its bucket's middle below all floats, the largest above
    logs = buckets * log_factor + np.log(2 / (1 + np.exp(log_factor)))
    info = np.finfo(np.float64)
    with np.errstate(over="ignore"):
        found: npt.NDArray[np.float64] = np.clip(np.exp(logs), info.smallest_subnormal, info.max)
    return found


def places_of(buckets: Counts) -> Index:
    """Where buckets lie among `BUCKETS` counters: those of a sketch are all different."""
    found: Index = buckets % BUCKETS
    return found


def unplaced(places: Index, lowest: Counts) -> Counts:
    """The opposite, in sketches with these lowest buckets."""
    found: Counts = lowest + (places - lowest) % BUCKETS
    return found
