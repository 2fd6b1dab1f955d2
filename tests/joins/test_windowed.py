"""Window joins and co-groups against a model that goes record by record."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.errors import UserCodeError
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.joins.co_group import CoGroup, CoGroupStep
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.step import JoinStep, outer_sides
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.rows import RowReader
from headgate.operators.windows.kinds import cumulative, sliding, tumbling

KEYS = (("k",), ("k",))
SCHEMAS = tuple(pa.schema([pa.field("k", pa.string()), pa.field(n, pa.int64())]) for n in "ab")
WINDOWS = {
    "tumbling": (10, 10, 3),
    "sliding": (10, 4, 1),
    "overlapping": (12, 3, 0),
}
"""Size, slide and offset, ms."""


def window_of(name, lateness):
    size, slide, offset = (f"{ms}ms" for ms in WINDOWS[name])
    if name == "tumbling":
        return tumbling(size, offset=offset, allowed_lateness=f"{lateness}ms")
    return sliding(size, slide, offset=offset, allowed_lateness=f"{lateness}ms")


def step(how):
    outer = outer_sides(how)
    columns = join_columns(SCHEMAS, KEYS, (outer[1], outer[0]), None, ("l", "r"), Origin("here"))
    return JoinStep("join", columns, outer)


def together(key, left, right):
    yield key, sorted(row.a for row in left), sorted(row.b for row in right)


def co_group(window):
    user = UserFunction(together, "join", Origin("here"), RowReader(None, None, together))
    return CoGroup(CoGroupStep(step("inner"), together, user, (None, None)), window)


def batch(side, rows):
    keys = pa.array([None if row[0] is None else f"k{row[0]}" for row in rows], pa.string())
    data = pa.RecordBatch.from_arrays([keys, pa.array([r[2] for r in rows])], schema=SCHEMAS[side])
    return ColumnBatch(data, np.array([row[1] for row in rows], np.int64))


class Model:
    """Rows (key, time, number) by window and key."""

    def __init__(self, name, lateness, how):
        self.size, self.slide, self.offset = WINDOWS[name]
        self.lateness, self.outer = lateness, outer_sides(how)
        self.watermark = -(2**62)
        self.windows = defaultdict(lambda: ([], []))
        self.out, self.late = [], 0

    def gone(self, start):
        return start + self.size - 1 + self.lateness <= self.watermark

    def fired(self, start):
        return start + self.size - 1 <= self.watermark

    def starts(self, time):
        last = time - (time - self.offset) % self.slide
        return [s for s in range(last, time - self.size, -self.slide) if not self.gone(s)]

    def process(self, side, row):
        starts = self.starts(row[1])
        self.late += not starts
        for start in sorted(starts):
            window = self.windows[start]
            window[side].append(row)
            if self.fired(start):
                self.add_late(side, row, start)

    def add_late(self, side, row, start):
        others = [other for other in self.windows[start][1 - side] if other[0] == row[0]]
        for other in others:
            self.emit(*((row, other) if side == 0 else (other, row)), start)
        if not others and self.outer[side]:
            self.emit(*((row, None) if side == 0 else (None, row)), start)

    def emit(self, left, right, start):
        key = (left or right)[0]
        numbers = [row[2] if row else None for row in (left, right)]
        self.out.append((f"k{key}" if key is not None else None, *numbers, start + self.size - 1))

    def advance(self, watermark):
        before, self.watermark = self.watermark, max(watermark, self.watermark)
        for start in sorted(self.windows):
            if self.fired(start) and start + self.size - 1 > before:
                self.fire(start)
            if self.gone(start):
                del self.windows[start]

    def fire(self, start):
        left, right = self.windows[start]
        for row in left:
            others = [other for other in right if other[0] == row[0]]
            for other in others:
                self.emit(row, other, start)
            if not others and self.outer[0]:
                self.emit(row, None, start)
        for row in right:
            if self.outer[1] and not any(other[0] == row[0] for other in left):
                self.emit(None, row, start)


class CoGroupModel(Model):
    def add_late(self, side, row, start):
        self.group(row[0], start)

    def fire(self, start):
        for key in {row[0] for side in self.windows[start] for row in side}:
            self.group(key, start)

    def group(self, key, start):
        rows = [tuple(row[2] for row in side if row[0] == key) for side in self.windows[start]]
        self.out.append((f"k{key}" if key is not None else None, *rows, start + self.size - 1))


rows_ = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(-25, 30)),
    min_size=1,
    max_size=12,
)
event = st.one_of(
    st.tuples(st.just("rows"), st.integers(0, 1), rows_, st.integers(1, 12)),
    st.tuples(st.just("watermark"), st.integers(0, 14)),
    st.tuples(st.just("cut"), st.booleans()),
    st.tuples(st.just("restore"), st.integers(1, 3)),
)
histories = st.lists(event, max_size=14)


def check_end(found, model):
    assert found.dropped == len(found.late[0]) + len(found.late[1]) == model.late
    for side in ("left", "right"):
        assert found.fleet.gauge(side) == 0


@pytest.mark.parametrize("name", WINDOWS)
@settings(
    max_examples=45, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    how=st.sampled_from(["inner", "left", "right", "full"]),
    history=histories,
    lateness=st.sampled_from([0, 7]),
    parallelism=st.integers(1, 3),
)
def test_joins_of_any_history(fleet, replay, bounds, name, how, history, lateness, parallelism):
    model = Model(name, lateness, how)
    running = fleet(lambda: WindowJoin(step(how), window_of(name, lateness)), KEYS, parallelism)
    replayed = replay(running, model, history, batch)
    found = replayed.out
    assert Counter(found) == Counter(model.out)
    check_end(replayed, model)
    if not lateness:
        keys = {row[0] for row in found}
        for key in keys:
            ends = [row[-1] for row in found if row[0] == key]
            assert ends == sorted(ends)


@pytest.mark.parametrize("name", WINDOWS)
@settings(
    max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(history=histories, lateness=st.sampled_from([0, 7]), parallelism=st.integers(1, 3))
def test_co_groups_of_any_history(fleet, replay, bounds, name, history, lateness, parallelism):
    """Late rows come one by one: how often a key's rows are shown again depends on the batches."""
    model = CoGroupModel(name, lateness, "inner")
    running = fleet(partial(co_group, window_of(name, lateness)), KEYS, parallelism)
    found = replay(running, model, history, batch, most=1 if lateness else 99)
    rows = map(unnested, found.out)
    shown = Counter((key, tuple(a), tuple(b), time) for (key, a, b), time in rows)
    assert shown == Counter(model.out)
    check_end(found, model)


