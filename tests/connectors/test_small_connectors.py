"""Lists, printing, collecting, calling a function, forgetting."""

from __future__ import annotations

import asyncio
import io
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors import (
    Crash,
    Pause,
    blackhole,
    collect,
    csv_sink,
    from_list,
    function_sink,
    print_sink,
)
from headgate.connectors.collections import MarkerCrash
from headgate.connectors.sinks import PrintWriter
from headgate.errors import StateError, UsageError
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.operators.sink import Sink, SinkOperator
from headgate.state.snapshot import RestoredState
from headgate.testing.connectors import (
    check_sink,
    check_source,
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.tests.support.clocks import MovedClock

ROWS = [{"id": i, "name": f"n{i}"} for i in range(10)]
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
COLUMNS = ColumnBatch(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("batch_rows", [1, 4])
def test_list_every_position(splits: int, batch_rows: int) -> None:
    options: dict[str, Any] = {"splits": splits, "batch_rows": batch_rows}
    asyncio.run(check_source(from_list([3, "b", None, (1, 2)] * 3, **options)))
    asyncio.run(check_source(from_list(ROWS, schema=SCHEMA, **options)))


def test_list_keeps_its_order_and_projects() -> None:
    assert asyncio.run(read_all(from_list(["a", "b", "c"], batch_rows=2))) == ["a", "b", "c"]
    narrow = from_list(ROWS, schema={"id": "int64", "name": "string"}).with_columns(["name"])
    assert asyncio.run(read_all(narrow)) == [{"name": row["name"]} for row in ROWS]
    assert asyncio.run(read_all(from_list([]))) == []


def test_crash_marker_fires_in_the_first_attempts_only() -> None:
    source = from_list([1, 2, Crash(attempts=2), 3])

    async def run(attempt: int, splits: list[bytes]) -> tuple[list[Any], list[bytes], bool]:
        reader = open_reader(source, splits, make_context(attempt=attempt))
        records: list[Any] = []
        try:
            while not reader.finished:
                for batch in await read_batches(reader, 1):
                    records += records_of(batch)
        except MarkerCrash:
            return records, reader.snapshot(), True
        return records, reader.snapshot(), False

    records, positions, crashed = asyncio.run(run(1, source.splits(1)))
    assert (records, crashed) == ([1, 2], True)
    assert asyncio.run(run(2, positions))[::2] == ([], True)
    assert asyncio.run(run(3, positions)) == ([3], [], False)


def test_pause_marker_holds_back_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock(5.0)
    slept: list[float] = []

    async def sleep(delay: float) -> None:
        slept.append(delay)
        clock.now_s += delay

    monkeypatch.setattr(asyncio, "sleep", sleep)
    source = from_list([1, Pause("2s"), 2])

    async def run() -> list[Any]:
        reader = open_reader(source, source.splits(1), make_context(clock=clock))
        return [records_of(batch) for batch in await read_batches(reader)]

    assert asyncio.run(run()) == [[1], [2]]
    assert sum(slept) == 2


def written(writer: Any, batch: Any, **context: Any) -> None:
    writer.open(make_context(**context))
    writer.write(batch)


def test_print_lines() -> None:
    out = io.StringIO()
    written(PrintWriter(24, out), COLUMNS.slice(0, 1))
    written(PrintWriter(24, out), ObjectBatch(["x" * 50]), subtask_index=1, parallelism=2)
    assert out.getvalue() == "id=0, name=n0\n" + "2> " + "x" * 18 + "...\n"


def test_print_goes_to_the_current_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    written(print_sink().writer(), ObjectBatch([1, (2, 3)]))
    assert capsys.readouterr().out == "1\n(2, 3)\n"
    with pytest.raises(UsageError):
        print_sink(width=3)


def test_function_gets_each_record() -> None:
    seen: list[Any] = []
    written(function_sink(seen.append).writer(), ObjectBatch([1, 2]))
    written(function_sink(lambda row: seen.append((row.id, row["name"]))).writer(), COLUMNS)
    assert seen == [1, 2, *((row["id"], row["name"]) for row in ROWS)]


@pytest.mark.parametrize(
    "make",
    [
        lambda given: print_sink(guarantee=given),
        lambda given: blackhole(guarantee=given),
        lambda given: collect(guarantee=given),
        lambda given: function_sink(print, guarantee=given),
    ],
)
def test_a_guarantee_misspelt_is_refused_with_what_was_meant(make: Any) -> None:
    with pytest.raises(UsageError, match="no such guarantee guarantee=`exactly-once`") as caught:
        make("exactly-once")
    assert "exactly_once" in caught.value.fix


def test_a_function_sink_takes_functions_only() -> None:
    with pytest.raises(UsageError, match="takes a function, got `int`"):
        function_sink(3)  # type: ignore[arg-type]


def test_blackhole_takes_anything() -> None:
    operator = SinkOperator(blackhole(guarantee="exactly_once"))
    context = make_context()
    context.run_in_thread = lambda call: call()
    operator.open(context)
    operator.process(COLUMNS, 0)
    snapshot = operator.snapshot(1)
    assert snapshot is not None
    assert [cut.items() for cut in snapshot.items.values()] == [[]]  # type: ignore[operator]
    operator.close()


def opened(sink: Sink, restored_checkpoint: int = 0) -> SinkOperator:
    operator = SinkOperator(sink)
    context = make_context(operator_name="out", restored_checkpoint=restored_checkpoint)
    context.run_in_thread = lambda call: call()
    operator.open(context)
    return operator


def snapshot_of(sink: Sink) -> RestoredState:
    """Return the items of the sink in checkpoint 1, not committed yet."""
    operator = opened(sink)
    operator.process(COLUMNS, 0)
    snapshot = operator.snapshot(1)
    assert snapshot is not None
    items = {name: cut.items() for name, cut in snapshot.items.items()}  # type: ignore[operator]
    return RestoredState(items=items)


def test_a_sink_of_another_kind_does_not_take_over_what_is_to_be_committed(tmp_path: Path) -> None:
    files = partial(csv_sink, tmp_path / "out", guarantee="exactly_once")
    state = snapshot_of(files())
    for sink in (collect(guarantee="exactly_once"), blackhole()):
        with pytest.raises(StateError, match="sink `out` is a .*, and was a FileSink") as refused:
            opened(sink, restored_checkpoint=1).restore(state)
        assert "give the new sink another name" in refused.value.fix
    assert list((tmp_path / "out").glob("*.csv")) == []
    opened(files(), restored_checkpoint=1).restore(state)
    assert len(list((tmp_path / "out").glob("*.csv"))) == 1


def test_a_sink_that_left_nothing_to_commit_may_be_replaced() -> None:
    opened(collect(guarantee="exactly_once"), 1).restore(snapshot_of(blackhole()))


@pytest.mark.parametrize("in_files", [False, True])
def test_collect_is_exactly_once(tmp_path: Path, in_files: bool) -> None:
    path = str(tmp_path / "collected") if in_files else None
    sinks = [collect(path=path, guarantee="exactly_once")]

    def reset() -> None:
        shutil.rmtree(tmp_path / "collected", ignore_errors=True)
        sinks.append(collect(path=path, guarantee="exactly_once"))

    asyncio.run(
        check_sink(
            lambda: sinks[-1],
            [COLUMNS.slice(0, 2), ObjectBatch([1, "a"]), COLUMNS.slice(2, 1)],
            lambda: sinks[-1].rows,
            reset,
        )
    )


@pytest.mark.parametrize("in_files", [False, True])
def test_collect_shows_records_at_once(tmp_path: Path, in_files: bool) -> None:
    sink = collect(path=str(tmp_path)) if in_files else collect()
    other = collect()
    assert sink.rows == []
    written(sink.writer(), COLUMNS)
    written(sink.writer(), ObjectBatch([1]), subtask_index=1)
    assert sink.rows == [*ROWS, 1]
    assert other.rows == []
