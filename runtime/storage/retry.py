"""Retries after transient errors: exponential backoff with full jitter, bounded attempts."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")

Sleep = Callable[[float], Awaitable[None]]
"""Sleeps for seconds; `asyncio.sleep`, or virtual time in tests."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """The number of tries, and their pauses: a random one in (0, base × 2^(n-1)] before retry n."""

    attempts_max: int = 8
    delay_base_s: float = 0.1
    delay_max_s: float = 5.0

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """Return the pause after failed attempt number `attempt` (1, 2, ...), in seconds."""
        ceiling = min(self.delay_max_s, self.delay_base_s * 2.0 ** min(attempt - 1, 32))
        return ceiling * (1.0 - rng.random())


class Retrier:
    """Runs calls under a policy; clock and randomness are passed in."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        transient: Callable[[BaseException], bool],
        sleep: Sleep,
        rng: random.Random,
    ) -> None:
        self._policy = policy
        self._transient = transient
        self._sleep = sleep
        self._rng = rng

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the first result of `call`. Raise an error that is not transient, or the last one.

        The outcome of a failed attempt is unknown: `call` must be safe to repeat.
        """
        attempt = 1
        while True:
            try:
                return await call()
            except Exception as error:
                if attempt >= self._policy.attempts_max or not self._transient(error):
                    raise
            await self._sleep(self._policy.delay_s(attempt, self._rng))
            attempt += 1
