"""Tumbling-window aggregates against a dict: cuts into batches, lateness, snapshots, rescaling."""

from __future__ import annotations

import builtins
import itertools
import pickle
import weakref

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import PlanError, StateError
from headgate.operators.aggregation.aggregates import (
    AggregatePlan,
    count,
    max,
    parse_aggregate,
    sum,
)
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch, ObjectBatch
from headgate.operators.windows import small_windows, tumbling, windowed_aggregate
from headgate.operators.windows.kinds import WINDOW_FIELDS, TumblingWindow
from headgate.operators.windows.late import LATE, LATE_COUNTER
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of
from headgate.state.slots.key_index import KeyHasher

quick = settings(max_examples=40, deadline=None)

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64())])
AGGREGATES = {"n": count(), "total": sum("x"), "top": max("x")}


def plan(keys=("user",), aggregates=AGGREGATES, schema=SCHEMA):
    return AggregatePlan(keys, aggregates, schema, WINDOW_FIELDS)


def operator(window, **how):
    return pickle.loads(pickle.dumps(TumblingAggregate(window, plan(**how), "per-user")))


def batch(rows, schema=SCHEMA):
    """Rows (user, x, timestamp)."""
    columns = [
        pa.array([row[index] for row in rows], type_) for index, type_ in enumerate(schema.types)
    ]
    data = pa.RecordBatch.from_arrays(columns, schema=schema)
    return ColumnBatch(data, np.array([row[-1] for row in rows], np.int64))


def milliseconds(rows):
    """Result rows with window bounds as ms."""
    return [
        tuple(int(v.timestamp() * 1000) if hasattr(v, "timestamp") else v for v in row)
        for row in rows
    ]


class Model:
    """Record by record, with a dict per window: what the operator promises."""

    def __init__(self, window: TumblingWindow, keyed: bool) -> None:
        self.window, self.keyed, self.watermark = window, keyed, -(2**63)
        self.windows: dict[int, dict] = {}
        self.results, self.late, self.updates = [], [], set()

    def row(self, start, key):
        values = self.windows[start][key]
        present = [v for v in values if v is not None]
        result = (len(values), builtins.sum(present) if present else None)
        top = builtins.max(present) if present else None
        size = self.window.size_ms
        keys = (key,) if self.keyed else ()
        return (*keys, start, start + size, *result, top, start + size - 1)

    def records(self, rows):
        again = {}
        for user, x, time in rows:
            start = time - (time - self.window.offset_ms) % self.window.size_ms
            last = start + self.window.size_ms - 1
            if last + self.window.allowed_lateness_ms <= self.watermark:
                self.late.append((user, x, time))
                continue
            key = user if self.keyed else None
            self.windows.setdefault(start, {}).setdefault(key, []).append(x)
            if last <= self.watermark:
                again[start, key] = True
        self.results += sorted((self.row(*which) for which in again), key=str)

    def advance(self, watermark):
        before, self.watermark = self.watermark, watermark
        for start in sorted(self.windows):
            last = start + self.window.size_ms - 1
            if before < last <= watermark:
                keys = self.windows[start]
                self.results += sorted((self.row(start, key) for key in keys), key=str)
            if last + self.window.allowed_lateness_ms <= watermark:
                del self.windows[start]


windows = st.builds(
    TumblingWindow, st.integers(1, 12), st.just(0) | st.integers(0, 11), st.integers(0, 15)
).map(lambda w: TumblingWindow(w.size_ms, w.offset_ms % w.size_ms, w.allowed_lateness_ms))
rows_ = st.tuples(
    st.sampled_from(["a", "b", "c", "d", "somewhat longer than a cell", None]),
    st.none() | st.integers(-50, 50),
    st.integers(-20, 60),
)
steps = st.lists(
    st.tuples(st.lists(rows_, max_size=25), st.none() | st.integers(-30, 70)), max_size=8
)


