"""Durations and sizes: every notation means what it says, and nothing is guessed."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import UsageError
from headgate.operators.durations import format_duration, parse_duration
from headgate.operators.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("30s", 30_000),
        ("5m", 300_000),
        ("1h 30m", 5_400_000),
        ("1h30m", 5_400_000),
        ("100ms", 100),
        ("2d", 172_800_000),
        ("1 min", 60_000),
        ("20 s", 20_000),
        ("10000 ms", 10_000),
        (" 10 Minutes ", 600_000),
        ("0s", 0),
        (timedelta(minutes=1, milliseconds=1), 60_001),
    ],
)
def test_durations_in_every_notation(text, ms):
    assert parse_duration(text) == ms


@pytest.mark.parametrize("value", [10, 1.5, True, "10", " 7 "])
def test_a_number_without_a_unit_is_refused(value):
    with pytest.raises(UsageError) as caught:
        parse_duration(value, "idle_after", "job.py:3")
    assert str(caught.value) == (
        f"idle_after needs a unit value=`{value}`\n"
        "  at job.py:3\n"
        '  write a number with a unit, such as "30s", "5m", "1h 30m" or "100ms"'
    )


@pytest.mark.parametrize("value", ["", "s", "5x", "5m and more", "-5m", "1.5h", None, ["5m"]])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(UsageError, match="not a duration"):
        parse_duration(value)


@pytest.mark.parametrize("value", [timedelta(seconds=-1), timedelta(microseconds=1)])
def test_timedeltas_that_are_no_whole_milliseconds_are_refused(value):
    with pytest.raises(UsageError, match=r"negative|finer"):
        parse_duration(value)


@settings(deadline=None)
@given(st.integers(0, 10**12))
def test_a_formatted_duration_reads_back(ms):
    assert parse_duration(format_duration(ms)) == ms


def test_formatted_durations_are_short():
    assert format_duration(5_400_000) == "1h 30m"
    assert format_duration(0) == "0s"


@pytest.mark.parametrize(
    ("text", "size"), [("32kb", 32_768), ("1 mb", 1_048_576), ("7b", 7), ("2 GiB", 2 << 30)]
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("value", ["32", "kb", "1.5mb", 32, ""])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(UsageError, match="not a size with a unit"):
        parse_size(value)
