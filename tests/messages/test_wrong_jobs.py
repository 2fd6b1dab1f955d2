"""Wrong little jobs, as a newcomer writes them: what each says, where, and what to do about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import headgate as hg
from headgate import connectors as c
from headgate.errors import HeadgateError, UsageError, UserCodeError


class Pay(msgspec.Struct):
    card: str
    n: int


class NoMethod(hg.KeyedProcess[Any, Any, Any]):
    pass


class OneArgument(hg.KeyedProcess[Any, Any, Any]):
    def on_record(self, record: Any) -> list[Any]:  # type: ignore[override]
        return []


class ReturnsOne(hg.KeyedProcess[Any, Any, Any]):
    def on_record(self, record: Any, ctx: Any) -> Any:
        return 3


async def two(first: Any, second: Any) -> Any:
    return first


def of(name: str) -> Any:
    return getattr(c, name)


def stream(job: hg.Job) -> Any:
    rows = [{"card": "a", "n": 1}, {"card": "b", "n": 2}]
    return job.read(c.from_list(rows, schema=Pay), name="in")


def timed(job: hg.Job) -> Any:
    return stream(job).event_time("n").key_by("card")


def by_card(job: hg.Job) -> Any:
    return stream(job).key_by("card")


def read(source: Callable[[], Any]) -> Callable[[hg.Job], Any]:
    return lambda job: job.read(source(), name="r")


Case = tuple[Callable[[hg.Job], Any], str, str]
AT_PLAN_TIME: dict[str, Case] = {
    # what is given is of the wrong kind
    "map of None": (lambda j: stream(j).map(None), "map needs a function, got `NoneType`", ""),
    "filter of True": (
        lambda j: stream(j).filter(True),
        "filter needs a condition, got `bool`",
        "SQL text",
    ),
    "select of a list": (
        lambda j: stream(j).select(["card"]),
        "not an expression in select type=`list`",
        "SQL",
    ),
    "key_by a list": (
        lambda j: stream(j).key_by(["card"]),
        "key_by takes the names of columns, got `list`",
        "key_by(",
    ),
    "key_by None": (
        lambda j: stream(j).key_by(None),
        "key_by takes the names of columns, got `NoneType`",
        "key_by(",
    ),
    "window of a text": (
        lambda j: timed(j).window("1m"),
        "window needs a window, got '1m'",
        "hg.tumbling(",
    ),
    "window of a number": (
        lambda j: timed(j).window(60),
        "window needs a window, got 60",
        "hg.tumbling(",
    ),
    "event_time None": (
        lambda j: stream(j).event_time(None),
        "event_time needs a column or a function",
        "event_time(",
    ),
    "time without a unit": (
        lambda j: stream(j).event_time("n", max_out_of_order=5),
        "needs a unit value=`5`",
        "30s",
    ),
    "union with None": (lambda j: stream(j).union(None), "union needs streams of the same job", ""),
    "write a function": (
        lambda j: stream(j).write(print, name="x"),
        "write needs a sink, got `builtin_f",
        "",
    ),
    "write a path": (
        lambda j: stream(j).write("out", name="x"),
        "write needs a sink, got `str`",
        "",
    ),
    "read a path": (lambda j: j.read("data.csv", name="r"), "read needs a source, got `str`", ""),
    "into an instance": (
        lambda j: stream(j).map(str, into=Pay("a", 1)),
        "not a schema value=`Pay(",
        "a dataclass",
    ),
    "into a misspelt type": (
        lambda j: stream(j).map(str, into={"a": "strin"}),
        "unknown type `strin`",
        "`string`",
    ),
    "process of a class": (
        lambda j: by_card(j).process(NoMethod, name="p"),
        "needs an instance, got the class",
        "NoMethod()",
    ),
    "process of a function": (
        lambda j: by_card(j).process(max, name="p"),
        "process needs a KeyedProcess",
        "derive",
    ),
    "an aggregate not called": (
        lambda j: by_card(j).agg(c=hg.count, name="a"),
        "`c` is not an aggregate",
        "hg.count()",
    ),
    "throttle None": (
        read(lambda: c.throttle(None, 5)),
        "throttle takes a source, got `NoneType`",
        "",
    ),  # type: ignore[type-var]
    "parallelism as text": (
        lambda j: hg.Job("x", parallelism="2"),
        "parallelism must be a whole number",
        "",
    ),
    "max parallelism as text": (
        lambda j: hg.Job("x", max_parallelism="2"),
        "max_parallelism must be a whole",
        "",
    ),
    "options as a list": (
        lambda j: hg.Job("x", options=["a"]),
        "options of a job are a mapping, got `list`",
        "options={",
    ),
    # functions that cannot be called as they will be
    "map arity": (
        lambda j: stream(j).map(lambda a, b: a),
        "map calls its function with one argument",
        "the record",
    ),
    "map arity 0": (
        lambda j: stream(j).map(lambda: 1),
        "cannot take that: too many positional",
        "the record",
    ),
    "filter arity": (
        lambda j: stream(j).filter(lambda a, b: a),
        "filter calls its function with one",
        "the record",
    ),
    "flat_map arity": (
        lambda j: stream(j).flat_map(lambda: [1]),
        "flat_map calls its function with one",
        "the record",
    ),
    "key_with arity": (
        lambda j: stream(j).key_with(lambda: 1),
        "key_with calls its function with one",
        "the record",
    ),
    "partition_with arity": (
        lambda j: stream(j).partition_with(lambda r: 0),
        "with 2 arguments",
        "the parallelism",
    ),
    "reduce arity": (
        lambda j: by_card(j).reduce(lambda a: a, name="r"),
        "reduce calls its function with 2",
        "the value so far",
    ),
    "map_batches arity": (
        lambda j: stream(j).map_batches(lambda: 1),
        "map_batches calls its function",
        "the record batch",
    ),
    "map_async arity": (
        lambda j: stream(j).map_async(two, name="m"),
        "missing a required argument: 'second'",
        "the record",
    ),
    "lookup arity": (
        lambda j: stream(j).lookup("n", two, into=Pay, name="l"),
        "lookup calls its function",
        "the key",
    ),
    "on_record arity": (
        lambda j: by_card(j).process(OneArgument(), name="p"),
        "function=`OneArgument.on_record(record)`",
        "the context",
    ),
    "no on_record": (
        lambda j: by_card(j).process(NoMethod(), name="p"),
        "`NoMethod` has no method on_record",
        "def on_record",
    ),
    "function_sink arity": (
        lambda j: c.function_sink(lambda: 1),
        "function_sink calls its function with one",
        "the record",
    ),
    "a filter that yields": (
        lambda j: stream(j).filter(lambda r: (yield r)),
        "needs a function that returns",
        "return",
    ),
    "map_async of a plain function": (
        lambda j: stream(j).map_async(len, name="m"),
        "needs an `async def` function",
        "async def",
    ),
    "lookup without into": (
        lambda j: stream(j).lookup("n", two, name="l"),
        "needs into=",
        "into={",
    ),
    # names
    "a misspelt attribute": (
        lambda j: stream(j).map(lambda r: r.crd),
        "unknown column `crd` in map",
        "`card`",
    ),
    "a misspelt column": (
        lambda j: stream(j).filter("crd = 'a'"),
        "unknown column `crd` in filter",
        "`card`",
    ),
    "a name twice": (
        lambda j: stream(j).map(str, name="in"),
        "two steps are named `in`",
        "another name",
    ),
    "no name": (lambda j: stream(j).write(c.blackhole()), "sink has no name", 'name="..."'),
    "a side that is not there": (
        lambda j: stream(j).map(str).late,
        "no side output `late`",
        "side outputs",
    ),
    "a misspelt option": (
        lambda j: hg.Job("x", options={"paralellism": "2"}).validate(),
        "unknown option",
        "parallelism.default",
    ),
    "a misspelt guarantee": (
        lambda j: c.parquet_sink("o", guarantee="exactly-once"),
        "no such guarantee",
        "`exactly_once`",
    ),
    "a misspelt policy": (
        read(lambda: c.csv_source("x", Pay, on_bad_record="skip")),
        "no such policy",
        "drop",
    ),
    # bounds
    "many windows": (
        lambda j: hg.sliding("1d", "1ms"),
        "up to 86,400,000 windows of sliding('1d', '1ms')",
        "larger steps",
    ),
    "many growing windows": (
        lambda j: hg.cumulative("1d", "1ms"),
        "up to 86,400,000 windows of cumulative(",
        "larger steps",
    ),
    "an empty window": (lambda j: hg.tumbling("0s"), "a window needs a size", "tumbling("),
    "a misspelt duration": (
        lambda j: hg.tumbling("1 minuet"),
        "window size is not a duration",
        "30s",
    ),
    # sources of the wrong arguments
    "pattern with a number": (
        read(lambda: c.generator({"u": c.pattern("u", 50)})),
        "suffix=`50`: expected `str`, got `int`",
        "prefix, suffix, distinct",
    ),  # type: ignore[arg-type]
    "pattern of None": (
        read(lambda: c.generator({"u": c.pattern(None)})),
        "prefix=`None`: expected `str`",
        "prefix, suffix",
    ),  # type: ignore[arg-type]
    "sequence of a text": (
        read(lambda: c.generator({"u": c.sequence("1")})),
        "start=`'1'`: expected `int`",
        "start, step",
    ),  # type: ignore[arg-type]
    "event times every 0": (
        read(lambda: c.generator({"u": c.event_time(every=0)})),
        "duration needs a unit",
        "100ms",
    ),  # type: ignore[arg-type]
    "a choice of a text": (
        read(lambda: c.generator({"u": c.choice("abc")})),
        "a choice needs a list of values",
        "choice(",
    ),  # type: ignore[arg-type]
    "a list of None": (
        read(lambda: c.from_list(None)),
        "from_list takes a list of records, got `NoneType`",
        "",
    ),  # type: ignore[arg-type]
    "a record without a column": (
        read(lambda: c.from_list([{"card": "a"}], schema=Pay)),
        "does not fit the columns: a dict without `n`",
        "card: string, n: int64",
    ),
    "a value of another type": (
        read(lambda: c.from_list([Pay(1, 2)], schema=Pay)),
        "for column `card` of type string",
        "card: string",
    ),  # type: ignore[arg-type]
    "splits as a text": (
        read(lambda: c.from_list([1], splits="2")),
        "must be a whole number of at least 1 splits=`'2'`",
        "",
    ),  # type: ignore[call-overload]
    "no path": (
        read(lambda: c.csv_source(None, Pay)),
        "a path is a text or a pathlib.Path, got `NoneType`",
        "s3://",
    ),
    "an empty path": (read(lambda: c.csv_source("", Pay)), "got an empty text", "s3://"),
    "several paths": (read(lambda: c.csv_source(["a", "b"], Pay)), "got `list`", "data/*.csv"),
    "no schema": (
        read(lambda: c.csv_source("x", None)),
        "the source needs a schema",
        "Struct class",
    ),
    "an address": (
        read(lambda: c.csv_source("https://x/y.csv", Pay)),
        "no such kind of storage",
        "s3://",
    ),
    "rows of a batch as a text": (
        read(lambda: c.csv_source("x", Pay, batch_rows="8")),
        "batch_rows=`'8'`",
        "",
    ),
}


@pytest.mark.parametrize("name", AT_PLAN_TIME)
def test_it_is_said_when_the_job_is_written(name: str) -> None:
    write, message, fix = AT_PLAN_TIME[name]
    with pytest.raises(UsageError) as refused:
        write(hg.Job("wrong"))
    assert message in refused.value.message
    assert fix in refused.value.fix


def test_the_list_of_wrong_jobs_is_not_short() -> None:
    assert len(AT_PLAN_TIME) + len(WHEN_IT_RUNS) + len(FILES) >= 80


# what only records show


def raises_nothing(record: Any) -> None:
    return None


WHEN_IT_RUNS: dict[str, Case] = {
    "map returns nothing": (
        lambda j: stream(j).map(raises_nothing, into=Pay, name="step"),
        "the function of `step` returned a NoneType without `card`",
        "card: string",
    ),
    "flat_map returns nothing": (
        lambda j: stream(j).flat_map(raises_nothing, name="step"),
        "returned NoneType, which is not iterable",
        "an empty list",
    ),
    "flat_map returns a text": (
        lambda j: stream(j).flat_map(lambda r: r.card, name="step"),
        "whose parts would become records",
        "[value]",
    ),
    "a field is missing": (
        lambda j: stream(j).map(lambda r: {"card": "a"}, into=Pay, name="step"),
        "returned a dict without `n`",
        "n: int64",
    ),
    "a value of another type": (
        lambda j: stream(j).map(lambda r: {"card": 1, "n": 1}, into=Pay, name="step"),
        "for column `card` of type string",
        "n: int64",
    ),
    "process returns a number": (
        lambda j: by_card(j).process(ReturnsOne(), name="step"),
        "returned int, which is not iterable",
        "None for nothing",
    ),
    "map_batches returns a table": (
        lambda j: stream(j).map_batches(lambda b: pa.table({"n": [1]}), name="step"),
        "returned a Table, not a pyarrow.RecordBatch",
        "to_batches()",
    ),
    "a time without a zone": (
        lambda j: stream(j).event_time(lambda r: datetime(2026, 1, 1), name="step"),
        "returned a datetime without a time zone",
        "tzinfo",
    ),
    "a time as a text": (
        lambda j: stream(j).event_time(lambda r: "2026-01-01", name="step"),
        "returned '2026-01-01', which is not an event time",
        "milliseconds",
    ),
    "a time of None": (
        lambda j: stream(j).event_time(lambda r: None, name="step"),
        "returned None, which is not an event time",
        "milliseconds",
    ),
}


@pytest.mark.parametrize("name", WHEN_IT_RUNS)
def test_it_names_the_step_and_the_record(name: str) -> None:
    write, message, fix = WHEN_IT_RUNS[name]
    job = hg.Job("wrong")
    write(job).write(c.blackhole(), name="out")
    with pytest.raises(UserCodeError) as failed:
        job.run()
    assert message in failed.value.message
    assert "the function of `step`" in failed.value.message
    assert "record=`" in failed.value.message
    assert fix in failed.value.fix
    assert "test_wrong_jobs.py" in failed.value.where


def test_a_sink_function_that_raises_is_named_as_such() -> None:
    job = hg.Job("wrong")

    def sells(row: Any) -> None:
        raise ValueError(f"no {row.card}")

    sink = c.function_sink(sells, guarantee="none")
    stream(job).write(sink, name="shop")
    with pytest.raises(
        UserCodeError, match="the function of `shop` raised ValueError: no a"
    ) as raised:
        job.run()
    assert "function_sink(sells" in raised.value.where


# files

FILES: dict[str, tuple[bytes, Callable[[str], Any], str]] = {
    "nothing": (b"", lambda path: c.csv_source(path + "x", Pay), "no file found"),
    "other columns": (
        b"x,y\n1,2\n",
        lambda path: c.csv_source(path, Pay),
        "does not have the column exactly once column=`card`",
    ),
    "an empty file": (
        b"",
        lambda path: c.csv_source(path, Pay),
        "does not have the column exactly once",
    ),
    "carriage returns alone": (
        b"card,n\ra,1\rb,2\r",
        lambda path: c.csv_source(path, Pay),
        "the first line of an input file cannot be read",
    ),
    "utf-16": (
        "card,n\na,1\n".encode("utf-16"),
        lambda path: c.csv_source(path, Pay),
        "an input file is in UTF-16",
    ),
    "latin-1": (b"card,n\n\xe4,1\n", lambda path: c.csv_source(path, Pay), "invalid UTF8 data"),
    "a text for a number": (
        b"card,n\na,one\n",
        lambda path: c.csv_source(path, Pay),
        "invalid value 'one'",
    ),
    "a column short": (
        b"card,n\na\n",
        lambda path: c.csv_source(path, Pay),
        "Expected 2 columns, got 1",
    ),
    "csv read as json": (
        b"card,n\na,1\n",
        lambda path: c.json_source(path, Pay),
        "not a JSON object on one line",
    ),
    "csv read as parquet": (
        b"card,n\na,1\n",
        lambda path: c.parquet_source(path, Pay),
        "not a Parquet file",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named_and_its_mistake_not_tried_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, source, message = FILES[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    job = hg.Job("wrong")
    job.restart(3, "0s")
    job.read(source(str(path)), name="r").write(c.blackhole(), name="out")
    with caplog.at_level(logging.INFO), pytest.raises(HeadgateError) as failed:
        job.run()
    assert message in str(failed.value)
    assert str(path) in str(failed.value)
    assert failed.value.fix
    assert "restart 1" not in caplog.text


def test_an_empty_directory(tmp_path: Path) -> None:
    job = hg.Job("wrong")
    job.read(c.csv_source(tmp_path, Pay), name="r").write(c.blackhole(), name="out")
    with pytest.raises(UsageError, match="no file found"):
        job.run()


def test_a_sink_whose_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    job = hg.Job("wrong")
    stream(job).write(c.json_sink(tmp_path / "out", guarantee="none"), name="out")
    with pytest.raises(UsageError, match="writes into a directory, and there is a file") as refused:
        job.run()
    assert "the path of a directory" in refused.value.fix


def test_paths_may_be_paths(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("card,n\na,1\n")
    job = hg.Job("right")
    job.checkpoint(every="10s", storage=tmp_path / "checkpoints")
    rows = job.read(c.csv_source(tmp_path / "in.csv", Pay), name="in")
    rows.write(c.csv_sink(tmp_path / "out", guarantee="exactly_once"), name="out")
    job.run()
    assert [path.read_text() for path in (tmp_path / "out").glob("*.csv")]
