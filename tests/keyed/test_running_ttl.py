"""Running aggregates whose keys expire, under both state backends, against a dict with times."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import PlanError, StateError
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.expiring_group import ExpiringGroup
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch
from headgate.state.snapshot import RestoredState
from headgate.tests.support.operators import ManualClock, in_place, operator_context
from headgate.tests.support.subtasks import Step, steps, streams

__all__ = ["steps"]
Steps = Callable[..., Step]
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("text", pa.string())])


def sums(ttl: Any, key: str = "k") -> Any:
    columns = streams()[0].map(lambda record: record, into=SCHEMA)
    return columns.key_by(key).agg(
        total=hg.sum("n"),
        last=hg.last("text"),
        kinds=hg.count_distinct("text"),
        name="sum",
        ttl=ttl,
    )


def batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(one, field.type) for one, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class Model:
    """The records of each key since it began, and when it was last used."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.keys: dict[Any, tuple[list[tuple[int, str]], int]] = {}

    def add(self, rows: list[tuple[Any, int, str]], now: int) -> set[tuple[Any, ...]]:
        """Return the results of a batch."""
        for key, n, text in rows:
            seen, used = self.keys.get(key, ([], now))
            if used <= now - self.ttl_ms:
                seen = []
            self.keys[key] = ([*seen, (n, text)], now)
        found = set()
        for key in {row[0] for row in rows}:
            seen, _ = self.keys[key]
            found.add((key, sum(n for n, _ in seen), seen[-1][1], len({t for _, t in seen})))
        return found


@pytest.mark.parametrize("seed", range(12))
def test_aggregates_are_those_of_the_model(steps: Steps, seed: int) -> None:
    rng = random.Random(seed)
    ttl_ms = rng.choice([1, 2, 1_000])
    model, step = Model(ttl_ms), steps(sums(f"{ttl_ms}ms"), rng.randint(1, 3))
    for _ in range(80):
        rows = [
            (f"k{rng.randrange(9)}", rng.randrange(10), f"t{rng.randrange(4)}")
            for _ in range(rng.randrange(7))
        ]
        expected = model.add(rows, step.clock.ms)
        step.push_columns(batch(rows), key="k")
        assert {tuple(row.values()) for row, _ in step.take()} == expected
        step.clock.advance(rng.choice([0, 1, 300, 500, 999, 1_000]))
        if rng.random() < 0.15:
            step.restart(rng.randint(1, 3))


def keyed(operator: Any) -> dict[Any, tuple[int, int]]:
    """Total and last use of each key in the snapshot of an operator."""
    snapshot = operator.snapshot(1)
    tables = [cut.make(None) for cut in snapshot.tables.values()]
    for cut in snapshot.files.values():
        tables += list(cut.tables())
        cut.release()
    found = {}
    for table in tables:
        used = table.column("last_used").cast(pa.int64()).to_pylist()
        for row, at in zip(table.to_pylist(), used, strict=True):
            assert row["k"] not in found
            found[row["k"]] = (row["total"], at)
    return found


def test_snapshots_leave_out_what_has_expired(steps: Steps) -> None:
    step = steps(sums("1s"))
    start = step.clock.ms
    step.push_columns(batch([("a", 1, "x"), ("b", 1, "x")]))
    step.clock.advance(600)
    step.push_columns(batch([("a", 2, "x")]))
    (operator,) = step.operators
    assert keyed(operator) == {"a": (3, start + 600), "b": (1, start)}
    step.clock.advance(400)
    assert keyed(operator) == {"a": (3, start + 600)}
    step.clock.advance(600)
    assert keyed(operator) == {}


def test_switched_on_what_is_there_counts_as_used_at_the_restore(steps: Steps) -> None:
    """The error about run files says that a savepoint in canonical format is needed."""
    step = steps(sums(None))
    step.push_columns(batch([("a", 1, "x")]))
    step.clock.advance(10_000)
    if step.operators[0]._spilling is not None:
        with pytest.raises(StateError, match="change them with a canonical savepoint"):
            step.restart(stream=sums("1s"))
        return
    step.restart(stream=sums("1s"))
    step.clock.advance(999)
    step.push_columns(batch([("a", 2, "x")]))
    step.clock.advance(1_000)
    step.push_columns(batch([("a", 4, "x")]))
    assert [row["total"] for row, _ in step.take()] == [1, 3, 4]


def test_switched_off_what_is_there_stays(steps: Steps) -> None:
    step = steps(sums("1s"))
    step.push_columns(batch([("a", 1, "x")]))
    if step.operators[0]._spilling is not None:
        with pytest.raises(StateError, match="change them with a canonical savepoint"):
            step.restart(stream=sums(None))
        return
    step.restart(stream=sums(None))
    step.clock.advance(10_000)
    step.push_columns(batch([("a", 2, "x")]))
    assert [row["total"] for row, _ in step.take()] == [1, 3]


def test_the_duration_can_change(steps: Steps) -> None:
    step = steps(sums("1s"))
    step.push_columns(batch([("a", 1, "x"), ("b", 1, "x")]))
    step.clock.advance(900)
    step.restart(stream=sums("2s"))
    step.clock.advance(900)
    step.push_columns(batch([("a", 2, "x")]))
    step.restart(stream=sums("500ms"))
    step.push_columns(batch([("b", 2, "x")]))
    assert [row["total"] for row, _ in step.take()][2:] == [3, 2]


NUMBERS = pa.schema([("k", pa.int64()), ("n", pa.int64())])


