"""Retries: bounded, spread out, only for transient errors; sleep and randomness are ours."""

from __future__ import annotations

import asyncio
import random

import pytest

from headgate.runtime.storage.retry import Retrier, RetryPolicy


class Flaky:
    def __init__(self, failures, error=ConnectionError):
        self.failures, self.error, self.calls = failures, error, 0

    async def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return "answer"


def retrier(sleeps, policy):
    async def sleep(seconds):
        sleeps.append(seconds)

    return Retrier(
        policy,
        transient=lambda error: isinstance(error, ConnectionError),
        sleep=sleep,
        rng=random.Random(1),
    )


def test_a_transient_error_is_tried_again_until_it_works():
    sleeps, call = [], Flaky(3)
    assert asyncio.run(retrier(sleeps, RetryPolicy(attempts_max=4)).run(call)) == "answer"
    assert (call.calls, len(sleeps)) == (4, 3)


def test_attempts_are_bounded_and_the_last_error_is_raised():
    sleeps, call = [], Flaky(9)
    with pytest.raises(ConnectionError, match="failure 4"):
        asyncio.run(retrier(sleeps, RetryPolicy(attempts_max=4)).run(call))
    assert (call.calls, len(sleeps)) == (4, 3)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_other_errors_and_cancellation_are_not_tried_again(error):
    sleeps, call = [], Flaky(1, error)
    with pytest.raises(error):
        asyncio.run(retrier(sleeps, RetryPolicy()).run(call))
    assert (call.calls, sleeps) == (1, [])


def test_delays_grow_exponentially_up_to_a_limit_with_full_jitter():
    policy, rng = RetryPolicy(delay_base_s=0.1, delay_max_s=1.0), random.Random(7)
    for attempt, ceiling in [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (5000, 1.0)]:
        delays = [policy.delay_s(attempt, rng) for _ in range(200)]
        assert all(0 < delay <= ceiling for delay in delays)
        assert max(delays) > 0.9 * ceiling
        assert min(delays) < 0.1 * ceiling
