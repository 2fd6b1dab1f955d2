"""Receivers that want smaller buffers: senders obey, from the next buffer on, and nothing is lost."""

import asyncio
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headgate.errors import ExchangeError
from headgate.operators.clock import SystemClock
from headgate.operators.elements import ColumnBatch, EndOfPartition, ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.exchange.slicing import BatchSizer
from headgate.runtime.exchange.wire import (
    FrameKind,
    decode_buffer_size,
    encode_buffer_size,
    frame,
    unpack_header,
)

SETTINGS = ExchangeSettings(exclusive_buffers=10_000)
ROW_BYTES = 16
"""The bytes of a row of `make.ints`: a number and a timestamp."""


@pytest.fixture
def wire_up(make, clock):
    """A gate, and a partition of `count` channels that gives each an equal part of every batch."""

    def wire_up(count=1, options=SETTINGS):
        gate, channels = make.wired(count, options)

        def evenly(batch):
            size = len(batch) // count
            return [(i, batch.slice(i * size, size)) for i in range(count)]

        return gate, ResultPartition(channels, evenly, options, clock)

    return wire_up


def sizes_of(taken):
    sizer = BatchSizer()
    return [sizer.nbytes(element) for _, element in taken]


@pytest.mark.parametrize("kind", ["ints", "objects"])
def test_buffers_are_no_larger_than_the_receiver_wants(wire_up, make, drain, kind):
    gate, partition = wire_up()
    batch = getattr(make, kind)(0, 10_000)
    gate.announce_buffer_size(4096)
    partition.emit(batch)
    partition.flush()
    sizes = sizes_of(drain(gate))
    assert max(sizes) <= 4096
    assert min(sizes[:-1]) > 0.9 * 4096
    gate.announce_buffer_size(1 << 20)
    partition.emit(batch)
    partition.flush()
    assert sum(sizes_of(drain(gate))) == sum(sizes)
    assert partition.debloated_bytes is None


def test_small_batches_are_put_together_to_the_size_wanted(wire_up, make, drain):
    gate, partition = wire_up()
    gate.announce_buffer_size(100 * ROW_BYTES)
    for n in range(40):
        partition.emit(make.ints(10 * n, 10))
    assert [len(element) for _, element in drain(gate)] == [100] * 4


def test_a_record_larger_than_the_buffer_travels_alone(wire_up, drain):
    gate, partition = wire_up()
    gate.announce_buffer_size(256)
    partition.emit(ObjectBatch([b"x" * 1000 for _ in range(5)]))
    partition.emit(ColumnBatch(pa.record_batch({"b": [b"x" * 1000 for _ in range(5)]})))
    partition.flush()
    assert [len(element) for _, element in drain(gate)] == [1] * 10


def test_what_waits_already_stays_as_it_is(make, drain, clock):
    options = ExchangeSettings(exclusive_buffers=1, floating_buffers=0, rows_per_buffer_target=100)
    gate, channels = make.wired(1, options)
    partition = ResultPartition(channels, lambda batch: [(0, batch)], options, clock)
    for n in range(3):
        partition.emit(make.ints(100 * n, 100))
    gate.announce_buffer_size(50 * ROW_BYTES)
    partition.emit(make.ints(300, 94))
    assert [len(element) for _, element in drain(gate)] == [100, 100, 100, 47, 47]


