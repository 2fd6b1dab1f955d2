"""Reduce with values that its function changes in place, while threads write snapshots of them."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import from_list
from headgate.errors import PlanError, StateError
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.elements import ObjectBatch
from headgate.operators.origin import Origin
from headgate.runtime.options.recovery import KEEP_STATE
from headgate.state.keyed.keys import encode_key
from headgate.state.snapshot import RestoredState
from headgate.tests.support.threads import begun


class Numbers:
    """A value that is changed in place, and grows while it is pickled."""

    def __init__(self, key: int, number: int) -> None:
        self.key = key
        self.numbers = [number]
        self.seen = {number: number}


def absorb(value: Numbers, record: Numbers) -> Numbers:
    value.numbers += record.numbers
    value.seen[len(value.seen) + 10**6] = record.numbers[0]
    return value


def started(state: RestoredState | None = None) -> Any:
    operator = ReduceOperator(absorb, lambda record: record.key, origin=Origin("job.py:7"))
    operator.output = SimpleNamespace(emit=lambda batch: None)
    operator.open(SimpleNamespace(max_parallelism=16, options={}))
    if state is not None:
        operator.restore(state)
    return operator


def content(table: pa.Table) -> dict[int, list[int]]:
    values = [pickle.loads(value) for value in table["value"].to_pylist()]
    for value in values:
        assert len(value.seen) == len(value.numbers), "a torn value"
    return {value.key: value.numbers for value in values}


def test_cuts_deltas_and_restore() -> None:
    operator, rng = started(), random.Random(5)
    model: dict[int, list[int]] = {}

    def work(batches: int) -> None:
        for _ in range(batches):
            pairs = [(rng.randrange(400), rng.randrange(100)) for _ in range(200)]
            for key, number in pairs:
                model.setdefault(key, []).append(number)
            operator.process(ObjectBatch([Numbers(*pair) for pair in pairs]), 0)

    def cut() -> Any:
        return operator.snapshot(1).tables["reduce"], {k: list(v) for k, v in model.items()}

    work(5)
    base, expected = cut()
    assert base.epoch == 1
    stored = content(base.make(None))
    assert stored == expected
    for round_ in range(8):
        taken, expected = cut()
        since = taken.epoch - 1 if round_ % 2 else None
        made = begun(partial(taken.make, since))
        work(6)
        stored = (stored if since else {}) | content(made.result(30))
        assert stored == expected
        taken.confirm(taken.epoch)
    late, expected = cut()
    work(2)
    newer, expected_newer = cut()
    work(2)
    full = newer.make(None)
    assert content(full) == expected_newer
    assert content(late.make(None)) == expected
    infos = {info.name: info for info in operator.states()}
    again = started(RestoredState(tables={"reduce": full}, states=infos))
    operator = again
    model = {key: list(numbers) for key, numbers in expected_newer.items()}
    work(1)
    taken, expected = cut()
    assert taken.epoch == 2
    delta = content(taken.make(1))
    assert len(delta) < len(model)
    assert content(full) | delta == expected


def test_a_delta_has_no_keys_that_came_after_its_cut() -> None:
    """Without confirmations the changes of several cuts are known as one set."""
    operator = started()
    operator.process(ObjectBatch([Numbers(0, 0)]), 0)
    operator.snapshot(1)
    operator.process(ObjectBatch([Numbers(1, 1)]), 0)
    taken = operator.snapshot(2).tables["reduce"]
    for number in range(2, 50):
        operator.process(ObjectBatch([Numbers(number, number)]), 0)
        operator.snapshot(number + 1)
    assert content(taken.make(1)) == {1: [1]}


def test_nothing_is_logged_once_no_cut_is_open() -> None:
    operator = started()
    operator.process(ObjectBatch([Numbers(1, 1)]), 0)
    cut = operator.snapshot(1).tables["reduce"]
    assert operator._changes.newest is not None
    cut.discard()
    operator.process(ObjectBatch([Numbers(1, 1)]), 0)
    assert operator._changes.newest is None


def test_a_value_of_before_an_aborted_checkpoint_is_the_one_to_go_back_to() -> None:
    def opened() -> ReduceOperator:
        operator = ReduceOperator(lambda total, number: total + number, lambda number: "all")
        operator.output = SimpleNamespace(emit=lambda batch: None)
        options = {KEEP_STATE.key: "true"}
        operator.open(SimpleNamespace(max_parallelism=16, options=options, restored_checkpoint=1))
        return operator

    operator, taker = opened(), opened()
    operator.process(ObjectBatch([1]), 0)
    operator.snapshot(1).tables["reduce"].discard()
    for checkpoint_id in (2, 3):
        operator.process(ObjectBatch([10]), 0)
        operator.snapshot(checkpoint_id).tables["reduce"].discard()
        operator.on_checkpoint_aborted(checkpoint_id)
    operator.process(ObjectBatch([10]), 0)
    taker.restore(RestoredState(kept=operator.keep(), checkpoint_id=1))
    assert taker.query("reduce", "all") == 1


def test_a_value_that_cannot_be_pickled_fails_the_snapshot_and_not_the_records() -> None:
    """It does not matter whether the thread pickles it first, or the record that changes it."""
    operator = started()
    operator.process(ObjectBatch([Numbers(1, 1)]), 0)
    operator._values[1].lock = threading.Lock()
    cuts = [operator.snapshot(number).tables["reduce"] for number in (1, 2)]
    with pytest.raises(StateError, match=r"cannot be pickled.*key=`1`.*lock"):
        cuts[0].make(None)
    operator.process(ObjectBatch([Numbers(1, 2)]), 0)
    with pytest.raises(StateError, match=r"cannot be pickled.*key=`1`.*lock"):
        cuts[1].make(None)
    assert operator._values[1].numbers == [1, 2]


def test_a_value_whose_class_is_gone_is_said_with_step_and_line() -> None:
    table = pa.table(
        {"key_group": pa.array([0], pa.int32()), "key": [encode_key(1)], "value": [b"no pickle"]}
    )
    with pytest.raises(StateError, match="step=`reduce`") as caught:
        started(RestoredState(tables={"reduce": table}))
    assert caught.value.where == "job.py:7"


def test_a_function_that_yields_is_refused_before_anything_runs() -> None:
    def pairs(value: int, record: int) -> Iterator[int]:
        yield value + record

    keyed = hg.Job("sums").read(from_list([1, 2]), name="in").key_with(lambda record: record)
    with pytest.raises(PlanError, match="reduce needs a function that returns") as caught:
        keyed.reduce(pairs, name="sum")  # type: ignore[arg-type]
    assert "test_reduce_cuts.py" in caught.value.where
