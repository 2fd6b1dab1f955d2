"""The optimiser: fewer columns, fewer steps, and the same results."""

from __future__ import annotations

import pytest

from headgate.api.optimize import optimize
from headgate.operators.aggregation.aggregates import count, max, sum
from headgate.operators.elements import WATERMARK_MAX, ObjectBatch
from headgate.operators.expressions.expression_steps import ExpressionFactory
from headgate.operators.graph import Graph, Input
from headgate.operators.partitioning import HashColumns
from headgate.operators.sink import Guarantee
from headgate.operators.windows.kinds import tumbling


class Runner:
    """Runs a graph at parallelism 1 by direct calls: source batches in, records of each sink out."""

    def __init__(self, graph: Graph, harness) -> None:
        self.sunk = {}
        self.columns_sent = {}
        self.readers = {}
        self.runs = {}
        for node in graph.nodes:
            if node.sink is not None:
                self.sunk[node.name] = []
            elif node.factory is not None:
                run = self.runs[node.id] = harness(node.factory())
                run.output.emit = lambda batch, node=node: self.send(node, None, batch)
                run.output.emit_side = lambda tag, batch, node=node: self.send(node, tag, batch)
                run.output.emit_watermark = lambda time, node=node: self.advance(node, time)
            for input_ in node.inputs:
                self.readers.setdefault(input_.node.id, []).append((input_.side, node))

    def send(self, node, side, batch) -> None:
        if side is None and node.schema is not None:
            assert batch.data.schema.names == node.schema.names, node.name
            assert batch.data.schema.types == node.schema.types, node.name
        for tag, reader in self.readers.get(node.id, []):
            if tag == side and reader.sink is not None:
                times = (
                    batch.timestamps.tolist()
                    if batch.timestamps is not None
                    else [None] * len(batch)
                )
                if isinstance(batch, ObjectBatch):
                    rows = [repr(record) for record in batch.records]
                else:
                    rows = [repr(record) for record in batch.data.to_pylist()]
                self.sunk[reader.name] += list(zip(rows, times, strict=True))
            elif tag == side:
                self.runs[reader.id].push(batch)

    def advance(self, node, time) -> None:
        for tag, reader in self.readers.get(node.id, []):
            if tag is None and reader.id in self.runs:
                self.runs[reader.id].operator.on_watermark(time)

    def run(self, graph, batches):
        for node in graph.sources():
            for batch in batches:
                data = batch.data.select(node.schema.names)
                self.send(node, None, type(batch)(data, batch.timestamps))
        for node in graph.sources():
            self.advance(node, WATERMARK_MAX)
        return self.sunk


def straight(w, s):
    s.filter("n > 2").filter("ok").select("n * 2 AS m", "url").filter("m < 30").write(
        w.sink(), name="a"
    )


def branches(w, s):
    base = s.filter("n > 2").select("n", "url", "user_id")
    base.select("url").write(w.sink(), name="a")
    base.filter("n < 9").write(w.sink(), name="b")


def functions(w, s):
    s.filter(lambda r: r.n > 2).map(lambda r: r.url).write(w.sink(), name="a")


def whole_records(w, s):
    s.filter("n > 2").map(lambda r: str(r)).write(w.sink(), name="a")


def keyed(w, s):
    s.key_by("url").agg(n=count(), m=max("n"), name="agg").select("url", "m").write(
        w.sink(), name="a"
    )


def windows(w, s):
    timed = s.event_time("ts").filter("ok")
    timed.key_by("url").window(tumbling("5s")).agg(n=count(), name="win").write(w.sink(), name="a")
    timed.window(tumbling("5s")).agg(m=sum("n"), name="all").write(w.sink(), name="b")


def late(w, s):
    result = s.event_time("ts").key_by("url").window(tumbling("5s")).agg(n=count(), name="win")
    result.write(w.sink(), name="a")
    result.late.write(w.sink(), name="b")


def unions(w, s):
    one = s.filter("n > 2").select("url", "n", "ok")
    two = s.select("url", "n + 100 AS n", "ok")
    one.union(two).key_by("url").agg(n=sum("n"), name="agg").write(w.sink(), name="a")


def union_of_sources(w, s):
    other = w.stream("other").filter("ok")
    s.union(other).select("url", "n").write(w.sink(), name="a")
    other.write(w.sink(), name="b")


def reduces(w, s):
    s.key_with(lambda r: r.url).reduce(lambda a, b: b, name="last").select("n").write(
        w.sink(), name="a"
    )


def repartitioned(w, s):
    s.rebalance().filter("n > 3").shuffle().event_time("ts").select("url").write(w.sink(), name="a")


def function_keys(w, s):
    mapped = s.select("url", "n", "ok").key_with(lambda r: r.url).reduce(lambda a, b: a, name="r")
    mapped.write(w.sink(), name="a")


def only_counted(w, s):
    s.map(lambda r: 1).write(w.sink(), name="a")


PROGRAMS = [
    straight, branches, functions, whole_records, keyed, windows, late, unions, union_of_sources,
    reduces, repartitioned, function_keys, only_counted,
]  # fmt: skip


