"""Which runs to merge: size-tiered, as in Cassandra and in RocksDB's universal compaction.

Runs are merged with their neighbours in age only, so the order of age stays. A group of neighbours is
worth it when each of its runs is at most half as large again as all newer ones of the group together:
then the number of runs, and how often a row is rewritten, grow with the logarithm of state / flush. And
everything is merged when all newer runs together are more than twice the oldest one: so the files take
at most three times the space of the state.
"""

from __future__ import annotations

from collections.abc import Sequence

_SPACE = 2
_LIKE = 1.5


def choose_runs(sizes: Sequence[int], per_level: int, runs_max: int) -> tuple[int, int] | None:
    """Which runs to merge into one, as the range [start, stop); None: leave them.

    Args:
        sizes: of the runs, newest first.
        per_level: a group has at least this many runs.
        runs_max: with more runs than this the newest are merged in any case.
    """
    if len(sizes) >= per_level and sum(sizes[:-1]) > _SPACE * sizes[-1]:
        return 0, len(sizes)
    for start in range(len(sizes) - per_level + 1):
        stop, total = start + 1, sizes[start]
        while stop < len(sizes) and sizes[stop] <= _LIKE * total:
            total += sizes[stop]
            stop += 1
        if stop - start >= per_level:
            return start, stop
    if len(sizes) > runs_max:
        return 0, max(2, len(sizes) - runs_max + 1)
    return None
