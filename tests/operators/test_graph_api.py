"""The fluent API: what it builds, and how it answers mistakes: with the user's line and a way out."""

from __future__ import annotations

import functools
import inspect
import linecache

import cloudpickle
import msgspec
import polars as pl
import pyarrow as pa
import pytest

from headgate.api.stream import Stream, output_of
from headgate.errors import HeadgateError, PlanError, UsageError
from headgate.operators.aggregation.aggregates import avg, count, sum
from headgate.operators.graph import Chaining
from headgate.operators.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashColumns,
    HashFunction,
    Rebalance,
    Rescale,
    Shuffle,
)
from headgate.operators.sink import Guarantee
from headgate.operators.windows.kinds import tumbling


class Click(msgspec.Struct):
    url: str
    n: int


class PerUrl(msgspec.Struct):
    url: str
    n: int


def mistake(action) -> HeadgateError:
    with pytest.raises(UsageError) as caught:
        action()
    return caught.value


def here(offset: int) -> str:
    """`file:line` of the caller, moved by `offset` lines, as messages show it."""
    frame = inspect.currentframe().f_back
    path, line = frame.f_code.co_filename, frame.f_lineno + offset
    text = linecache.getline(path, line).strip()
    return f"tests/operators/test_graph_api.py:{line}  {text}"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


# what is built


def test_every_step_is_a_node_with_its_line(world):
    stream = world.stream("clicks").filter("n > 1")
    line = here(-1)
    source, node = world.graph.nodes
    assert (source.name, source.kind, source.stateful) == ("clicks", "source", True)
    assert source.sides == {"rejected": None}
    assert (node.name, node.kind, node.detail, node.stateful) == (
        "filter",
        "filter",
        "n > 1",
        False,
    )
    assert str(node.origin) == line
    assert [(each.node, each.partitioning) for each in node.inputs] == [(source, Forward())]
    assert stream.schema == world.schema


def test_derived_names_are_counted_and_give_way_to_given_ones(world):
    stream = world.stream().filter("n > 1").filter("n > 2").filter("n > 3", name="big")
    assert [node.name for node in world.graph.nodes] == [
        "src",
        "filter",
        "filter-2",
        "big",
    ]
    stream.write(world.sink(), name="filter")
    assert [node.name for node in world.graph.nodes] == [
        "src", "filter-3", "filter-2", "big", "filter"
    ]  # fmt: skip


def test_a_stream_is_a_value_and_branches(world):
    stream = world.stream()
    stream.write(world.sink(), name="one")
    stream.filter("ok").write(world.sink(), name="two")
    source = world.graph.nodes[0]
    assert [node.name for node, _ in world.graph.consumers(source)] == [
        "one",
        "filter",
    ]


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        (lambda s: s.rebalance(), Rebalance),
        (lambda s: s.rescale(), Rescale),
        (lambda s: s.shuffle(), Shuffle),
        (lambda s: s.broadcast(), Broadcast),
        (lambda s: s.to_one(), Global),
        (lambda s: s.partition_with(lambda row, n: 0), Custom),
    ],
)
def test_routes(world, route, kind):
    route(world.stream()).filter("ok").filter("n > 1")
    first, second = world.graph.nodes[1:]
    assert isinstance(first.inputs[0].partitioning, kind)
    assert isinstance(second.inputs[0].partitioning, Forward)
    assert first.parallelism == (1 if kind is Global else None)


def test_keys_route_by_columns_or_function(world):
    world.stream().key_by("url", "n").agg(total=sum("amount"), name="totals")
    world.stream("other").key_with(lambda row: row.url).reduce(max, name="largest")
    agg, reduce = world.graph.nodes[1], world.graph.nodes[3]
    assert agg.inputs[0].partitioning == HashColumns(("url", "n"))
    assert isinstance(reduce.inputs[0].partitioning, HashFunction)
    assert agg.stateful
    assert reduce.stateful
    assert agg.schema.names == ["url", "n", "total"]
    assert reduce.schema == world.schema


