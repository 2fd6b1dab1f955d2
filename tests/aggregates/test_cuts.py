"""The rows of a cut stay as they are until a thread has read all of them, and can be read back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.operators.aggregation.aggregate_tables import aggregate_info, restored_rows
from headgate.operators.aggregation.aggregates import collect, count_distinct, first, last, quantile

from .conftest import Aggregated

WORDS = pa.schema([("x", pa.string())])
NUMBERS = pa.schema([("x", pa.int64())])


@pytest.mark.parametrize("aggregate", [collect("x"), count_distinct("x")], ids=str)
def test_memory_is_not_reused_while_columns_are_made(monkeypatch, aggregate):
    """Lists and texts are read last, when the values of the slots are at hand already."""
    held = Aggregated(aggregate, WORDS)
    held.add([(0, 0, "a"), (0, 0, "b"), (1, 0, "c")], 2)
    state = held.state
    cut = state.cut(1)
    ((accumulator, _),) = state._accumulators
    columns = type(accumulator).columns

    def meanwhile(self, values):
        """The window is dropped; its memory goes to another one if nobody reads it."""
        if not state.busy:
            state.reset()
        return columns(self, values)

    monkeypatch.setattr(type(accumulator), "columns", meanwhile)
    assert cut.columns(cut.slots(None))[0].to_pylist() == [["a", "b"], ["c"]]
    assert not state.busy


def carried_over(old, new):
    """The result of `new` over the numbers 1 to 3, saved as state of `old`."""
    before, after = Aggregated(old, NUMBERS), Aggregated(new, NUMBERS)
    before.add([(0, 0, 1), (0, 0, 2), (0, 0, 3)], 1)
    slots = np.zeros(1, np.intp)
    info = aggregate_info(before.plan, "running", "aggregate")
    after.state.load(slots, restored_rows(after.plan, before.table(slots), info, "step"), 1)
    return after.results(1)[0]


def test_the_numbers_of_aggregates_may_change_and_their_kind_may_not():
    assert carried_over(quantile("x", 0.0), quantile("x", 1.0)) == pytest.approx(3, rel=0.01)
    assert carried_over(collect("x", limit=3), collect("x", limit=9)) == [1, 2, 3]
    with pytest.raises(StateError, match="another aggregate"):
        carried_over(first("x"), last("x"))