def planned(world, program, **source):
    world.sink = lambda make=world.sink: make(Guarantee.NONE)
    program(world, world.stream(**source))
    return world.graph, optimize(world.graph, 1)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_results_with_and_without(world, harness, program):
    plain, better = planned(world, program)
    batches = [world.batch(7, start, times=False) for start in (0, 7, 14, 3)]
    expected = Runner(plain, harness).run(plain, batches)
    found = Runner(better, harness).run(better, batches)
    assert {name: sorted(rows) for name, rows in found.items()} == {
        name: sorted(rows) for name, rows in expected.items()
    }
    assert any(expected.values())


@pytest.mark.parametrize("program", PROGRAMS)
def test_names_of_what_has_state_stay(world, program):
    plain, better = planned(world, program)
    assert [n.name for n in better.nodes if n.stateful] == [
        n.name for n in plain.nodes if n.stateful
    ]
    assert (
        len({n.name for n in better.nodes})
        == len({n.id for n in better.nodes})
        == len(better.nodes)
    )
    seen = set()
    for node in better.nodes:
        assert all(input_.node.id in seen for input_ in node.inputs)
        seen.add(node.id)


@pytest.mark.parametrize(
    ("program", "columns"),
    [
        (straight, ["url", "n", "ok"]),
        (branches, ["url", "user_id", "n"]),
        (functions, ["url", "n"]),
        (whole_records, ["url", "user_id", "amount", "n", "ts", "ok"]),
        (keyed, ["url", "n"]),
        (windows, ["url", "n", "ts", "ok"]),
        (late, ["url", "user_id", "amount", "n", "ts", "ok"]),
        (unions, ["url", "n", "ok"]),  # the selects before the union make `ok`, used or not
        (reduces, ["url", "user_id", "amount", "n", "ts", "ok"]),
        (repartitioned, ["url", "n", "ts"]),
        (only_counted, ["url"]),
    ],
)
def test_sources_read_only_what_is_used(world, program, columns):
    _, better = planned(world, program)
    source = next(better.sources())
    assert source.schema.names == columns
    assert source.source.schema.names == columns


def test_a_source_that_cannot_choose_is_left_alone(world):
    class Stubborn(world.source):
        def with_columns(self, columns):
            return self

    world.source = Stubborn
    stream = world.job.read(Stubborn(), name="src")
    stream.select("n").write(world.sink(), name="a")
    better = optimize(world.graph, 1)
    assert better.nodes[0].schema == world.schema


def test_neighbours_become_one_step(world):
    plain, better = planned(world, straight)
    assert [node.kind for node in plain.nodes] == [
        "source", "filter", "filter", "select", "filter", "sink"
    ]  # fmt: skip
    assert [node.kind for node in better.nodes] == ["source", "select", "sink"]
    assert better.nodes[1].detail == "n > 2; ok; n * 2 AS m, url; m < 30"
    assert better.nodes[1].columns_read == {"n", "ok", "url"}


def filters_left(world, first, second):
    """Return the number of filter steps that remain of two neighbours."""
    second(first(world.stream().filter("n > 2")).filter("ok")).write(world.sink(), name="out")
    return [node.kind for node in optimize(world.graph, 1).nodes].count("filter")


def same(stream):
    return stream


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda s: s.rebalance(), same),
        (lambda s: s.disable_chaining(), same),
        (lambda s: s.parallel(3), same),
        (same, lambda s: s.start_new_chain()),
        (same, lambda s: s.disable_chaining()),
        (same, lambda s: s.parallel(3)),
    ],
)
def test_what_the_user_separated_stays_apart(world, first, second):
    assert filters_left(world, first, second) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (same, same),
        (lambda s: s.start_new_chain(), same),
        (lambda s: s.parallel(3), lambda s: s.parallel(3)),
    ],
)
def test_what_runs_in_one_chain_is_joined(world, first, second):
    assert filters_left(world, first, second) == 1


def test_a_step_with_two_readers_is_not_swallowed(world):
    _, better = planned(world, branches)
    shared = [node for node in better.nodes if len(better.consumers(node)) == 2]
    assert len(shared) == 1
    assert isinstance(shared[0].factory, ExpressionFactory)


def test_columns_are_dropped_before_a_shuffle(world):
    stream = world.stream().map_batches(lambda data: data)
    stream.key_by("url").agg(n=sum("n"), name="agg").write(world.sink(), name="a")
    better = optimize(world.graph, 1)
    select = next(node for node in better.nodes if node.kind == "select")
    assert select.name == "agg columns"
    assert select.schema.names == ["url", "n"]
    (reader, _) = better.consumers(select)[0]
    assert reader.name == "agg"
    assert better.nodes[0].schema == world.schema


def test_nothing_to_do_adds_nothing(world):
    stream = world.stream().map_batches(lambda data: data)
    stream.write(world.sink(), name="a")
    better = optimize(world.graph, 1)
    assert [node.name for node in better.nodes] == ["src", "map_batches", "a"]
    assert better.nodes[0] is not world.graph.nodes[0]


def test_columns_that_decide_where_a_record_goes_are_kept(world):
    """Also if the step behind the exchange does not read them."""
    world.stream().select("n").write(world.sink(), name="a")
    source, select, _ = world.graph.nodes
    select.inputs = (Input(source, HashColumns(("url",))),)
    better = optimize(world.graph, 1)
    assert better.nodes[0].schema.names == ["url", "n"]