def test_windows_per_key_and_over_all(world):
    stream = world.stream().event_time("ts", max_out_of_order="10s")
    keyed = stream.key_by("url").window(tumbling("1m")).agg(n=count(), m=avg("n"), name="keyed")
    total = stream.window(tumbling("1m")).agg(n=count(), name="total")
    assert keyed.schema.names == ["url", "window_start", "window_end", "n", "m"]
    assert total.schema.names == ["window_start", "window_end", "n"]
    node = world.graph.nodes[-1]
    assert node.inputs[0].partitioning == Global()
    assert node.parallelism == 1
    assert keyed.late.schema == world.schema
    assert keyed.has_event_time
    assert keyed.late.has_event_time
    keyed.late.write(world.sink(), name="late")
    assert world.graph.nodes[-1].inputs[0].side == "late"


def test_into_renames_the_record_class_and_casts_what_can_be(world):
    stream = world.stream().event_time("ts").key_by("url").window(tumbling("1m"))
    assert stream.agg(n=count(), name="same", into=PerUrl).schema.names == ["url", "n"]
    node = world.graph.nodes[-1]
    assert (node.kind, node.row_type) == ("select", PerUrl)
    small = stream.agg(n=count(), name="small", into={"n": "int", "url": "string"})
    assert small.schema == pa.schema({"n": pa.int32(), "url": pa.string()})
    assert small.late.schema == world.schema
    assert small.rebalance().late.name == small.late.name == "small.late"
    small.parallel(3)
    assert [node.parallelism for node in world.graph.nodes[-2:]] == [3, 3]
    assert repr(small).startswith("Stream(select")


def test_records_keep_their_class_until_columns_change(world):
    stream = world.stream(schema=pa.schema({"url": pa.string(), "n": pa.int64()}), row_type=Click)
    assert output_of(stream.filter("n > 1")).node.row_type is Click
    assert output_of(stream.select("n")).node.row_type is None
    assert output_of(stream.map(lambda c: c, into=PerUrl)).node.row_type is PerUrl


def test_coroutines_head_a_chain_and_chains_can_be_cut(world):
    async def later(row):
        return row

    stream = world.stream()
    assert output_of(stream.map(later)).node.chaining is Chaining.HEAD
    assert output_of(stream.filter(functools.partial(later))).node.chaining is Chaining.HEAD
    assert output_of(stream.filter("ok")).node.chaining is Chaining.ALWAYS
    assert output_of(stream.filter("ok").start_new_chain()).node.chaining is Chaining.HEAD
    assert (
        output_of(stream.filter("ok").disable_chaining().parallel(3)).node.chaining
        is Chaining.NEVER
    )
    assert world.graph.nodes[-1].parallelism == 3


def test_columns_read_are_known(world):
    stream = world.stream()
    assert output_of(stream.filter("n > 1 AND ok")).node.columns_read == {"n", "ok"}
    assert output_of(stream.filter(lambda row: row.n > 1)).node.columns_read == {"n"}
    assert output_of(stream.map(str)).node.columns_read is None
    assert output_of(stream.map(lambda row: row.url)).node.columns_read == {"url"}
    assert output_of(stream.event_time("ts")).node.columns_read == {"ts"}
    assert output_of(stream.select("url", "n * 2 AS m")).node.columns_read == {"url", "n"}


def test_a_graph_travels(world):
    stream = world.stream(row_type=None).event_time("ts").map(lambda row: row, into=world.schema)
    stream.select("url", "n * 2 AS m").key_by("url").agg(m=sum("m"), name="agg").write(
        world.sink(), name="out"
    )
    back = cloudpickle.loads(cloudpickle.dumps(world.graph))
    assert [node.name for node in back.nodes] == [node.name for node in world.graph.nodes]
    for node in back.nodes[1:]:
        assert node.factory() is not node.factory()


# mistakes