def play(harnesses, owner_of, history, keyed, model):
    """Run one part of a history through all subtasks and the model."""
    for rows, watermark in history:
        for index, harness in enumerate(harnesses):
            mine = [row for row in rows if owner_of(row[0] if keyed else 0) == index]
            harness.process(batch(mine))
        model.records(rows)
        if watermark is not None and watermark > model.watermark:
            for harness in harnesses:
                harness.watermark(watermark)
            model.advance(watermark)


def owner(parallelism):
    return lambda key: owner_of(key_group_of(hash_key(key), 8), parallelism, 8)


def results(harnesses, kind="rows"):
    return sorted((row for h in harnesses for row in milliseconds(h.output.rows(kind))), key=str)


@pytest.mark.parametrize("keyed", [True, False])
@settings(max_examples=100, deadline=None)
@given(window=windows, history=steps, cut=st.integers(0, 8), data=st.data())
def test_equals_record_by_record_over_snapshots_and_rescales(
    start, keyed, window, history, cut, data
):
    parallelisms = [data.draw(st.integers(1, 3)) if keyed else 1 for _ in range(2)]
    keys = ("user",) if keyed else ()
    model, tables, harnesses, found, late, dropped = Model(window, keyed), None, [], [], [], 0
    for part, parallelism in zip((history[:cut], history[cut:]), parallelisms, strict=True):
        harnesses = [
            start(operator(window, keys=keys), tables, index, parallelism)
            for index in range(parallelism)
        ]
        play(harnesses, owner(parallelism), part, keyed, model)
        found += results(harnesses)
        late += results(harnesses, LATE)
        for harness in harnesses:
            dropped += harness.output.counts.get(LATE_COUNTER, 0)
        made = [harness.tables() for harness in harnesses]
        tables = {name: pa.concat_tables([t[name] for t in made]) for name in made[0]}
    for harness in harnesses:
        harness.output.events.clear()
        harness.watermark(WATERMARK_MAX)
        assert harness.output.events[-1] == ("watermark", WATERMARK_MAX)
        assert harness.tables()["windows"].num_rows == 0
    model.advance(WATERMARK_MAX)
    found += results(harnesses)
    assert sorted(found, key=str) == sorted(model.results, key=str)
    assert sorted(late, key=str) == sorted(model.late, key=str)
    assert dropped == len(model.late)


