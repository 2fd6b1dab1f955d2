"""Sessions against a model that takes one record at a time: merging, lateness, snapshots, rescaling."""

from __future__ import annotations

import builtins
import itertools
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.api.steps.aggregates import session_aggregate
from headgate.errors import JobError
from headgate.operators.aggregation.aggregates import AggregatePlan, count, max, sum
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.windows.kinds import WINDOW_FIELDS
from headgate.operators.windows.late import LATE, LATE_COUNTER
from headgate.operators.windows.sessions import table as table_module
from headgate.operators.windows.sessions.window import session
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64()), ("gap", pa.int64())])
AGGREGATES = {"n": count(), "total": sum("x"), "top": max("x")}


def operator(window, keys=("user",), aggregates=AGGREGATES, schema=SCHEMA):
    plan = AggregatePlan(keys, aggregates, schema, WINDOW_FIELDS)
    factory, _ = session_aggregate(window, plan, "visits")
    return pickle.loads(pickle.dumps(factory))()


def batch(rows):
    """Rows (user, x, gap, timestamp)."""
    columns = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(SCHEMA.types)]
    data = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return ColumnBatch(data, np.array([row[-1] for row in rows], np.int64))


class Model:
    """Record by record, as Flink's merging windows: what the operator promises.

    A session that is due fires again at the end of a batch, if it got records of it.
    """

    def __init__(self, gap, lateness, keyed):
        self.gap, self.lateness, self.keyed = gap, lateness, keyed
        self.watermark = -(2**63)
        self.sessions = {}  # by key: lists [start, end, values]
        self.results, self.late = [], []

    def emit(self, key, session):
        start, end, values = session
        present = [v for v in values if v is not None]
        top = builtins.max(present) if present else None
        total = builtins.sum(present) if present else None
        keys = (key,) if self.keyed else ()
        self.results.append((*keys, start, end, len(values), total, top, end - 1))

    def records(self, rows):
        touched = []
        for row in rows:
            key = row[0] if self.keyed else None
            start, end = row[-1], row[-1] + (self.gap or row[2])
            held = self.sessions.setdefault(key, [])
            met = [s for s in held if s[0] <= end and start <= s[1]]
            merged = [
                builtins.min([start, *(s[0] for s in met)]),
                builtins.max([end, *(s[1] for s in met)]),
                [v for s in met for v in s[2]] + [row[1]],
            ]
            if merged[1] - 1 + self.lateness <= self.watermark:
                self.late.append(row)
                continue
            self.sessions[key] = [s for s in held if s not in met] + [merged]
            touched = [(k, s) for k, s in touched if not any(s is m for m in met)]
            touched.append((key, merged))
        for key, merged in touched:
            if merged[1] - 1 <= self.watermark:
                self.emit(key, merged)

    def advance(self, watermark):
        before, self.watermark = self.watermark, watermark
        for key, held in self.sessions.items():
            for one in held:
                if before < one[1] - 1 <= watermark:
                    self.emit(key, one)
            held[:] = [s for s in held if s[1] - 1 + self.lateness > watermark]


USERS = ["a", "a", "a", "b", "c", "somewhat longer than a cell", None]


def history_of(random):
    """`(rows, watermark or None, whether a checkpoint is taken)`; time goes on, and some rows are late."""
    history, now = [], 0
    for _ in range(random.randint(1, 8)):
        spread = random.choice([25, 25, 4])  # rows that lie close together are one session per key
        rows = [
            (
                random.choice(USERS),
                random.choice([None, random.randint(-50, 50)]),
                random.randint(1, 9),
                now + random.randint(-spread, spread),
            )
            for _ in range(random.randint(0, 12))
        ]
        now += random.randint(0, 12)
        history.append((rows, random.choice([None, now]), random.random() < 0.3))
    return history


def gap_of(random):
    """The same for all rows, in ms, or None: that of the row."""
    return random.choice([None, 1, 3, random.randint(1, 12)])


def window_of(gap, lateness):
    length = "gap" if gap is None else f"{gap}ms"
    return session(length, allowed_lateness=f"{lateness}ms")


def owner(parallelism, keyed):
    return lambda row: owner_of(key_group_of(hash_key(row[0]), 8), parallelism, 8) if keyed else 0


