"""Sliding, cumulative and zoned windows against a record-by-record model: lateness, snapshots, rescales."""

from __future__ import annotations

import builtins
import math
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.operators.aggregation.aggregates import AggregatePlan, avg, count, max, min, sum
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.windows.kinds import (
    WINDOW_FIELDS,
    CumulativeWindow,
    SlidingWindow,
    TumblingWindow,
)
from headgate.operators.windows.late import LATE, LATE_COUNTER
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of

DAY, HOUR = 86_400_000, 3_600_000
SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64()), ("f", pa.float64())])
EXACT = {"n": count(), "m": count("x"), "total": sum("x"), "mean": avg("x")}
MIXED = {
    "n": count(),
    "total": sum("x"),
    "top": max("x"),
    "low": min("x"),
    "fs": sum("f"),
    "fm": avg("f"),
}


def plan(keys, aggregates):
    return AggregatePlan(keys, aggregates, SCHEMA, WINDOW_FIELDS)


def expected(aggregates, records):
    """The aggregates of some records (user, x, f, time)."""
    found = []
    for aggregate in aggregates.values():
        column = {"x": 1, "f": 2, None: None}[aggregate.column]
        values = [1] * len(records) if column is None else [r[column] for r in records]
        values = [v for v in values if v is not None]
        if aggregate.kind == "count":
            found.append(len(values))
        elif not values:
            found.append(None)
        elif aggregate.kind == "avg":
            found.append(math.fsum(values) / len(values))
        elif aggregate.kind == "sum":
            found.append(math.fsum(values) if column == 2 else builtins.sum(values))
        else:
            found.append(getattr(builtins, aggregate.kind)(values))
    return tuple(found)


@cache
def midnight(day, zone, offset_ms):
    """When the clocks first show it, or jump over it; searched minute by minute."""
    shown = datetime(1970, 1, 1) + timedelta(days=day, milliseconds=offset_ms)
    moment = (shown - timedelta(days=1)).replace(tzinfo=UTC)
    while moment.astimezone(zone).replace(tzinfo=None) < shown:
        moment += timedelta(minutes=15)
    return round(moment.timestamp() * 1000)


def naive_windows(window, time):
    """The bounds of all windows that a record lies in, one after the other."""
    size, offset = window.size_ms, window.offset_ms
    if not window.zone:
        if isinstance(window, CumulativeWindow):
            start = time - (time - offset) % size
            ends = range(start + window.step_ms, start + size + 1, window.step_ms)
            return [(start, end) for end in ends if end > time]
        every = window.every_ms if isinstance(window, SlidingWindow) else size
        start, found = time - (time - offset) % every, []
        while start > time - size:
            found.append((start, start + size))
            start -= every
        return found
    zone = ZoneInfo(window.zone)
    low, high = (time - offset) // DAY - 1, (time - offset) // DAY + 2
    start_of = {day: midnight(day, zone, offset) for day in range(low, high + 1)}
    day = builtins.max(day for day in start_of if start_of[day] <= time)
    days = size // DAY
    if isinstance(window, CumulativeWindow):
        first = day - day % days
        start = midnight(first, zone, offset)
        if window.step_ms % DAY == 0:
            steps = window.step_ms // DAY
            ends = [
                midnight(d, zone, offset) for d in range(first + steps, first + days + 1, steps)
            ]
        else:
            ends = []
            for each in range(first, first + days):
                begin, stop = midnight(each, zone, offset), midnight(each + 1, zone, offset)
                ends += range(begin + window.step_ms, stop, window.step_ms)
                ends.append(stop)
        return [(start, end) for end in sorted(set(ends)) if end > time]
    every = window.every_ms // DAY if isinstance(window, SlidingWindow) else days
    first, found = day - day % every, []
    while first > day - days:
        found.append((midnight(first, zone, offset), midnight(first + days, zone, offset)))
        first -= every
    return found


