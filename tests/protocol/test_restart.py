"""Fixed delay: how many restarts, when, and which failures count."""

from __future__ import annotations

import pytest

from headgate.errors import InternalError
from headgate.runtime.protocol.restart import FixedDelayRestart, GiveUp, Restart


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
