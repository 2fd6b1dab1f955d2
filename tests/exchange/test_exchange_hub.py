"""Hubs: real sockets between workers, handshakes, credits over the wire, failures, attempts."""

import asyncio
import os
import random
import struct

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from headgate.errors import DataError, ExchangeError, UsageError
from headgate.operators.elements import (
    CheckpointBarrier,
    ColumnBatch,
    EndOfPartition,
    ObjectBatch,
    Watermark,
)
from headgate.runtime.exchange import links
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.hub import ExchangeHub, WorkerAddress
from headgate.runtime.exchange.links import (
    DIRECT_BYTES,
    SCRATCH_BYTES,
    ChannelHello,
    FrameConnection,
)
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.exchange.wire import HEADER, WIRE_VERSION, FrameKind, frame
from headgate.runtime.listening import ListenerLimits

transports = pytest.mark.parametrize("transport", ["uds", "tcp"])


async def until(condition):
    """Wait for something that will happen; `run` ends the test if it does not."""
    while not condition():  # noqa: ASYNC110  the condition is state of a socket, not ours to signal
        await asyncio.sleep(0.001)


async def send_all(channel, elements):
    """Send as a partition does: wait while there is a backlog."""
    for element in elements:
        while channel.queued_buffers:
            assert channel.error is None
            await asyncio.sleep(0)
        if isinstance(element, ColumnBatch | ObjectBatch):
            channel.send(element)
        else:
            channel.send_control(element)


@transports
def test_random_buffers_arrive_whole_and_in_order(run, hubs, take, transport):
    """Goal: no byte is lost, whatever the sizes. Method: three channels, random buffers of 0 B to
    2 MB as columns and as objects, with barriers between; a slow reader."""

    async def scenario():
        pair = await hubs(transport)
        gate, channels = await pair.link(3)
        rng = random.Random(7)

        def element(n):
            size = rng.choice([0, 1, 100, 5_000, 16_000, 17_000, 70_000, 300_000, 2_000_000])
            payload = rng.randbytes(size)
            match n % 3:
                case 0:
                    return ColumnBatch(pa.record_batch({"n": [n], "b": [payload]}), np.array([n]))
                case 1:
                    return ObjectBatch([n, payload])
            return CheckpointBarrier(n, size)

        sent = [[element(n) for n in range(60)] for _ in channels]
        senders = [
            asyncio.create_task(send_all(*each)) for each in zip(channels, sent, strict=True)
        ]
        received = [[] for _ in channels]
        while sum(map(len, received)) < 180:
            position, got = await take(gate)
            received[position].append(got)
            gate.validate()
            await asyncio.sleep(0)
        await asyncio.gather(*senders)
        for before, after in zip(sent, received, strict=True):
            for a, b in zip(before, after, strict=True):
                if isinstance(a, ColumnBatch):
                    assert a.data.equals(b.data)
                    assert a.timestamps.tolist() == b.timestamps.tolist()
                elif isinstance(a, ObjectBatch):
                    assert a.records == b.records
                else:
                    assert a == b
        assert not pair.failures
        await pair.close()

    run(scenario())


@transports
def test_slow_consumer_bounds_both_ends(run, hubs, make, clock, take, lent, transport):
    """Queued buffers of sender and receiver stay within credits plus what one emission makes."""
    settings = ExchangeSettings(exclusive_buffers=2, floating_buffers=3)

    async def scenario():
        pair = await hubs(transport, settings)
        gate, channels = await pair.link(1)
        partition = ResultPartition(channels, lambda b: [(0, b)], settings, clock)
        emitted = 0

        async def produce():
            nonlocal emitted
            for n in range(100):
                await until(lambda: not partition.backlogged)
                partition.emit(make.ints(n * 10_000, 10_000))
                emitted += 1
            partition.broadcast(EndOfPartition())

        producer = asyncio.create_task(produce())
        # Without a reader the producer must come to rest with all credits used and one batch queued.
        await until(lambda: gate.queued_buffers == 5 and emitted == 6)
        await asyncio.sleep(0.02)  # in which it would go on, if anything let it
        assert (gate.queued_buffers, emitted) == (5, 6)
        assert partition.backlogged
        assert lent(gate) == 3
        rows = []
        while True:
            _, element = await take(gate)
            gate.validate()
            if isinstance(element, EndOfPartition):
                break
            rows.append(element.data["n"].to_numpy())
            assert gate.queued_buffers <= 5
        await producer
        assert np.array_equal(np.concatenate(rows), np.arange(1_000_000))
        assert lent(gate) == 0
        await until(lambda: channels[0].credits == 2)
        await pair.close()

    run(scenario())