def test_a_missing_name_shows_the_line(world):
    keyed = world.stream().key_by("url")
    error = mistake(lambda: keyed.agg(n=count()))
    assert str(error) == (
        "stateful step has no name\n"
        f"  at {here(-3)}\n"
        '  its state is stored under this name; add name="..."'
    )


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda w, s: w.job.read(w.source()), "source has no name"),
        (lambda w, s: s.write(w.sink()), "sink has no name"),
        (lambda w, s: s.key_by("url").reduce(max), "stateful step has no name"),
        (lambda w, s: s.window(tumbling("1m")).agg(n=count()), "stateful step has no name"),
        (lambda w, s: s.write(w.sink(), name=""), "sink has no name"),
        (lambda w, s: s.write(w.sink(), name="a/b"), "not a name for a sink value=`a/b`"),
        (lambda w, s: s.write(w.sink(), name="x" * 101), "not a name for a sink"),
    ],
)
def test_names_where_state_or_effects_live(world, action, text):
    stream = world.stream().event_time("ts")
    error = mistake(lambda: action(world, stream))
    assert error.message.startswith(text)
    assert "test_graph_api.py" in error.where


def test_a_name_used_twice_shows_both_lines(world):
    stream = world.stream()
    stream.write(world.sink(), name="lake")
    first = here(-1)
    error = mistake(lambda: stream.write(world.sink(), name="lake"))
    assert str(error) == (
        "two steps are named `lake`\n"
        f"  at {first}\n"
        f"  at {here(-4)}\n"
        "  a name is the address of a step's state: give one of them another name"
    )


def test_an_unknown_column_shows_near_ones(world):
    stream = world.stream()
    error = mistake(lambda: stream.filter("amout > 0"))
    assert str(error) == (
        "unknown column `amout` in filter\n"
        f"  at {here(-3)}\n"
        "  did you mean `amount`? columns: url, user_id, amount, n, ts, ok"
    )


