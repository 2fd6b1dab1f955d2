"""Measurements of a subtask for its buffers, and the rows it takes at once; on virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.operators.elements import ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.protocol.debloating import DebloatSettings
from headgate.runtime.task.accounting import Activity, TimeAccounting
from headgate.runtime.task.debloater import Debloater, OutputRoom
from headgate.testing.loop import VirtualLoop

MAX = 1 << 20


class Bench:
    """A subtask that is played by hand: its gate with one sender, its time, its debloater."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(seed=1)
        self.told: list[int] = []
        self.gate = InputGate([InputChannelSpec(0, 0)], ExchangeSettings(exclusive_buffers=10))
        sender: Any = SimpleNamespace(
            add_credits=lambda count: None, set_buffer_size=self.told.append
        )
        self.gate.open(self.gate.attach(0, sender))
        self.time = TimeAccounting(self.loop.time)
        self.debloater = Debloater(DebloatSettings(size_max=MAX), self.time, [])
        self.debloater.watch(self.gate)
        self.loop.call_soon(self.debloater.start)
        self.loop.drive()

    def fill(self, buffers: int) -> None:
        for _ in range(buffers):
            self.gate.receive(0, batch(1), 0)

    def work(self, seconds: float, records: int = 0, input_index: int = 0) -> None:
        self.time.switch(Activity.BUSY)
        self.debloater.slice_begins()
        self.loop.drive(self.loop.time() + seconds)
        self.debloater.slice_over(batch(records), input_index)

    def wait(self, activity: Activity, seconds: float) -> None:
        self.time.switch(activity)
        self.loop.drive(self.loop.time() + seconds)


def batch(records: int) -> ObjectBatch:
    """A batch of records of 64 bytes each."""
    return ObjectBatch(list(range(records)))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.debloater.stop()
    bench.loop.close()


def test_time_under_backpressure_counts_and_idle_time_does_not(bench: Bench) -> None:
    bench.fill(10)
    for _ in range(200):
        bench.work(0.05, records=100)
        bench.wait(Activity.BACKPRESSURED, 0.05)
    slow = bench.told[-1]
    assert slow == pytest.approx(6_400, rel=0.3)  # a second's bytes in ten buffers
    for _ in range(200):
        bench.work(0.05, records=100)
        bench.wait(Activity.IDLE, 0.05)
    assert bench.told[-1] == pytest.approx(12_800, rel=0.3)


def test_periods_end_also_while_it_sleeps_in_backpressure(bench: Bench) -> None:
    bench.fill(10)
    bench.work(0.1, records=100)
    bench.wait(Activity.BACKPRESSURED, 20.0)
    assert bench.told[-1] == 256
    assert bench.debloater.sizes.announced == 256


def test_what_a_coroutine_was_given_counts_when_it_is_done(bench: Bench) -> None:
    bench.fill(10)
    bench.work(5.0, records=5_000)
    assert len(bench.told) == 1
    assert bench.debloater.sizes.time_to_consume_ms < 15_000
    bench.work(0.1)
    bench.wait(Activity.IDLE, 1.0)
    assert bench.told[-1] > 5_000  # as the throughput of 64,000 wants it, not as one of none


def test_records_of_no_channel_of_the_gate_do_not_count(bench: Bench) -> None:
    """Those that come back in a loop."""
    bench.fill(10)
    for _ in range(100):
        bench.work(0.2, records=10_000, input_index=1)
    assert bench.told[-1] == 256


def test_nothing_to_do_changes_nothing(bench: Bench) -> None:
    bench.wait(Activity.IDLE, 3600.0)
    assert bench.told == []


def test_a_source_has_no_gate_and_no_timer() -> None:
    loop = VirtualLoop(seed=1)
    debloater = Debloater(DebloatSettings(size_max=MAX), TimeAccounting(loop.time), [])
    loop.call_soon(debloater.start)
    loop.drive(100.0)
    debloater.stop()
    assert debloater.rows_at_once() is None
    loop.close()


# ---- rows at once ---------------------------------------------------------------------------------


class Parts(SimpleNamespace):
    """Result partitions, as far as they matter here."""

    __hash__ = object.__hash__


def slice_of(room: OutputRoom, rows: int, sent: dict[Parts, int]) -> None:
    room.slice_begins()
    for part, row_bytes in sent.items():
        part.emitted_bytes += rows * row_bytes
    room.slice_over(rows)


def parts(*rooms: int | None) -> list[Parts]:
    return [Parts(debloated_bytes=room, emitted_bytes=0) for room in rooms]


def test_rows_fill_the_partition_with_least_room() -> None:
    a, b, c = parts(10_000, 50_000, None)
    room = OutputRoom([a, b, c])
    assert room.rows() is None
    slice_of(room, 100, {a: 10, b: 500, c: 10_000})
    assert room.rows() == 95  # 50,000 at 500 a row, less 5 %
    b.debloated_bytes = None
    assert room.rows() == 950
    a.debloated_bytes = None
    assert room.rows() is None


def test_a_row_too_large_for_the_room_goes_alone() -> None:
    (a,) = parts(256)
    room = OutputRoom([a])
    slice_of(room, 10, {a: 100_000})
    assert room.rows() == 1


def test_what_sends_nothing_is_not_held_back() -> None:
    """An aggregate emits when its window ends, and not per row; what timers emit is not a row's."""
    (a,) = parts(256)
    room = OutputRoom([a])
    for _ in range(10):
        slice_of(room, 1000, {a: 0})
        a.emitted_bytes += 1_000_000
    assert room.rows() is None


def test_it_follows_what_a_row_sends_now() -> None:
    (a,) = parts(10_000)
    room = OutputRoom([a])
    slice_of(room, 100, {a: 100})
    assert room.rows() == 95
    for _ in range(100):
        slice_of(room, 100, {a: 10})
    assert room.rows() == pytest.approx(950, rel=0.01)
