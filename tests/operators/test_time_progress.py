"""The progress of event time: of a subtask, and of key groups that were cut at a later event time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.aggregation.aggregates import AggregatePlan, parse_aggregate
from headgate.operators.base import Operator
from headgate.operators.elements import WATERMARK_MAX, WATERMARK_MIN, ColumnBatch
from headgate.operators.joins.as_of import AsOfJoin
from headgate.operators.joins.columns import join_columns
from headgate.operators.joins.interval import Interval, IntervalJoin
from headgate.operators.joins.step import JoinStep
from headgate.operators.joins.windowed import WindowJoin
from headgate.operators.origin import Origin
from headgate.operators.time_progress import KeyGroupTable, TimeProgress, clamped
from headgate.operators.windows.kinds import WINDOW_FIELDS, tumbling
from headgate.operators.windows.sessions.operator import SessionAggregate
from headgate.operators.windows.sessions.window import FixedGap
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.state.keygroups import KeyGroupRange
from headgate.state.snapshot import KEY_GROUP_COLUMN, RestoredState
from headgate.tests.support.operators import Recorder, start_operator

TABLE = KeyGroupTable.of_times("progress", "window", "watermark", "gone_through")
OWN = KeyGroupRange(2, 4)


def opened(lateness: int = 10, table: KeyGroupTable = TABLE) -> TimeProgress:
    progress = TimeProgress(table, lambda watermark: clamped(watermark - lateness))
    context: Any = SimpleNamespace(key_groups=OWN, max_parallelism=8)
    progress.open(context)
    return progress


def stored(**columns: list[int]) -> RestoredState:
    groups = list(range(OWN.first, OWN.last + 1))
    return RestoredState({"progress": pa.table({KEY_GROUP_COLUMN: groups, **columns})})


def restored(lateness: int = 10, **columns: list[int]) -> TimeProgress:
    progress = opened(lateness)
    progress.restore(stored(**columns))
    return progress


def rows(progress: TimeProgress) -> list[tuple[int, ...]]:
    table = progress.cut().make(None)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def of(progress: TimeProgress, *groups: int) -> tuple[list[int], list[int]]:
    """Return the progress of event time, and the expired windows."""
    numbers = np.array(groups)
    now, expired = progress.now(numbers), progress.expired(numbers)
    found = (np.broadcast_to(each, numbers.shape).tolist() for each in (now, expired))
    return next(found), next(found)


def test_without_a_restore_all_key_groups_are_equal() -> None:
    progress = opened()
    assert progress.groups_of(lambda: [pa.array([1, 2])]) is None
    assert rows(progress) == [(group, WATERMARK_MIN, WATERMARK_MIN) for group in (2, 3, 4)]
    assert progress.advance(50)
    assert not progress.advance(50)
    assert (progress.now(None), progress.expired(None), progress.latest) == (50, 40, 50)
    assert rows(progress) == [(group, 50, 40) for group in (2, 3, 4)]


def test_a_restore_of_nothing_begins_at_the_beginning() -> None:
    progress = opened()
    progress.restore(RestoredState())
    progress.restore(stored(watermark=[WATERMARK_MIN] * 3, gone_through=[WATERMARK_MIN] * 3))
    assert (progress.watermark, progress.bounds, progress.differs) == (
        WATERMARK_MIN,
        [WATERMARK_MIN],
        False,
    )


def test_key_groups_keep_what_they_had_reached() -> None:
    progress = restored(watermark=[50, 20, 30], gone_through=[40, 10, 20])
    assert (progress.watermark, progress.bounds, progress.latest) == (20, [10], 50)
    assert of(progress, 2, 3, 4) == ([50, 20, 30], [40, 10, 20])
    assert progress.not_fired(np.array([2, 3, 4]), 30).tolist() == [False, True, False]
    assert progress.not_fired(np.array([2, 4]), np.array([51, 31])).tolist() == [True, True]
    assert rows(progress) == [(2, 50, 40), (3, 20, 10), (4, 30, 20)]
    assert progress.advance(35)
    assert of(progress, 2, 3, 4) == ([50, 35, 35], [40, 25, 25])
    assert [progress.now_of(group) for group in (2, 3, 4)] == [50, 35, 35]
    groups = progress.groups_of(lambda: [pa.array([1, 2])])
    assert groups is not None
    assert len(groups) == 2


def test_caught_up_key_groups_are_dropped_with_the_watermark_after() -> None:
    progress = restored(watermark=[50, 20, 30], gone_through=[40, 10, 20])
    progress.advance(60)
    assert progress.differs, "results that are due with this watermark may have fired before"
    assert progress.not_fired(np.array([2, 3]), 45).tolist() == [False, True]
    assert rows(progress) == [(group, 60, 50) for group in (2, 3, 4)]
    progress.advance(61)
    assert not progress.differs


def test_of_two_bounds_the_later_counts() -> None:
    times = {"watermark": [50, 20, 20], "gone_through": [40, 10, 10]}
    longer = restored(30, **times)
    assert of(longer, 2, 3) == ([50, 20], [40, 10]), "what has expired does not come back"
    longer.advance(45)
    assert of(longer, 2, 3) == ([50, 45], [40, 15])
    shorter = restored(0, **times)
    assert of(shorter, 2, 3) == ([50, 20], [50, 20])


def test_an_operator_may_ask_for_the_rule_of_today_with_the_next_watermark() -> None:
    progress = opened(0)
    state = stored(watermark=[50, 20, 20], gone_through=[40, 10, 10])
    progress.restore(state, todays_rule=False)
    assert of(progress, 2, 3) == ([50, 20], [40, 10])
    progress.advance(21)
    assert of(progress, 2, 3) == ([50, 21], [40, 21])


def test_key_groups_may_differ_only_in_what_has_expired() -> None:
    """Some had expired further before the lateness grew; then time caught up for all."""
    progress = restored(30, watermark=[50, 50, 50], gone_through=[40, 20, 20])
    assert of(progress, 2, 3) == ([50, 50], [40, 20])
    progress.advance(70)
    progress.advance(71)
    assert not progress.differs


def test_the_first_snapshots_had_no_bounds() -> None:
    assert of(restored(watermark=[50, 20, 20]), 2, 3) == ([50, 20], [40, 10])


def test_stored_bounds_can_be_made_to_fit_other_windows() -> None:
    progress = opened(100)
    state = stored(watermark=[50, 20, 20], gone_through=[41, 13, WATERMARK_MIN])
    progress.restore(state, fitted=lambda time: time // 10 * 10 + 9)
    assert of(progress, 2, 3, 4) == ([50, 20, 20], [49, 19, -80])


def test_the_end_of_time() -> None:
    progress = opened(-5)
    progress.advance(WATERMARK_MAX)
    assert rows(progress) == [(group, WATERMARK_MAX, WATERMARK_MAX) for group in (2, 3, 4)]


def test_further_columns_are_constant() -> None:
    table = KeyGroupTable("progress", "window", (*TABLE.columns, pa.field("w", pa.string())))
    progress = opened(table=table)
    progress.advance(30)
    cut = progress.cut("tumbling 1m").make(None)
    assert cut.column("w").to_pylist() == ["tumbling 1m"] * 3
    again = opened(table=table)
    again.restore(RestoredState({"progress": cut}))
    assert (again.watermark, again.bounds) == (30, [20])


JOINED = pa.schema([("key", pa.int64()), ("price", pa.int64())])


def join_step() -> JoinStep:
    keys = (("key",), ("key",))
    columns = join_columns((JOINED, JOINED), keys, (False, False), "_right", ("l", "r"), Origin(""))
    return JoinStep("join", columns, (False, False))


def plan() -> AggregatePlan:
    aggregates = {"total": parse_aggregate("sum(price)")}
    return AggregatePlan(("key",), aggregates, JOINED, WINDOW_FIELDS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TumblingAggregate(tumbling("10s"), plan()),
        lambda: SessionAggregate(FixedGap(10_000), 0, plan(), "step"),
        lambda: IntervalJoin(join_step(), Interval(-10_000, 0)),
        lambda: AsOfJoin(join_step(), valid_for_ms=10_000),
        lambda: WindowJoin(join_step(), tumbling("10s")),
    ],
    ids=["tumbling", "sessions", "interval join", "as-of join", "window join"],
)
def test_the_state_of_a_finished_operator_does_not_wait_for_the_garbage_collector(
    make: Callable[[], Operator],
) -> None:
    gc.disable()
    try:
        operator = make()
        start_operator(operator, Recorder())
        operator.process(ColumnBatch(pa.record_batch([[1], [2]], JOINED), np.array([5_000])), 0)
        operator.on_watermark(20_000)
        operator.close()
        left = weakref.ref(operator)
        del operator
        assert left() is None
    finally:
        gc.enable()