class Model:
    """Record by record, with a list of records per window and key: what the operator promises."""

    def __init__(self, window, aggregates, keyed):
        self.window, self.aggregates, self.keyed = window, aggregates, keyed
        self.watermark = -(2**63)
        self.windows, self.fired = {}, set()
        self.results, self.late = [], []

    def row(self, bounds, key):
        keys = (key,) if self.keyed else ()
        records = self.windows[bounds][key]
        return (*keys, *bounds, *expected(self.aggregates, records), bounds[1] - 1)

    def gone(self, bounds):
        return bounds[1] - 1 + self.window.allowed_lateness_ms <= self.watermark

    def records(self, rows):
        again = {}
        for row in rows:
            kept = [b for b in naive_windows(self.window, row[-1]) if not self.gone(b)]
            if not kept:
                self.late.append(row)
            for bounds in kept:
                key = row[0] if self.keyed else None
                self.windows.setdefault(bounds, {}).setdefault(key, []).append(row)
                if bounds[1] - 1 <= self.watermark:
                    again[bounds, key] = True
        self.results += [self.row(*which) for which in again]

    def advance(self, watermark):
        before, self.watermark = self.watermark, watermark
        for bounds in sorted(self.windows, key=lambda b: (b[1], b[0])):
            if before < bounds[1] - 1 <= watermark:
                self.results += [self.row(bounds, key) for key in self.windows[bounds]]
            if self.gone(bounds):
                del self.windows[bounds]


def same(found, wanted):
    """Equal but for the last bits of floats."""
    found, wanted = sorted(found, key=place), sorted(wanted, key=place)
    assert [place(row) for row in found] == [place(row) for row in wanted]
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            if isinstance(a, float) and isinstance(b, float):
                assert math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9), (one, other)
            else:
                assert a == b, (one, other)


def place(row):
    """A row without what may differ in the last bits."""
    return str([value for value in row if not isinstance(value, float)])


def start_all(start, window, aggregates, keyed, tables, parallelism):
    operator = PaneAggregate(window, plan(("user",) if keyed else (), aggregates), "step")
    return [start(operator, tables, index, parallelism) for index in range(parallelism)]


def play(harnesses, history, keyed, model, make_batch, cuts):
    """Run one part of a history through all subtasks and the model."""
    for rows, watermark in history:
        for index, harness in enumerate(harnesses):
            mine = [
                row for row in rows if owner(row[0] if keyed else None, len(harnesses)) == index
            ]
            harness.process(make_batch(mine, SCHEMA))
        model.records(rows)
        if watermark is not None and watermark > model.watermark:
            for harness in harnesses:
                before = len(harness.output.events)
                harness.watermark(watermark)
                sent = harness.output.events[before:]
                assert sent[-1] == ("watermark", watermark)
                times = [
                    t for kind, b in sent[:-1] if kind == "rows" for t in b.timestamps.tolist()
                ]
                assert times == sorted(times)
            model.advance(watermark)


def owner(key, parallelism):
    return owner_of(key_group_of(hash_key(key), 8), parallelism, 8) if parallelism > 1 else 0


def results(harnesses, kind="rows"):
    return [row for harness in harnesses for row in harness.output.rows(kind)]


def uniform(draw):
    kind = draw(st.sampled_from(["tumbling", "sliding", "sliding", "cumulative"]))
    lateness = draw(st.just(0) | st.integers(0, 20))
    if kind == "cumulative":
        step = draw(st.integers(1, 6))
        size = step * draw(st.integers(1, 6))
        return CumulativeWindow(size, step, draw(st.integers(0, size - 1)), lateness)
    size = draw(st.integers(1, 20))
    if kind == "tumbling":
        return TumblingWindow(size, draw(st.integers(0, size - 1)), lateness)
    every = draw(st.integers(1, size))
    return SlidingWindow(size, every, draw(st.integers(0, every - 1)), lateness)


values = (st.none() | st.integers(-50, 50), st.none() | st.floats(-1e6, 1e6, width=32))
users = st.sampled_from(["a", "b", "c", "d", "somewhat longer than a cell", None])


def histories(low, high):
    rows = st.lists(st.tuples(users, *values, st.integers(low, high)), max_size=25)
    return st.lists(st.tuples(rows, st.none() | st.integers(low - 5, high + 5)), max_size=8)