def test_backlog_without_credit_earns_floating_credit(run, hubs, make):
    """A sender that used its last credit with an empty queue has nothing to carry later news."""

    async def scenario():
        pair = await hubs(settings=ExchangeSettings(exclusive_buffers=1, floating_buffers=1))
        gate, (channel,) = await pair.link(1)
        channel.send(make.ints(0, 1))
        await until(lambda: gate.queued_buffers == 1)
        channel.send(make.ints(1, 1))
        await until(lambda: gate.queued_buffers == 2)
        await pair.close()

    run(scenario())


def test_elements_wait_for_connection_and_gate(run, hubs, receive):
    """Channels may be used before anything else exists; order is kept."""

    async def scenario():
        pair = await hubs()
        channel = pair.a.output_channel(0, pair.addresses[1], 1)
        channel.send_control(CheckpointBarrier(1, 0))
        channel.send(ObjectBatch([1]))
        other = InputGate([InputChannelSpec(99, 0)])
        pair.b.register_gate(other, 1)
        await pair.a.connect(pair.addresses, 1)
        channel.send_control(CheckpointBarrier(2, 0))
        late = pair.a.output_channel(1, pair.addresses[1], 1)
        late.send_control(Watermark(5))
        await asyncio.sleep(0.01)
        gate = InputGate([InputChannelSpec(0, 0), InputChannelSpec(1, 1)])
        pair.b.register_gate(gate, 1)
        taken = await receive(gate, 4)
        assert [e.checkpoint_id for _, e in taken if isinstance(e, CheckpointBarrier)] == [1, 2]
        assert (1, Watermark(5)) in taken
        await pair.close()

    run(scenario())


def test_local_channels_pass_by_reference(run, hubs):
    async def scenario():
        pair = await hubs()
        before = pair.a.output_channel(0, pair.addresses[0], 1)
        gate = InputGate([InputChannelSpec(0, 0), InputChannelSpec(1, 0)])
        pair.a.register_gate(gate, 1)
        after = pair.a.output_channel(1, pair.addresses[0], 1)
        batch = ObjectBatch([object()])
        for channel in (before, after):
            assert isinstance(channel, LocalOutputChannel)
            channel.send(batch)
            assert gate.poll()[1] is batch
        await pair.a.connect(pair.addresses, 1)  # nobody to connect to
        await pair.close()

    run(scenario())


def test_same_host_uses_the_unix_socket_and_others_tcp(run, hubs, tmp_path):
    async def scenario():
        pair = await hubs("uds")
        a = pair.addresses[1]
        assert os.stat(a.uds_path).st_mode & 0o077 == 0
        elsewhere = msgspec.structs.replace(a, host_id="another host")
        # The TCP port is wrong: the connection succeeds only if the Unix socket is used.
        no_tcp = msgspec.structs.replace(a, tcp_port=1)
        pair.b.register_gate(InputGate([InputChannelSpec(0, 0)]), 1)
        pair.a.output_channel(0, a, 1)
        await pair.a.connect([no_tcp], 1)
        await pair.a.reset()
        await until(lambda: not pair.b._accepting)
        await pair.b.reset()
        pair.b.register_gate(InputGate([InputChannelSpec(0, 0)]), 2)
        pair.a.output_channel(0, a, 2)
        with pytest.raises(ExchangeError, match="cannot connect to a worker peer=`b`"):
            await pair.a.connect([msgspec.structs.replace(elsewhere, tcp_port=1)], 2)
        await pair.close()
        assert not os.path.exists(a.uds_path)

    run(scenario())


