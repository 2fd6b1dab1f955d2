"""The choice of runs to merge: their number, the space they take and the rows written stay bounded."""

from __future__ import annotations

import random

import pytest

from headgate.state.runs.merge import choose_runs


def merge_all(sizes: list[int], most: int = 10**9) -> tuple[list[int], int]:
    """Merge while there is something to merge; no run grows beyond `most`. Also the rows written."""
    written = 0
    while (choice := choose_runs(sizes, 4, 12)) is not None:
        start, stop = choice
        assert 0 <= start < stop <= len(sizes)
        assert stop - start >= 2
        size = min(most, sum(sizes[start:stop]))
        sizes = [*sizes[:start], size, *sizes[stop:]]
        written += size
    return sizes, written


def test_runs_of_like_size_are_merged_and_larger_ones_left() -> None:
    assert choose_runs([10, 10, 10], 4, 12) is None
    assert choose_runs([10, 10, 10, 10], 4, 12) == (0, 4)
    assert choose_runs([10, 10, 10, 1000], 4, 12) is None
    assert choose_runs([10, 10, 10, 10, 1000], 4, 12) == (0, 4)
    assert choose_runs([500, 10, 10, 10, 10], 4, 12) == (0, 5)
    assert choose_runs([1, 500, 10, 10, 10, 10, 9000], 4, 12) == (1, 6)
    assert choose_runs([40, 40, 40, 50], 4, 12) == (0, 4)
    assert choose_runs([40, 90, 200, 100], 4, 12) == (0, 4)
    assert choose_runs([], 4, 12) is None


def test_too_many_runs_are_merged_whatever_their_sizes() -> None:
    sizes = [4**age for age in range(13)]
    assert choose_runs(sizes, 4, 12) == (0, 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("flush", [100, 1])
def test_rows_are_rewritten_few_times(seed: int, flush: int) -> None:
    """1000 flushes, of full or of random size, into a state of 12 full ones."""
    chance = random.Random(seed)
    sizes: list[int] = []
    flushed = written = 0
    for _ in range(1_000):
        size = flush if flush == 100 else chance.randint(1, 100)
        flushed += size
        sizes, more = merge_all([size, *sizes], most=1_200)
        written += more
        assert len(sizes) <= 12
        assert sum(sizes) <= 3 * 1_200
    assert written <= 2.5 * flushed