HOUR_MS = 3_600_000


def test_cumulative_windows_of_local_days(fleet):
    """A day has as many steps as it has hours: numbers of steps that it does not have are no windows."""
    window = cumulative("1d", "6h", zone="Europe/Berlin", allowed_lateness="1d")
    running = fleet(lambda: WindowJoin(step("full"), window), KEYS)
    midnight = 20_000 * 24 * HOUR_MS - 2 * HOUR_MS  # of 2024-10-04 there
    seven = midnight + 7 * HOUR_MS
    running.process(0, batch(0, [(1, seven, 1)]))
    running.process(1, batch(1, [(1, seven, 2)]))
    running.watermark(midnight + 30 * HOUR_MS)
    ends = [midnight + hours * HOUR_MS - 1 for hours in (12, 18, 24)]
    assert running.take() == [("k1", 1, 2, end) for end in ends]
    running.process(0, batch(0, [(1, seven, 3)]))
    assert running.take() == [("k1", 3, 2, end) for end in ends]


def unnested(row):
    """An object record, as the recorder shows it: its fields, then the time."""
    *record, time = row
    return record[0] if len(record) == 1 else tuple(record), time


def raising(key, left, right):
    raise ValueError(f"no {key}")


def one(key, left, right):
    return {"key": key}


@pytest.mark.parametrize(
    ("function", "problem"),
    [(raising, "raised ValueError: no k1 record=`'k1'`"), (one, "returned one dict")],
)
def test_a_function_that_fails_is_named_with_the_key(fleet, function, problem):
    user = UserFunction(function, "rates", Origin("jobs.py:7"), RowReader(None, None, function))
    step_ = CoGroupStep(step("inner"), function, user, (None, None))
    running = fleet(lambda: CoGroup(step_, window_of("tumbling", 0)), KEYS)
    running.process(0, batch(0, [(1, 5, 1)]))
    with pytest.raises(UserCodeError, match="jobs.py:7") as error:
        running.watermark(100)
    assert problem in str(error.value)


def test_keys_and_rows_of_a_co_group(fleet):
    """Keys of several columns are tuples, rows come in the order in which they came."""
    seen = []

    def look(key, left, right):
        seen.append((key, [row.a for row in left], [row["b"] for row in right]))

    user = UserFunction(look, "join", Origin("here"), RowReader(None, None, look))
    columns = join_columns(
        SCHEMAS, (("k", "a"), ("k", "b")), (False, False), None, ("l", "r"), Origin("here")
    )
    join = JoinStep("join", columns, (False, False))
    made = CoGroup(CoGroupStep(join, look, user, (None, None)), window_of("tumbling", 0))
    running = fleet(lambda: made, (("k", "a"), ("k", "b")))
    running.process(0, batch(0, [(1, 5, 1), (None, 5, 3), (1, 6, 1)]))
    running.process(1, batch(1, [(1, 4, 1), (2, 5, 2)]))
    running.watermark(WATERMARK_MAX)
    assert seen == [
        (("k1", 1), [1, 1], [1]),
        ((None, 3), [3], []),
        (("k2", 2), [], [2]),
    ]
    assert running.take() == []


