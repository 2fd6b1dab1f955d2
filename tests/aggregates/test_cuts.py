"""What a thread reads of a cut stays as it is until it has read all of it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headgate.operators.aggregates import collect, count_distinct

from .conftest import Aggregated

WORDS = pa.schema([("x", pa.string())])


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
