"""Windows of a quiet stream close: time goes on with the clock, at a price that is counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.operators.splits import WHOLE
from headgate.operators.watermarks.operator import BEHIND_CLOCK
from headgate.operators.watermarks.strategy import bounded_by
from headgate.runtime.task.valve import WatermarkValve

TICK_MS = 200


def test_after_silence_time_goes_on_with_the_clock(step):
    run = step(bounded_by(100), close_after_ms=1_000)
    run.read(WHOLE, 5_000).wait(900)
    assert run.watermarks == [4_899]
    run.wait(500)
    assert run.watermarks == [4_899, 5_899, 6_099, 6_299]
    run.wait(60_000)
    assert run.watermarks[-1] == 4_899 + 61_400


def test_without_any_event_time_there_is_nothing_to_go_on_from(step):
    run = step(close_after_ms=1_000)
    run.wait(60_000)
    assert run.signals == []


def test_a_split_without_records_is_waited_for_unless_it_is_idle(step):
    run = step(close_after_ms=1_000)
    patient = step(close_after_ms=1_000, idle_after_ms=2_000)
    for each in (run, patient):
        each.splits.opened("a")
        each.splits.opened("b")
        each.read("a", 5_000).wait(1_900)
    assert run.watermarks == patient.watermarks == []
    run.wait(10_000)
    patient.wait(200)
    assert run.watermarks == []
    assert patient.watermarks == [4_999, 4_999 + 2_000]


def test_records_behind_the_clock_are_counted(step):
    run = step(close_after_ms=1_000)
    run.read(WHOLE, 5_000).wait(1_200)
    assert run.watermarks[-1] == 4_999 + 1_200
    run.read(WHOLE, 4_000, 4_999, 5_000, 6_199, 6_200)
    assert run.counts == {BEHIND_CLOCK: 2}  # the first two are late in any case, the last is not
    run.wait(TICK_MS)
    assert run.watermarks[-1] == 6_199
    run.read(WHOLE, 7_000).wait(TICK_MS)
    assert run.watermarks[-1] == 6_999
    run.read(WHOLE, 6_500)
    assert run.counts == {BEHIND_CLOCK: 2}  # late by the rule itself


def test_a_record_ends_the_silence(step):
    run = step(close_after_ms=1_000)
    run.read(WHOLE, 5_000).wait(900).read(WHOLE, 5_001).wait(900)
    assert run.watermarks == [4_999, 5_000]


def test_backpressure_is_not_silence(step):
    run = step(close_after_ms=1_000)
    run.read(WHOLE, 5_000)
    run.held_s += 60
    run.wait(60_000)
    assert run.watermarks == [4_999]


def test_one_that_is_idle_still_moves_time_but_holds_nobody_back(step):
    run = step(idle_after_ms=500, close_after_ms=1_000)
    run.read(WHOLE, 5_000).wait(1_000)
    assert run.signals == [
        ("watermark", 4_999),
        ("idle", True),
        ("idle", False),
        ("watermark", 5_999),
        ("idle", True),
    ]


def test_after_the_end_the_clock_means_nothing(step):
    run = step(close_after_ms=1_000)
    run.read(WHOLE, 5_000)
    run.operator.on_watermark(2**63 - 1)
    run.wait(60_000)
    assert run.watermarks == [2**63 - 1]
    assert run.clock.due == {}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 50_000), st.sampled_from([0, 200, 3_000])),
        min_size=1,
        max_size=8,
    )
)
def test_a_quiet_stream_of_two_subtasks_closes_its_windows(step, records):
    """Through the valve, in whatever order the two fell silent: with idle_after, only the furthest
    counts in the end, and it goes on for ever."""
    runs = [step(idle_after_ms=500, close_after_ms=1_000) for _ in range(2)]
    valve, seen = WatermarkValve(2), [0, 0]
    passed = []

    def feed():
        for channel, run in enumerate(runs):
            for kind, value in run.events[seen[channel] :]:
                if kind == "watermark":
                    passed.append(valve.on_watermark(channel, value).watermark)
                elif kind == "idle":
                    passed.append(valve.on_status(channel, value).watermark)
            seen[channel] = len(run.events)

    for channel, time, pause in records:
        runs[channel].read(WHOLE, time)
        for _ in range(pause // TICK_MS):
            for run in runs:
                run.wait(TICK_MS)
            feed()
    for _ in range(100):
        for run in runs:
            run.wait(TICK_MS)
        feed()
    watermarks = [each for each in passed if each is not None]
    assert watermarks == sorted(set(watermarks))
    assert valve.watermark >= max(time for _, time, _ in records) + 15_000
    assert valve.idle