def check(start, make_batch, window, aggregates, keyed, history, cut, parallelisms):
    model, tables, harnesses, found, late, dropped = (
        Model(window, aggregates, keyed), None, [], [], [], 0,
    )  # fmt: skip
    for part, parallelism in zip((history[:cut], history[cut:]), parallelisms, strict=True):
        harnesses = start_all(start, window, aggregates, keyed, tables, parallelism)
        play(harnesses, part, keyed, model, make_batch, None)
        found += results(harnesses)
        late += results(harnesses, LATE)
        dropped += builtins.sum(h.output.counts.get(LATE_COUNTER, 0) for h in harnesses)
        made = [harness.tables() for harness in harnesses]
        tables = {name: pa.concat_tables([t[name] for t in made]) for name in made[0]}
    for harness in harnesses:
        harness.output.events.clear()
        harness.watermark(WATERMARK_MAX)
        assert harness.output.events[-1] == ("watermark", WATERMARK_MAX)
        assert harness.tables()["panes"].num_rows == 0
    model.advance(WATERMARK_MAX)
    found += results(harnesses)
    same(found, model.results)
    same(late, model.late)
    assert dropped == len(model.late)


@pytest.mark.parametrize("aggregates", [EXACT, MIXED], ids=["exact", "mixed"])
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "whole"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_equals_record_by_record_over_snapshots_and_rescales(
    start, make_batch, keyed, aggregates, data
):
    window = uniform(data.draw)
    parallelisms = [data.draw(st.integers(1, 3)) if keyed else 1 for _ in range(2)]
    history = data.draw(histories(-20, 60))
    check(
        start, make_batch, window, aggregates, keyed, history,
        data.draw(st.integers(0, 8)), parallelisms,
    )  # fmt: skip


# In Berlin the 28th of March 2021 has 23 hours, and the 31st of October 25; in Apia the 30th of December
# 2011 does not exist; in Santiago the clocks jump over midnight on the 5th of September 2021.
MOMENTS = {
    "Europe/Berlin": (datetime(2021, 3, 28), datetime(2021, 10, 31)),
    "Pacific/Apia": (datetime(2011, 12, 30),),
    "America/Santiago": (datetime(2021, 9, 5),),
    "Asia/Kolkata": (datetime(2021, 3, 28),),
    "UTC": (datetime(2021, 3, 28),),
}


@pytest.mark.parametrize("aggregates", [EXACT, MIXED], ids=["exact", "mixed"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_days_of_a_zone_equal_record_by_record(start, make_batch, aggregates, data):
    zone = data.draw(st.sampled_from(sorted(MOMENTS)))
    moment = data.draw(st.sampled_from(MOMENTS[zone])).replace(tzinfo=UTC)
    middle = round(moment.timestamp() * 1000)
    offset = data.draw(st.sampled_from([0, 0, 6 * HOUR, 2 * HOUR + HOUR // 2]))
    lateness = data.draw(st.sampled_from([0, HOUR, DAY]))
    days = data.draw(st.integers(1, 3))
    kind = data.draw(st.sampled_from(["tumbling", "sliding", "days", "hours"]))
    if kind == "tumbling":
        window = TumblingWindow(days * DAY, offset, lateness, zone)
    elif kind == "sliding":
        window = SlidingWindow(
            days * DAY, data.draw(st.integers(1, days)) * DAY, offset, lateness, zone
        )
    elif kind == "days":
        window = CumulativeWindow(days * DAY, DAY, offset, lateness, zone)
    else:
        step = data.draw(st.sampled_from([HOUR, 6 * HOUR, 12 * HOUR]))
        window = CumulativeWindow(days * DAY, step, offset, lateness, zone)
    times = st.integers(-96, 96).map(lambda halves: middle + halves * HOUR // 2)
    rows = st.lists(st.tuples(users, *values, times), max_size=12)
    moves = st.none() | times.map(lambda time: time - 1) | times
    history = data.draw(st.lists(st.tuples(rows, moves), max_size=5))
    check(
        start, make_batch, window, aggregates, True, history, data.draw(st.integers(0, 5)), [1, 2]
    )


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_day_that_does_not_exist_is_not_taken_for_gone_after_a_restore(
    start, make_batch, earlier, cut
):
    begins, ends = 1325239200000, 1325325600000  # of the 31st of December 2011 in Apia
    window = SlidingWindow(2 * DAY, DAY, 0, HOUR, "Pacific/Apia")
    rows = [("a", None, None, begins - 5 * HOUR)] if earlier else []
    history = [(rows, ends - 1), ([("a", None, None, begins)], None)]
    check(start, make_batch, window, EXACT, True, history, cut, [1, 2])
