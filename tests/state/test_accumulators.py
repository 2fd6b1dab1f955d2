"""Aggregates against DuckDB and plain Python, over random cuts of the rows into batches."""

from __future__ import annotations

import itertools
from decimal import Decimal

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import JobError, PlanError, StateError
from headgate.state.aggregates.accumulators import IntSum
from headgate.state.aggregates.state import AggregateSpec, AggregateState, accumulator_for
from headgate.state.values import values_of

quick = settings(max_examples=20, deadline=None)
DUCKDB = duckdb.connect(config={"threads": 1})

KINDS = ("count", "sum", "min", "max", "avg")
NUMBERS = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(10**15), 10**15)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.float64(), st.integers(-1000, 1000).map(lambda n: n / 8)),
    (pa.float32(), st.integers(-1000, 1000).map(lambda n: n / 8)),
    (pa.decimal128(12, 2), st.decimals(-(10**6), 10**6, places=2, allow_nan=False)),
]
ORDERED = [
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates()),
    (pa.timestamp("ms"), st.integers(0, 10**12)),
    (pa.timestamp("us"), st.integers(-(10**15), 10**15)),
    (pa.string(), st.text(max_size=5).filter(lambda text: "\0" not in text)),
    (pa.binary(), st.binary(max_size=5)),
]


def specs(type_: pa.DataType, kinds: tuple[str, ...]) -> list[AggregateSpec]:
    found = [AggregateSpec(kind, kind, "x", type_) for kind in kinds]
    return [*found, AggregateSpec("count", "rows", None, None)]


def saved(state):
    """The state columns as a table."""
    cut = state.cut(1)
    columns = cut.columns(cut.slots(None))
    return pa.Table.from_arrays(
        columns, names=[f.name for a, _ in state._accumulators for f in a.state_fields()]
    )


def run(type_, kinds, slots, values, cuts, restore_at=None):
    """The results per slot, by name, after adding the rows batch by batch."""
    state = AggregateState(specs(type_, kinds))
    size, bounds = 0, [0, *sorted(cuts), len(slots)]
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        if low == high:
            continue
        size = max(size, *(slot + 1 for slot in slots[low:high]))
        column = values_of(pa.array(values, type_).slice(low, high - low))
        state.add(np.array(slots[low:high], np.intp), {"x": column}, size)
        if restore_at == number:
            table = saved(state)
            order = list(range(size))[::-1]
            state = AggregateState(specs(type_, kinds))
            state.load(np.array(order, np.intp), table.take(pa.array(order)), size)
    results = state.results(slice(0, size))
    return {spec.name: r.to_pylist() for spec, r in zip(specs(type_, kinds), results, strict=True)}


def in_duckdb(type_, kinds, slots, values):
    table = pa.table({"slot": pa.array(slots, pa.int64()), "x": pa.array(values, type_)})
    calls = ", ".join(f"{kind}(x)" for kind in kinds)
    DUCKDB.register("t", table)
    found = DUCKDB.execute(
        f"SELECT {calls}, count(*) FROM t GROUP BY slot ORDER BY slot"
    ).fetchall()
    columns = list(zip(*found, strict=True)) or [()] * (len(kinds) + 1)
    return {name: list(c) for name, c in zip([*kinds, "rows"], columns, strict=True)}


