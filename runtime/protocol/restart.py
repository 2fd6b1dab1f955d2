"""When a failed job is restarted, and when it is given up (features.md 3.12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

from ...errors import check


@final
@dataclass(frozen=True, slots=True)
class Restart:
    """Start attempt number `number` + 1 at `at_ms`, not before."""

    at_ms: int
    number: int
    """How many restarts this makes: 1 for the first."""


@final
@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job has failed for good."""

    reason: str


RestartDecision: TypeAlias = Restart | GiveUp


class RestartStrategy(Protocol):
    """Decides after each failure. One instance per job; it is not reset by a success."""

    def on_failure(self, now_ms: int, *, recoverable: bool) -> RestartDecision:
        """The running attempt failed, or a further failure came while its restart is pending.

        A further failure is merged: the same `Restart` comes back, and nothing is counted. Failures
        of attempts that are over must not be passed in.
        """
        ...


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
            return GiveUp("the failure would happen again")
        # Strictly before: with a delay of 0 every failure counts, or an instant failure would loop.
        if self._last is not None and now_ms < self._last.at_ms:
            return self._last
        number = 1 if self._last is None else self._last.number + 1
        if number > self._attempts:
            return GiveUp(f"all restart attempts are used up attempts=`{self._attempts}`")
        self._last = Restart(now_ms + self._delay_ms, number)
        return self._last
