"""The number of restarts, their times, and the failures that count."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate.api.settings import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    RestartSettings,
)
from headgate.errors import InternalError
from headgate.runtime.protocol.restart import (
    ExponentialDelayRestart,
    FailureRateRestart,
    FixedDelayRestart,
    GiveUp,
    Restart,
    RestartStrategy,
    restart_strategy,
)


def test_restarts_after_the_delay_until_attempts_are_used_up() -> None:
    strategy = FixedDelayRestart(attempts=2, delay_ms=1000)
    assert strategy.on_failure(100, recoverable=True) == Restart(1100, 1)
    assert strategy.on_failure(5000, recoverable=True) == Restart(6000, 2)
    assert strategy.on_failure(9000, recoverable=True) == GiveUp(
        "all restart attempts are used up attempts=`2`"
    )


def test_failures_while_a_restart_is_pending_are_merged() -> None:
    strategy = FixedDelayRestart(attempts=2, delay_ms=1000)
    first = strategy.on_failure(100, recoverable=True)
    assert strategy.on_failure(600, recoverable=True) == first
    assert strategy.on_failure(1099, recoverable=True) == first
    assert strategy.on_failure(1100, recoverable=True) == Restart(2100, 2)


def test_a_merged_failure_that_is_not_recoverable_gives_up() -> None:
    strategy = FixedDelayRestart(attempts=2, delay_ms=1000)
    strategy.on_failure(100, recoverable=True)
    assert isinstance(strategy.on_failure(200, recoverable=False), GiveUp)


def test_without_delay_every_failure_counts() -> None:
    strategy = FixedDelayRestart(attempts=2, delay_ms=0)
    assert strategy.on_failure(7, recoverable=True) == Restart(7, 1)
    assert strategy.on_failure(7, recoverable=True) == Restart(7, 2)
    assert isinstance(strategy.on_failure(7, recoverable=True), GiveUp)


def test_no_attempts_means_never() -> None:
    assert isinstance(FixedDelayRestart(0, 0).on_failure(1, recoverable=True), GiveUp)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(InternalError, match="negative restart attempts"):
        FixedDelayRestart(-1, 0)
    with pytest.raises(InternalError, match="negative restart delay"):
        FixedDelayRestart(1, -1)


def no_jitter(low: float, high: float) -> float:
    raise AssertionError("no random number is needed")


def exponential(uniform: Any = no_jitter, **settings: Any) -> ExponentialDelayRestart:
    return ExponentialDelayRestart(ExponentialDelay(**settings), uniform)


EXAMPLE: dict[str, Any] = {"initial_ms": 1_000, "multiplier": 2, "max_ms": 10_000}
"""The example of Flink's document on failure recovery."""


def pauses(strategy: RestartStrategy, failures: int, *, runs_ms: int = 10) -> list[int]:
    """Return the waits of a job that runs for this time and then fails, again and again."""
    now, found = 0, []
    for _ in range(failures):
        decision = strategy.on_failure(now, recoverable=True)
        assert isinstance(decision, Restart), decision
        found.append(decision.at_ms - now)
        now = decision.at_ms + runs_ms
    return found


def test_the_pauses_of_the_example() -> None:
    expected = [1_000, 2_000, 4_000, 8_000, 10_000, 10_000, 10_000]
    assert pauses(exponential(jitter=0, **EXAMPLE), 7) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        # 1st and 2nd retry: 1.1 and 2.2; 3rd: 3.6 to 4.4; 4th: 7.2 to 8.8; the cap is hard.
        (1, [1_100, 2_200, 4_400, 8_800, 10_000, 10_000]),
        (-1, [1_000, 1_800, 3_600, 7_200, 10_000, 10_000]),
    ],
)
def test_the_jitter_of_the_example(end: int, expected: list[int]) -> None:
    asked: list[tuple[float, float]] = []

    def extreme(low: float, high: float) -> float:
        asked.append((low, high))
        return high if end > 0 else low

    assert pauses(exponential(extreme, jitter=0.1, **EXAMPLE), 6) == expected
    assert asked[2] == (-400, 400)


def test_the_ninth_failure_of_the_example_is_fatal() -> None:
    strategy = exponential(jitter=0, attempts=8, reset_ms=360_000, **EXAMPLE)
    until = sum(pauses(strategy, 8, runs_ms=1)) + 8
    assert strategy.on_failure(until, recoverable=True) == GiveUp(
        "all restart attempts are used up attempts=`8`"
    )


def test_pauses_and_attempts_begin_anew_after_six_minutes_of_the_example() -> None:
    strategy = exponential(jitter=0, attempts=8, reset_ms=360_000, **EXAMPLE)
    now = 0
    for _ in range(8):
        decision = strategy.on_failure(now, recoverable=True)
        assert isinstance(decision, Restart)
        now = decision.at_ms + 1
    restarted_ms = now - 1
    assert isinstance(strategy.on_failure(restarted_ms + 359_999, recoverable=True), GiveUp)
    again = strategy.on_failure(restarted_ms + 360_000, recoverable=True)
    assert again == Restart(restarted_ms + 361_000, 9)


def test_a_pause_is_never_below_the_initial_one_nor_above_the_longest() -> None:
    strategy = exponential(random.Random(1).uniform, initial_ms=1_000, max_ms=1_500, jitter=1.0)
    assert all(1_000 <= pause <= 1_500 for pause in pauses(strategy, 200))


def test_pauses_stay_finite_for_ever() -> None:
    strategy = exponential(random.Random(1).uniform, multiplier=1_000.0)
    assert pauses(strategy, 5_000)[-1] == 60_000


def test_a_failure_up_to_the_pending_restart_belongs_to_it() -> None:
    strategy = exponential(jitter=0)
    first = strategy.on_failure(0, recoverable=True)
    assert strategy.on_failure(1_000, recoverable=True) == first
    assert strategy.on_failure(1_001, recoverable=True) == Restart(2_501, 2)


def test_what_would_happen_again_is_not_tried_again() -> None:
    for strategy in (exponential(), FailureRateRestart(FailureRate())):
        assert isinstance(strategy.on_failure(0, recoverable=False), GiveUp)


def test_the_failure_rate_of_the_document() -> None:
    strategy = FailureRateRestart(FailureRate(3, 300_000, 10_000))
    at = [0, 60_000, 120_000]
    for number, now in enumerate(at, 1):
        assert strategy.on_failure(now, recoverable=True) == Restart(now + 10_000, number)
    # The fourth within five minutes of the first.
    assert strategy.on_failure(300_000, recoverable=True) == GiveUp(
        "too many failures in a short time max_failures=`3` interval_ms=`300000`"
    )


def test_failures_that_are_long_ago_do_not_count() -> None:
    strategy = FailureRateRestart(FailureRate(3, 300_000, 10_000))
    now = 0
    for number in range(1, 50):
        assert strategy.on_failure(now, recoverable=True) == Restart(now + 10_000, number)
        now += 100_001


def test_failures_while_a_restart_is_pending_do_not_count_for_the_rate() -> None:
    strategy = FailureRateRestart(FailureRate(1, 60_000, 1_000))
    first = strategy.on_failure(0, recoverable=True)
    assert strategy.on_failure(999, recoverable=True) == first
    assert isinstance(strategy.on_failure(1_000, recoverable=True), GiveUp)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (FixedDelay(1, 1), FixedDelayRestart),
        (FailureRate(), FailureRateRestart),
        (ExponentialDelay(), ExponentialDelayRestart),
    ],
)
def test_settings_become_strategies(settings: RestartSettings, kind: type) -> None:
    assert isinstance(restart_strategy(settings, no_jitter), kind)
