"""Side outputs of process functions: typed, named by the class, used as often as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.api.stream import output_of
from headgate.connectors import collect, from_list
from headgate.errors import PlanError, StateError


class Split(hg.KeyedProcess[bool, int, int]):
    odd = hg.SideOutput[int]()
    large = hg.SideOutput[str]()

    def on_record(self, record: int, ctx: hg.Context[bool]) -> Iterator[int]:
        if record > 5:
            ctx.emit(Split.large, f"{record}")
        if record % 2:
            ctx.emit(self.odd, record)
        else:
            yield record


def is_odd(record: int) -> bool:
    return record % 2 == 1


def test_records_go_where_they_are_sent_with_their_event_time(world: Any) -> None:
    (stream,) = world.sources()
    step = world.step(stream.key_with(is_odd).process(Split(), name="p"))
    step.push([1, 2, 7, 8], [10, 20, 70, 80])
    assert step.take() == [(2, 20), (8, 80)]
    assert step.take("odd") == [(1, 10), (7, 70)]
    assert step.take("large") == [("7", 70), ("8", 80)]


def test_many_side_records_of_one_record_are_sent_on_meanwhile(world: Any) -> None:
    class Many(hg.KeyedProcess[bool, int, int]):
        side = hg.SideOutput[int]()

        def on_record(self, record: int, ctx: hg.Context[bool]) -> Iterator[int]:
            for number in range(record):
                ctx.emit(self.side, number)
                yield -number

    (stream,) = world.sources(event_time=False)
    step = world.step(stream.key_with(is_odd).process(Many(), name="p"))
    step.push([20_001])
    assert [record for record, _ in step.take("side")] == list(range(20_001))
    assert [record for record, _ in step.take()] == [-n for n in range(20_001)]


def test_a_side_can_be_used_twice_and_beside_the_main_output() -> None:
    job = hg.Job("sides", parallelism=2)
    split = (
        job.read(from_list(list(range(10))), name="numbers")
        .key_with(is_odd)
        .process(Split(), name="split")
    )
    odd = split.side(Split.odd)
    sinks = [collect(guarantee="none") for _ in range(4)]
    split.write(sinks[0], name="even")
    odd.write(sinks[1], name="odd")
    odd.map(lambda n: n * 10).rebalance().write(sinks[2], name="odd-10")
    split.side("large").write(sinks[3], name="large")
    assert job.run().status == "FINISHED"
    assert [sorted(sink.rows) for sink in sinks] == [
        [0, 2, 4, 6, 8],
        [1, 3, 5, 7, 9],
        [10, 30, 50, 70, 90],
        ["6", "7", "8", "9"],
    ]


def test_a_side_output_is_a_stream_with_event_time(world: Any) -> None:
    (stream,) = world.sources()
    assert stream.key_with(is_odd).process(Split(), name="p").side(Split.odd).has_event_time
    (stream,) = world.sources(event_time=False)
    assert not stream.key_with(is_odd).process(Split(), name="p").side(Split.odd).has_event_time


def test_a_subclass_has_the_side_outputs_of_its_base(world: Any) -> None:
    class More(Split):
        more = hg.SideOutput[int]()

    (stream,) = world.sources()
    result = stream.key_with(is_odd).process(More(), name="p")
    assert set(output_of(result).node.sides) == {"odd", "large", "more"}


def test_side_outputs_of_others_are_refused(world: Any) -> None:
    class Other(hg.KeyedProcess[bool, int, int]):
        odds = hg.SideOutput[int]()

        def on_record(self, record: int, ctx: hg.Context[bool]) -> None:
            ctx.emit(Split.odd, record)

    (stream,) = world.sources()
    result = stream.key_with(is_odd).process(Other(), name="p")
    with pytest.raises(PlanError, match="no side output `odd`") as planned:
        result.side(Split.odd)
    assert "did you mean `odds`" in planned.value.fix
    with pytest.raises(StateError, match=r"no such side output SideOutput\(Split.odd\)") as ran:
        world.step(result).push([1], [1])
    assert "test_sides.py" in ran.value.where


def test_one_side_output_has_one_name(world: Any) -> None:
    class Twice(Split):
        other = Split.odd

    (stream,) = world.sources()
    with pytest.raises(PlanError, match="two names: `odd` and `other`") as caught:
        stream.key_with(is_odd).process(Twice(), name="p")
    assert "test_sides.py" in caught.value.where