def test_each_receiver_has_its_own_size_and_the_smallest_says_how_much_room_there_is(
    make, clock, drain
):
    gates, channels = zip(*(make.wired(1, SETTINGS) for _ in range(2)), strict=True)
    channels = [channel for (channel,) in channels]
    partition = ResultPartition(channels, lambda batch: [(0, batch), (1, batch)], SETTINGS, clock)
    assert partition.debloated_bytes is None
    gates[1].announce_buffer_size(1000)
    assert partition.debloated_bytes == 2000
    partition.emit(make.ints(0, 10_000))
    partition.flush()
    assert partition.emitted_bytes == 2 * 10_000 * ROW_BYTES
    assert [len(drain(gate)) for gate in gates] == [1, 10_000 // 59 + 1]
    gates[0].announce_buffer_size(500)
    gates[1].announce_buffer_size(SETTINGS.buffer_size_max_bytes)
    assert partition.debloated_bytes == 1000


def test_no_receiver_gets_more_than_the_option_allows(wire_up, make, drain):
    gate, partition = wire_up(options=replace(SETTINGS, buffer_size_max_bytes=2048))
    gate.announce_buffer_size(1 << 20)
    partition.emit(make.ints(0, 1000))
    partition.flush()
    assert max(sizes_of(drain(gate))) <= 2048
    assert partition.debloated_bytes is None


def test_the_size_is_told_to_senders_that_come_later(make):
    gate = InputGate([InputChannelSpec(0, 0)], SETTINGS)
    gate.announce_buffer_size(4096)
    channel = LocalOutputChannel(0, SETTINGS)
    channel.bind(gate)
    assert channel.buffer_size_bytes == 4096


def test_buffers_in_use_are_those_at_the_gate_and_a_bounded_number_at_the_senders(make, drain):
    options = ExchangeSettings(exclusive_buffers=2, floating_buffers=1)
    gate, (a, b) = make.wired(2, options)
    assert gate.buffers_in_use == 0
    a.send(make.ints(0, 1))
    assert gate.buffers_in_use == 1
    for n in range(4):
        a.send(make.ints(n, 1))
    assert (gate.queued_buffers, gate.buffers_in_use) == (3, 5)
    for n in range(100):
        b.send(make.ints(n, 1))
    assert (gate.queued_buffers, gate.buffers_in_use) == (5, 7)
    drain(gate)
    assert gate.buffers_in_use == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("iiooasp"), st.integers(1, 60)), max_size=60),
    st.integers(0, 2**32),
)
def test_no_record_is_lost_or_reordered_when_sizes_change(steps, seed):
    """Goal: whatever sizes are wanted when, each channel delivers all records once and in order.
    Method: random emits, announcements, flushes and polls; the invariants after each step."""
    options = ExchangeSettings(
        exclusive_buffers=2, rows_per_buffer_target=40, object_rows_per_buffer=20
    )
    gates = [InputGate([InputChannelSpec(i, 0)], options) for i in range(2)]
    channels = [LocalOutputChannel(i, options) for i in range(2)]
    for channel, gate in zip(channels, gates, strict=True):
        channel.bind(gate)
    rng = random.Random(seed)

    def dealt(batch):
        middle = rng.randrange(len(batch) + 1)
        parts = [(0, batch.slice(0, middle)), (1, batch.slice(middle, len(batch) - middle))]
        for index, part in parts:
            expected[index] += rows_of(part)
        return [(index, part) for index, part in parts if len(part)]

    partition = ResultPartition(channels, dealt, options, SystemClock())
    expected, received = [[], []], [[], []]

    def poll(count):
        for gate, rows in zip(gates, received, strict=True):
            for _ in range(count):
                polled = gate.poll()
                if polled is not None:
                    rows += rows_of(polled[1])

    number = 0
    for step, size in steps:
        numbers = np.arange(number, number + size)
        match step:
            case "i":
                partition.emit(ColumnBatch(pa.record_batch({"n": numbers})))
            case "o":
                partition.emit(ObjectBatch(numbers.tolist()))
            case "a":
                gates[size % 2].announce_buffer_size(1 + size * size)
            case "s":
                partition.flush()
            case "p":
                poll(size)
        number += size
        for gate in gates:
            gate.validate()
    partition.flush()
    poll(10_000)
    assert received == expected
    assert not partition.backlogged


def rows_of(batch):
    return batch.records if isinstance(batch, ObjectBatch) else batch.data["n"].to_pylist()


# ---- over sockets ---------------------------------------------------------------------------------


async def until(condition):
    """Wait for something that will happen; `run` ends the test if it does not."""
    while not condition():  # noqa: ASYNC110  state of a socket, not ours to signal
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["ints", "objects"])
def test_sizes_travel_over_sockets(run, hubs, make, take, clock, kind):
    """The hub's own settings are not the job's; sizes and credits share their sequence."""

    async def scenario():
        pair = await hubs()
        options = replace(SETTINGS, exclusive_buffers=3, buffer_size_max_bytes=65_536)
        gate, channels = await pair.link(1, settings=options)
        partition = ResultPartition(channels, lambda batch: [(0, batch)], options, clock)
        sizer, largest = BatchSizer(), []
        for n, size in enumerate([None, 4096, 512, 20_000, 1 << 30]):
            if size is not None:
                gate.announce_buffer_size(size)
                await until(lambda size=size: channels[0].buffer_size_bytes == size)
            partition.emit(getattr(make, kind)(n * 10_000, 10_000))
            partition.flush()
            taken, rows = [], 0
            while rows < 10_000:
                _, element = await take(gate)
                taken.append(element)
                rows += len(element)
                gate.validate()
            got = [row for element in taken for row in rows_of(element)]
            assert got == list(range(n * 10_000, (n + 1) * 10_000))
            largest.append(max(map(sizer.nbytes, taken)))
        assert largest[0] == largest[4] <= 65_536
        assert largest[0] > largest[3] > largest[1] > largest[2]
        assert (largest[1] <= 4096, largest[2] <= 512, largest[3] <= 20_000) == (True,) * 3
        partition.broadcast(EndOfPartition())
        assert (await take(gate))[1] == EndOfPartition()
        assert not pair.failures
        await pair.close()

    run(scenario())


def test_a_size_lost_on_the_way_breaks_the_connection(run, hubs, make):
    async def scenario():
        pair = await hubs()
        _, (channel,) = await pair.link(1)
        (end,) = pair.a._regions[0].dialling.values()
        await until(lambda: channel.credits)
        header, _ = frame(FrameKind.BUFFER_SIZE, encode_buffer_size(100), sequence=5)
        with pytest.raises(ExchangeError, match="out of sequence"):
            end.frame_received(unpack_header(header), encode_buffer_size(100))
        await pair.close()

    run(scenario())


def test_sizes_survive_the_wire_and_noise_is_refused():
    for size in (1, 256, 1 << 20, 2**32 - 1):
        assert decode_buffer_size(encode_buffer_size(size)) == size
    assert decode_buffer_size(encode_buffer_size(2**40)) == 2**32 - 1
    for payload in (b"", b"\0\0\0\0", b"123", b"12345"):
        with pytest.raises(ExchangeError, match="not a size of buffers"):
            decode_buffer_size(payload)