def test_windows_that_were_gone_stay_gone_with_more_lateness(fleet):
    """A window that has lost some of its rows would be shown with the rest."""
    shorter = fleet(partial(co_group, sliding("10ms", "5ms")), KEYS)
    shorter.process(0, batch(0, [(1, 2, 1), (1, 7, 2)]))
    shorter.watermark(9)
    assert [unnested(row) for row in shorter.take()] == [
        (("k1", [1], []), 4),
        (("k1", [1, 2], []), 9),
    ]
    chains = shorter.complete(shorter.cut())
    longer = fleet(
        partial(co_group, sliding("10ms", "5ms", allowed_lateness="1m")), KEYS, 1, chains
    )
    longer.process(1, batch(1, [(1, 6, 3)]))
    assert longer.take() == []
    longer.watermark(14)
    longer.process(0, batch(0, [(1, 8, 4)]))
    shown = [unnested(row) for row in longer.take()]
    assert shown == [(("k1", [2], [3]), 14), (("k1", [2, 4], [3]), 14)]


def test_small_batches_wait_in_large_pieces(fleet):
    """A record a batch: a batch of its own for each would be many times as large as the records."""
    running = fleet(lambda: WindowJoin(step("inner"), tumbling("1h")), KEYS)
    pending = None
    for number in range(600):
        for side in (0, 1):
            running.process(side, batch(side, [(number, number, number)]))
        if number % 200 == 50:
            if pending is not None:
                running.complete(pending)
            pending = running.cut()
    for rows in running.operators[0]._sides:
        (pieces,) = rows._panes.values()
        assert len(pieces) < 50
    running.complete(pending)
    running = running.restored(running.complete(running.cut()), 2)
    running.watermark(WATERMARK_MAX)
    assert sorted(row[1:3] for row in running.take()) == [(n, n) for n in range(600)]


@pytest.mark.parametrize("name", ["tumbling", "sliding"])
@pytest.mark.parametrize("kind", ["full", "co-group"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    before=st.tuples(rows_, rows_),
    after=st.lists(st.tuples(rows_, rows_, st.integers(0, 15)), max_size=3),
    watermarks=st.tuples(*[st.integers(-30, 30)] * 3),
    lateness=st.sampled_from([0, 7]),
    parallelism=st.integers(1, 2),
)
def test_subtasks_cut_at_different_times_go_on_together(
    fleet, name, kind, before, after, watermarks, lateness, parallelism
):
    """As behind an unaligned checkpoint: nothing fires twice, and nothing is lost."""
    window = window_of(name, lateness)
    factory = (
        partial(co_group, window) if kind == "co-group" else partial(WindowJoin, step(kind), window)
    )
    here = fleet(factory, KEYS, 3)
    numbers = iter(range(10_000))

    def push(running, rows):
        for side in (0, 1):
            for row in rows[side]:
                running.process(side, batch(side, [row]))

    def numbered(rows):
        return tuple([(key, time, next(numbers)) for key, time in own] for own in rows)

    push(here, numbered(before))
    for operator, watermark in zip(here.operators, watermarks, strict=True):
        operator.on_watermark(watermark)
    for tag in ("rows", "late", "late_other"):
        here.take(tag)
    chains = here.complete(here.cut(), full=True)
    there = here.restored(chains, parallelism)
    now = min(watermarks)
    for *rows, step_ in after:
        new = numbered(rows)
        now += step_
        for running in (here, there):
            push(running, new)
            running.watermark(now)
        for tag in ("rows", "late", "late_other"):
            assert Counter(map(repr, there.take(tag))) == Counter(map(repr, here.take(tag)))
        there = there.restored(there.complete(there.cut()), parallelism)
    for running in (here, there):
        running.watermark(WATERMARK_MAX)
    assert Counter(map(repr, there.take())) == Counter(map(repr, here.take()))


def test_what_fired_ahead_of_others_does_not_fire_again(fleet):
    running = fleet(lambda: WindowJoin(step("inner"), sliding("10ms", "5ms")), KEYS, 2)
    rows = [(n, 7, n) for n in range(8)]
    for side in (0, 1):
        running.process(side, batch(side, rows))
    for operator, watermark in zip(running.operators, (9, 2), strict=True):
        operator.on_watermark(watermark)
    out = running.take()
    assert 0 < len(out) < 8
    again = running.restored(running.complete(running.cut()), 1)
    again.watermark(WATERMARK_MAX)
    expected = Counter((f"k{n}", n, n, end) for n in range(8) for end in (9, 14))
    assert Counter(out + again.take()) == expected
