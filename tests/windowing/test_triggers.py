"""Triggers, evictors and assigners one by one; state per window; what is refused."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.errors import JobError, PlanError, StateError, UserCodeError
from headgate.operators.elements import WATERMARK_MAX


def key_of(record):
    return record[0]


class Values(hg.WindowProcess):
    def on_window(self, key, window, records, ctx):
        yield [record[1] for record in records]


def step_of(world, window, function=None, *, event_time=True, make=None, **how):
    windows = world.stream(event_time=event_time).key_with(key_of).window(window, **how)
    return world.Step(windows.process(function or Values(), name="w"))


def values(step):
    return [result for result, _ in step.take()]


def push(step, *pairs, key="a"):
    """Pairs (value, event time)."""
    step.push([(key, value) for value, _ in pairs], [time for _, time in pairs], key=key_of)


GLOBAL = hg.global_window()


def test_count_fires_for_every_so_many_records_and_purging_forgets_them(world):
    step = step_of(world, GLOBAL, trigger=hg.triggers.Count(2))
    push(step, (1, 0), (2, 1), (3, 2), (4, 3))
    assert step.take() == [([1, 2], 1), ([1, 2, 3, 4], 3)]
    step = step_of(world, GLOBAL, trigger=hg.triggers.Purging(hg.triggers.Count(2)))
    push(step, (1, 0), (2, 1), (3, 2), (4, 3), (5, 4))
    assert values(step) == [[1, 2], [3, 4]]


def test_a_count_window_is_count_and_eviction(world):
    step = step_of(world, hg.count_window(3))
    push(step, *((n, n) for n in range(7)))
    assert values(step) == [[0, 1, 2], [3, 4, 5]]
    step = step_of(world, hg.count_window(3, 2))
    push(step, *((n, n) for n in range(6)))
    assert values(step) == [[0, 1], [1, 2, 3], [3, 4, 5]]


def test_delta_fires_when_records_have_gone_far_enough(world):
    trigger = hg.triggers.Delta(10, lambda a, b: abs(b[1] - a[1]))
    step = step_of(world, GLOBAL, trigger=trigger)
    push(step, (0, 0), (7, 0), (10, 0), (11, 0), (20, 0), (1, 0), (0, 0))
    assert [found[-1] for found in values(step)] == [11, 0]


def test_continuous_event_time_fires_at_multiples_and_at_the_end_once(world):
    trigger = hg.triggers.ContinuousEventTime("10ms")
    step = step_of(world, hg.tumbling("30ms"), trigger=trigger)
    push(step, (1, 3), (2, 12))
    step.watermark(9)
    assert values(step) == []
    step.watermark(10)
    assert values(step) == [[1, 2]]
    step.watermark(WATERMARK_MAX)
    assert values(step) == [[1, 2], [1, 2]]


def test_continuous_processing_time_shows_results_while_the_window_is_there(world):
    trigger = hg.triggers.ContinuousProcessingTime("10ms")
    step = step_of(world, hg.tumbling("30ms"), trigger=trigger)
    push(step, (1, 3))
    step.clock.advance(10)
    push(step, (2, 4))
    step.restart()
    step.clock.advance(10)
    assert values(step) == [[1], [1, 2]]
    step.watermark(29)
    step.clock.advance(100)
    assert values(step) == []


def test_processing_time_ends_with_the_window_also_behind_a_continuous_trigger(world):
    trigger = hg.triggers.ContinuousProcessingTime("20ms")
    window = hg.tumbling("50ms", time="processing")
    step = step_of(world, window, event_time=False, trigger=trigger)
    step.push([("a", 1)], key=key_of)
    step.clock.advance(200)
    assert values(step) == [[1], [1], [1]]


def test_sliding_windows_of_the_machines_clock(world):
    window = hg.sliding("20ms", "10ms", time="processing")
    step = step_of(world, window, event_time=False)
    step.push([("a", 1)], key=key_of)
    step.clock.advance(10)
    step.push([("a", 2)], key=key_of)
    step.clock.advance(100)
    assert step.take() == [([1], None), ([1, 2], None), ([2], None)]


def test_cumulative_windows_grow(world):
    step = step_of(world, hg.cumulative("30ms", "10ms"))
    push(step, (1, 3), (2, 12), (3, 25))
    step.watermark(WATERMARK_MAX)
    assert step.take() == [([1], 9), ([1, 2], 19), ([1, 2, 3], 29)]


@pytest.mark.parametrize(
    ("evictor", "first", "second"),
    [
        (hg.evictors.Count(2), [3, 9], [9, 4]),
        (hg.evictors.Count(2, after=True), [1, 3, 9], [3, 9, 4]),
        (hg.evictors.Time("5ms"), [3, 9], [9, 4]),
        (hg.evictors.Delta(7, lambda a, b: abs(a[1] - b[1])), [3, 9], [3, 9, 4]),
    ],
    ids=["count", "count after", "time", "delta"],
)
def test_evictors_leave_out_what_they_say_and_the_window_forgets_it(world, evictor, first, second):
    window = hg.tumbling("20ms", allowed_lateness="20ms")
    step = step_of(world, window, evictor=evictor)
    push(step, (1, 1), (3, 5), (9, 8))
    step.watermark(19)
    assert values(step) == [first]
    push(step, (4, 12))
    assert values(step) == [second]


class Odd(hg.Evictor):
    def evict_before(self, records, window, watermark):
        return [timed for timed in records if timed.record[1] % 2]


def test_an_evictor_of_your_own(world):
    step = step_of(world, hg.tumbling("10ms"), evictor=Odd())
    push(step, (1, 1), (2, 2), (3, 3))
    step.watermark(WATERMARK_MAX)
    assert values(step) == [[1, 3]]


class Weekday(hg.WindowAssigner):
    """Each record in the window of its time, and of the next one."""

    allowed_lateness_ms = 5

    def assign(self, record, timestamp):
        start = timestamp - timestamp % 10
        return [hg.Window(start, start + 10), hg.Window(start + 10, start + 20)]


def test_an_assigner_of_your_own(world):
    step = step_of(world, Weekday())
    push(step, (1, 3), (2, 12))
    step.watermark(13)
    push(step, (3, 1))
    assert step.take() == [([1], 9), ([1, 3], 9)]
    step.watermark(WATERMARK_MAX)
    assert step.take() == [([1, 2, 3], 19), ([2], 29)]


class Stubborn(hg.Trigger):
    """Fires at a price, or 5 ms after the first record; remembers the sum."""

    can_merge = True

    def on_element(self, record, timestamp, window, ctx):
        total = ctx.get("sum", 0) + record[1]
        ctx.set("sum", total)
        ctx.event_time.at(min(timestamp + 5, window.last), tag="soon")
        if total >= 10:
            ctx.remove("sum")
            ctx.event_time.cancel("soon")
            return hg.TriggerResult.FIRE_AND_PURGE
        return hg.TriggerResult.CONTINUE

    def on_event_time(self, time, window, ctx):
        return hg.TriggerResult.FIRE

    def on_merge(self, window, ctx):
        if sums := ctx.merged("sum"):
            ctx.set("sum", sum(sums))
        ctx.event_time.at(window.last, tag="soon")


def test_a_trigger_of_your_own_remembers_and_merges(world):
    step = step_of(world, hg.session("10ms"), trigger=Stubborn())
    push(step, (4, 0), (3, 20))
    step.restart()
    push(step, (1, 10))
    assert values(step) == []
    push(step, (2, 12))
    assert values(step) == [[4, 3, 1, 2]]
    push(step, (1, 13))
    step.watermark(17)
    assert values(step) == []
    step.watermark(18)
    assert values(step) == [[1]]
    step.watermark(WATERMARK_MAX)
    assert values(step) == []


class Fires(hg.WindowProcess[str, tuple, tuple]):
    """Counts by window and by key, and says what was cleared."""

    of_window = hg.per_window(hg.ValueState[int](default=0))
    of_key = hg.ValueState[int](default=0)
    cleared = hg.SideOutput[tuple]()

    def on_window(self, key, window, records, ctx):
        self.of_window.set(self.of_window.get() + 1)
        self.of_key.set(self.of_key.get() + 1)
        yield window.start, self.of_window.get(), self.of_key.get()

    def clear(self, key, window, ctx):
        ctx.emit(self.cleared, (key, window.start, self.of_window.get()))


@pytest.mark.parametrize("restart", [False, True])
def test_state_of_a_window_goes_with_it_and_that_of_the_key_stays(steps, world, restart):
    windows = world.stream().key_with(key_of)
    late = hg.tumbling("10ms", allowed_lateness="10ms")
    step = steps(windows.window(late).process(Fires(), name="w"))
    push(step, (1, 1), (2, 11))
    step.watermark(9)
    if restart:
        step.restart()
    push(step, (3, 2), (4, 3))
    assert values(step) == [(0, 1, 1), (0, 2, 2), (0, 3, 3)]
    step.watermark(19)
    assert values(step) == [(10, 1, 4)]
    assert [record for record, _ in step.take("cleared")] == [("a", 0, 3)]
    step.watermark(WATERMARK_MAX)
    assert [record for record, _ in step.take("cleared")] == [("a", 10, 1)]
    (operator,) = step.operators
    tables = operator.snapshot(1).tables
    if "of_window" in tables:
        assert tables["of_window"].make(None).num_rows == 0
        assert tables["of_key"].make(None).column("value").to_pylist() == [4]


def test_state_that_expires_by_event_time_is_used_at_the_time_of_the_record(steps, world):
    class Brief(hg.WindowProcess):
        seen = hg.ValueState[int](default=0, ttl=hg.StateTtl("1s", time="event"))

        def on_window(self, key, window, records, ctx):
            self.seen.set(self.seen.get() + 1)
            yield self.seen.get(), ctx.timestamp

    windows = world.stream().key_with(key_of).window(GLOBAL, trigger=hg.triggers.Count(1))
    step = steps(windows.process(Brief(), name="w"))
    push(step, (1, 5_000))
    step.watermark(5_500)
    push(step, (2, 5_600))
    step.watermark(6_600)
    push(step, (3, 6_700))
    assert values(step) == [(1, 5_000), (2, 5_600), (1, 6_700)]


def test_clear_is_at_the_time_of_the_timer_that_clears(world):
    times = []

    class Clears(Values):
        def clear(self, key, window, ctx):
            times.append((window.start, ctx.key, ctx.timestamp))

    step = step_of(world, hg.tumbling("10ms", allowed_lateness="5ms"), Clears())
    push(step, (1, 1))
    push(step, (2, 11), key="b")
    step.watermark(14)
    step.watermark(WATERMARK_MAX)
    assert times == [(0, "a", 14), (10, "b", 24)]


def test_a_record_without_windows_is_not_late(world):
    class Picky(hg.WindowAssigner):
        def assign(self, record, timestamp):
            return []

    step = step_of(world, Picky())
    push(step, (1, 1))
    assert step.metrics.counts == {}


class Failing(hg.WindowProcess):
    def on_window(self, key, window, records, ctx):
        raise ValueError("no")


def test_a_failing_function_is_named_with_key_and_window(world):
    step = step_of(world, hg.tumbling("10ms"), Failing())
    push(step, (1, 1))
    with pytest.raises(UserCodeError) as caught:
        step.watermark(20)
    assert "Window(start=0, end=10)" in str(caught.value)


def test_timers_are_those_of_the_trigger(world):
    class Sets(hg.WindowProcess):
        def on_window(self, key, window, records, ctx):
            ctx.event_time.at(5)

    step = step_of(world, hg.tumbling("10ms"), Sets())
    push(step, (1, 1))
    with pytest.raises(StateError, match="a WindowProcess has no timers"):
        step.watermark(20)


class Wrong(hg.WindowAssigner):
    merging = True

    def __init__(self, made):
        self.made = made

    def assign(self, record, timestamp):
        return self.made


@pytest.mark.parametrize(
    ("made", "what"),
    [
        ([(1, 2)], "something else than windows"),
        ([hg.Window(5, 5)], "something else than windows"),
        ([hg.Window(1, 2), hg.Window(2, 3)], "gave 2 windows for a record"),
    ],
)
def test_what_an_assigner_gives_is_checked(world, made, what):
    step = step_of(world, Wrong(made))
    with pytest.raises(JobError, match=what):
        push(step, (1, 1))


@pytest.mark.parametrize("gap", ["0s", 0, -1, None, 1.5, True])
def test_the_gap_of_a_record_is_checked(world, gap):
    step = step_of(world, hg.session(lambda record: gap))
    with pytest.raises(JobError, match="the gap of a session must be a duration"):
        push(step, (1, 1))


class Taken(Values):
    window_homes = hg.ValueState[int]()


class NoMerge(hg.AggregateFunction):
    def create(self):
        return 0

    def add(self, accumulator, value):
        return 0

    def result(self, accumulator):
        return 0


SESSION = hg.session("10s")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda s: s.window("1m").process(Values(), name="w"), "not a window type=`str`"),
        (lambda s: s.window(GLOBAL).process(Values(), name="w"), "global needs a trigger"),
        (lambda s: s.window(SESSION, trigger=hg.triggers.Count), "got the class `Count`"),
        (lambda s: s.window(SESSION, evictor=3), "needs an instance of hg.Evictor, got 3"),
        (
            lambda s: s.window(SESSION, trigger=hg.triggers.Delta(1, max)).process(
                Values(), name="w"
            ),
            "`Delta` has no on_merge",
        ),
        (
            lambda s: s.window(SESSION).aggregate(NoMerge(), name="w"),
            "`NoMerge` has no method merge",
        ),
        (
            lambda s: s.window(SESSION).process(Fires(), name="w"),
            "state `of_window` of two windows",
        ),
        (lambda s: s.window(SESSION).process(Values, name="w"), "got the class `Values`"),
        (lambda s: s.window(SESSION).aggregate(NoMerge, name="w"), "got the class `NoMerge`"),
        (lambda s: s.window(SESSION).aggregate(3, name="w"), "an aggregate needs the method"),
        (
            lambda s: s.window(SESSION).process(hg.WindowProcess(), name="w"),
            "has no method on_window",
        ),
        (lambda s: s.window(SESSION).agg(n=hg.count(), name="w"), "works on whole columns"),
        (lambda s: s.window(hg.session("a + 1")).process(Values(), name="w"), "no columns"),
        (
            lambda s: s.window(hg.tumbling("1d", zone="Europe/Berlin")).process(Values(), name="w"),
            "for columns only",
        ),
        (
            lambda s: s.window(hg.tumbling("1m", emit_rows=5)).process(Values(), name="w"),
            "need a trigger",
        ),
        (lambda s: s.window(hg.count_window(5), evictor=Odd()), "has its trigger and evictor"),
        (lambda s: s.window(SESSION).process(Taken(), name="w"), "state=`window_homes`"),
        (lambda s: hg.triggers.Count(0), "at least 1"),
        (lambda s: hg.triggers.ContinuousEventTime("0s"), "needs an interval"),
        (lambda s: hg.triggers.Purging("count"), "needs a trigger"),
        (lambda s: hg.per_window(3), "needs a keyed state"),
        (lambda s: hg.tumbling("1m", time="event time"), "event or processing"),
        (lambda s: hg.session("1m", time="processing", allowed_lateness="1s"), "no lateness"),
    ],
)
def test_mistakes_are_found_when_the_job_is_planned(world, make, what):
    with pytest.raises(PlanError) as caught:
        make(world.stream().key_with(key_of))
    assert what in str(caught.value)


def test_event_time_windows_need_event_time(world):
    windows = world.stream(event_time=False).key_with(key_of).window(hg.tumbling("1m"))
    with pytest.raises(PlanError, match="a window needs event time, and"):
        windows.process(Values(), name="w")
