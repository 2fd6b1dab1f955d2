"""The restart strategy that a job runs with."""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.api.settings import (
    NO_RESTART,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    RestartSettings,
)
from headgate.errors import HeadgateError, OptionError, PlanError
from headgate.runtime.job import runnable
from headgate.runtime.job_settings import restart_settings
from headgate.runtime.options.registry import Options

EXPONENTIAL = "restart-strategy.exponential-delay"


def chosen(
    written: RestartSettings | None = None, *, checkpoints: bool = True, **texts: str
) -> RestartSettings:
    options = {key.replace("__", "-").replace("_", "."): text for key, text in texts.items()}
    return restart_settings(written, Options(options), checkpoints)


def test_without_a_word_checkpoints_decide() -> None:
    assert chosen() == ExponentialDelay()
    assert chosen(checkpoints=False) == NO_RESTART


@pytest.mark.parametrize("text", ["none", "off", "disable"])
def test_none_wins_over_what_the_job_says(text: str) -> None:
    options = Options({"restart-strategy.type": text})
    assert restart_settings(FixedDelay(3, 1), options, True) == NO_RESTART


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"restart-strategy.type": "fixeddelay"}, FixedDelay(1, 1_000)),
        (
            {
                "restart-strategy.type": "fixed-delay",
                "restart-strategy.fixed-delay.attempts": "3",
                "restart-strategy.fixed-delay.delay": "10000 ms",
            },
            FixedDelay(3, 10_000),
        ),
        (
            {
                "restart-strategy.type": "failurerate",
                "restart-strategy.failure-rate.max-failures-per-interval": "3",
                "restart-strategy.failure-rate.failure-rate-interval": "5 min",
                "restart-strategy.failure-rate.delay": "10 s",
            },
            FailureRate(3, 300_000, 10_000),
        ),
        (
            {
                "restart-strategy.type": "exponentialdelay",
                f"{EXPONENTIAL}.initial-backoff": "10 s",
                f"{EXPONENTIAL}.max-backoff": "2 min",
                f"{EXPONENTIAL}.backoff-multiplier": "1.4",
                f"{EXPONENTIAL}.reset-backoff-threshold": "10 min",
                f"{EXPONENTIAL}.jitter-factor": "0.1",
                f"{EXPONENTIAL}.attempts-before-reset-backoff": "10",
            },
            ExponentialDelay(10_000, 120_000, 1.4, 0.1, 600_000, 10),
        ),
    ],
)
def test_options_as_the_document_writes_them(
    texts: dict[str, str], expected: RestartSettings
) -> None:
    assert restart_settings(None, Options(texts), False) == expected
    assert restart_settings(FixedDelay(9, 9), Options(texts | {}), True).__class__ is (
        expected.__class__
    )


def test_an_option_changes_one_value_of_what_the_job_says() -> None:
    options = Options({"restart-strategy.fixed-delay.attempts": "7"})
    assert restart_settings(FixedDelay(3, 50), options, True) == FixedDelay(7, 50)


@pytest.mark.parametrize(
    ("written", "checkpoints", "strategy"),
    [
        (None, True, "exponential-delay"),
        (None, False, "none"),
        (NO_RESTART, True, "none"),
        (FailureRate(), True, "failure-rate"),
    ],
)
def test_a_value_of_a_strategy_that_nobody_chose_is_an_error(
    written: RestartSettings | None, checkpoints: bool, strategy: str
) -> None:
    options = Options({"restart-strategy.fixed-delay.attempts": "7"})
    with pytest.raises(OptionError, match=f"has no effect.*strategy=`{strategy}`") as caught:
        restart_settings(written, options, checkpoints)
    assert caught.value.fix == "set restart-strategy.type to fixed-delay"


def test_values_of_several_strategies_may_stand_beside_the_name_of_one() -> None:
    texts = {
        "restart-strategy.type": "failure-rate",
        "restart-strategy.fixed-delay.attempts": "7",
        "restart-strategy.failure-rate.delay": "2 s",
    }
    assert restart_settings(FixedDelay(3, 1), Options(texts), True) == FailureRate(delay_ms=2_000)


def test_the_longest_pause_below_the_first_is_an_error() -> None:
    options = Options({f"{EXPONENTIAL}.initial-backoff": "2 min"})
    with pytest.raises(OptionError, match="below the first"):
        restart_settings(None, options, True)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (hg.fixed_delay(4, "2s"), FixedDelay(4, 2_000)),
        (hg.failure_rate(3, "5min", "10s"), FailureRate(3, 300_000, 10_000)),
        (hg.exponential_delay(), ExponentialDelay()),
        (
            hg.exponential_delay("2s", "30s", 3, jitter=0, reset_after="1min", attempts=5),
            ExponentialDelay(2_000, 30_000, 3, 0, 60_000, 5),
        ),
        (hg.no_restart(), NO_RESTART),
    ],
)
def test_a_job_says_it_in_python(made: RestartSettings, expected: RestartSettings) -> None:
    assert made == expected
    job = hg.Job("job")
    job.restart(made)
    assert runnable(job).restart_settings == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: hg.fixed_delay(-1),
        lambda: hg.fixed_delay(True),
        lambda: hg.failure_rate(0),
        lambda: hg.failure_rate(interval="0s"),
        lambda: hg.exponential_delay("2min"),
        lambda: hg.exponential_delay(initial="0s"),
        lambda: hg.exponential_delay(multiplier=0.5),
        lambda: hg.exponential_delay(jitter=2),
        lambda: hg.exponential_delay(attempts=0),
        lambda: hg.exponential_delay(reset_after="soon"),
    ],
)
def test_mistakes_are_found_where_they_are_written(make: Any) -> None:
    with pytest.raises(HeadgateError) as caught:
        make()
    assert isinstance(caught.value, PlanError) or caught.value.where
