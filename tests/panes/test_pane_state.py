"""Snapshots of panes: cuts that stay open, deltas, what is refused; early results; sums at their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import JobError, PlanError, StateError, UsageError
from headgate.operators.aggregation.aggregates import AggregatePlan, count, max, sum
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, ObjectBatch
from headgate.operators.windows.kinds import (
    WINDOW_FIELDS,
    CountWindow,
    CumulativeWindow,
    Early,
    GlobalWindow,
    SlidingWindow,
    TumblingWindow,
    count_window,
    cumulative,
    global_window,
    sliding,
    tumbling,
)
from headgate.operators.windows.panes.operator import PaneAggregate
from headgate.operators.windows.panes.table import SPARSE_MAPS

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64()), ("f", pa.float64())])
EXACT = {"n": count(), "total": sum("x")}
MIXED = {"n": count(), "top": max("x")}
DAY = 86_400_000

rows_ = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.none() | st.integers(-50, 50),
        st.just(0.5),
        st.integers(0, 60),
    ),
    max_size=20,
)
history_ = st.lists(st.tuples(rows_, st.none() | st.integers(0, 60)), max_size=5)
windows_ = st.sampled_from(
    [
        SlidingWindow(10, 3, 1, 4),
        SlidingWindow(12, 4, 0, 0),
        CumulativeWindow(12, 3, 0, 5),
        TumblingWindow(7, 2, 3, "", Early(0, 5)),
    ]
)


def operator(window, aggregates=EXACT, keys=("user",)):
    return PaneAggregate(window, AggregatePlan(keys, aggregates, SCHEMA, WINDOW_FIELDS), "my step")


def play(harness, history, make_batch, watermark=-(2**63)):
    for rows, to in history:
        harness.process(make_batch(rows, SCHEMA))
        if to is not None and to > watermark:
            harness.watermark(watermark := to)
    return watermark


def sorted_rows(table):
    return sorted(map(str, table.to_pylist()))


def merged(base, delta, keys):
    """Base and delta together: later rows replace those of the same keys."""
    rows = {tuple(row[key] for key in keys): row for row in base.to_pylist() + delta.to_pylist()}
    found = pa.Table.from_pylist(list(rows.values()), base.schema)
    return found.sort_by("key_group")


@pytest.mark.parametrize("aggregates", [EXACT, MIXED], ids=["exact", "mixed"])
@settings(max_examples=40, deadline=None)
@given(window=windows_, parts=st.lists(history_, min_size=3, max_size=3), last=rows_)
def test_a_base_and_deltas_restore_what_was_there(
    start, make_batch, aggregates, window, parts, last
):
    harness, watermark = start(operator(window, aggregates)), -(2**63)
    tables, epoch = None, 0
    for part in parts:
        watermark = play(harness, part, make_batch, watermark)
        cuts = harness.cut().tables
        if tables is None:
            made = cuts["panes"].make(None)
        else:
            made = merged(tables["panes"], cuts["panes"].make(epoch), cuts["panes"].keys)
        epoch = cuts["panes"].epoch
        tables = {"panes": made, "watermark": cuts["watermark"].make(None)}
    restored = start(operator(window, aggregates), tables)
    ends = []
    for each in (harness, restored):
        each.output.events.clear()
        each.process(make_batch(last, SCHEMA))
        each.watermark(WATERMARK_MAX)
        ends.append([sorted(map(str, each.output.rows(kind))) for kind in ("rows", "late")])
    if not window.early:
        assert ends[0] == ends[1]
    assert ends[0][1] == ends[1][1]
    assert set(ends[1][0]) <= set(ends[0][0])


@pytest.mark.parametrize("aggregates", [EXACT, MIXED], ids=["exact", "mixed"])
@settings(max_examples=40, deadline=None)
@given(window=windows_, before=history_, after=history_)
def test_an_open_cut_does_not_see_what_comes_later(
    start, make_batch, aggregates, window, before, after
):
    harness, twin = start(operator(window, aggregates)), start(operator(window, aggregates))
    watermark = play(harness, before, make_batch)
    play(twin, before, make_batch)
    cut = harness.cut().tables
    play(harness, after, make_batch, watermark)
    wanted = twin.tables()
    for name in ("panes", "watermark"):
        assert sorted_rows(cut[name].make(None)) == sorted_rows(wanted[name])


def test_other_windows_are_refused(start, make_batch):
    harness = start(operator(SlidingWindow(10, 5)))
    harness.process(make_batch([("a", 1, 0.5, 3)], SCHEMA))
    tables = harness.tables()
    for window in (SlidingWindow(10, 2), SlidingWindow(20, 5), SlidingWindow(10, 5, 1)):
        with pytest.raises(StateError, match="other windows old=`sliding 10ms every 5ms`"):
            start(operator(window), tables)
    start(operator(SlidingWindow(10, 5, 0, 99)), tables)


def test_more_lateness_does_not_bring_back_what_is_gone(start, make_batch):
    harness = start(operator(SlidingWindow(10, 5)))
    harness.process(make_batch([("a", 1, 0.5, 3), ("a", 1, 0.5, 12)], SCHEMA))
    harness.watermark(9)
    restored = start(operator(SlidingWindow(10, 5, 0, 100)), harness.tables())
    restored.process(make_batch([("a", 1, 0.5, 4), ("a", 1, 0.5, 9)], SCHEMA))
    assert [row[-1] for row in restored.output.rows("late")] == [4]
    assert restored.output.rows() == []
    restored.watermark(14)
    assert restored.output.rows() == [("a", 5, 15, 2, 2, 14)]


def test_less_lateness_counts_at_once(start, make_batch):
    harness = start(operator(TumblingWindow(10, 0, 100, "", Early(0, 99))))
    harness.process(make_batch([("a", 1, 0.5, 3)], SCHEMA))
    harness.watermark(14)
    restored = start(operator(TumblingWindow(10, 0, 0, "", Early(0, 99))), harness.tables())
    restored.process(make_batch([("a", 1, 0.5, 4)], SCHEMA))
    assert [row[-1] for row in restored.output.rows("late")] == [4]
    assert restored.tables()["panes"].num_rows == 0


def test_sums_of_floats_do_not_drift(start, make_batch):
    harness = start(operator(SlidingWindow(4, 1), {"s": sum("f")}))
    for time, value in enumerate([1e17, 1.0, *[0.25] * 40]):
        harness.process(make_batch([("a", 1, value, time)], SCHEMA))
        harness.watermark(time)
    assert [row[3] for row in harness.output.rows()][5:] == [1.0] * 37


@pytest.mark.parametrize("kinds", [EXACT, {**EXACT, "top": max("x")}], ids=["exact", "mixed"])
def test_a_sum_that_leaves_int64_fails_the_job(start, make_batch, kinds):
    harness = start(operator(SlidingWindow(3, 1), kinds))
    for time, value in enumerate([2**62, 0, 0, 2**62, -(2**61), 2**61]):
        harness.process(make_batch([("a", value, 0.0, time)], SCHEMA))
        harness.watermark(time)
    assert [row[4] for row in harness.output.rows()] == [2**62] * 3 + [2**62, 2**61, 2**62]
    harness.process(make_batch([("a", 2**62, 0.0, 6)], SCHEMA))
    harness.process(make_batch([("a", 2**61, 0.0, 7)], SCHEMA))
    with pytest.raises(JobError, match="left the range of int64"):
        harness.watermark(8)


def test_keys_that_are_gone_are_forgotten(start, make_batch):
    harness = start(operator(SlidingWindow(20, 5)))
    for time in range(0, 5000, 5):
        harness.process(make_batch([(f"once {time}", 1, 0.5, time)], SCHEMA))
        harness.watermark(time)
    assert harness.tables()["panes"].num_rows <= 5


def test_maps_of_panes_are_bounded(start, make_batch, monkeypatch):
    monkeypatch.setattr("headgate.operators.windows.panes.table.MAP_BYTES_MAX", 16)
    harness = start(operator(SlidingWindow(60, 1)))
    rows = [(user, 1, 0.5, time) for time in range(50) for user in "ab"]
    for _ in range(2):
        harness.process(make_batch(rows, SCHEMA))
        assert len(harness.operator._table._maps) <= 2
    harness.watermark(WATERMARK_MAX)
    assert [row[3] for row in harness.output.rows() if row[1] == -9] == [100, 100]


def test_panes_with_few_of_the_keys_take_over_maps(start, make_batch):
    harness = start(operator(SlidingWindow(100, 1)))
    rows = [(f"{user} {time}", 1, 0.5, time) for time in range(50) for user in "ab"]
    for _ in range(2):
        harness.process(make_batch(rows, SCHEMA))
        assert len(harness.operator._table._maps) <= SPARSE_MAPS
    harness.watermark(WATERMARK_MAX)
    found = [row[3] for row in harness.output.rows() if row[1] == 0]
    assert found == [2] * len(rows)


# --- early results -----------------------------------------------------------------------------


def test_results_come_early_by_the_clock_and_at_the_end(start, make_batch):
    harness = start(operator(TumblingWindow(10, early=Early(1_000))))
    harness.process(make_batch([("a", 1, 0.5, 3), ("b", 2, 0.5, 13)], SCHEMA))
    harness.timers.move(999)
    assert harness.output.rows() == []
    harness.timers.move(1)
    assert harness.output.rows() == [("a", 0, 10, 1, 1, 9), ("b", 10, 20, 1, 2, 19)]
    harness.output.events.clear()
    harness.timers.move(10_000)
    assert harness.output.rows() == []
    harness.process(make_batch([("a", 5, 0.5, 4)], SCHEMA))
    harness.watermark(9)
    harness.timers.move(1_000)
    assert harness.output.rows() == [("a", 0, 10, 2, 6, 9)]
    harness.process(make_batch([("a", 5, 0.5, 14)], SCHEMA))
    harness.operator.finish()
    harness.timers.move(1_000)
    assert len(harness.output.rows()) == 1
    assert harness.timers.waiting == []


def test_results_come_early_after_so_many_rows(start, make_batch):
    harness = start(operator(SlidingWindow(10, 5, early=Early(0, 2)), MIXED))
    harness.process(make_batch([("a", 1, 0.5, 3)], SCHEMA))
    assert harness.output.rows() == []
    harness.process(make_batch([("b", 7, 0.5, 8)], SCHEMA))
    assert sorted(harness.output.rows()) == [
        ("a", -5, 5, 1, 1, 4), ("a", 0, 10, 1, 1, 9),
        ("b", 0, 10, 1, 7, 9), ("b", 5, 15, 1, 7, 14),
    ]  # fmt: skip
    harness.output.events.clear()
    harness.watermark(9)
    assert sorted(harness.output.rows()) == [
        ("a", -5, 5, 1, 1, 4), ("a", 0, 10, 1, 1, 9), ("b", 0, 10, 1, 7, 9),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(window=windows_, history=history_, every=st.integers(1, 9))
def test_early_results_change_nothing_about_the_final_ones(
    start, make_batch, window, history, every
):
    finals = []
    for early in (Early(), Early(0, every)):
        harness, last = start(operator(replace(window, early=early))), {}
        play(harness, history, make_batch)
        harness.watermark(WATERMARK_MAX)
        for row in harness.output.rows():
            last[row[:3]] = row[3:]
        finals.append((last, harness.output.rows("late")))
    assert finals[0] == finals[1]


# --- what users write --------------------------------------------------------------------------


def test_objects_and_rows_without_time_are_refused(start, make_batch):
    harness = start(operator(SlidingWindow(10, 5)))
    with pytest.raises(PlanError, match="`my step` aggregates columns"):
        harness.process(ObjectBatch([1], np.zeros(1, np.int64)))
    batch = make_batch([("a", 1, 0.5, 3)], SCHEMA)
    with pytest.raises(PlanError, match="`my step` needs event time"):
        harness.process(ColumnBatch(batch.data))


def test_windows_say_what_they_are():
    assert sliding("1m", "10s", offset="1s", allowed_lateness="5s").describe() == (
        "sliding 1m every 10s, offset 1s, allowed lateness 5s"
    )
    assert cumulative("1d", "1h", zone="Europe/Berlin", emit_rows=5).describe() == (
        "cumulative 1d by 1h, zone Europe/Berlin, early every 5 rows"
    )
    assert tumbling("7d", zone="UTC", emit_every="10s").describe() == (
        "tumbling 7d, zone UTC, early every 10s"
    )
    assert (count_window(5), count_window(5, 2)) == (CountWindow(5, 5), CountWindow(5, 2))
    assert count_window(5, 2).describe() == "count 5 every 2"
    assert global_window(emit_every="1s") == GlobalWindow(Early(1_000))
    assert global_window(emit_every="1s").describe() == "global, early every 1s"
    assert SlidingWindow(10, 5).grid().pane_of(7) == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sliding("1m", "2m"), "at least once in its size every=`2m` size=`1m`"),
        (lambda: sliding("1m", "0s"), "at least once in its size"),
        (lambda: sliding("0s", "1s"), "a window needs a size"),
        (lambda: sliding("1m", "10s", offset="10s"), "must be less than its size"),
        (lambda: cumulative("1m", "7s"), "must be a multiple of its step step=`7s`"),
        (lambda: cumulative("1m", "0s"), "must be a multiple of its step"),
        (lambda: tumbling("1h", zone="Europe/Berlin"), "whole days there length=`1h`"),
        (lambda: sliding("2d", "12h", zone="UTC"), "whole days there length=`12h`"),
        (lambda: cumulative("2d", "16h", zone="UTC"), "whole days there length=`16h`"),
        (lambda: tumbling("2d", zone="UTC", offset="1d"), "less than a day"),
        (lambda: tumbling("1d", zone="Europe/Berln"), "did you mean `Europe/Berlin`"),
        (lambda: tumbling("1d", zone="../x"), "unknown time zone"),
        (lambda: tumbling("1m", emit_every="0s"), "emit_every must not be 0"),
        (lambda: tumbling("1m", emit_rows=0), "emit_rows must be a number of rows"),
        (lambda: count_window(0), "a number of records size=`0`"),
        (lambda: count_window(3, "1"), "a number of records every=`1`"),
    ],
)
def test_windows_that_cannot_be_are_refused(make, said):
    with pytest.raises((PlanError, UsageError)) as caught:
        make()
    assert said in str(caught.value)