@quick
@given(st.lists(rows_, min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_how_rows_are_cut_into_batches_does_not_matter(start, rows, cuts):
    window, outputs = TumblingWindow(10), []
    for bounds in ([0, len(rows)], [0, *sorted(c for c in cuts if c < len(rows)), len(rows)]):
        harness = start(operator(window))
        for low, high in itertools.pairwise(bounds):
            harness.process(batch(rows[low:high]))
        harness.watermark(1000)
        outputs.append(sorted(harness.output.rows(), key=str))
    assert outputs[0] == outputs[1]


def test_late_is_exact_at_the_boundary(start):
    harness = start(operator(TumblingWindow(10, 0, 5)))
    harness.watermark(13)  # one below 9 + 5
    harness.process(batch([("a", 1, 0)]))
    assert milliseconds(harness.output.rows()) == [("a", 0, 10, 1, 1, 1, 9)]
    harness.watermark(14)
    harness.process(batch([("a", 1, 9), ("a", 2, 10)]))
    assert harness.output.rows(LATE) == [("a", 1, 9)]
    assert harness.output.counts == {LATE_COUNTER: 1}


def test_results_come_in_window_order_and_before_the_watermark(start):
    harness = start(operator(TumblingWindow(10)))
    harness.process(batch([("a", 1, 25), ("a", 1, 5), ("a", 1, 15), ("a", 1, 45)]))
    harness.watermark(29)
    kinds = [kind for kind, _ in harness.output.events]
    assert kinds == ["rows", "watermark"]
    assert [row[-1] for row in harness.output.rows()] == [9, 19, 29]
    harness.watermark(29)
    assert [kind for kind, _ in harness.output.events][2:] == ["watermark"]


def test_a_window_fires_exactly_at_its_last_millisecond(start):
    harness = start(operator(TumblingWindow(10)))
    harness.process(batch([("a", 1, 0)]))
    harness.watermark(8)
    assert harness.output.rows() == []
    harness.watermark(9)
    assert len(harness.output.rows()) == 1


def test_an_allowed_late_row_updates_only_its_key(start):
    harness = start(operator(TumblingWindow(10, 0, 100)))
    harness.process(batch([("a", 1, 0), ("b", 2, 0)]))
    harness.watermark(9)
    harness.output.events.clear()
    harness.process(batch([("b", 5, 3), ("b", None, 4)]))
    assert milliseconds(harness.output.rows()) == [("b", 0, 10, 3, 7, 5, 9)]


def test_what_was_late_stays_late_after_a_rescale_to_more_subtasks(start):
    harness = start(operator(TumblingWindow(10)))
    harness.watermark(50)
    tables = harness.tables()
    for index in range(8):
        restored = start(operator(TumblingWindow(10)), tables, index, 8)
        restored.process(batch([("a", 1, 5)]))
        restored.watermark(1000)
        assert restored.output.rows() == []
        assert len(restored.output.rows(LATE)) == 1


def test_a_restored_watermark_is_the_least_of_those_merged_and_late_is_what_was_late(start):
    first = start(operator(TumblingWindow(10)), None, 0, 2)
    second = start(operator(TumblingWindow(10)), None, 1, 2)
    first.watermark(30)
    second.watermark(19)
    made = [first.tables(), second.tables()]
    tables = {name: pa.concat_tables([t[name] for t in made]) for name in made[0]}
    merged = start(operator(TumblingWindow(10)), tables)
    groups = [key_group_of(hash_key(key), 8) for key in "abcdef"]
    assert {group < 4 for group in groups} == {True, False}
    for key, group in zip("abcdef", groups, strict=True):
        merged.output.events.clear()
        merged.process(batch([(key, 1, 19), (key, 1, 20)]))
        expected = [(key, 1, 19), (key, 1, 20)] if group < 4 else [(key, 1, 19)]
        assert merged.output.rows(LATE) == expected


def test_large_windows_come_out_in_pieces(start):
    harness = start(operator(TumblingWindow(10), keys=("x",), aggregates={"n": count()}))
    schema, size = SCHEMA, 150_000
    columns = [pa.nulls(size, pa.string()), pa.array(np.arange(size))]
    data = pa.RecordBatch.from_arrays(columns, schema=schema)
    harness.process(ColumnBatch(data, np.zeros(size, np.int64)))
    harness.watermark(9)
    pieces = [element for kind, element in harness.output.events if kind == "rows"]
    assert [len(piece) for piece in pieces] == [65_536, 65_536, 18_928]
    assert {x for piece in pieces for x in piece.data["x"].to_pylist()} == set(range(size))


def test_the_snapshot_is_a_table_anyone_can_read(start):
    harness = start(
        operator(TumblingWindow(10), aggregates={"n": count(), "m": parse_aggregate("avg(x)")})
    )
    harness.process(batch([("a", 1, 0), ("a", 2, 1), ("b", None, 11)]))
    table = harness.tables()["windows"]
    assert table.schema.names == [
        *("key_group", "user", "window_start", "window_end", "n", "m__sum", "m__count")
    ]
    plain = table.cast(
        pa.schema(
            [f.with_type(pa.timestamp("ms")) if "window" in f.name else f for f in table.schema]
        )
    )
    found = duckdb.sql('SELECT "user", n, m__sum, m__count FROM plain ORDER BY "user"').fetchall()
    assert plain.num_rows == 2
    assert found == [("a", 2, 3, 2), ("b", 1, None, 0)]


def test_a_snapshot_is_a_cut_that_later_rows_do_not_touch(start):
    harness = start(operator(TumblingWindow(10)))
    harness.process(batch([("a", 1, 0)]))
    snapshot = harness.operator.snapshot(1)
    harness.process(batch([("a", 5, 0), ("b", 5, 0)]))
    harness.watermark(1000)
    harness.process(batch([("c", 7, 2000)]))
    table = snapshot.tables["windows"].make(None)
    assert table.select(["user", "n", "total"]).to_pylist() == [{"user": "a", "n": 1, "total": 1}]


def test_memory_of_fired_windows_is_used_again_without_their_rows(start):
    harness = start(operator(TumblingWindow(10)))
    for number in range(6):
        harness.process(batch([("a", number, number * 10), ("b", None, number * 10)]))
        harness.watermark(number * 10 + 9)
    assert milliseconds(harness.output.rows()) == [
        row
        for n in range(6)
        for row in [
            ("a", n * 10, n * 10 + 10, 1, n, n, n * 10 + 9),
            ("b", n * 10, n * 10 + 10, 1, None, None, n * 10 + 9),
        ]
    ]


def test_rows_without_event_time_are_refused(start):
    harness = start(operator(TumblingWindow(10)))
    with pytest.raises(PlanError) as error:
        harness.process(ColumnBatch(batch([("a", 1, 0)]).data, None))
    assert ".event_time(" in error.value.fix


def test_python_objects_are_refused(start):
    harness = start(operator(TumblingWindow(10)))
    with pytest.raises(PlanError, match="per-user"):
        harness.process(ObjectBatch([1], np.zeros(1, np.int64)))


def test_state_of_other_keys_is_refused(start):
    harness = start(operator(TumblingWindow(10)))
    harness.process(batch([("a", 1, 0)]))
    with pytest.raises(StateError, match="x"):
        start(operator(TumblingWindow(10), keys=("x",)), harness.tables())


@pytest.mark.parametrize(
    "type_",
    [pa.int64(), pa.int8(), pa.date32(), pa.timestamp("ms"), pa.decimal128(15, 2), pa.bool_()],
)
def test_null_is_a_group_as_in_sql(start, type_):
    schema = pa.schema([("user", type_), ("x", pa.int64())])
    numbers = pa.array([0, 1, None, 1, None, 0], pa.int32())
    if pa.types.is_timestamp(type_):
        numbers = numbers.cast(pa.int64())
    keys = numbers.cast(type_, safe=False)
    data = pa.RecordBatch.from_arrays([keys, pa.array([1, 2, 3, 4, 5, None])], schema=schema)
    harness = start(operator(TumblingWindow(10), schema=schema))
    for low, high in ((0, 2), (2, 6)):
        harness.process(ColumnBatch(data.slice(low, high - low), np.zeros(high - low, np.int64)))
    restored = start(operator(TumblingWindow(10), schema=schema), harness.tables())
    restored.watermark(9)
    rows = pa.Table.from_batches([data])
    assert rows.num_rows == 6
    query = 'SELECT "user", count(*), sum(x)::BIGINT, max(x) FROM rows GROUP BY 1'
    found = [(row[0], *row[3:6]) for row in restored.output.rows()]
    assert sorted(found, key=str) == sorted(duckdb.sql(query).fetchall(), key=str)


@pytest.mark.parametrize("type_", [pa.int64(), pa.uint8(), pa.bool_(), pa.string()])
def test_a_key_in_a_window_is_told_from_all_others(type_):
    numbers = np.arange(200) % 2 if pa.types.is_boolean(type_) else np.arange(200)
    keys = pa.array(numbers).cast(type_)
    hasher = KeyHasher([type_], 7, dense=False)
    seen = set()
    for start in (-20_000, 0, 10_000, 20_000):
        starts = np.full(len(keys), start)
        lanes = np.array(small_windows.WindowKeys(hasher, starts, [keys]).lanes(None))
        seen |= set(map(tuple, lanes.T.tolist()))
        # Nulls beside them change nothing for the others.
        some = pa.array([None, *keys.to_pylist()], type_)
        both = np.array(
            small_windows.WindowKeys(hasher, np.append(start, starts), [some]).lanes(None)
        )
        assert (both[:, 1:] == lanes).all()
        seen.add(tuple(both[:, 0].tolist()))
    assert len(seen) == 4 * (len(set(numbers)) + 1)


def test_large_windows_come_out_in_pieces_between_small_ones(start, monkeypatch):
    """A small window that is open, or fires too, does not make the large ones one huge batch."""
    monkeypatch.setattr(windowed_aggregate, "EMIT_ROWS_MAX", 50)
    monkeypatch.setattr(tumbling, "EMIT_ROWS_MAX", 50)
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 5)
    harness = start(operator(TumblingWindow(10)))
    for begin in (10, 30):
        harness.process(batch([(f"{n}", 1, begin) for n in range(130)]))
    harness.process(batch([("a", 1, 0), ("a", 1, 20), ("a", 1, 99)]))
    built = []
    emit = harness.operator._send
    monkeypatch.setattr(
        harness.operator,
        "_send",
        lambda fired: (built.append(builtins.sum(len(f.starts) for f in fired)), emit(fired)),
    )
    harness.watermark(60)
    assert builtins.max(built) <= 100
    ends = [row[-1] for row in harness.output.rows()]
    assert ends == [9] + [19] * 130 + [29] + [39] * 130


def test_small_windows_that_are_not_due_are_not_looked_at(start, monkeypatch):
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 5)
    harness = start(operator(TumblingWindow(10)))
    harness.process(batch([("a", 1, 95)]))
    small = harness.operator._small
    starts, small._starts = small._starts, None
    harness.watermark(50)
    small._starts = starts
    harness.watermark(99)
    assert len(harness.output.rows()) == 1


