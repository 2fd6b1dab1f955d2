"""Failed records are counted, and every failure has its record."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import StateError
from headgate.operators.base import OperatorContext
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.functions.dead_letters import DeadLetters, OnError
from headgate.operators.functions.user_code import user_error
from headgate.operators.origin import Origin
from headgate.operators.per_record.base import UserFunction
from headgate.operators.per_record.operators import MapOperator
from headgate.operators.rows import RowReader
from headgate.tests.support.operators import operator_context

ORIGIN = Origin("job.py:5", "the line")


class Surroundings:
    """An output and metrics that remember."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.main: list[Any] = []
        self.failed: list[Any] = []

    def counter(self, name: str) -> Any:
        def inc(amount: int = 1) -> None:
            self.counts[name] = self.counts.get(name, 0) + amount

        return SimpleNamespace(inc=inc)

    def emit(self, batch: Any) -> None:
        self.main += batch.records

    def emit_side(self, tag: str, batch: Any) -> None:
        assert tag == "failed"
        self.failed += batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records

    @property
    def context(self) -> OperatorContext:
        return operator_context(metrics=self)


def run(function: Any, policy: OnError, records: list[Any]) -> Surroundings:
    around = Surroundings()
    user = UserFunction(function, "step", ORIGIN, RowReader(None, None, function), on_error=policy)
    operator = MapOperator(user)
    operator.output = around  # type: ignore[assignment]
    operator.open(around.context)
    operator.process(ObjectBatch(records, np.arange(len(records))), 0)
    return around


def invert(n: float) -> float:
    return 1 / n


def test_dropped_records_are_counted() -> None:
    around = run(invert, OnError("drop"), [1, 0, 2, 0])
    assert around.main == [1, 0.5]
    assert around.failed == []
    assert around.counts == {"failed_records": 2, "failed_records_dropped": 2}


def test_records_kept_apart_are_counted_but_not_as_dropped() -> None:
    around = run(invert, OnError("side_output"), [1, 0, 2, 0])
    assert [letter.record for letter in around.failed] == [0, 0]
    assert [str(letter.event_time) for letter in around.failed] == [
        "1970-01-01 00:00:00.001000+00:00", "1970-01-01 00:00:00.003000+00:00",
    ]  # fmt: skip
    assert around.failed[0].origin == "job.py:5"
    assert around.counts == {"failed_records": 2}


@pytest.mark.parametrize("retries", [0, 2])
def test_the_end_of_an_iterator_is_a_failure_like_others(retries: int) -> None:
    def function(n: int) -> int:
        return next(iter([n] if n else []))

    around = run(function, OnError("side_output", retries=retries), [1, 0, 2, 0])
    assert around.main == [1, 2]
    assert [letter.error_type for letter in around.failed] == ["StopIteration"] * 2


def test_errors_of_headgate_are_no_dead_letters() -> None:
    def function(n: int) -> int:
        raise StateError("state is not what it was")

    with pytest.raises(StateError):
        run(function, OnError("drop"), [1])


class Worse(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_that_cannot_say_what_it_is() -> None:
    around = Surroundings()
    letters = DeadLetters("step", ORIGIN, OnError("side_output"))
    letters.open(around.context, around)  # type: ignore[arg-type]
    letters.take(ObjectBatch([1]), [Worse()])
    assert around.failed[0].error == "<its text raised RuntimeError>"
    error = user_error("step", ORIGIN, 1, Worse())
    assert "raised Worse: <its text raised RuntimeError> record=`1`" in str(error)


@pytest.mark.parametrize("columns", [True, False])
def test_a_text_with_what_no_column_takes(columns: bool) -> None:
    """Such as the name of a file that is not UTF-8."""
    around = Surroundings()
    letters = DeadLetters("step", ORIGIN, OnError("side_output"))
    letters.open(around.context, around)  # type: ignore[arg-type]
    record = ColumnBatch(pa.record_batch({"n": [1]})) if columns else ObjectBatch([1])
    letters.take(record, [ValueError("no \udcff é")])
    (letter,) = around.failed
    assert (letter["error"] if columns else letter.error) == "no \\udcff é"


@pytest.mark.parametrize("time", [2**53, -(2**62)])
def test_an_event_time_that_no_datetime_holds(time: int) -> None:
    """Such as one in microseconds: a reason for a dead letter, not for a failure."""
    around = Surroundings()
    letters = DeadLetters("step", ORIGIN, OnError("side_output"))
    letters.open(around.context, around)  # type: ignore[arg-type]
    letters.take(ObjectBatch([1, 2], np.array([time, 0])), [ValueError()] * 2)
    assert [letter.event_time for letter in around.failed] == [
        None,
        datetime(1970, 1, 1, tzinfo=UTC),
    ]


@given(
    failures=st.lists(st.integers(0, 3), max_size=30),
    retries=st.integers(0, 3),
    fail=st.booleans(),
)
def test_each_record_is_called_for_as_often_as_it_must(
    failures: list[int], retries: int, fail: bool
) -> None:
    """Against a model, record by record."""
    calls = [0] * len(failures)

    def function(place: int) -> int:
        calls[place] += 1
        if calls[place] <= failures[place]:
            raise ValueError(f"{place}: {calls[place]}")
        return place * 10

    lost = [place for place, count in enumerate(failures) if count > retries]
    if fail and lost:
        with pytest.raises(Exception, match=f"ValueError: {lost[0]}: {retries + 1}"):
            run(function, OnError("fail", retries), list(range(len(failures))))
        assert calls[lost[0] + 1 :] == [0] * (len(failures) - lost[0] - 1)
        return
    policy = OnError("fail" if fail else "side_output", retries)
    around = run(function, policy, list(range(len(failures))))
    assert around.main == [p * 10 for p in range(len(failures)) if p not in lost]
    assert [(x.record, x.error) for x in around.failed] == [
        (place, f"{place}: {retries + 1}") for place in lost
    ]
    assert calls == [min(count, retries) + 1 for count in failures]
