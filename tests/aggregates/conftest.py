"""Aggregates of rows that come in batches, cut, merged, saved and restored at random."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from headgate.operators.aggregation.aggregates import Aggregate, AggregatePlan
from headgate.state.aggregates.state import AggregateState
from headgate.state.slots.epochs import TableEpoch
from headgate.state.values import EVENT_TIME, Values, values_of

SLOTS = 5


class Aggregated:
    """The state of one aggregate over rows (slot, time, values of the columns)."""

    def __init__(self, aggregate: Aggregate, schema: pa.Schema, timed: bool = True) -> None:
        self.plan = AggregatePlan((), {"r": aggregate}, schema)
        self.schema, self.timed = schema, timed
        self.state: AggregateState = self.plan.new_state(TableEpoch())

    def add(self, rows: Sequence[tuple[Any, ...]], size: int = SLOTS) -> None:
        if not rows:
            return
        slots = np.array([row[0] for row in rows], np.intp)
        columns = {
            field.name: values_of(pa.array([row[2 + at] for row in rows], field.type))
            for at, field in enumerate(self.schema)
        }
        if self.timed:
            columns[EVENT_TIME] = Values(np.array([row[1] for row in rows], np.int64), None)
        self.state.add(slots, columns, size)

    def table(self, slots: np.ndarray) -> pa.Table:
        return pa.Table.from_arrays(
            self.state.columns(slots), schema=pa.schema(list(self.plan.state_schema)[1:])
        )

    def renew(self, order: Sequence[int]) -> None:
        """Save the slots, restore them in this order into a new state, each under its number."""
        slots = np.array(order, np.intp)
        table = self.table(slots)
        self.state = self.plan.new_state(TableEpoch())
        self.state.load(slots, table, SLOTS)

    def results(self, size: int = SLOTS) -> list[Any]:
        found: list[Any] = self.state.results(slice(0, size))[0].to_pylist()
        return found


def cuts(rows: int) -> st.SearchStrategy[list[int]]:
    """Return a strategy for the places at which rows are cut into batches."""
    return st.lists(st.integers(0, rows), max_size=4).map(sorted)


def pieces(rows: Sequence[Any], at: Sequence[int]) -> list[Sequence[Any]]:
    return [rows[low:high] for low, high in itertools.pairwise([0, *at, len(rows)])]


def whole_and_in_parts(
    aggregate: Aggregate, schema: pa.Schema, rows: Sequence[Any], data: Any, timed: bool = True
) -> tuple[list[Any], list[Any]]:
    """The results of the rows in one batch; and of batches, restored in between, merged in parts."""
    whole = Aggregated(aggregate, schema, timed)
    whole.state.add(np.arange(SLOTS), _nulls(schema, timed), SLOTS)
    whole.add(rows)
    parted = Aggregated(aggregate, schema, timed)
    parted.state.add(np.arange(SLOTS), _nulls(schema, timed), SLOTS)
    # the rows behind the cut go to other slots first, which are merged then
    behind = data.draw(st.integers(0, len(rows)), label="merged from")
    first = rows[:behind]
    for batch in pieces(first, data.draw(cuts(len(first)), label="cuts")):
        parted.add(batch)
        if data.draw(st.booleans(), label="restored"):
            parted.renew(data.draw(st.permutations(range(SLOTS))))
    second = rows[behind:]
    moved = [(row[0] + SLOTS, *row[1:]) for row in second]
    nulls = _nulls(schema, timed)
    parted.state.add(np.arange(SLOTS, 2 * SLOTS), nulls, 2 * SLOTS)
    for batch in pieces(moved, data.draw(cuts(len(moved)), label="cuts behind")):
        parted.add(batch, 2 * SLOTS)
    before = parted.state.results(slice(SLOTS, 2 * SLOTS))
    parted.state.merge(np.arange(SLOTS), np.arange(SLOTS, 2 * SLOTS))
    assert parted.state.results(slice(SLOTS, 2 * SLOTS)) == before or _has_nan(before)
    return whole.results(), parted.results()


def _has_nan(columns: list[pa.Array]) -> bool:
    return any("nan" in str(column.to_pylist()) for column in columns)


def _nulls(schema: pa.Schema, timed: bool) -> dict[str, Values]:
    """One row per slot, of nulls, so that all slots are there."""
    columns = {field.name: values_of(pa.nulls(SLOTS, field.type)) for field in schema}
    if timed:
        columns[EVENT_TIME] = Values(np.zeros(SLOTS, np.int64), None)
    return columns