def dense(slots):
    """Slots in the order a slot table gives them out."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(slot, len(numbers)) for slot in slots]


@pytest.mark.parametrize(("type_", "values"), NUMBERS + ORDERED, ids=lambda x: str(x)[:16])
@quick
@given(data=st.data())
def test_equals_duckdb_with_nulls_and_restores(type_, values, data):
    rows = data.draw(st.lists(st.tuples(st.integers(0, 5), st.none() | values), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=4))
    kinds = KINDS if (type_, values) in NUMBERS else ("count", "min", "max")
    slots = dense([slot for slot, _ in rows])
    items = pa.array([value for _, value in rows], type_).to_pylist()
    found = run(type_, kinds, slots, items, cuts, data.draw(st.none() | st.integers(0, 5)))
    expected = in_duckdb(type_, kinds, slots, items)
    assert found.pop("avg", None) == pytest.approx(expected.pop("avg", None))
    assert found == expected


@quick
@given(st.lists(st.none() | st.floats(allow_nan=True, width=32), min_size=1), st.data())
def test_nan_is_greater_than_any_number(values, data):
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=3))
    slots = [0] * len(values)
    found = run(pa.float64(), ("min", "max"), slots, values, cuts)
    expected = in_duckdb(pa.float64(), ("min", "max"), slots, values)
    assert str(found["min"]).replace("-0.0", "0.0") == str(expected["min"]).replace("-0.0", "0.0")
    assert str(found["max"]).replace("-0.0", "0.0") == str(expected["max"]).replace("-0.0", "0.0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", [pa.int64(), pa.float64(), pa.decimal128(25, 1)], ids=str)
@quick
@given(data=st.data())
def test_one_group_as_a_whole_equals_slot_by_slot(kind, type_, data):
    values = data.draw(st.lists(st.none() | st.integers(-99, 99), min_size=1))
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=4))
    state = AggregateState(specs(type_, (kind,)))
    bounds = [0, *sorted(cuts), len(values)]
    for low, high in itertools.pairwise(bounds):
        if low < high:
            column = values_of(pa.array(values, pa.int64()).cast(type_).slice(low, high - low))
            state.add_all({"x": column}, high - low)
    whole = [column.to_pylist() for column in state.results(slice(0, 1))]
    items = pa.array(values, pa.int64()).cast(type_).to_pylist()
    assert whole == list(run(type_, (kind,), [0] * len(values), items, cuts).values())


def test_reset_leaves_nothing_behind():
    state = AggregateState(specs(pa.int64(), KINDS))
    for values in ([5, None, 7], [1, 2, 3]):
        state.reset()
        state.add(np.array([0, 1, 0], np.intp), {"x": values_of(pa.array(values))}, 2)
    assert [column.to_pylist() for column in state.results(slice(0, 2))] == [
        [2, 1],
        [4, 2],
        [1, 2],
        [3, 2],
        [2.0, 2.0],
        [2, 1],
    ]


def test_frozen_columns_do_not_see_later_rows():
    state = AggregateState(specs(pa.int64(), KINDS))
    state.add(np.zeros(1, np.intp), {"x": values_of(pa.array([5]))}, 1)
    cut = state.cut(1)
    state.add(np.zeros(1, np.intp), {"x": values_of(pa.array([None, 9])).pick(slice(1, 2))}, 1)
    assert state.busy
    frozen = pa.Table.from_arrays(
        cut.columns(cut.slots(None)),
        names=["count", "sum", "min", "max", "avg__sum", "avg__count", "rows"],
    )
    assert not state.busy
    assert {name: frozen[name].to_pylist() for name in frozen.column_names} == {
        "count": [1],
        "sum": [5],
        "min": [5],
        "max": [5],
        "avg__sum": [5],
        "avg__count": [1],
        "rows": [1],
    }


@pytest.mark.parametrize("whole", [True, False])
def test_a_sum_that_leaves_int64_fails_instead_of_wrapping(whole):
    state = AggregateState([AggregateSpec("sum", "total", "x", pa.int64())])

    def add(*numbers: int) -> None:
        columns = {"x": values_of(pa.array(numbers))}
        if whole:
            state.add_all(columns, len(numbers))
        else:
            state.add(np.zeros(len(numbers), np.intp), columns, 1)

    # large steps that cancel out are fine, however many
    for _ in range(5):
        add(2**62, 2**61)
        add(-(2**62), -(2**61))
    assert state.results(slice(0, 1))[0].to_pylist() == [0]
    add(2**62)
    with pytest.raises(JobError, match="total"):
        add(2**62)


def test_large_numbers_do_not_make_each_batch_look_at_all_sums(monkeypatch):
    looked, magnitude = [], IntSum._magnitude
    monkeypatch.setattr(
        IntSum,
        "_magnitude",
        staticmethod(lambda data: (looked.append(len(data)), magnitude(data))[1]),
    )
    state = AggregateState([AggregateSpec("sum", "total", "x", pa.int64())])
    keys, rows = 50_000, 100
    state.add(np.arange(keys), {"x": values_of(pa.array(np.zeros(keys, np.int64)))}, keys)
    looked.clear()
    steps = [2**60, -(2**60)] * 25
    for step in steps:
        state.add(np.arange(rows), {"x": values_of(pa.array([step] * rows))}, keys)
    assert state.results(slice(0, keys))[0].to_pylist() == [0] * keys
    assert sum(looked) <= rows * len(steps) + 2 * keys


def test_integer_averages_do_not_depend_on_order():
    values = [2**53 + 1, 1, -(2**53), 3] * 3
    averages = {
        run(pa.int64(), ("avg",), [0] * 12, order, [])["avg"][0]
        for order in (values, values[::-1], sorted(values))
    }
    assert averages == {sum(values) / 12}


def test_a_decimal_sum_is_exact_and_wide():
    big = Decimal("9" * 12 + ".99")
    found = run(pa.decimal128(14, 2), ("sum",), [0] * 100, [big] * 100, [50])
    assert found["sum"] == [big * 100]


@pytest.mark.parametrize(
    ("kind", "type_"),
    [
        ("sum", pa.string()),
        ("avg", pa.bool_()),
        ("sum", pa.timestamp("s")),
        ("max", pa.list_(pa.int8())),
    ],
)
def test_aggregates_that_make_no_sense_are_refused(kind, type_):
    with pytest.raises(PlanError) as error:
        accumulator_for(kind, "x", type_)
    assert error.value.fix


def test_a_snapshot_of_other_aggregates_is_refused():
    state = AggregateState([AggregateSpec("sum", "total", "x", pa.int64())])
    with pytest.raises(StateError, match="total"):
        state.load(np.zeros(1, np.intp), pa.table({"total": [1.5]}), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_aggregate_the_snapshot_does_not_know_starts_empty(kind):
    state = AggregateState([AggregateSpec(kind, "new", "x", pa.int64())])
    state.load(np.arange(2), pa.table({"other": [1, 2]}), 2)
    nothing = 0 if kind == "count" else None
    assert state.results(slice(0, 2))[0].to_pylist() == [nothing, nothing]
    state.add(np.array([1]), {"x": values_of(pa.array([5]))}, 2)
    assert state.results(slice(0, 2))[0].to_pylist() == [nothing, 1 if kind == "count" else 5]


@pytest.mark.parametrize(("type_", "values"), NUMBERS + ORDERED, ids=lambda x: str(x)[:16])
@quick
@given(data=st.data())
def test_slots_merged_are_as_if_all_rows_had_come_to_one(type_, values, data):
    kinds = KINDS if (type_, values) in NUMBERS else ("min", "max", "count")
    rows = data.draw(st.lists(st.tuples(st.integers(0, 5), st.none() | values)))
    rows += [(slot, data.draw(st.none() | values)) for slot in range(6)]
    target = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    state = AggregateState(specs(type_, kinds))
    slots = np.array([slot for slot, _ in rows], np.intp)
    state.add(slots, {"x": values_of(pa.array([value for _, value in rows], type_))}, 6)
    before = state.results(slice(3, 6))
    state.merge(np.array(target[3:], np.intp), np.array([3, 4, 5]))
    where = [target[slot] if slot > 2 else slot for slot, _ in rows]
    state_of_one = AggregateState(specs(type_, kinds))
    state_of_one.add(
        np.array(where, np.intp), {"x": values_of(pa.array([v for _, v in rows], type_))}, 3
    )
    assert state.results(slice(0, 3)) == state_of_one.results(slice(0, 3))
    assert state.results(slice(3, 6)) == before


def test_a_merge_that_leaves_int64_fails_and_an_open_cut_keeps_what_was():
    state = AggregateState([AggregateSpec("sum", "total", "x", pa.int64())])
    state.add(np.array([0, 1]), {"x": values_of(pa.array([2**62, 2**62 - 1]))}, 2)
    cut = state.cut(1)
    state._changed.table.cut()
    with pytest.raises(JobError, match="left the range of int64"):
        state.merge(np.array([0]), np.array([1]))
    state.add(np.array([0, 1]), {"x": values_of(pa.array([-(2**61), 0]))}, 2)
    assert cut.columns(cut.slots(None))[0].to_pylist() == [2**62, 2**62 - 1]
