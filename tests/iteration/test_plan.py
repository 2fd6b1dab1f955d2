"""Loops as they are written: what is refused, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list, numbers
from headgate.errors import PlanError, UsageError
from headgate.operators.graph import Graph
from headgate.runtime.job import runnable
from headgate.runtime.plan import make_plan


class Part(msgspec.Struct, frozen=True):
    id: int
    left: int


def halves(stream: Any) -> tuple[Any, Any]:
    halved = stream.map(lambda n: n // 2)
    return halved.filter(lambda n: n > 0), halved


def job_of(build: Callable[[hg.Stream[Any]], Any], parallelism: int = 2) -> hg.Job:
    job = hg.Job("loops", parallelism=parallelism)
    result = build(job.read(from_list([1, 2, 3]), name="in"))
    if isinstance(result, hg.Stream):
        result.write(collect(guarantee="none"), name="out")
    return job


def test_head_and_tail_share_slots_and_the_body_is_the_loop() -> None:
    job = job_of(lambda s: s.iterate(halves, name="halve").map(str, name="behind"))
    plan = make_plan(runnable(job).plan(), job_name="loops", parallelism=2)
    (loop,) = plan.loops
    assert loop.name == "halve"
    assert plan.vertices[loop.head].name == "halve"
    assert "feedback" in plan.vertices[loop.tail].name
    assert loop.vertices == {loop.head, loop.tail}
    assert plan.loop_from(plan.vertices[loop.head]) is loop
    assert plan.loops_through(plan.vertices[0]) == frozenset()
    assert "back to the begin of the loop" in job.explain()


def test_steps_beside_the_way_back_are_not_of_the_loop() -> None:
    def body(stream: Any) -> tuple[Any, Any]:
        moved = stream.rebalance().map(lambda n: n - 1, name="moved")
        return moved.rebalance().filter(bool, name="again"), moved.rebalance().map(
            str, name="aside"
        )

    plan = make_plan(
        runnable(job_of(lambda s: s.iterate(body, name="loop"))).plan(),
        job_name="loops",
        parallelism=2,
    )
    names = {plan.vertices[each].head.name for each in plan.loops[0].vertices}
    assert names == {"loop", "moved", "again"}


def test_a_tail_of_another_width_is_an_own_vertex() -> None:
    def body(stream: Any) -> tuple[Any, Any]:
        narrow = stream.map(lambda n: n - 1).parallel(1)
        return narrow.filter(bool).parallel(1), narrow

    plan = make_plan(
        runnable(job_of(lambda s: s.iterate(body, name="loop"))).plan(),
        job_name="loops",
        parallelism=2,
    )
    (loop,) = plan.loops
    assert plan.vertices[loop.tail].parallelism == plan.vertices[loop.head].parallelism == 2


def test_columns_that_only_come_back_are_kept() -> None:
    """The output needs one column; the loop needs all it was given, or they would be gone next time."""
    job = hg.Job("loops")

    def body(stream: Any) -> tuple[Any, Any]:
        less = stream.select("id", "left - 1 AS left")
        return less.filter("left > 0"), less.select("id")

    parts = job.read(from_list([Part(1, 2)], schema=Part), name="in")
    parts.iterate(body, name="loop").write(collect(guarantee="none"), name="out")
    graph: Graph = runnable(job).plan()
    (head,) = [node for node in graph.nodes if node.kind == "iterate"]
    assert head.inputs[0].node.schema.names == ["id", "left"]
    (tail,) = [node for node in graph.nodes if node.feeds is not None]
    assert tail.feeds == head.id


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda s: s.iterate(halves), "iteration has no name"),
        (lambda s: s.iterate(lambda t: t, name="x"), "must return two streams"),
        (lambda s: s.iterate(lambda t: (t, t.key_with(str)), name="x"), "must return two streams"),
        (
            lambda s: s.iterate(lambda t: (s, t), name="x"),
            "does not come from the stream in the loop",
        ),
        (lambda s: s.iterate(halves, name="x", parallelism=0), "parallelism must be"),
        (lambda s: s.iterate(halves, name="x", wait=3), "wait of iterate"),
        (
            lambda s: s.iterate(lambda t: (t.map(lambda n: Part(n, n), into=Part), t), name="x"),
            "is of columns, and its input is not",
        ),
        (
            lambda s: s.map(lambda n: Part(n, n), into=Part).iterate(
                lambda t: (t.select("id"), t), name="x"
            ),
            "other columns",
        ),
        (
            lambda s: s.iterate(lambda t: (t.iterate(halves, name="inner"), t), name="x"),
            "`inner` is a loop inside the loop `x`",
        ),
        (
            lambda s: s.iterate(lambda t: (t.to_one(), t), name="x"),
            "would go to one subtask",
        ),
        (lambda s: s.iterate_rounds(halves, name="x", max_rounds=0), "max_rounds must be"),
        (
            lambda s: s.iterate_rounds(halves, name="x", max_rounds=2, while_any="n > 1"),
            "needs columns",
        ),
        (
            lambda s: s.map(lambda n: Part(n, n), into=Part).iterate_rounds(
                lambda t: (t, t), name="x", max_rounds=2, while_any="right > 1"
            ),
            "right",
        ),
    ],
)
def test_mistakes_are_refused(build: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        job_of(build)
    assert "test_plan.py" in caught.value.where


def test_rounds_need_an_end() -> None:
    job = hg.Job("loops")
    endless = job.read(numbers(), name="endless")
    with pytest.raises(PlanError, match="source `endless` has no end"):
        endless.iterate_rounds(halves, name="x", max_rounds=2)


def test_ends_of_different_widths_are_refused() -> None:
    inside: list[Any] = []

    def body(stream: Any) -> tuple[Any, Any]:
        inside.append(stream)
        return halves(stream)

    def build(stream: Any) -> Any:
        output = stream.iterate(body, name="x")
        inside[0].parallel(1)
        return output

    with pytest.raises(PlanError, match="different parallelisms"):
        make_plan(runnable(job_of(build)).plan(), job_name="loops", parallelism=2)


def test_two_loops_may_stand_behind_each_other() -> None:
    job = job_of(lambda s: s.iterate(halves, name="a").iterate(halves, name="b"))
    plan = make_plan(runnable(job).plan(), job_name="loops", parallelism=2)
    first, second = plan.loops
    assert not first.vertices & second.vertices


def test_rounds_need_an_end_of_what_is_read_inside() -> None:
    job = hg.Job("loops")
    endless = job.read(numbers(), name="endless").event_time(lambda n: n)

    def body(stream: Any) -> tuple[Any, Any]:
        return stream.union(endless).filter(lambda n: n > 5), stream

    with pytest.raises(PlanError, match="source `endless` has no end"):
        job.read(from_list([1]), name="in").iterate_rounds(body, name="x", max_rounds=3)
