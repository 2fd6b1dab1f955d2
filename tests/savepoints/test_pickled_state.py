"""Pickled state: named at plan time, typed where a type is declared, and refused by option, unread."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.connectors import collect, from_list, numbers
from headgate.errors import PlanError, StateError
from headgate.operators.aggregation.reduce import ReduceOperator
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.loops.stored import encode, restored
from headgate.runtime.cli.app import app
from headgate.runtime.exchange.channel_state import InFlightRecords
from headgate.runtime.job import runnable
from headgate.runtime.worker.channels import recovered_batches
from headgate.state.keyed.descriptors import AggregatingState, ReducingState
from headgate.state.snapshot import ChannelAddress, RestoredState, StateHandle

OPTION = "headgate.state.allow-pickle"


class Canary:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.directory), 0o777, True)


class Remembers(hg.KeyedProcess[int, int, int]):
    last = hg.ValueState()  # type: ignore[var-annotated]
    seen = hg.OperatorListState[Any]()

    def __init__(self, path: Path) -> None:
        self.sung = path / "sung"

    def on_record(self, record: int, ctx: hg.Context[int]) -> list[int]:
        self.last.set(Canary(self.sung))
        self.seen.add(Canary(self.sung))
        return [record]


class Declares(hg.KeyedProcess[int, int, int]):
    last = hg.ValueState[int]()
    seen = hg.OperatorListState[int]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> list[int]:
        return [record]


class Annotates(Declares):
    """The types in the annotations of the attributes, which are texts in this module."""

    first: hg.ValueState[int] = hg.ValueState()
    counts: ClassVar[hg.MapState[str, int]] = hg.MapState()


def job_of(function: Any, path: Path, rate: float | None = None, **options: str) -> hg.Job:
    job = hg.Job("pickles", options={key.replace("__", "."): v for key, v in options.items()})
    job.checkpoint(every="50ms", storage=str(path))
    stream = job.read(numbers(5000, rate=rate, batch_rows=20), name="numbers").key_with(
        lambda number: number
    )
    stream.process(function, name="remember").write(collect(guarantee="none"), name="out")
    return job


def test_the_annotation_of_an_attribute_declares_its_type(tmp_path: Path) -> None:
    job = job_of(Annotates(), tmp_path, **{OPTION: "false"})
    assert "pickled" not in str(job.explain())


def test_the_option_refuses_state_of_no_declared_type_at_plan_time(tmp_path: Path) -> None:
    job = job_of(Remembers(tmp_path), tmp_path, **{OPTION: "false"})
    with pytest.raises(PlanError) as caught:
        job.explain()
    text = str(caught.value)
    assert (
        f"state of `remember` would be pickled, and {OPTION} is false states=`last, seen`" in text
    )
    assert "last = hg.ValueState[int]()" in text
    assert "test_pickled_state.py" in text
    job_of(Declares(), tmp_path, **{OPTION: "false"}).explain()


def test_explain_and_validate_name_pickled_state(tmp_path: Path) -> None:
    explained = job_of(Remembers(tmp_path), tmp_path).explain()
    assert "pickled state\n  remember: last, seen  (declare its type, such as last = " in explained
    assert "pickled state" not in job_of(Declares(), tmp_path).explain()
    file = tmp_path / "job.py"
    file.write_text(
        "import headgate as hg\n"
        "from headgate.connectors import from_list, collect\n"
        "job = hg.Job('j')\n"
        "numbers = job.read(from_list([1]), name='n').key_with(lambda n: n)\n"
        "numbers.reduce(lambda a, b: a + b, name='sum').write(collect(guarantee='none'), name='o')\n"
    )
    done = CliRunner().invoke(app, ["validate", str(file)])
    assert done.exit_code == 0
    assert "note: state is pickled, since its type is not known. sum: reduce" in done.output
    assert "annotate the type that the function returns" in done.output


def test_a_restore_is_refused_by_name_and_nothing_is_unpickled(lab: Any, tmp_path: Path) -> None:
    async def stop(running: Any) -> None:
        await running.checkpoint()
        await running.request("stop")

    lab.run(job_of(Remembers(tmp_path), lab.path, rate=400), stop)
    (tmp_path / "sung").rmdir()  # a snapshot copies the values
    ran = lab.run(job_of(Declares(), lab.path, **{OPTION: "false"}))
    error = str(ran.outcome.error)
    assert isinstance(ran.outcome.error, StateError)
    assert "holds pickled state" in error
    assert "states=`remember.last, remember.seen`" in error
    assert not ran.job.texts("restart")
    assert not (tmp_path / "sung").exists()


def test_committables_loops_calls_and_records_on_their_way(tmp_path: Path) -> None:
    def refused(build: Any, **options: str) -> str:
        job = hg.Job("j", options={OPTION: "false", **options})
        build(job, job.read(from_list([1, 2]), name="numbers"))
        with pytest.raises(PlanError) as caught:
            job.explain()
        return str(caught.value)

    exactly = collect(guarantee="exactly_once")
    assert "`out` would be pickled" in refused(lambda _, s: s.write(exactly, name="out"))

    async def call(number: int) -> int:
        return number

    none = collect(guarantee="none")
    text = refused(lambda _, s: s.map_async(call, name="ask").write(none, name="out"))
    assert "`ask` would be pickled" in text
    unaligned = {"execution.checkpointing.unaligned.enabled": "true"}
    text = refused(lambda _, s: s.rebalance().write(none, name="out"), **unaligned)
    assert "records of `numbers` are Python objects" in text


def test_a_loop_of_columns_does_not_unpickle_what_a_checkpoint_calls_a_batch(
    tmp_path: Path,
) -> None:
    forged = encode(ObjectBatch([Canary(tmp_path / "sung")]), "loop")
    with pytest.raises(StateError, match="loop is now of columns"):
        restored(forged, pa.schema([("n", pa.int64())]), "loop")
    assert not (tmp_path / "sung").exists()


def test_records_on_their_way_are_not_unpickled(tmp_path: Path) -> None:
    sung = tmp_path / "sung"
    job = hg.Job("j", parallelism=2)
    numbers = job.read(from_list([1]), name="numbers")
    numbers.rebalance().write(collect(guarantee="none"), name="out")
    plan = runnable(job).spec().plan
    channel = ChannelAddress(
        source="numbers", side="", target="out", input_index=0, sender=0, receiver=0
    )
    records = InFlightRecords()
    records.add(channel, ObjectBatch([Canary(sung)]))
    ((_, data, rows),) = records.encoded()
    handle = StateHandle(
        state="input", kind="input", size_bytes=1, checksum="", rows=rows, channel=channel
    )
    vertex = next(vertex for vertex in plan.vertices if vertex.head.name == "out")
    with pytest.raises(StateError, match=r"are pickled.*from=`numbers` to=`out`"):
        recovered_batches(plan, vertex, 0, [(handle, data)], before=2, allow_pickle=False)
    assert not sung.exists()
    recovered_batches(plan, vertex, 0, [(handle, data)], before=2, allow_pickle=True)
    assert sung.exists()


class Total(msgspec.Struct):
    n: int


class Event(msgspec.Struct):
    key: int
    n: float


def keep_larger(value: Event, record: Event) -> Event:
    return value if value.n > record.n else record


def add(value: Total, record: Total) -> Total:
    return Total(value.n + record.n)


class Mean:
    def create(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, accumulator: tuple[float, int], value: float) -> tuple[float, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def result(self, accumulator: tuple[float, int]) -> float:
        return accumulator[0] / accumulator[1]


class Infers(hg.KeyedProcess[int, int, int]):
    total = ReducingState(add)
    mean = AggregatingState(Mean())

    def on_record(self, record: int, ctx: hg.Context[int]) -> list[int]:
        return [record]


def test_types_are_taken_from_the_annotations_of_functions(tmp_path: Path) -> None:
    explained = job_of(Infers(), tmp_path, **{OPTION: "false"}).explain()
    assert "pickled" not in explained
    job = hg.Job("j", options={OPTION: "false"})
    totals = job.read(from_list([Total(1), Total(2)]), name="t").key_with(lambda t: t.n)
    totals.reduce(add, name="sum").write(collect(guarantee="none"), name="out")
    assert "pickled" not in job.explain()


def reduced(operator: ReduceOperator, *records: Any) -> list[Any]:
    """Return the results for some records."""
    made: list[Any] = []
    operator.output = SimpleNamespace(emit=lambda batch: made.extend(to_list_of(batch)))  # type: ignore[assignment]
    for record in records:
        operator.process(record, 0)
    return made


def to_list_of(batch: Any) -> list[Any]:
    return batch.data.to_pylist() if isinstance(batch, ColumnBatch) else list(batch.records)


def opened(operator: ReduceOperator) -> ReduceOperator:
    operator.open(SimpleNamespace(max_parallelism=16, options={}))  # type: ignore[arg-type]
    return operator


def carried(before: ReduceOperator, after: ReduceOperator) -> pa.Table:
    """The state of one operator in another; returns its table."""
    table = before.snapshot(1).tables["reduce"].make(None)
    infos = {info.name: info for info in before.states()}
    opened(after).restore(RestoredState(tables={"reduce": table}, states=infos))
    return table


def test_reduce_of_an_annotated_function_is_a_column_and_loads_what_was_pickled() -> None:
    def key(record: Event) -> int:
        return record.key

    untyped = opened(ReduceOperator(lambda a, b: keep_larger(a, b), key))
    reduced(untyped, ObjectBatch([Event(1, 2.0), Event(1, 5.0), Event(2, 1.0)]))
    typed = ReduceOperator(keep_larger, key)
    assert typed.pickled_states() == []
    old = carried(untyped, typed)
    assert old.schema.field("value").type == pa.binary()
    again = ReduceOperator(keep_larger, key)
    table = carried(typed, again)
    assert table.column("value").to_pylist() == [
        {"key": k, "n": n} for k, n in ((1, 5.0), (2, 1.0))
    ]
    assert reduced(again, ObjectBatch([Event(1, 3.0), Event(2, 3.0)])) == [
        Event(1, 5.0),
        Event(2, 3.0),
    ]


def test_reduce_of_columns_is_stored_as_columns_and_rounds_nothing() -> None:
    schema = pa.schema([("k", pa.string()), ("x", pa.float32()), ("at", pa.timestamp("ms", "UTC"))])

    def total(value: Any, record: Any) -> Any:
        return type(value)(value.k, value.x + record.x, record.at)

    def batch(*values: float) -> ColumnBatch:
        rows = [{"k": "a", "x": value, "at": datetime(2026, 1, 1, tzinfo=UTC)} for value in values]
        return ColumnBatch(pa.RecordBatch.from_pylist(rows, schema=schema))

    straight = opened(ReduceOperator(total, ["k"], schema=schema))
    expected = reduced(straight, batch(0.1, 16_777_216.5, 1.25), batch(0.25, 0.5))
    before = opened(ReduceOperator(total, ["k"], schema=schema))
    made = reduced(before, batch(0.1, 16_777_216.5, 1.25))
    after = ReduceOperator(total, ["k"], schema=schema)
    assert after.pickled_states() == []
    table = carried(before, after)
    assert table.schema.field("value").type.field("x").type == pa.float64()
    assert made + reduced(after, batch(0.25, 0.5)) == expected


def test_a_value_of_another_type_than_the_annotated_one_fails_the_checkpoint_with_the_reason() -> (
    None
):
    operator = opened(ReduceOperator(add, lambda record: 1, step="sum"))
    reduced(operator, ObjectBatch([5]))
    with pytest.raises(
        StateError, match=r"cannot be stored as struct.*step=`sum` key=`1`.*Total, not int"
    ):
        operator.snapshot(1).tables["reduce"].make(None)
