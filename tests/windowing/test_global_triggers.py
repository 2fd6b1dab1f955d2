"""Triggers in windows without end: whose clock they go by, and that they stop with the input."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError, StateError
from headgate.operators.elements import WATERMARK_MAX
from headgate.testing import harness

GLOBAL = hg.global_window()
TRIGGERS = hg.triggers


def key_of(record):
    return record[0]


class Values(hg.WindowProcess):
    def on_window(self, key, window, records, ctx):
        yield [record[1] for record in records]


def step_of(world, window=GLOBAL, *, event_time=True, **how):
    windows = world.stream(event_time=event_time).key_with(key_of).window(window, **how)
    return world.Step(windows.process(Values(), name="w"))


def push(step, *pairs):
    step.push([("a", value) for value, _ in pairs], [time for _, time in pairs], key=key_of)


class TenAfter(hg.Trigger):
    """Fires ten ms of event time after each record."""

    def on_element(self, record, timestamp, window, ctx):
        ctx.event_time.at(timestamp + 10, tag=str(timestamp))
        return hg.TriggerResult.CONTINUE

    def on_event_time(self, time, window, ctx):
        return hg.TriggerResult.FIRE


class Again(TenAfter):
    """Sets its timer again for ever."""

    def on_event_time(self, time, window, ctx):
        ctx.event_time.at(time + 10)
        return hg.TriggerResult.FIRE


class AgainUntilTheEnd(Again):
    def on_event_time(self, time, window, ctx):
        if ctx.input_ended:
            return hg.TriggerResult.FIRE
        return super().on_event_time(time, window, ctx)


def test_continuous_event_time_fires_in_a_global_window_as_the_watermark_passes(world):
    step = step_of(world, trigger=TRIGGERS.ContinuousEventTime("10ms"))
    push(step, (1, 3), (2, 12))
    step.watermark(9)
    assert step.take() == []
    step.watermark(12)
    assert step.take() == [([1, 2], 10)]
    step.restart()
    push(step, (3, 13))
    step.watermark(31)
    assert step.take() == [([1, 2, 3], 20), ([1, 2, 3], 30)]


@pytest.mark.parametrize("evictor", [None, hg.evictors.Count(1_000)], ids=["plain", "evictor"])
def test_what_is_pending_at_the_end_of_the_input_fires_once(world, evictor):
    step = step_of(world, trigger=TRIGGERS.ContinuousEventTime("10ms"), evictor=evictor)
    push(step, (1, 3), (2, 12))
    step.end()
    assert step.take() == [([1, 2], 10)]


def test_purging_forgets_what_a_continuous_trigger_has_shown(world):
    trigger = TRIGGERS.Purging(TRIGGERS.ContinuousEventTime("10ms"))
    step = step_of(world, trigger=trigger)
    push(step, (1, 3))
    step.watermark(25)
    push(step, (2, 26))
    step.watermark(WATERMARK_MAX)
    assert step.take() == [([1], 10), ([2], 30)]


def test_a_trigger_of_ones_own_sees_event_times_and_its_timers_fire(world):
    step = step_of(world, trigger=TenAfter())
    push(step, (1, 3), (2, 12))
    step.watermark(13)
    step.watermark(WATERMARK_MAX)
    assert step.take() == [([1, 2], 13), ([1, 2], 22)]


def test_event_timers_fire_in_windows_of_the_machines_clock_too(world):
    step = step_of(world, hg.tumbling("50ms", time="processing"), trigger=TenAfter())
    push(step, (1, 3))
    step.watermark(13)
    assert [values for values, _ in step.take()] == [[1]]


@pytest.mark.parametrize("window", [GLOBAL, hg.tumbling("30d")], ids=["global", "tumbling"])
def test_a_trigger_that_never_stops_fails_with_its_window_and_key(world, window):
    step = step_of(world, window, trigger=Again())
    push(step, (1, 3))
    with pytest.raises(StateError, match="repeats for ever after the end.*key=`'a'`.*window="):
        step.end()


def test_a_trigger_that_asks_whether_the_input_ended_ends_too(world):
    step = step_of(world, trigger=AgainUntilTheEnd())
    push(step, (1, 3))
    step.watermark(25)
    step.end()
    assert [time for _, time in step.take()] == [13, 23, 33]


def test_a_long_window_with_a_short_interval_ends_with_its_window(world):
    step = step_of(world, hg.tumbling("365d"), trigger=TRIGGERS.ContinuousEventTime("1ms"))
    push(step, (1, 3))
    step.end()
    year = 365 * 86_400_000
    assert step.take() == [([1], year - 1), ([1], year - 1)]


@pytest.mark.parametrize(
    "trigger",
    [TRIGGERS.EventTime(), TRIGGERS.Purging(TRIGGERS.ContinuousEventTime("1s"))],
    ids=["end", "purging"],
)
@pytest.mark.parametrize(
    "window", [GLOBAL, hg.tumbling("1m", time="processing")], ids=["global", "clock"]
)
def test_a_trigger_by_event_time_is_refused_where_there_is_none(world, trigger, window):
    with pytest.raises(PlanError, match="fires by event time, and"):
        step_of(world, window, event_time=False, trigger=trigger)


@pytest.mark.parametrize(
    ("trigger", "found"),
    [
        (TRIGGERS.ContinuousEventTime("10s"), [[1, 2], [1, 2, 3]]),
        (TRIGGERS.Purging(TRIGGERS.ContinuousEventTime("10s")), [[1, 2], [3]]),
        (TRIGGERS.Count(2), [[1, 2]]),
        (TRIGGERS.EventTime(), [[1, 2, 3]]),
    ],
    ids=["continuous", "purging", "count", "end"],
)
def test_a_harness_with_a_global_window_ends(trigger, found):
    job = hg.Job("global")
    rows = job.read(from_list([], schema={"k": "string", "v": "int64", "at": "int64"}), name="in")
    keyed = rows.event_time("at", max_out_of_order="0s").key_by("k")
    shown = keyed.window(GLOBAL, trigger=trigger).process(Listed(), name="w")
    shown.write(collect(guarantee="none"), name="out")
    with harness(job) as h:
        h.push("in", {"k": "a", "v": 1, "at": 1_000}, {"k": "a", "v": 2, "at": 9_000})
        h.advance_watermark("in", 10_000)
        h.push("in", {"k": "a", "v": 3, "at": 12_000})
        h.end()
        assert h.drain("out") == found


class Listed(hg.WindowProcess):
    def on_window(self, key, window, records, ctx):
        yield [record.v for record in records]
