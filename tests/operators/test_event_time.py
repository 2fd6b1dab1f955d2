"""event_time: times from columns and functions, watermarks and idleness on a clock moved by hand."""

from __future__ import annotations

from datetime import UTC, date, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import BadRecordError, PlanError, UserCodeError
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, ObjectBatch
from headgate.operators.event_time import (
    ColumnTimes,
    FunctionTimes,
    check_time_column,
    milliseconds,
)
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.rows import RowReader
from headgate.operators.watermarks.operator import ROWS_PER_WATERMARK, EventTimeOperator
from headgate.operators.watermarks.strategy import WatermarkSettings, bounded_by

ORIGIN = Origin("job.py:5")


def by_function(function):
    return FunctionTimes(
        UserFunction(function, "event_time", ORIGIN, RowReader(None, None, function))
    )


def operator(bound_ms=0, idle_after_ms=None):
    settings = WatermarkSettings(bounded_by(bound_ms), idle_after_ms)
    return EventTimeOperator(by_function(lambda x: x), settings)


@pytest.mark.parametrize("kind", ["s", "ms", "us", "ns"])
@given(seconds=st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_timestamps_of_every_unit(kind, seconds):
    column = pa.array(
        [datetime.fromtimestamp(s, UTC) for s in seconds], pa.timestamp(kind, tz="UTC")
    )
    assert milliseconds(column).tolist() == [s * 1_000 for s in seconds]


def test_parts_of_a_millisecond_are_rounded_down_also_before_1970():
    assert milliseconds(pa.array([1_999, -1], pa.timestamp("us"))).tolist() == [1, -1]


def test_dates_and_integers():
    days = pa.array([date(1970, 1, 2), date(1969, 12, 31)])
    assert milliseconds(days).tolist() == [86_400_000, -86_400_000]
    assert milliseconds(days.cast(pa.date64())).tolist() == [86_400_000, -86_400_000]
    assert milliseconds(pa.array([5, -5], pa.int64())).tolist() == [5, -5]


@pytest.mark.parametrize("kind", [pa.string(), pa.float64(), pa.int32(), pa.bool_()])
def test_other_columns_have_no_event_times(kind):
    with pytest.raises(PlanError, match=r"column `ts` has no event times type="):
        check_time_column("ts", kind, "job.py:5")


def test_a_null_event_time_names_the_record():
    data = pa.RecordBatch.from_pydict({"url": ["a", "b"], "ts": pa.array([1, None], pa.int64())})
    with pytest.raises(BadRecordError) as caught:
        ColumnTimes("ts", ORIGIN)(ColumnBatch(data))
    assert str(caught.value) == (
        "event time is null column=`ts` record=`Row(url='b', ts=None)`\n"
        "  at job.py:5\n"
        '  drop such records before: .filter("ts IS NOT NULL")'
    )


def test_a_function_returns_milliseconds_or_an_aware_datetime():
    moment = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    assert by_function(lambda x: x)(ObjectBatch([7, moment])).tolist() == [7, -1]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (None, "None"),
        (1.5, "1.5"),
        (True, "True"),
        (datetime(2024, 1, 1), "a datetime without a time zone"),
    ],
)
def test_other_results_are_refused(result, shown):
    with pytest.raises(
        UserCodeError, match=f"returned {shown}, which is not an event time record=`1`"
    ):
        by_function(lambda x: result)(ObjectBatch([1]))


def test_records_carry_their_times(harness, world):
    run = harness(EventTimeOperator(ColumnTimes("ts", ORIGIN), WatermarkSettings(bounded_by(0))))
    run.push(world.batch(3, times=False))
    assert run.times == [0, 1_000, 2_000]


def test_the_watermark_is_the_latest_time_less_bound_less_one(harness):
    run = harness(operator(bound_ms=100))
    run.push(ObjectBatch([1_000, 5_000, 3_000]))
    assert run.watermarks == []
    run.clock.advance(199)
    assert run.watermarks == []
    run.clock.advance(1)
    assert run.watermarks == [4_899]


def test_watermarks_only_grow(harness):
    run = harness(operator())
    for times in ([5_000], [1_000], [4_000], [9_000]):
        run.push(ObjectBatch(times))
        run.clock.advance(200)
    assert run.watermarks == [4_999, 8_999]


def test_without_records_there_is_no_watermark(harness):
    run = harness(operator())
    run.clock.advance(10_000)
    run.push(ObjectBatch([]))
    run.clock.advance(10_000)
    assert run.output.events == []