def play(subtasks, owns, history, model):
    """Run one part of a history through all subtasks and the model."""
    for rows, watermark, checkpoint in history:
        writes = [subtask.checkpoint() for subtask in subtasks] if checkpoint else []
        for index, subtask in enumerate(subtasks):
            subtask.operator.process(batch([row for row in rows if owns(row) == index]), 0)
        for write in writes:  # after the table has changed
            write()
        model.records(rows)
        if watermark is not None and watermark > model.watermark:
            for subtask in subtasks:
                subtask.operator.on_watermark(watermark)
            model.advance(watermark)


@pytest.mark.parametrize("keyed", [True, False])
@settings(max_examples=400, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_equals_record_by_record_over_snapshots_and_rescales(start, keyed, random):
    # One source of chance: examples that hypothesis varies from each other are too much alike.
    gap, lateness, history = gap_of(random), random.choice([0, 3, 12]), history_of(random)
    cut, often = random.randint(0, len(history)), random.random() < 0.3
    parallelisms = [random.randint(1, 3) if keyed else 1 for _ in range(2)]
    window, keys = window_of(gap, lateness), ("user",) if keyed else ()
    model, tables = Model(gap, lateness, keyed), None
    found, late, dropped = [], [], 0
    before = table_module._DEAD_MIN
    table_module._DEAD_MIN = 0 if often else before
    try:
        for part, parallelism in zip((history[:cut], history[cut:]), parallelisms, strict=True):
            subtasks = [
                start(operator(window, keys), tables, index, parallelism)
                for index in range(parallelism)
            ]
            play(subtasks, owner(parallelism, keyed), part, model)
            for subtask in subtasks:
                subtask.checkpoint()()
                found += subtask.output.rows()
                late += subtask.output.rows(LATE)
                dropped += subtask.output.counts.get(LATE_COUNTER, 0)
            tables = [subtask.tables() for subtask in subtasks]
    finally:
        table_module._DEAD_MIN = before
    assert sorted(found, key=str) == sorted(model.results, key=str)
    assert sorted(late, key=str) == sorted(((*r[:3], r[3]) for r in model.late), key=str)
    assert dropped == len(model.late)


@settings(max_examples=200, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_without_lateness_results_do_not_depend_on_how_batches_are_cut(start, random):
    gap, history = gap_of(random), history_of(random)

    def run(pieces):
        subtask = start(operator(window_of(gap, 0)))
        for rows, watermark, _ in history:
            for piece in pieces(rows):
                subtask.operator.process(batch(piece), 0)
            if watermark is not None:
                subtask.operator.on_watermark(watermark)
        subtask.operator.on_watermark(WATERMARK_MAX)
        return sorted(subtask.output.rows(), key=str), sorted(subtask.output.rows(LATE), key=str)

    def random_pieces(rows):
        inner = {random.randint(0, len(rows)) for _ in range(3)}
        bounds = sorted({0, len(rows), *inner})
        return [rows[low:high] for low, high in itertools.pairwise(bounds)]

    whole = run(lambda rows: [rows])
    assert run(lambda rows: [[row] for row in rows]) == whole
    assert run(random_pieces) == whole


def test_a_session_ends_a_gap_after_its_last_record_and_a_record_at_its_end_extends_it(start):
    subtask = start(operator(session("10ms")))
    subtask.operator.process(batch([("a", 1, 1, 100), ("a", 2, 1, 110), ("a", 3, 1, 121)]), 0)
    subtask.operator.on_watermark(118)
    assert subtask.output.rows() == []
    subtask.operator.on_watermark(119)
    assert subtask.output.rows() == [("a", 100, 120, 2, 3, 2, 119)]
    assert subtask.output.events[-1] == ("watermark", 119)
    subtask.operator.on_watermark(WATERMARK_MAX)
    assert subtask.output.rows()[1:] == [("a", 121, 131, 1, 3, 3, 130)]


def test_results_come_in_the_order_of_their_ends(start):
    subtask = start(operator(session("10ms")))
    rows = [("b", 1, 1, 500), ("a", 1, 1, 300), ("c", 1, 1, 400), ("a", 1, 1, 100)]
    subtask.operator.process(batch(rows), 0)
    subtask.operator.on_watermark(WATERMARK_MAX)
    assert [row[-1] for row in subtask.output.rows()] == [109, 309, 409, 509]


def test_a_late_row_is_taken_if_it_meets_a_session_and_so_is_the_next(start):
    """Each link of the chain is late by itself and meets what the one before made of the session."""
    rows = [("a", 1, 1, t) for t in (58, 50, 42, 34, 26)]
    for pieces in ([rows], [[row] for row in rows]):
        subtask = start(operator(session("10ms")))
        subtask.operator.process(batch([("a", 1, 1, 66)]), 0)
        subtask.operator.on_watermark(70)
        for piece in pieces:
            subtask.operator.process(batch(piece), 0)
        subtask.operator.process(batch([("a", 9, 1, 15)]), 0)
        assert subtask.output.rows(LATE) == [("a", 9, 1, 15)]
        subtask.operator.on_watermark(WATERMARK_MAX)
        assert subtask.output.rows() == [("a", 26, 76, 6, 6, 1, 75)]


def test_a_late_row_does_not_wait_for_the_row_that_would_save_it(start):
    subtask = start(operator(session("10ms")))
    subtask.operator.on_watermark(70)
    subtask.operator.process(batch([("a", 1, 1, 58), ("a", 2, 1, 66)]), 0)
    assert subtask.output.rows(LATE) == [("a", 1, 1, 58)]
    assert subtask.output.counts == {LATE_COUNTER: 1}


def test_what_fired_can_be_joined_and_fires_again_as_one(start):
    subtask = start(operator(session("10ms", allowed_lateness="100ms")))
    subtask.operator.process(batch([("a", 1, 1, 100), ("a", 2, 1, 120)]), 0)
    subtask.operator.on_watermark(140)
    subtask.operator.process(batch([("a", 4, 1, 110)]), 0)
    assert subtask.output.rows() == [
        ("a", 100, 110, 1, 1, 1, 109),
        ("a", 120, 130, 1, 2, 2, 129),
        ("a", 100, 130, 3, 7, 4, 129),
    ]


@pytest.mark.parametrize("gap", [None, 0, -5, 2**60])
def test_a_gap_that_is_none_fails_and_shows_the_record(start, gap):
    subtask = start(operator(session("gap")))
    with pytest.raises(JobError, match="the gap of a session must be above 0 ms") as caught:
        subtask.operator.process(batch([("a", 1, 3, 0), ("b", 7, gap, 0)]), 0)
    assert "'user': 'b'" in str(caught.value)


def test_sessions_that_are_gone_give_their_memory_back(start):
    subtask = start(operator(session("10ms")))
    for turn in range(30):
        rows = [(f"user {turn} {n}", 1, 1, turn * 100) for n in range(300)]
        subtask.operator.process(batch(rows), 0)
        subtask.operator.on_watermark(turn * 100 + 50)
    assert len(subtask.output.rows()) == 9_000
    assert subtask.operator._table.size < 4_000


def test_a_delta_has_only_what_changed(start):
    subtask = start(operator(session("10ms")))
    subtask.operator.process(batch([(f"user {n}", 1, 1, n) for n in range(500)]), 0)
    subtask.checkpoint()()
    subtask.operator.process(batch([("user 7", 1, 1, 9), ("new", 1, 1, 9)]), 0)
    subtask.checkpoint()()
    base, delta = subtask.chains["sessions"]
    assert base.num_rows == 500
    assert sorted(delta.column("user").to_pylist()) == ["new", "user 7"]


def test_another_lateness_after_a_restore_does_not_bring_back_what_was_gone(start):
    subtask = start(operator(session("10ms")))
    subtask.operator.process(batch([("a", 1, 1, 100), ("b", 1, 1, 110)]), 0)
    subtask.operator.on_watermark(115)
    subtask.checkpoint()()
    again = start(operator(session("10ms", allowed_lateness="1s")), [subtask.tables()])
    again.operator.process(batch([("a", 2, 1, 101), ("b", 2, 1, 112)]), 0)
    assert again.output.rows(LATE) == [("a", 2, 1, 101)]
    again.operator.on_watermark(200)
    assert again.output.rows() == [("b", 110, 122, 2, 3, 2, 121)]
