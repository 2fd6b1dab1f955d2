"""The number of rows taken at once, against models of the costs of user code."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headgate.runtime.task.accounting import ROWS_MAX, SliceSizer

BATCH = 32_768


def run(sizer: SliceSizer, cost: Callable[[int], float], slices: int) -> tuple[int, float]:
    """Return the rows and seconds of this number of slices, of batches of `BATCH` rows."""
    total_rows, total_s, left = 0, 0.0, BATCH
    for _ in range(slices):
        rows = min(left, sizer.rows)
        seconds = cost(rows)
        sizer.took(rows, seconds)
        total_rows, total_s, left = total_rows + rows, total_s + seconds, left - rows or BATCH
    return total_rows, total_s


@pytest.mark.parametrize("row_s", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_rows_that_cost_are_cut_to_the_budget(row_s: float) -> None:
    sizer = SliceSizer(50)
    run(sizer, lambda rows: rows * row_s, 40)
    longest = max(run(sizer, lambda rows: rows * row_s, 1)[1] for _ in range(100))
    assert longest <= 0.051
    assert sizer.rows >= min(BATCH, 0.04 / row_s)


def test_one_row_may_cost_more_than_the_budget() -> None:
    sizer = SliceSizer(50)
    run(sizer, lambda rows: rows * 0.3, 20)
    assert sizer.rows == 1


def test_free_rows_come_in_whole_batches() -> None:
    sizer = SliceSizer(50)
    run(sizer, lambda rows: 0.0, 100)
    assert sizer.rows == ROWS_MAX


@pytest.mark.parametrize("call_s", [0.04, 0.06, 0.5])
def test_a_price_per_call_is_not_paid_for_every_row(call_s: float) -> None:
    """A sink that sends each batch to a database in one round trip."""
    sizer = SliceSizer(50)
    run(sizer, lambda rows: call_s, 40)
    rows, _ = run(sizer, lambda rows: call_s, 100)
    assert rows > 80 * BATCH


def test_with_both_prices_calls_take_half_of_the_time_at_most() -> None:
    sizer, row_s, call_s = SliceSizer(50), 1e-4, 0.2
    run(sizer, lambda rows: call_s + rows * row_s, 40)
    rows, seconds = run(sizer, lambda rows: call_s + rows * row_s, 100)
    assert 0.4 <= rows * row_s / seconds <= 0.6


def test_stalls_of_a_machine_with_too_much_to_do() -> None:
    """A sleep takes its time there, and the wait for a processor."""
    chance = random.Random(5)
    sizer = SliceSizer(50)

    def cost(rows: int) -> float:
        return rows * 5e-5 + chance.choice((0.0, 0.02, 0.1))

    run(sizer, cost, 100)
    rows, seconds = run(sizer, cost, 2_000)
    assert rows * 5e-5 / seconds > 0.3
    assert seconds / 2_000 < 0.25


def test_a_service_that_becomes_slow_is_noticed_at_once() -> None:
    sizer = SliceSizer(50)
    run(sizer, lambda rows: rows * 1e-6, 50)
    run(sizer, lambda rows: rows * 1e-3, 1)
    assert run(sizer, lambda rows: rows * 1e-3, 1)[1] <= 0.051
    run(sizer, lambda rows: rows * 1e-6, 20)
    assert sizer.rows >= BATCH


def test_an_empty_batch_says_nothing() -> None:
    sizer = SliceSizer(50)
    before = sizer.rows
    sizer.took(0, 0.7)
    assert sizer.rows == before
