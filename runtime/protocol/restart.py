"""Restart strategies: when a failed job is restarted, and when it has failed for good.

All strategies merge failures: one that comes before the pending restart has happened belongs to it.
The same `Restart` is returned, and nothing is counted.

`PoisonCounter` and `RepeatCounter` count failures that another attempt does not avoid: those of one
record, and those of a bug. `StartFailures` delays the start of further workers when workers fail to
start.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from math import inf, log
from typing import Final, Protocol, TypeAlias, final

import msgspec

from ...api.settings import ExponentialDelay, FailureRate, FixedDelay, RestartSettings
from ...errors import check


@final
class Restart(msgspec.Struct, frozen=True):
    """Start attempt number `number` + 1 at `at_ms`, not before."""

    at_ms: int
    number: int
    """The number of restarts including this one: 1 for the first."""


@final
class GiveUp(msgspec.Struct, frozen=True):
    """The job has failed for good."""

    reason: str


RestartDecision: TypeAlias = Restart | GiveUp
NOT_RECOVERABLE = GiveUp("the failure would happen again")


class RestartStrategy(Protocol):
    """Decides after each failure. One instance per coordinator."""

    def on_failure(self, now_ms: int, *, recoverable: bool) -> RestartDecision:
        """Decide after the running attempt failed, or a further failure came while its restart is pending.

        A further failure is merged: the same `Restart` is returned, and nothing is counted.
        Failures of attempts that are over must not be passed in.
        """
        ...


def restart_strategy(
    settings: RestartSettings, uniform: Callable[[float, float], float]
) -> RestartStrategy:
    """Return the strategy of `settings`; `uniform(low, high)` draws a random number."""
    match settings:
        case FixedDelay():
            return FixedDelayRestart(settings.attempts, settings.delay_ms)
        case FailureRate():
            return FailureRateRestart(settings)
        case ExponentialDelay():
            return ExponentialDelayRestart(settings, uniform)


@final
class FixedDelayRestart:
    """At most `attempts` restarts, each `delay_ms` after the failure. 0 attempts: never restart."""

    def __init__(self, attempts: int, delay_ms: int) -> None:
        check(attempts >= 0, "negative restart attempts", attempts=attempts)
        check(delay_ms >= 0, "negative restart delay", delay_ms=delay_ms)
        self._attempts = attempts
        self._delay_ms = delay_ms
        self._last: Restart | None = None

    def on_failure(self, now_ms: int, *, recoverable: bool) -> RestartDecision:
        """See `RestartStrategy`."""
        if not recoverable:
            return NOT_RECOVERABLE
        # Strictly before: with a delay of 0 every failure counts, or an instant failure would loop.
        if self._last is not None and now_ms < self._last.at_ms:
            return self._last
        number = 1 if self._last is None else self._last.number + 1
        if number > self._attempts:
            return GiveUp(f"all restart attempts are used up attempts=`{self._attempts}`")
        self._last = Restart(now_ms + self._delay_ms, number)
        return self._last


@final
class FailureRateRestart:
    """Restarts while no more than `max_failures` failures fall into any `interval_ms`."""

    def __init__(self, settings: FailureRate) -> None:
        check(settings.max_failures >= 1, "no failure is allowed", settings=settings)
        self._settings = settings
        self._failures_ms: deque[int] = deque(maxlen=settings.max_failures + 1)
        self._last: Restart | None = None

    def on_failure(self, now_ms: int, *, recoverable: bool) -> RestartDecision:
        """See `RestartStrategy`."""
        if not recoverable:
            return NOT_RECOVERABLE
        if self._last is not None and now_ms < self._last.at_ms:
            return self._last
        settings, failures = self._settings, self._failures_ms
        failures.append(now_ms)
        full = len(failures) == failures.maxlen
        if full and now_ms - failures[0] <= settings.interval_ms:
            return GiveUp(
                f"too many failures in a short time max_failures=`{settings.max_failures}` "
                f"interval_ms=`{settings.interval_ms}`"
            )
        number = 1 if self._last is None else self._last.number + 1
        self._last = Restart(now_ms + settings.delay_ms, number)
        return self._last


@final
class ExponentialDelayRestart:
    """Pauses grow from failure to failure, and are reset after a long time without one.

    As in Flink's `ExponentialDelayRestartBackoffTimeStrategy`, the time without failure counts from
    when the restart was due; no pause is below the initial one, and none is above the longest.
    """

    def __init__(
        self, settings: ExponentialDelay, uniform: Callable[[float, float], float]
    ) -> None:
        self._settings = settings
        self._uniform = uniform
        self._attempt = 0
        self._last: Restart | None = None

    def on_failure(self, now_ms: int, *, recoverable: bool) -> RestartDecision:
        """See `RestartStrategy`."""
        if not recoverable:
            return NOT_RECOVERABLE
        settings, last = self._settings, self._last
        if last is not None and now_ms <= last.at_ms:
            return last
        if last is not None and now_ms - last.at_ms >= settings.reset_ms:
            self._attempt = 0
        if settings.attempts is not None and self._attempt >= settings.attempts:
            return GiveUp(f"all restart attempts are used up attempts=`{settings.attempts}`")
        delay_ms = self._delay_ms()
        self._attempt += 1
        number = 1 if last is None else last.number + 1
        self._last = Restart(now_ms + delay_ms, number)
        return self._last

    def _delay_ms(self) -> int:
        settings = self._settings
        base = self._base_ms()
        if base == inf:
            return settings.max_ms
        spread = base * settings.jitter
        jittered = base + self._uniform(-spread, spread) if spread else base
        return round(max(settings.initial_ms, min(jittered, settings.max_ms)))

    def _base_ms(self) -> float:
        settings = self._settings
        # Far enough above the longest pause that no jitter goes below it, and numbers stay finite.
        if self._attempt * log(settings.multiplier) > log(settings.max_ms) + log(1e6):
            return inf
        return float(settings.initial_ms * settings.multiplier**self._attempt)


WINDOW_MS: Final = 60_000


@final
class StartFailures:
    """A pause after each failure, and no start at all while the last minute has too many of them.

    All times are on one monotonic clock, ms.
    """

    def __init__(self, max_per_minute: float, pause_ms: int) -> None:
        self._max = max_per_minute
        self._pause_ms = pause_ms
        self._failures: deque[int] = deque()

    def failed(self, now_ms: int) -> None:
        """Note that a worker did not start, or died before it was needed."""
        self._failures.append(now_ms)
        while len(self._failures) > self._max + 1:
            self._failures.popleft()

    def wait_ms(self, now_ms: int) -> int:
        """Return the pause before the next start, ms."""
        while self._failures and self._failures[0] <= now_ms - WINDOW_MS:
            self._failures.popleft()
        if not self._failures:
            return 0
        paused_until = self._failures[-1] + self._pause_ms
        if len(self._failures) >= self._max:
            paused_until = max(paused_until, self._failures[0] + WINDOW_MS)
        return max(0, paused_until - now_ms)


KEPT_MAX: Final = 1_000
"""The most records that are remembered."""
FORGET_MS: Final = 3_600_000
"""A failure longer ago than this, in ms, does not count: the record was processed meanwhile."""


@final
class PoisonCounter:
    """The counter of one coordinator.

    A record is identified by the failed step and a hash of its content.
    """

    def __init__(self, failures_max: int) -> None:
        check(failures_max >= 1, "no failure is allowed", failures_max=failures_max)
        self._failures_max = failures_max
        self._seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """The failures, and the time of the last, in ms, by record; the most recent at the end."""

    def failed(self, step: str, record_id: str, now_ms: int) -> int | None:
        """Count a failure; return the number of failures once they are too many, else None.

        Args:
            step: the step whose function raised.
            record_id: of the record; empty: unknown, and nothing is counted.
            now_ms: the time.
        """
        if not record_id:
            return None
        count, last_ms = self._seen.pop((step, record_id), (0, now_ms))
        count = 1 if now_ms - last_ms > FORGET_MS else count + 1
        self._seen[step, record_id] = (count, now_ms)
        if len(self._seen) > KEPT_MAX:
            self._seen.popitem(last=False)
        return count if count >= self._failures_max else None


@final
class RepeatCounter:
    """Counts consecutive failures with the same message, while no checkpoint completes."""

    def __init__(self, failures_max: int) -> None:
        check(failures_max >= 1, "no failure is allowed", failures_max=failures_max)
        self._failures_max = failures_max
        self._last: tuple[str, str, int] | None = None
        self._count = 0

    def failed(self, where: str, text: str, checkpoint: int) -> int | None:
        """Count a failure.

        Args:
            where: the subtask or the phase that failed.
            text: the message.
            checkpoint: the newest completed checkpoint; a newer one than at the failure before
                means that the job made progress, and resets the count.

        Returns:
            The number of such failures, once they are too many; else None.
        """
        found = (where, text, checkpoint)
        self._count = self._count + 1 if found == self._last else 1
        self._last = found
        return self._count if self._count >= self._failures_max else None