def test_missing_unix_socket_falls_back_to_tcp(run, hubs, receive):
    async def scenario():
        pair = await hubs("tcp")
        pair.addresses[1] = msgspec.structs.replace(pair.addresses[1], uds_path="/nowhere/x.sock")
        gate, (channel,) = await pair.link(1)
        channel.send_control(Watermark(1))
        assert await receive(gate, 1) == [(0, Watermark(1))]
        await pair.close()

    run(scenario())


def test_addresses_travel_as_bytes_and_long_paths_are_refused(run, tmp_path):
    address = WorkerAddress("w", "10.0.0.1", None, 80, "h")
    assert WorkerAddress.decode(address.encode()) == address

    async def scenario():
        with pytest.raises(UsageError, match="too long"):
            await ExchangeHub("w", "t").start(str(tmp_path / ("x" * 120)))

    run(scenario())


# ---- handshake ------------------------------------------------------------------------------------


@transports
def test_wrong_token_is_refused(run, hubs, transport):
    async def scenario():
        pair = await hubs(transport, tokens=("wrong", "secret"))
        with pytest.raises(ExchangeError, match=r"refused the connection: wrong token peer=`b`"):
            await pair.link(1)
        await pair.close()

    run(scenario())


def test_another_attempt_is_refused(run, hubs):
    async def scenario():
        pair = await hubs()
        pair.b.register_gate(InputGate([InputChannelSpec(0, 0)]), 4)
        pair.a.output_channel(0, pair.addresses[1], 3)
        with pytest.raises(ExchangeError, match="another attempt runs here attempt=`4` yours=`3`"):
            await pair.a.connect(pair.addresses, 3)
        await pair.close()

    run(scenario())


def test_another_worker_at_the_address_is_noticed(run, hubs):
    async def scenario():
        pair = await hubs()
        pair.b.register_gate(InputGate([InputChannelSpec(0, 0)]), 1)
        wrong = msgspec.structs.replace(pair.addresses[1], worker_id="c")
        pair.a.output_channel(0, wrong, 1)
        with pytest.raises(ExchangeError, match="this is another worker worker=`b`"):
            await pair.a.connect([wrong], 1)
        await pair.close()

    run(scenario())


def test_unreachable_peer_is_named(run, hubs):
    async def scenario():
        pair = await hubs("tcp")
        gone = msgspec.structs.replace(pair.addresses[1], tcp_port=1)
        channel = pair.a.output_channel(0, gone, 1)
        with pytest.raises(ExchangeError, match="cannot connect to a worker peer=`b`"):
            await pair.a.connect([gone], 1)
        assert isinstance(channel.error, ExchangeError)
        with pytest.raises(ExchangeError, match="cannot connect"):
            await pair.a.connect(pair.addresses, 1)  # one try per attempt
        await pair.close()

    run(scenario())


