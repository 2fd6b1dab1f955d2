"""When is a loop at rest? Heads, bodies and channels in every order of delivery that chance finds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import InternalError
from headgate.operators.elements import LoopProbe
from headgate.runtime.protocol.loop_rounds import LoopRounds
from headgate.runtime.task.input_subtask import ProbeAlignment

LOOP = "loop"


@dataclass
class Head:
    queue: deque[int] = field(default_factory=deque)
    outside: list[int] = field(default_factory=list)
    number: int = 0
    out: bool = False
    arrived: int = 0


class Net:
    """`width` heads and as many bodies, all connected with all, or each with its own and one neighbour."""

    def __init__(self, width: int, everyone: bool, records: list[tuple[int, int]]) -> None:
        self.heads = [Head() for _ in range(width)]
        for index, record in records:
            self.heads[index % width].outside.append(record)
        near = [(h, b) for h in range(width) for b in (h, (h + 1) % width)]
        pairs = [(h, b) for h in range(width) for b in range(width)] if everyone else near
        self.channels: dict[tuple[int, int], deque[int | LoopProbe]] = {
            pair: deque() for pair in pairs
        }
        self.bodies = [ProbeAlignment({LOOP}) for _ in range(width)]
        self.rounds = LoopRounds(width)
        self.over = False
        self.steps = 0

    @property
    def under_way(self) -> bool:
        """Is there a record anywhere?"""
        waiting = any(head.queue or head.outside for head in self.heads)
        return waiting or any(
            isinstance(each, int) for channel in self.channels.values() for each in channel
        )

    def choices(self) -> list[tuple[str, int, int]]:
        found = [("deliver", *pair) for pair, channel in self.channels.items() if channel]
        for index, head in enumerate(self.heads):
            if head.outside or head.queue:
                targets = [b for h, b in self.channels if h == index]
                found += [("send", index, b) for b in targets]
            elif not head.out:
                found.append(("probe", index, 0))
        return found

    def do(self, what: str, index: int, target: int) -> None:
        self.steps += 1
        head = self.heads[index]
        if what == "send":
            record = head.outside.pop() if head.outside else head.queue.popleft()
            self.channels[index, target].append(record)
        elif what == "probe":
            head.number += 1
            head.out, head.arrived = True, 0
            for (h, _), channel in self.channels.items():
                if h == index:
                    channel.append(LoopProbe(LOOP, head.number))
        else:
            self._deliver(index, target)

    def _deliver(self, index: int, body: int) -> None:
        element = self.channels[index, body].popleft()
        own = self.heads[body]
        if isinstance(element, int):
            if element:
                own.queue.append(element - 1)
                own.arrived += 1
            return
        self.bodies[body].on_probe(index, element)
        for probe in self.bodies[body].due([h for h, b in self.channels if b == body]):
            assert own.out
            assert probe.number == own.number
            total = self.rounds.report(body, probe.number, own.arrived)
            if total is not None:
                self._decide(total)

    def _decide(self, total: int) -> None:
        for head in self.heads:
            head.out = False
        if total == 0:
            assert not self.under_way, "the loop was said to be at rest, and was not"
            self.over = True


@given(
    data=st.data(),
    width=st.integers(1, 3),
    everyone=st.booleans(),
    records=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=5),
)
@settings(max_examples=80, deadline=None)
def test_a_loop_ends_when_nothing_is_under_way_and_not_before(
    data: st.DataObject, width: int, everyone: bool, records: list[tuple[int, int]]
) -> None:
    net = Net(width, everyone, records)
    while not net.over:
        choices = net.choices()
        assert choices, "the loop stands still"
        at = data.draw(st.integers(0, len(choices) - 1)) if net.steps < 150 else 0
        if net.steps >= 150:  # chance alone may go on for ever: now records first
            choices.sort(key=lambda choice: choice[0] == "probe")
        net.do(*choices[at])
        assert net.steps < 2_000
    assert not net.under_way


def test_a_channel_from_outside_is_waited_for_until_it_ends() -> None:
    probes = ProbeAlignment({LOOP})
    probes.on_probe(0, LoopProbe(LOOP, 1))
    assert list(probes.due({0, 1})) == []
    assert list(probes.due({0})) == [LoopProbe(LOOP, 1)]
    assert list(probes.due({0})) == []


def test_probes_of_other_loops_end_here() -> None:
    probes = ProbeAlignment({LOOP})
    probes.on_probe(0, LoopProbe("other", 1))
    assert list(probes.due({0})) == []


def test_the_round_zero_is_a_round() -> None:
    probes = ProbeAlignment({LOOP})
    probes.on_probe(0, LoopProbe(LOOP, 0))
    assert list(probes.due({0})) == [LoopProbe(LOOP, 0)]


def test_the_sum_is_there_when_all_heads_have_said_theirs() -> None:
    rounds = LoopRounds(2)
    assert rounds.report(1, 5, 3) is None
    assert rounds.report(0, 5, 4) == 7
    assert rounds.report(0, 6, 0) is None
    assert rounds.report(1, 6, 0) == 0


def test_heads_that_disagree_are_a_bug() -> None:
    rounds = LoopRounds(3)
    rounds.report(0, 1, 0)
    with pytest.raises(InternalError, match="twice"):
        rounds.report(0, 1, 0)
    with pytest.raises(InternalError, match="another round"):
        rounds.report(1, 2, 0)
