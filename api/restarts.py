"""Restart strategies for `job.restart`."""

from __future__ import annotations

from ..errors import PlanError
from ..operators.durations import Duration, parse_duration
from ..operators.origin import capture_origin
from .settings import NO_RESTART, ExponentialDelay, FailureRate, FixedDelay, RestartSettings


def fixed_delay(attempts: int = 1, delay: Duration = "1s") -> RestartSettings:
    """Restart at most `attempts` times, each `delay` after the failure.

    As Flink's `restart-strategy.fixed-delay`.

    Raises:
        PlanError: a number below 0, or an invalid duration.
    """
    where = str(capture_origin())
    check_number("attempts", attempts, 0, where)
    return FixedDelay(attempts, parse_duration(delay, "restart delay", where))


def failure_rate(
    max_failures: int = 1, interval: Duration = "1min", delay: Duration = "1s"
) -> RestartSettings:
    """Restart while no more than `max_failures` happen within `interval`, each `delay` after the failure.

    As Flink's `restart-strategy.failure-rate`.

    Raises:
        PlanError: a number below 1, or an invalid duration.
    """
    where = str(capture_origin())
    check_number("max_failures", max_failures, 1, where)
    return FailureRate(
        max_failures,
        positive(interval, "failure rate interval", where),
        parse_duration(delay, "restart delay", where),
    )


def exponential_delay(
    initial: Duration = "1s",
    max: Duration = "1min",
    multiplier: float = 1.5,
    *,
    jitter: float = 0.1,
    reset_after: Duration = "1h",
    attempts: int | None = None,
) -> RestartSettings:
    """Restart after pauses that grow from `initial` by `multiplier` up to `max`.

    As Flink's `restart-strategy.exponential-delay`.

    Args:
        initial: the first pause, which is the shortest.
        max: the longest pause.
        multiplier: the growth of each pause, 1 or more.
        jitter: the fraction of a pause, 0 to 1, by which it is lengthened or shortened at random,
            so that jobs that failed together do not restart together.
        reset_after: this long without a failure, counted from the restart, resets the pauses.
        attempts: restarts until the reset; one failure more ends the job. None: any number.

    Raises:
        PlanError: a number out of its bounds, or an invalid duration.
    """
    where = str(capture_origin())
    initial_ms = positive(initial, "initial restart delay", where)
    max_ms = positive(max, "longest restart delay", where)
    if max_ms < initial_ms:
        raise PlanError(
            f"the longest restart delay is below the first initial=`{initial}` max=`{max}`",
            where=where,
            fix="raise max",
        )
    if not _is_number(multiplier) or not 1 <= multiplier <= MULTIPLIER_MAX:
        raise PlanError(
            f"a restart multiplier must be a number in 1..{MULTIPLIER_MAX} value=`{multiplier}`",
            where=where,
        )
    if not _is_number(jitter) or not 0 <= jitter <= 1:
        raise PlanError(f"a restart jitter must be a number in 0..1 value=`{jitter}`", where=where)
    if attempts is not None:
        check_number("attempts", attempts, 1, where)
    reset_ms = positive(reset_after, "time until restart delays are reset", where)
    return ExponentialDelay(initial_ms, max_ms, multiplier, jitter, reset_ms, attempts)


def no_restart() -> RestartSettings:
    """Let the first failure end the job."""
    return NO_RESTART


MULTIPLIER_MAX = 1_000


def positive(value: Duration, what: str, where: str) -> int:
    """Return a duration above 0, in ms."""
    found = parse_duration(value, what, where)
    if found < 1:
        raise PlanError(f"the {what} must be above 0 value=`{value}`", where=where)
    return found


def check_number(name: str, value: object, at_least: int, where: str) -> None:
    """Raise PlanError unless `value` is a whole number of `at_least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PlanError(
            f"restart({name}=...) must be a whole number from {at_least} value=`{value}`",
            where=where,
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
