"""Small column batches are gathered before they are split; receivers see no difference."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.operators.elements import (
    CheckpointBarrier,
    ColumnBatch,
    EndOfPartition,
    ObjectBatch,
    Watermark,
)
from headgate.operators.partitioning import Custom, Global, HashColumns, HashFunction, Rebalance
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.partitioners import gather_rows, make_partitioner
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.tests.support.clocks import MovedClock

WIDE = ExchangeSettings(exclusive_buffers=1000)


@pytest.fixture
def wire_up(make, clock):
    """(gate, partition, clock) with channels by key and a number of rows to gather."""

    def wire_up(gathered, count=2, options=WIDE, split=None):
        gate, channels = make.wired(count, options)
        by_key = make_partitioner(
            HashColumns(("n",)), count, sender=0, max_parallelism=128, rng=random.Random(1)
        )
        partition = ResultPartition(channels, split or by_key, options, clock, gather_rows=gathered)
        return gate, partition, clock

    return wire_up


def by_remainder(count):
    """Split batches of any kind and any columns by their first number, record by record."""

    def split(batch):
        numbers = batch.records if isinstance(batch, ObjectBatch) else batch.data[0].to_pylist()
        targets = np.array(numbers) % count
        return [(int(i), batch.take(np.flatnonzero(targets == i))) for i in np.unique(targets)]

    return split


def contents(elements):
    """What each channel has delivered: control elements, and records, in whatever buffers."""
    found = {}
    for position, element in elements:
        of_channel = found.setdefault(position, [])
        if isinstance(element, ObjectBatch):
            of_channel += element.records
        elif isinstance(element, ColumnBatch):
            times = element.timestamps
            times = [None] * len(element) if times is None else times.tolist()
            of_channel += zip(element.data.to_pylist(), times, strict=True)
        else:
            of_channel.append(element)
    return found


SIZES = st.integers(1, 60)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["ints", "untimed", "narrow", "nulls", "objects"]), SIZES),
    st.tuples(st.sampled_from(["flush", "watermark", "barrier", "early"]), SIZES),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(ACTIONS, max_size=30), st.integers(1, 5), st.integers(1, 150))
def test_each_channel_delivers_what_it_would_without(actions, count, gathered):
    clock = Ticking()
    delivered = []
    for gather in (0, gathered):
        gate = InputGate([InputChannelSpec(i, 0) for i in range(count)], WIDE)
        channels = [LocalOutputChannel(i, WIDE) for i in range(count)]
        for channel in channels:
            channel.bind(gate)
        partition = ResultPartition(channels, by_remainder(count), WIDE, clock, gather_rows=gather)
        act(partition, actions, clock)
        taken = []
        while (polled := gate.poll()) is not None:
            taken.append(polled)
        delivered.append((contents(taken), partition.emitted_bytes, partition.stats().records_out))
        assert partition.next_flush() is None
        gate.validate()
    plain, with_gathering = delivered
    assert with_gathering[0] == plain[0]
    assert with_gathering[2] == plain[2]
    # Each piece is rounded down to whole bytes where it is counted.
    assert plain[1] <= with_gathering[1] <= plain[1] + count * len(actions)


class Ticking(MovedClock):
    def monotonic(self):
        self.now_s += 0.001
        return self.now_s


def act(partition, actions, clock):
    start = 0
    for number, (action, size) in enumerate(actions):
        numbers = np.arange(start, start + size)
        start += size
        match action:
            case "ints":
                partition.emit(ColumnBatch(pa.record_batch({"n": numbers}), numbers * 10))
            case "untimed":
                partition.emit(ColumnBatch(pa.record_batch({"n": numbers})))
            case "narrow":
                names = (
                    pa.array(["a"] * size)
                    .dictionary_encode()
                    .cast(pa.dictionary(pa.int8(), pa.string()))
                )
                partition.emit(ColumnBatch(pa.record_batch({"n": numbers, "name": names})))
            case "nulls":
                odd = pa.array(numbers, mask=numbers % 2 == 0)
                partition.emit(ColumnBatch(pa.record_batch({"n": numbers, "odd": odd}), numbers))
            case "objects":
                partition.emit(ObjectBatch(numbers.tolist(), numbers))
            case "watermark":
                # Never two in a row with nothing between: the newer one would replace the older.
                partition.emit(ColumnBatch(pa.record_batch({"n": np.arange(64)})))
                partition.broadcast(Watermark(number))
            case "barrier":
                partition.broadcast(CheckpointBarrier(number + 1, 0))
            case "early":
                clock.now_s += 1.0
                partition.flush_early(clock.now_s, 0.0)
            case "flush":
                partition.flush()
    partition.broadcast(EndOfPartition())


def test_batches_are_split_together_when_there_are_enough(wire_up, make):
    splits = []

    def split(batch):
        splits.append(len(batch))
        return by_remainder(2)(batch)

    _, partition, _ = wire_up(100, split=split)
    for n in range(7):
        partition.emit(make.ints(40 * n, 40))
    assert splits == [120, 120]
    partition.emit(make.ints(0, 100))
    assert splits[2:] == [40, 100], "a batch that is large enough is not copied"
    partition.emit(make.ints(0, 40))
    partition.emit(make.objects(0, 10))
    assert splits[4:] == [40, 10], "objects are not gathered"
    texts = pa.record_batch({"n": [1], "text": ["x" * 10_000]})
    partition.emit(ColumnBatch(texts))
    assert splits[6:] == [1], "nor are large rows"


def test_many_bytes_are_split_before_there_are_enough_rows(wire_up, make):
    options = ExchangeSettings(exclusive_buffers=1000, buffer_size_max_bytes=1600)
    splits = []
    _, partition, _ = wire_up(
        1_000_000, 2, options, lambda batch: splits.append(len(batch)) or [(0, batch)]
    )
    for n in range(8):
        partition.emit(make.ints(n, 5))  # 16 bytes each, of 2 * 1600 / 16
    assert splits == [15, 15]


def test_gathered_records_wait_no_longer_than_the_buffer_timeout(wire_up, make, drain):
    gate, partition, clock = wire_up(1000)
    clock.now_s = 5.0
    partition.emit(make.ints(0, 10))
    clock.now_s = 5.06
    partition.emit(make.ints(10, 10))
    assert gate.poll() is None
    assert partition.next_flush() == pytest.approx(5.1)
    assert not partition.flush_due(5.09)
    assert partition.flush_due(5.11)
    partition.flush()
    assert sum(len(batch) for _, batch in drain(gate)) == 20
    assert partition.next_flush() is None


def test_buffers_of_gathered_records_are_as_old_as_the_first_of_them(wire_up, make):
    _, partition, clock = wire_up(20)
    clock.now_s = 1.0
    partition.emit(make.ints(0, 10))
    clock.now_s = 1.05
    partition.emit(make.ints(10, 10))  # split now, and in buffers
    partition.emit(make.ints(20, 10))
    assert partition.next_flush() == pytest.approx(1.1)


def test_an_idle_subtask_sends_gathered_records_to_receivers_that_wait(wire_up, make, drain):
    gate, partition, clock = wire_up(1000)
    partition.emit(make.ints(0, 10))
    assert partition.next_early() is not None
    partition.flush_early(clock.now_s, 0.0)
    assert sum(len(batch) for _, batch in drain(gate)) == 10
    assert partition.next_early() is None


def test_without_waiting_nothing_is_gathered(wire_up, make, drain):
    gate, partition, _ = wire_up(1000, options=ExchangeSettings(buffer_timeout_ms=0))
    partition.emit(make.ints(0, 10))
    assert sum(len(batch) for _, batch in drain(gate)) == 10


@pytest.mark.parametrize(
    "partitioning",
    [HashFunction(abs), Custom(lambda record, parallelism: 0), Rebalance(), Global()],
)
def test_only_batches_by_key_columns_are_gathered(partitioning):
    assert gather_rows(partitioning, 8) == 0
    assert gather_rows(HashColumns(("k",)), 8) > 0
    assert gather_rows(HashColumns(("k",)), 1) == 0


def test_a_partition_that_is_closed_has_nothing_to_send(wire_up, make):
    _, partition, _ = wire_up(1000)
    partition.emit(make.ints(0, 10))
    assert partition.next_flush() is not None
    partition.close()
    assert (partition.next_flush(), partition.next_early()) == (None, None)
