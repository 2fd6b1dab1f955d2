"""Goal: a watermark that fires windows does not wait for the interval, and no other is sent for it."""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.api.stream import Stream, output_of
from headgate.connectors import blackhole, from_list
from headgate.operators.watermarks.strategy import bounded_by
from headgate.runtime.job import runnable

SCHEMA = {"k": "string", "at": "int64"}


def test_the_watermark_at_the_end_of_a_window_is_sent_at_once(step: Any) -> None:
    found = step(bounded_by(100), {"pipeline.auto-watermark-interval": "1h"}, window_ends_ms=1_000)
    found.read("", 0, 500)  # the first watermark of all
    assert found.watermarks == [399]
    found.wait(400_000).read("", 999, 1_098)
    assert found.watermarks == [399], "one more ms is needed for the end of the window"
    found.wait(400_000).read("", 1_100)
    assert found.watermarks == [399, 999]
    found.wait(400_000).read("", 1_700)
    assert found.watermarks == [399, 999], "no window ends here"
    found.wait(400_000).read("", 5_000)
    assert found.watermarks == [399, 999, 4_899], "one watermark for all windows that are due"


def test_all_splits_must_have_reached_the_end(step: Any) -> None:
    found = step(bounded_by(0), {"pipeline.auto-watermark-interval": "1h"}, window_ends_ms=1_000)
    found.splits.opened("a")
    found.splits.opened("b")
    found.read("a", 1_500)
    assert found.watermarks == []
    found.wait(400_000).read("b", 700)
    assert found.watermarks == [699]
    found.wait(400_000).read("b", 1_001)
    assert found.watermarks == [699, 1_000]


def test_at_full_speed_it_is_looked_ten_times_per_interval(step: Any) -> None:
    found = step(bounded_by(0), {"pipeline.auto-watermark-interval": "200ms"}, window_ends_ms=10)
    for n in range(1_000):
        found.read("", 100 * n)
        if n % 10 == 9:
            found.wait(1)  # ten batches per ms
    assert 5 <= len(found.watermarks) <= 6, "100 ms are five times 20 ms"


def test_data_at_rest_has_watermarks_by_rows_alone(step: Any) -> None:
    found = step(bounded_by(0), at_rest=True, window_ends_ms=1_000)
    found.read("", 0, 5_000).read("", 9_000)
    assert found.watermarks == []


def times_of(make: Any) -> int:
    """The distance of the ends of windows that the plan finds for the first step of event time."""
    job = hg.Job("ends")
    stream = job.read(from_list([], schema=SCHEMA), name="in").event_time("at", name="times")
    make(stream)
    spec = runnable(job).spec()
    nodes = [node for vertex in spec.plan.vertices for node in vertex.nodes]
    return next(node.window_ends_ms for node in nodes if node.name == "times")


def count(stream: Stream[Any], window: Any, name: str = "counts") -> Stream[Any]:
    counted = stream.key_by("k").window(window).agg(n=hg.count(), name=name)
    counted.write(blackhole(), name=f"{name}-out")
    return counted


@pytest.mark.parametrize(
    ("window", "every_ms"),
    [
        (hg.tumbling("1m"), 60_000),
        (hg.tumbling("1m", offset="10s"), 10_000),
        (hg.sliding("1m", every="25s"), 5_000),
        (hg.sliding("50s", every="25s"), 25_000),
        (hg.cumulative("1h", step="5m"), 300_000),
        (hg.tumbling("1d", zone="Europe/Berlin"), 0),
        (hg.session("1m"), 0),
        (hg.count_window(3), 0),
    ],
    ids=lambda value: value if isinstance(value, int) else value.describe(),
)
def test_the_ends_of_a_window(window: Any, every_ms: int) -> None:
    assert times_of(lambda stream: count(stream, window)) == every_ms


def test_every_end_is_a_multiple() -> None:
    for window in (hg.sliding("7s", every="3s", offset="1s"), hg.tumbling("9s", offset="6s")):
        ends = [window.grid().bounds(number)[1] for number in range(-5, 50)]
        assert [end for end in ends if end % window.ends_every_ms] == []


def test_several_windows_and_the_next_event_time() -> None:
    def two(stream: Stream[Any]) -> None:
        count(stream, hg.tumbling("1m"), "minutes")
        count(stream.filter("k <> ''"), hg.sliding("90s", every="45s"), "others")

    def behind_other_times(stream: Stream[Any]) -> None:
        count(stream.event_time("at", name="again"), hg.tumbling("1m"))

    def joined(stream: Stream[Any]) -> None:
        other = stream.filter("k <> ''", name="other")
        windows = stream.key_by("k").window(hg.tumbling("30s"))
        both = windows.join(other.key_by("k"), name="both", suffix="_other")
        both.write(blackhole(), name="out")

    assert times_of(two) == 15_000
    assert times_of(behind_other_times) == 0
    assert times_of(joined) == 30_000


def test_records_in_windows() -> None:
    job = hg.Job("job")
    stream = job.read(from_list([], schema=SCHEMA), name="in").event_time("at", name="times")
    windows = stream.key_with(lambda row: row.k).window(hg.tumbling("2m"))
    result = windows.reduce(lambda one, other: other, name="last")
    assert output_of(result).node.window_ends_ms == 120_000
