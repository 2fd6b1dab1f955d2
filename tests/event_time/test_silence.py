"""Windows of a quiet stream close: time goes on with the clock, at a price that is counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.splits import WHOLE, History
from headgate.operators.watermarks.operator import BEHIND_CLOCK
from headgate.operators.watermarks.strategy import bounded_by
from headgate.runtime.task.valve import WatermarkValve
from headgate.state.snapshot import RestoredState
from headgate.testing import harness

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


def test_a_reader_that_has_read_all_its_splits_is_driven_by_the_clock(step):
    run = step(close_after_ms=1_000)
    run.splits.opened("a")
    run.read("a", 5_000, last=True).wait(2_000)
    assert run.watermarks[-1] == 4_999 + 2_000


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
    run.operator.on_watermark(WATERMARK_MAX)
    run.wait(60_000)
    assert run.watermarks == [WATERMARK_MAX]
    assert run.clock.waiting == {}


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
    counts in the end, and it repeats for ever."""
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


def restored(step, *before):
    """A step that begins with what these had in a checkpoint."""
    run = step(close_after_ms=1_000)
    items = [item for each in before for item in each.operator.snapshot(1).items["watermark"].items]
    run.operator.restore(RestoredState(items={"watermark": items}))
    return run


def test_after_a_restore_silence_goes_on_from_where_time_was(step):
    before = step(close_after_ms=1_000).read(WHOLE, 5_000).wait(2_000)
    run = restored(step, before).wait(1_000)
    assert run.watermarks == [4_999 + 2_000 + 1_000]
    run.read(WHOLE, 5_000, 4_999)
    assert run.counts == {BEHIND_CLOCK: 1}
    assert restored(step, restored(step, before)).wait(1_000).watermarks == run.watermarks


def test_after_a_restore_the_slowest_that_was_waited_for_decides(step):
    slow, fast = (step(close_after_ms=9_000).read(WHOLE, at).wait(TICK_MS) for at in (1_000, 5_000))
    assert restored(step, slow, fast).wait(1_000).watermarks == [1_999]
    slow.operator.on_idle(True)
    assert restored(step, slow, fast).wait(1_000).watermarks == [5_999]
    fast.operator.on_idle(True)
    assert restored(step, slow, fast).wait(1_000).watermarks == [5_999]
    fast.operator.on_watermark(WATERMARK_MAX)
    assert restored(step, slow, fast).wait(1_000).watermarks == [1_999]


def test_after_a_restore_a_split_without_a_record_still_has_none(step):
    never, fast = step(close_after_ms=9_000), step(close_after_ms=9_000).read(WHOLE, 5_000)
    assert restored(step, never, fast.wait(TICK_MS)).wait(60_000).watermarks == []


def test_without_close_after_the_clock_is_not_remembered(step):
    run = step(idle_after_ms=1_000).read(WHOLE, 5_000)
    assert "watermark" not in run.operator.snapshot(1).items
    assert [info.name for info in run.operator.states()] == ["reached"]


def test_a_window_of_a_quiet_job_closes_also_after_a_crash():
    job = hg.Job("quiet")
    job.checkpoint(every="1h", storage="never-made")
    rows = job.read(from_list([], schema={"k": "string", "at": "int64"}), name="in")
    counts = (
        rows.event_time("at", idle_after="1m", close_after="30s", name="times")
        .key_by("k")
        .window(hg.tumbling("10m"))
        .agg(n=hg.count(), name="counts")
    )
    counts.write(collect(guarantee="exactly_once"), name="out")
    with harness(job) as h:
        h.push("in", {"k": "a", "at": 60_000})
        h.advance_time("5m")
        h.checkpoint()
        assert h.drain("out") == []
        h.crash()
        h.advance_time("3m 30s")
        h.checkpoint()
        assert h.drain("out") == []
        h.advance_time("31s")
        h.checkpoint()
        assert [row["n"] for row in h.drain("out")] == [1]


def test_a_history_that_is_slow_to_read_is_not_silent(step):
    run = step(idle_after_ms=1_000, close_after_ms=1_000)
    run.splits.history = History.BEING_READ
    run.read(WHOLE, 5_000).wait(60_000)
    assert run.signals == [("watermark", 5_000 - 1)]
    run.splits.history = History.NONE
    run.wait(1_000 + TICK_MS)
    assert ("idle", True) in run.signals
