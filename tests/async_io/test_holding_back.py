"""The input of a subtask while the head of its chain is full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.operators.elements import CheckpointBarrier, EndOfData, ObjectBatch, Watermark
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.exchange.wire import ChannelId
from headgate.runtime.task.input_subtask import InputSubtask


class Gate:
    """A gate of two channels, and how often it woke its reader."""

    def __init__(self) -> None:
        specs = [InputChannelSpec(ChannelId(index), 0) for index in range(2)]
        self.gate = InputGate(specs)
        self.woken = 0
        for position, spec in enumerate(specs):
            self.gate.attach(spec.channel_id, SimpleNamespace(add_credits=lambda count: None))
            self.gate.open(position)
        self.gate.set_listener(self._wake)

    def _wake(self) -> None:
        self.woken += 1


@pytest.fixture
def made() -> Gate:
    return Gate()


def batch(n: int) -> ObjectBatch:
    return ObjectBatch([n])


def test_control_elements_are_read_past_channels_with_batches(made: Gate) -> None:
    gate = made.gate
    gate.receive(0, batch(1), 0)
    gate.receive_control(0, Watermark(5))
    gate.receive_control(1, Watermark(6))
    gate.receive_control(1, EndOfData())
    assert gate.poll_control() == (1, Watermark(6))
    assert gate.poll_control() == (1, EndOfData())
    assert gate.poll_control() is None
    gate.validate()
    polled = gate.poll()
    assert polled is not None
    assert polled[1].records == [1]  # type: ignore[union-attr]
    assert gate.poll_control() == (0, Watermark(5))
    gate.validate()


def test_a_blocked_channel_stays_blocked(made: Gate) -> None:
    made.gate.block(0)
    made.gate.receive_control(0, Watermark(5))
    assert made.gate.poll_control() is None
    made.gate.unblock_all()
    assert made.gate.poll_control() == (0, Watermark(5))


def test_a_barrier_behind_batches_is_known_and_wakes(made: Gate) -> None:
    gate = made.gate
    gate.receive(0, batch(1), 0)
    assert not gate.holds_barrier
    woken = made.woken
    gate.receive_control(0, CheckpointBarrier(1, 0))
    assert gate.holds_barrier
    assert made.woken > woken
    gate.poll()
    assert gate.holds_barrier
    assert gate.poll_control() == (0, CheckpointBarrier(1, 0))
    assert not gate.holds_barrier


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("barrier", ["none", "here", "elsewhere"])
def test_records_in_front_of_a_barrier_go_only_to_those_who_store_them(
    stores: bool, full: bool, barrier: str
) -> None:
    """A process function that still fires timers must not get the records behind them."""
    operator = SimpleNamespace(full=lambda: full, stores_what_waits=stores)
    subtask: Any = SimpleNamespace(
        chain=SimpleNamespace(head=SimpleNamespace(operator=operator)),
        _barriers_in=SimpleNamespace(pending=barrier == "elsewhere"),
        gate=SimpleNamespace(holds_barrier=barrier == "here"),
    )
    expected = full and not (stores and barrier != "none")
    assert InputSubtask._holds_back(subtask) == expected