def numbers(keys: Any, n: int = 1) -> ColumnBatch:
    keys = np.asarray(keys, np.int64)
    columns = [pa.array(keys), pa.array(np.full(len(keys), n))]
    return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=NUMBERS))


class Sink:
    def emit(self, batch: Any) -> None:
        pass


def opened(clock: ManualClock, tmp_path: Any = None, **options: str) -> RunningAggregate:
    plan = AggregatePlan(("k",), {"total": hg.sum("n")}, NUMBERS, ttl_ms=1_000)
    operator = RunningAggregate(plan)
    operator.output = Sink()  # type: ignore[assignment]
    operator.open(
        operator_context(
            clock=clock,
            timers=clock,
            run_in_thread=in_place,
            options=options,
            local_directory=lambda: tmp_path,
        )
    )
    return operator


def group_of(operator: RunningAggregate) -> ExpiringGroup:
    group = operator._expiring
    assert group is not None
    return group


def test_keys_in_memory_are_those_of_the_last_while() -> None:
    """However many keys come: those that have expired are dropped, with records and without."""
    clock = ManualClock()
    operator = opened(clock)
    for low in range(0, 1_000_000, 10_000):
        operator.process(numbers(np.arange(low, low + 10_000)), 0)
        clock.advance(100)
        assert group_of(operator).keys <= 160_000
    clock.advance(3_000)
    assert group_of(operator).keys == 0
    operator.close()
    assert not clock.waiting


def test_keys_in_constant_use_are_held_few_times() -> None:
    clock = ManualClock()
    operator = opened(clock)
    for _ in range(50):
        operator.process(numbers(np.arange(1_000)), 0)
        clock.advance(100)
        group = group_of(operator)
        assert group.keys == 1_000
        assert len(group._older) <= 3
    operator.close()


def test_a_delta_has_what_changed_and_each_key_once() -> None:
    """A key that moves to another generation after a cut is in that cut where it was."""
    clock, rng = ManualClock(), random.Random(3)
    operator = opened(clock)
    state: dict[int, tuple[int, int]] = {}
    stored: dict[int, tuple[int, int]] = {}
    previous = 0
    for step in range(60):
        cut = operator.snapshot(step).tables["running"]
        expected = dict(state)
        now, keys = clock.ms, rng.sample(range(40), 10)
        for key in keys:
            total, used = state.get(key, (0, now))
            state[key] = (1 if used <= now - 1_000 else total + 1, now)
        operator.process(numbers(keys), 0)  # after the cut, before it is read
        since = previous if step % 7 else None
        table = cut.make(since)
        used = table.column("last_used").cast(pa.int64()).to_pylist()
        rows = {
            k: (t, u)
            for k, t, u in zip(
                table["k"].to_pylist(), table["total"].to_pylist(), used, strict=True
            )
        }
        assert len(rows) == table.num_rows
        stored = rows if since is None else stored | rows
        previous = cut.epoch
        alive = {k: v for k, v in expected.items() if v[1] > now - 1_000}
        assert {k: v for k, v in stored.items() if v[1] > now - 1_000} == alive
        if since is None:
            assert stored == alive
        clock.advance(rng.choice([10, 200, 400, 700]))
    operator.close()


def test_merges_on_disk_leave_out_what_has_expired(tmp_path: Any) -> None:
    clock = ManualClock()
    options = {"state.backend.type": "rocksdb", "taskmanager.memory.managed.size": "64kb"}
    operator = opened(clock, tmp_path, **options)
    for low in range(0, 200_000, 2_000):
        operator.process(numbers(np.arange(low, low + 2_000)), 0)
        clock.advance(100)
    spilling = operator._spilling
    assert spilling is not None
    spilling.table.flush()
    spilling.table.wait_for_flush()
    while spilling.table.poll():
        pass
    assert sum(len(run) for run in spilling.table._runs.version.runs) < 100_000
    cut = operator.snapshot(1).files["running"]
    assert sum(table.num_rows for table in cut.tables()) <= 20_000
    cut.release()
    operator.close()


def test_a_canonical_table_changes_the_backend_and_the_time_to_live(tmp_path: Any) -> None:
    clock = ManualClock()
    before = opened(clock)
    before.process(numbers([1, 2]), 0)
    clock.advance(500)
    before.process(numbers([2]), 0)
    clock.advance(500)
    table = before.snapshot(1).tables["running"].make(None)
    assert table.num_rows == 1
    disk = opened(clock, tmp_path, **{"state.backend.type": "rocksdb"})
    infos = {"running": before.states()[0]}
    disk.restore(RestoredState(tables={"running": table.drop_columns(["last_used"])}, states=infos))
    clock.advance(999)
    disk.process(numbers([2]), 0)
    cut = disk.snapshot(1).files["running"]
    assert pa.concat_tables(cut.tables()).to_pydict()["total"] == [3]
    cut.release()
    disk.close()


def test_what_cannot_be() -> None:
    columns = streams()[0].map(lambda record: record, into=SCHEMA).key_by("k")
    with pytest.raises(PlanError, match="`ttl` is the time to live of the keys"):
        columns.agg(ttl=hg.count(), name="x")
    with pytest.raises(PlanError, match="two columns are called `last_used`"):
        columns.agg(last_used=hg.count(), ttl="1s", name="x")
    with pytest.raises(PlanError, match="time=`processing` only"):
        columns.agg(n=hg.count(), ttl=hg.StateTtl("1s", time="event"), name="x")
