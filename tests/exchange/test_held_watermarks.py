"""At full speed watermarks wait for partly filled buffers; none overtakes a record, and none is late."""

from __future__ import annotations

import random

import pytest

from headgate.operators.elements import (
    CheckpointBarrier,
    EndOfData,
    ObjectBatch,
    Watermark,
    WatermarkStatus,
)
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.queues import BURST, PAUSE_S
from headgate.runtime.exchange.settings import ExchangeSettings

WIDE = ExchangeSettings(exclusive_buffers=1000, object_rows_per_buffer=10)


def by_remainder(batch):
    parts = [[n for n in batch.records if n % 2 == index] for index in range(2)]
    return [(index, ObjectBatch(part)) for index, part in enumerate(parts) if part]


def to_first(batch):
    return [(0, batch)]


@pytest.fixture
def wire_up(make, clock):
    def wire_up(settings=WIDE, hold=True, receivers=2):
        gate, channels = make.wired(receivers, settings)
        clock.now_s = 100.0
        split = by_remainder if receivers == 2 else to_first
        made = ResultPartition(channels, split, settings, clock, may_hold_watermarks=hold)
        return gate, made, clock

    return wire_up


def sent(gate):
    """Return the elements that the first channel delivers."""
    found = []
    while (polled := gate.poll()) is not None:
        position, element = polled
        if position == 0:
            found += element.records if isinstance(element, ObjectBatch) else [element]
    return found


def use_up(gate, partition):
    """Send as many watermarks as may make buffers leave at once."""
    for number in range(BURST + 1):
        partition.emit(ObjectBatch([0, 1]))
        partition.broadcast(Watermark(number))
        assert sent(gate) == [0, Watermark(number)]


def test_a_watermark_waits_for_partly_filled_buffers_at_full_speed(wire_up):
    gate, partition, clock = wire_up()
    use_up(gate, partition)
    partition.emit(ObjectBatch([2, 3]))
    partition.broadcast(Watermark(20))
    partition.emit(ObjectBatch([4, 5]))
    partition.broadcast(Watermark(21))
    assert sent(gate) == []
    assert partition.next_flush() == pytest.approx(clock.now_s + PAUSE_S)
    clock.now_s += PAUSE_S
    assert partition.flush_due(clock.now_s)
    partition.flush()
    assert sent(gate) == [2, 4, Watermark(21)]
    assert partition.next_flush() is None


def test_a_watermark_waits_where_there_is_one_receiver(wire_up):
    """A window without keys gets one row of each sender and pane, which fills no buffer."""
    gate, partition, clock = wire_up(receivers=1)
    for number in range(BURST + 1):
        partition.emit(ObjectBatch([number]))
        partition.broadcast(Watermark(number))
        assert sent(gate) == [number, Watermark(number)]
    for number in (20, 21):
        partition.emit(ObjectBatch([number]))
        partition.broadcast(Watermark(number))
        assert sent(gate) == []
    clock.now_s += PAUSE_S
    assert partition.flush_due(clock.now_s)
    partition.flush()
    assert sent(gate) == [20, 21, Watermark(21)]


def test_watermarks_that_come_seldom_never_wait(wire_up):
    gate, partition, clock = wire_up()
    for number in range(50):
        partition.emit(ObjectBatch([0, 1]))
        partition.broadcast(Watermark(number))
        assert sent(gate) == [0, Watermark(number)]
        clock.now_s += PAUSE_S


def test_a_watermark_with_no_record_in_front_leaves_at_once(wire_up):
    gate, partition, _ = wire_up()
    use_up(gate, partition)
    partition.broadcast(Watermark(20))
    assert sent(gate) == [Watermark(20)]


def test_full_buffers_do_not_take_the_watermark_along(wire_up):
    """The other channel may have records in front of it; it leaves when it is due."""
    gate, partition, clock = wire_up()
    use_up(gate, partition)
    partition.emit(ObjectBatch([2, 3]))
    partition.broadcast(Watermark(20))
    partition.emit(ObjectBatch([2] * 9))
    assert sent(gate) == [2] * 10
    clock.now_s += PAUSE_S
    assert partition.flush_due(clock.now_s)
    partition.flush()
    assert sent(gate) == [Watermark(20)]


def test_it_leaves_as_soon_as_both_ends_are_idle(wire_up):
    gate, partition, clock = wire_up()
    use_up(gate, partition)
    partition.emit(ObjectBatch([2, 3]))
    partition.broadcast(Watermark(20))
    assert partition.next_early() is not None
    partition.flush_early(clock.now_s, 0.0)
    assert sent(gate) == [2, Watermark(20)]


@pytest.mark.parametrize("behind", [CheckpointBarrier(1, 0), EndOfData()])
def test_what_may_not_wait_takes_it_along(wire_up, behind):
    gate, partition, _ = wire_up()
    use_up(gate, partition)
    partition.emit(ObjectBatch([2, 3]))
    partition.broadcast(WatermarkStatus(idle=False))
    partition.broadcast(Watermark(20))
    partition.broadcast(WatermarkStatus(idle=True))
    partition.broadcast(behind)
    assert sent(gate) == [
        2,
        WatermarkStatus(idle=False),
        Watermark(20),
        WatermarkStatus(idle=True),
        behind,
    ]


@pytest.mark.parametrize(
    ("settings", "hold"),
    [(WIDE, False), (ExchangeSettings(exclusive_buffers=1000, buffer_timeout_ms=None), True)],
)
def test_without_leave_or_without_a_timeout_none_waits(wire_up, settings, hold):
    gate, partition, _ = wire_up(settings, hold)
    use_up(gate, partition)
    partition.emit(ObjectBatch([2]))
    partition.broadcast(Watermark(20))
    assert sent(gate) == [2, Watermark(20)]


@pytest.mark.parametrize("seed", range(20))
def test_no_watermark_overtakes_a_record(wire_up, seed):
    """Records are their own times: each watermark comes behind all records that were emitted before it."""
    rng = random.Random(seed)
    gate, partition, clock = wire_up()
    number, last, arrived = 0, None, [[], []]

    def arrive():
        while (polled := gate.poll()) is not None:
            position, element = polled
            items = element.records if isinstance(element, ObjectBatch) else [element]
            arrived[position] += items

    for _ in range(400):
        rows = rng.randint(1, 6)
        partition.emit(ObjectBatch(list(range(number, number + rows))))
        number += rows
        if rng.random() < 0.6:
            last = Watermark(number - 1)
            partition.broadcast(last)
        if rng.random() < 0.1:
            partition.flush_early(clock.now_s, rng.random())
        clock.now_s += rng.choice([0.0, 0.001, 0.03])
        if partition.flush_due(clock.now_s):
            partition.flush()
        if rng.random() < 0.3:
            arrive()
    partition.flush()
    arrive()
    for index, elements in enumerate(arrived):
        records = [each for each in elements if isinstance(each, int)]
        assert records == [n for n in range(number) if n % 2 == index]
        watermarks = [each for each in elements if isinstance(each, Watermark)]
        assert watermarks[-1] == last
        assert [w.timestamp for w in watermarks] == sorted(w.timestamp for w in watermarks)
        highest = -1
        for element in elements:
            if isinstance(element, Watermark):
                highest = element.timestamp
            else:
                assert element > highest, "it was emitted before the watermark"