def test_silent_peer_times_out_at_both_ends(run, hubs):
    async def scenario():
        async def listen(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        pair = await hubs(
            "tcp",
            ExchangeSettings(connect_timeout_ms=100),
            limits=ListenerLimits(handshake_timeout_ms=100),
        )
        port = server.sockets[0].getsockname()[1]
        silent = msgspec.structs.replace(pair.addresses[1], tcp_port=port)
        pair.a.output_channel(0, silent, 1)
        with pytest.raises(ExchangeError, match="TimeoutError"):
            await pair.a.connect([silent], 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.addresses[1].tcp_port)
        assert await reader.read() == b""  # a caller that says nothing is hung up on
        writer.close()
        await pair.close()
        server.close()
        await asyncio.sleep(0.01)

    run(scenario())


async def speak(address, data):
    """Connect as a stranger and say `data`; returns (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", address.tcp_port)
    writer.write(data)
    return reader, writer


def hello(attempt=1, **changes):
    content = {
        "version": WIRE_VERSION,
        "token": "secret",
        "worker_id": "x",
        "expected_peer": "b",
        "attempt": attempt,
    }
    payload = msgspec.msgpack.encode(ChannelHello(**content | changes))
    return b"".join(bytes(part) for part in frame(FrameKind.HELLO, payload))


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HEADER.pack(1 << 30, FrameKind.HELLO, 0, 0, 0, 0),
        HEADER.pack(0, FrameKind.OPEN, 0, 0, 0, 0),
        HEADER.pack(3, FrameKind.HELLO, 0, 0, 0, 0) + b"abc",
        hello() + HEADER.pack((1 << 30) + 1, FrameKind.OBJECTS, 0, 0, 0, 0),
        hello() + HEADER.pack(0, FrameKind.CONTROL, 0, 0, 5, 0),
        hello() + HEADER.pack(0, 77, 0, 0, 5, 0),
        hello() + HEADER.pack(0, FrameKind.OPEN, 0, 0, 0, 3),
    ],
    ids=["http", "large hello", "no hello", "bad hello", "1 GiB", "not open", "kind", "sequence"],
)
def test_noise_ends_the_connection_and_nothing_else(run, hubs, receive, noise):
    async def scenario():
        pair = await hubs("tcp")
        gate, (channel,) = await pair.link(1)
        reader, writer = await speak(pair.addresses[1], noise)
        try:
            while await reader.read(1000):
                pass
        except ConnectionResetError:
            pass
        writer.close()
        channel.send_control(Watermark(1))
        assert await receive(gate, 1) == [(0, Watermark(1))]
        await pair.close()

    run(scenario())


def test_header_of_a_huge_frame_takes_memory_only_as_bytes_arrive(run, hubs):
    async def scenario():
        pair = await hubs("tcp")
        pair.b.register_gate(InputGate([InputChannelSpec(0, 0)]), 1)
        opened = HEADER.pack(0, FrameKind.OPEN, 0, 0, 0, 0)
        huge = HEADER.pack(1 << 30, FrameKind.OBJECTS, 0, 0, 0, 1)
        _, writer = await speak(pair.addresses[1], hello() + opened + huge + bytes(100_000))
        await until(lambda: any(end._header for end in pair.b._accepting))
        (end,) = pair.b._accepting
        assert len(end._body) == links.BODY_FIRST_BYTES
        writer.close()
        await pair.close()

    run(scenario())


def test_sequence_gap_over_the_socket_fails_the_gate(run, hubs, take):
    async def scenario():
        pair = await hubs("tcp")
        gate = InputGate([InputChannelSpec(0, 0)])
        pair.b.register_gate(gate, 1)
        opened = HEADER.pack(0, FrameKind.OPEN, 0, 0, 0, 0)
        _, writer = await speak(
            pair.addresses[1], hello() + opened + HEADER.pack(0, FrameKind.BACKLOG, 0, 1, 0, 2)
        )
        with pytest.raises(ExchangeError, match=r"out of sequence .*expected=`1`.*peer=`x`"):
            await take(gate)
        assert [(me, peer) for me, peer, _ in pair.failures] == [("b", "x")]
        writer.close()
        await pair.close()

    run(scenario())


# ---- failure and attempts -------------------------------------------------------------------------


@transports
def test_death_of_a_peer_fails_both_sides(run, hubs, make, clock, take, transport):
    async def scenario():
        pair = await hubs(transport)
        gate, channels = await pair.link(2)
        partition = ResultPartition(channels, lambda b: [(0, b)], pair.settings, clock)
        waiting = asyncio.create_task(take(gate))
        await until(lambda: len(pair.b._accepting) == 1)
        (end,) = pair.b._accepting
        end._transport.abort()
        with pytest.raises(ExchangeError, match=r"connection broke .*peer=`a`"):
            await waiting
        await until(lambda: len(pair.failures) == 2)
        with pytest.raises(ExchangeError, match=r"connection broke .*peer=`b`"):
            partition.emit(make.ints(0, 1))
        assert sorted((me, peer) for me, peer, _ in pair.failures) == [("a", "b"), ("b", "a")]
        await pair.close()
        assert len(pair.failures) == 2

    run(scenario())


def test_a_record_too_large_fails_the_sender_and_names_it(run, hubs, clock):
    """The receiver could only take it for a corrupt header, and break the connection off."""

    async def scenario():
        pair = await hubs(settings=ExchangeSettings(frame_size_max_bytes=1 << 20))
        pair.b.register_gate(InputGate([InputChannelSpec(0, 0)], pair.settings), 1)
        channel = pair.a.output_channel(0, pair.addresses[1], 1, "parse")
        await pair.a.connect(pair.addresses, 1)
        settings = replace(pair.settings, buffer_timeout_ms=0)
        partition = ResultPartition([channel], lambda b: [(0, b)], settings, clock)
        await until(lambda: channel.credits)
        with pytest.raises(DataError, match="operator=`parse` bytes=`2097176` limit=`1048576`"):
            partition.emit(ObjectBatch([b"x" * (2 << 20)]))
        assert not pair.failures
        await pair.close()

    run(scenario())


def test_waiting_producer_learns_of_the_death(run, hubs, make, clock):
    async def scenario():
        pair = await hubs()
        _, channels = await pair.link(1)
        partition = ResultPartition(channels, lambda b: [(0, b)], pair.settings, clock)
        for n in range(30):
            partition.emit(make.ints(n, 8192))
        waiting = asyncio.create_task(until(lambda: not partition.backlogged))
        await asyncio.sleep(0.01)
        await pair.b.close()
        with pytest.raises(ExchangeError, match="peer=`b`"):
            await waiting
        await pair.close()

    run(scenario())


def test_loss_after_the_end_of_all_channels_is_no_failure(run, hubs, receive):
    async def scenario():
        pair = await hubs()
        gate, channels = await pair.link(2)
        for channel in channels:
            channel.send_control(EndOfPartition())
        await receive(gate, 2)
        await pair.a.close()
        await until(lambda: not pair.b._accepting)
        assert gate.poll() is None
        await pair.close()
        assert not pair.failures

    run(scenario())


def test_reset_makes_ready_for_the_next_attempt_only(run, hubs, receive):
    async def scenario():
        pair = await hubs()
        old, (channel,) = await pair.link(1, attempt=1)
        await asyncio.gather(pair.a.reset(), pair.b.reset())
        with pytest.raises(ExchangeError):
            old.poll()
        channel.send_control(Watermark(1))
        assert channel.error is not None
        with pytest.raises(ExchangeError, match="the attempt is over attempt=`1` last=`1`"):
            pair.a.register_gate(InputGate([InputChannelSpec(0, 0)]), 1)
        gate, (channel,) = await pair.link(1, attempt=2)
        with pytest.raises(ExchangeError, match="another attempt runs here"):
            pair.a.output_channel(5, pair.addresses[1], 3)
        channel.send_control(Watermark(2))
        assert await receive(gate, 1) == [(0, Watermark(2))]
        await pair.close()

    run(scenario())


def test_both_directions_and_twice_the_same_channel(run, hubs, receive):
    async def scenario():
        pair = await hubs()
        gate, (channel,) = await pair.link(1)
        back_gate = InputGate([InputChannelSpec(7, 0)])
        pair.a.register_gate(back_gate, 1)
        back = pair.b.output_channel(7, pair.addresses[0], 1)
        await pair.b.connect(pair.addresses, 1)
        await pair.b.connect(pair.addresses, 1)  # again: nothing to do
        channel.send_control(Watermark(1))
        back.send_control(Watermark(2))
        assert await receive(gate, 1) == [(0, Watermark(1))]
        assert await receive(back_gate, 1) == [(0, Watermark(2))]
        for again in (
            lambda: pair.b.output_channel(7, pair.addresses[0], 1),
            lambda: pair.b.register_gate(InputGate([InputChannelSpec(0, 0)]), 1),
        ):
            with pytest.raises(ExchangeError, match="already"):
                again()
        await pair.close()

    run(scenario())


def test_unpicklable_record_fails_the_emission(run, hubs, clock):
    async def scenario():
        import threading

        pair = await hubs()
        _, channels = await pair.link(1)
        await until(lambda: channels[0].credits == 2)
        partition = ResultPartition(channels, lambda b: [(0, b)], pair.settings, clock)
        partition.emit(ObjectBatch([threading.Lock()]))
        with pytest.raises(DataError, match="must be picklable"):
            partition.broadcast(Watermark(1))  # flushes
        await pair.close()

    run(scenario())


# ---- framing --------------------------------------------------------------------------------------


class _Transport:
    """Feeds a connection by hand."""

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, high):
        self.high = high

    def abort(self):
        self.aborted = True


class _Collector(FrameConnection):
    def __init__(self, settings, scratch):
        super().__init__(settings, scratch)
        self.frames = []

    def frame_received(self, header, payload):
        self.frames.append((header.sequence, bytes(payload)))


def test_any_cutting_of_the_stream_gives_the_same_frames(run):
    """Goal: frames do not depend on how the kernel cuts the stream, nor on other connections of the event
    loop. Method: the same random frames fed in random pieces, as small as one byte, through the buffers
    that three connections ask for, in any order; a read that brings nothing is among them."""

    async def scenario():
        rng = random.Random(3)
        sizes = [0, 1, 15, 16, 17, 16_000, 16_384, 17_000, 262_144, 262_128, 262_129, 300_000]
        sizes += [9 << 20]
        frames = [(n, rng.randbytes(rng.choice(sizes[:-1]))) for n in range(60)]
        frames.append((60, bytes(sizes[-1])))
        stream = b"".join(
            bytes(part)
            for n, payload in frames
            for part in frame(FrameKind.OBJECTS, payload, sequence=n)
        )
        for piece_max in (700, 20_000, 600_000):
            scratch = bytearray(SCRATCH_BYTES)
            connections = [_Collector(ExchangeSettings(), scratch) for _ in range(3)]
            for connection in connections:
                connection.connection_made(_Transport())
                connection.establish()
            offsets = dict.fromkeys(connections, 0)
            while offsets:
                connection = rng.choice(list(offsets))
                offset = offsets[connection]
                buffer = connection.get_buffer(-1)
                assert len(buffer) > 0
                if rng.random() < 0.1:
                    continue  # nothing could be read after all
                count = min(len(buffer), rng.randint(1, piece_max), len(stream) - offset)
                buffer[:count] = stream[offset : offset + count]
                connection.buffer_updated(count)
                assert len(connection._begun) < DIRECT_BYTES
                offsets[connection] += count
                if offsets[connection] == len(stream):
                    del offsets[connection]
            assert [connection.frames for connection in connections] == [frames] * 3

    run(scenario())


def test_connections_share_one_scratch_buffer(run, hubs):
    async def scenario():
        pair = await hubs()
        await pair.link(2)
        ends = [*pair.a._regions[0].dialling.values(), *pair.b._accepting]
        assert len(ends) == 2
        assert ends[0]._scratch is pair.a._scratch
        assert ends[1]._scratch is pair.b._scratch
        held = [value for end in ends for value in vars(end).values() if isinstance(value, bytes)]
        assert sum(map(len, held)) < DIRECT_BYTES
        await pair.close()

    run(scenario())


def test_paused_socket_keeps_frames_in_the_channels_queue(run, hubs, make, receive):
    async def scenario():
        pair = await hubs(settings=ExchangeSettings(exclusive_buffers=50))
        gate, (channel,) = await pair.link(1)
        await until(lambda: channel.credits == 50)
        (end,) = pair.a._regions[0].dialling.values()
        end.pause_writing()
        for n in range(5):
            channel.send(make.ints(n, 1))
        assert channel.queued_buffers == 5
        assert channel.credits == 50
        end.resume_writing()
        assert channel.queued_buffers == 0
        taken = await receive(gate, 5)
        assert [batch.data["n"][0].as_py() for _, batch in taken] == list(range(5))
        await pair.close()

    run(scenario())


def test_header_is_sixteen_bytes():
    assert HEADER.size == struct.calcsize("<IBBHII") == 16
