"""Random streams against what the promises say: every record once, marks in their places, any batches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import Bench, Service, source

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 3), min_size=1, max_size=6)),
        st.tuples(st.just("watermark"), st.just(None)),
        st.tuples(st.just("advance"), st.integers(1, 40)),
        st.tuples(st.just("restart"), st.integers(1, 3)),
    ),
    max_size=14,
)
WAITS = st.lists(st.integers(0, 50), min_size=4, max_size=60)


class Waits:
    """The times of calls: chance, but the same for every run."""

    def __init__(self, waits: list[int]) -> None:
        self._waits = waits

    def __call__(self, record: tuple[int, int]) -> int:
        return self._waits[record[1] % len(self._waits)]


class Tens(Service):
    async def ask(self, n: Any) -> Any:
        await super().ask(n)
        return n


def run(step: Bench, script: list[Any], *, rescale: bool) -> list[list[tuple[int, int]]]:
    """Play a script. Returns the records in the order they came, cut at the watermarks."""
    pushed: list[list[tuple[int, int]]] = [[]]
    number = 0
    for what, value in script:
        if what == "push":
            records = []
            for key in value:
                records.append((key, number))
                number += 1
            pushed[-1] += records
            for at in range(step.parallelism):
                mine = [r for r in records if step.owner(r[0]) == at]
                if mine:
                    step.push(mine, [r[1] for r in mine], at)
        elif what == "watermark":
            step.watermark(len(pushed))
            pushed.append([])
        elif what == "advance":
            step.advance(value)
        else:
            step.restart(value if rescale else None)
    step.end()
    return pushed


@pytest.mark.parametrize("kind", ["ordered", "unordered", "keyed"])
@settings(max_examples=40, deadline=None)
@given(script=STEPS, waits=WAITS, room=st.integers(1, 5))
def test_every_record_once_and_in_its_place(
    kind: str, script: list[Any], waits: list[int], room: int
) -> None:
    service = Tens(Waits(waits))
    given: dict[str, Any] = {"max_in_flight": room, "timeout": "1h", "name": "ask"}
    stream = source()
    if kind == "keyed":
        stream = stream.key_with(lambda r: r[0]).map_async(service.ask, **given)
    else:
        stream = stream.map_async(service.ask, ordered=kind == "ordered", **given)
    step = Bench(stream)
    try:
        pushed = run(step, script, rescale=False)
        found: list[Any] = []
        passed: dict[Any, int] = {}
        mark = 0
        for event, value in step.events:
            if event == "watermark":
                mark = value
            else:
                found.append(value)
                passed[value] = mark
    finally:
        step.close()
        step.loop.close()
    assert service.most <= room
    assert sorted(found) == sorted(sum(pushed, []))
    if kind == "ordered":
        assert found == sum(pushed, [])
    if kind == "keyed":
        for key in range(4):
            of_key = [record for record in found if record[0] == key]
            assert of_key == sorted(of_key)
    if all(what != "restart" for what, _ in script):  # else marks begin again, as sources do
        assert passed == {record: place for place, part in enumerate(pushed) for record in part}


@pytest.mark.parametrize("keyed", [True, False])
@settings(max_examples=30, deadline=None)
@given(script=STEPS, waits=WAITS, room=st.integers(1, 5))
def test_any_parallelism(keyed: bool, script: list[Any], waits: list[int], room: int) -> None:
    service = Tens(Waits(waits))
    stream = source()
    if keyed:
        stream = stream.key_with(lambda r: r[0])
    step = Bench(
        stream.map_async(service.ask, max_in_flight=room, timeout="1h", name="ask"), parallelism=2
    )
    try:
        pushed = run(step, script, rescale=True)
        found = step.take_timed()
    finally:
        step.close()
        step.loop.close()
    assert sorted(found) == sorted((record, record[1]) for part in pushed for record in part)
    if keyed:
        begun = {key: [r for r in service.asked if r[0] == key] for key in range(4)}
        for records in begun.values():  # those asked again after a restart come in order as well
            firsts = list(dict.fromkeys(records))
            assert firsts == sorted(firsts)