@pytest.mark.parametrize(
    ("action", "text", "fix"),
    [
        (lambda s: s.filter(lambda r: r.amout), "unknown column `amout` in filter", "`amount`?"),
        (lambda s: s.map(lambda r: r["amout"]), "unknown column `amout` in map", "`amount`?"),
        (lambda s: s.key_with(lambda r: r.urll), "unknown column `urll` in key_with", "`url`?"),
        (lambda s: s.select("urll"), "unknown column `urll` in select", "`url`?"),
        (lambda s: s.key_by("urll"), "unknown column `urll` in key_by", "`url`?"),
        (lambda s: s.event_time("tss"), "unknown column `tss` in event_time", "`ts`?"),
        (
            lambda s: s.key_by("url").agg(n=sum("m"), name="x"),
            "unknown column `m` in sum(m)",
            "columns: url, user_id",
        ),
        (lambda s: s.key_by(), "key_by needs a column", "key_by("),
        (lambda s: s.key_by("n", "n"), "key_by names a column twice", ""),
        (
            lambda s: s.key_by("amount"),
            "column `amount` is a float, and floats are no keys",
            "CAST",
        ),
        (lambda s: s.event_time("url"), "column `url` has no event times", "timestamps, dates"),
        (lambda s: s.event_time("ts", idle_after=5), "idle_after needs a unit value=`5`", '"30s"'),
        (lambda s: s.map(3), "map needs a function, got `int`", ""),
        (lambda s: s.map(str, max_in_flight=0), "max_in_flight must be a whole number", ""),
        (lambda s: s.map(str, into=int), "not a schema", "msgspec.Struct"),
        (
            lambda s: s.map(str).filter("n > 1"),
            "filter by expression needs columns, but `map`",
            "into=",
        ),
        (lambda s: s.map(str).select("n"), "select needs columns, but `map` is", "the step `map`"),
        (lambda s: s.map(str).key_by("n"), "key_by needs columns", "into="),
        (lambda s: s.map(str).event_time("ts"), "event_time by column needs columns", "into="),
        (lambda s: s.map(str).map_batches(str), "map_batches needs columns", "into="),
        (lambda s: s.side("lat"), "`src` has no side output `lat`", "side outputs: rejected"),
        (lambda s: s.late, "`src` has no side output `late`", "rejected"),
        (lambda s: s.rejected.side("x"), "`src.rejected` has no side output `x`", "none"),
        (
            lambda s: s.window(tumbling("1m")),
            "a window needs event time, and `src` has none",
            "event_time",
        ),
        (lambda s: s.event_time("ts").window("1m"), "not a window type=`str`", "tumbling"),
        (
            lambda s: s.key_with(str).agg(n=count(), name="x"),
            "agg needs a key made of columns",
            "select",
        ),
        (
            lambda s: (
                s.event_time("ts").key_with(str).window(tumbling("1m")).agg(n=count(), name="x")
            ),
            "agg of windows works on whole columns, and key_with gives a function",
            ".reduce(...)",
        ),
        (
            lambda s: s.key_by("url").agg(n="count()", name="x"),
            "`n` is not an aggregate",
            "hg.count()",
        ),
        (lambda s: s.key_by("url").agg(name="x"), "no aggregates given", "n=hg.count()"),
        (
            lambda s: s.key_by("url").agg(n=count(), name="x", into={"m": "long"}),
            "`m` of into= is not in the result of `x`",
            "columns: url, n",
        ),
        (
            lambda s: s.key_by("url").agg(n=count(), name="x", into={"n": "string"}),
            "`n` of into= is string, the result is int64",
            "change the type",
        ),
        (lambda s: s.parallel(0), "parallelism must be a whole number of at least 1 value=`0`", ""),
        (lambda s: s.rebalance().parallel(2), "parallel() applies to a step", ""),
        (lambda s: s.rejected.disable_chaining(), "disable_chaining() applies to a step", ""),
        (lambda s: s.to_one().filter("ok").parallel(2), "`filter` runs in one subtask", ""),
        (lambda s: s.union(3), "union needs streams of the same job", ""),
        (
            lambda s: s.union(s.select("n", "url")),
            "`src` and `select` have different columns: no column `user_id`",
            ".select('url', 'user_id'",
        ),
        (lambda s: s.union(s.map(str)), "union with a stream of columns needs columns", "into="),
        (
            lambda s: s.union(s.event_time("ts")),
            "`src` has no event time, the stream it is",
            "before union",
        ),
        (lambda s: s.write("out/", name="x"), "write needs a sink, got `str`", ""),
    ],
)
def test_mistakes_are_answered_at_once(world, action, text, fix):
    stream = world.stream()
    error = mistake(lambda: action(stream))
    assert error.message.startswith(text)
    assert fix in error.fix
    assert "test_graph_api.py" in error.where


def test_unions_of_two_jobs_are_refused(world):
    other = type(world)()
    error = mistake(lambda: world.stream().union(other.stream()))
    assert error.message == "union needs streams of the same job"


def test_a_sink_that_cannot_promise_says_what_it_can(world):
    sink = world.sink(Guarantee.EXACTLY_ONCE)
    error = mistake(lambda: world.stream().write(sink, name="lake"))
    assert error.message == "sink `lake` cannot promise exactly_once: plain()"
    assert error.fix == "it supports: at_least_once, none"


def test_a_sink_of_columns_refuses_objects(world):
    sink = world.sink(columns=True)
    error = mistake(lambda: world.stream().map(str).write(sink, name="lake"))
    assert error.message == "sink `lake` needs columns, but `map` is a stream of Python objects"


def test_what_a_sink_says_about_the_schema_gets_the_users_line(world):
    class Picky(world.sink):
        def bind(self, schema):
            raise PlanError("no column `id`")

    error = mistake(lambda: world.stream().write(Picky(), name="lake"))
    assert str(error) == f"no column `id`\n  at {here(-1)}"


def test_polars_expressions_work_everywhere_text_does(world):
    stream = (
        world.stream().filter(pl.col("n") > 1).select(pl.col("n") * 2, pl.col("url").alias("u"))
    )
    assert stream.schema == pa.schema({"n": pa.int64(), "u": pa.string()})
    assert isinstance(stream, Stream)