def test_a_replay_at_full_speed_sends_watermarks_by_rows(harness):
    run = harness(operator())
    rows = ROWS_PER_WATERMARK // 4
    for number in range(9):
        run.push(ObjectBatch(list(range(number * rows, (number + 1) * rows))))
    assert run.watermarks == [ROWS_PER_WATERMARK - 2, 2 * ROWS_PER_WATERMARK - 2]


def test_the_interval_is_an_option(harness):
    run = harness(operator(), options={"pipeline.auto-watermark-interval": "1 s"})
    run.push(ObjectBatch([10]))
    run.clock.advance(999)
    assert run.watermarks == []
    run.clock.advance(1)
    assert run.watermarks == [9]


def test_without_an_interval_each_batch_sends_a_watermark(harness):
    run = harness(
        operator(idle_after_ms=1_000), options={"pipeline.auto-watermark-interval": "0 ms"}
    )
    run.push(ObjectBatch([10]))
    run.push(ObjectBatch([20]))
    assert run.watermarks == [9, 19]
    run.clock.advance(1_000)
    assert ("idle", True) in run.signals


def test_watermarks_from_upstream_end_here_except_the_last(harness):
    run = harness(operator())
    run.push(ObjectBatch([10]))
    run.operator.on_watermark(500)
    assert run.watermarks == []
    run.operator.on_watermark(WATERMARK_MAX)
    assert run.watermarks == [WATERMARK_MAX]
    run.clock.advance(10_000)
    assert run.watermarks == [WATERMARK_MAX]
    assert run.clock.waiting == {}


def test_silence_makes_idle_and_the_next_record_active(harness):
    run = harness(operator(idle_after_ms=1_000))
    run.push(ObjectBatch([10]))
    run.clock.advance(900)
    run.push(ObjectBatch([20]))
    run.clock.advance(900)
    assert ("idle", True) not in run.signals
    run.clock.advance(200)
    assert run.signals == [("watermark", 9), ("watermark", 19), ("idle", True)]
    run.clock.advance(10_000)
    assert run.signals.count(("idle", True)) == 1
    before = len(run.output.events)
    run.push(ObjectBatch([30]))
    assert [kind for kind, _ in run.output.events[before:]] == ["idle", "batch"]
    assert run.output.events[before] == ("idle", False)


def test_records_that_wait_behind_backpressure_are_not_silence(harness):
    """Marked idle, the subtask would let event time pass by the records that wait."""
    run = harness(operator(idle_after_ms=1_000))
    held_s = 0.0
    run.operator.context.held_s = lambda: held_s
    run.push(ObjectBatch([10]))
    run.clock.advance(200)
    for _ in range(20):
        held_s += 0.5
        run.clock.advance(500)
    assert run.signals == [("watermark", 9)]
    run.clock.advance(1_000)
    assert run.signals == [("watermark", 9), ("idle", True)]


def test_silence_begins_behind_what_others_of_the_chain_do_with_a_batch(harness):
    run = harness(operator(idle_after_ms=1_000))
    emit = run.output.emit

    def slowly(batch):
        run.clock.ms += 5_000
        emit(batch)

    run.output.emit = slowly
    run.push(ObjectBatch([10]))
    run.clock.advance(0)
    assert run.signals == [("watermark", 9)]


def test_a_subtask_that_never_gets_a_record_becomes_idle(harness):
    run = harness(operator(idle_after_ms=1_000))
    run.clock.advance(1_200)
    assert run.signals == [("idle", True)]


def test_without_idle_after_silence_is_not_idle(harness):
    run = harness(operator())
    run.clock.advance(1_000_000)
    assert run.signals == []


def test_idle_upstream_is_idle_here(harness):
    run = harness(operator())
    run.push(ObjectBatch([10]))
    run.operator.on_idle(True)
    run.operator.on_idle(True)
    run.operator.on_idle(False)
    assert run.signals == [("watermark", 9), ("idle", True), ("idle", False)]


def test_closing_stops_the_timer(harness):
    run = harness(operator())
    run.operator.close()
    assert run.clock.waiting == {}


@given(st.lists(st.lists(st.integers(-1_000, 1_000), max_size=4), max_size=6))
@settings(max_examples=50, deadline=None)
def test_no_record_within_the_bound_is_ever_late(harness, batches):
    """A record at most `bound` behind the latest before it is not below the watermark sent so far."""
    bound = 50
    run = harness(operator(bound_ms=bound))
    latest = -(10**9)
    for times in batches:
        for time in times:
            if time >= latest - bound:
                assert not run.watermarks or time > run.watermarks[-1]
            latest = max(latest, time)
        run.push(ObjectBatch(times, np.zeros(len(times), np.int64)))
        run.clock.advance(200)
    assert run.watermarks == sorted(set(run.watermarks))