def test_groups_kept_for_later_windows_have_a_bound_in_bytes(start, monkeypatch):
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 0)
    monkeypatch.setattr(tumbling, "_SPARE_BYTES_MAX", 60_000)
    harness = start(operator(TumblingWindow(10)))
    for begin in range(0, 200, 10):
        harness.process(batch([(f"{n}", 1, begin) for n in range(300)]))
    groups = len(harness.operator._groups)
    harness.watermark(1000)
    spare = harness.operator._spare
    assert groups == 20
    assert 1 <= len(spare) < 20
    assert builtins.sum(group.nbytes for group in spare) == harness.operator._spare_bytes <= 60_000


def test_a_large_shared_table_gives_its_memory_back_when_it_empties(start, monkeypatch):
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 10**9)
    monkeypatch.setattr(small_windows, "KEPT_ROWS_MAX", 10)
    harness = start(operator(TumblingWindow(10)))
    kept = []
    for rows in (8, 12):
        harness.process(batch([(f"{n}", 1, 100 * rows) for n in range(rows)]))
        before = harness.operator._small._group
        harness.watermark(100 * rows + 9)
        kept.append(harness.operator._small._group is before)
    assert kept == [True, False]


def test_restored_large_windows_equal_those_before(start, monkeypatch):
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 20)
    harness = start(operator(TumblingWindow(10)))
    for begin in range(0, 300, 10):
        rows = 10 if begin % 30 else 40
        harness.process(batch([(f"{n}", begin + n, begin) for n in range(rows)]))
    restored = start(operator(TumblingWindow(10)), harness.tables())
    assert len(restored.operator._groups) == 10
    for each in (harness, restored):
        each.watermark(1000)
    assert sorted(harness.output.rows(), key=str) == sorted(restored.output.rows(), key=str)


def test_memory_of_a_large_window_that_is_gone_is_freed_an_array_per_batch(start, monkeypatch):
    monkeypatch.setattr(tumbling, "_SPARE_BYTES_MAX", 0)
    monkeypatch.setattr(tumbling, "SMALL_ROWS", 1)
    subject = operator(TumblingWindow(10))
    harness = start(subject)
    harness.process(batch([("a", 1, 0), ("b", 2, 1)]))
    (group,) = subject._groups.values()
    arrays = [weakref.ref(array) for array in group.memory()]
    del group
    harness.watermark(9)
    alive = [builtins.sum(array() is not None for array in arrays)]
    for _ in arrays:
        harness.process(batch([("a", 1, 10)]))
        alive.append(builtins.sum(array() is not None for array in arrays))
    assert alive == list(range(len(arrays), -1, -1))
    assert len(arrays) >= 6
