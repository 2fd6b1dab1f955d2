"""Gates and channels in one process: order, credits, blocking, waiting, failing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import ExchangeError, InternalError
from headgate.operators.elements import (
    CheckpointBarrier,
    ColumnBatch,
    EndOfPartition,
    LatencyMarker,
    Watermark,
    WatermarkStatus,
)
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.settings import ExchangeSettings


class _Sender:
    """Counts the credits a gate gives."""

    def __init__(self):
        self.credits = 0

    def add_credits(self, count):
        self.credits += count


@pytest.fixture
def remote_gate():
    """A gate with senders that only count: (gate, senders)."""

    def remote_gate(count, **options):
        gate = InputGate(
            [InputChannelSpec(10 + i, 0) for i in range(count)], ExchangeSettings(**options)
        )
        senders = [_Sender() for _ in range(count)]
        for i, sender in enumerate(senders):
            gate.open(gate.attach(10 + i, sender))
        return gate, senders

    return remote_gate


def test_round_robin_over_channels(make, drain):
    gate, (a, b) = make.wired(2)
    for n in range(3):
        a.send(make.ints(n, 1))
    b.send_control(Watermark(1))
    b.send_control(CheckpointBarrier(1, 0))
    assert [position for position, _ in drain(gate)] == [0, 1, 0, 1, 0]


def test_blocked_channel_keeps_its_data_upstream(make, drain):
    """A blocked channel takes what credits allow, the rest stays with its sender, in order."""
    gate, (a, b) = make.wired(2, ExchangeSettings(floating_buffers=0))
    gate.block(0)
    for n in range(5):
        a.send(make.ints(n, 1))
    b.send(make.ints(100, 1))
    assert [position for position, _ in drain(gate)] == [1]
    assert gate.queued_buffers == 2
    assert a.queued_buffers == 3
    assert gate.poll() is None
    gate.unblock_all()
    taken = [int(batch.data["n"][0].as_py()) for _, batch in drain(gate)]
    assert taken == [0, 1, 2, 3, 4]
    assert a.queued_buffers == 0
    gate.validate()


def test_block_after_data_arrived_hides_it(make):
    gate, (a,) = make.wired(1)
    a.send(make.ints(0, 1))
    gate.block(0)
    assert gate.poll() is None
    gate.unblock_all()
    assert gate.poll() is not None


def test_floating_credits_reach_the_backlogged_channel_and_return(remote_gate, make, lent):
    gate, senders = remote_gate(3, exclusive_buffers=2, floating_buffers=4)
    assert [sender.credits for sender in senders] == [2, 2, 2]
    gate.receive(0, make.ints(0, 1), 3)
    assert senders[0].credits == 4  # one is used, three wait: it lacks two
    assert lent(gate) == 2
    gate.receive_backlog(1, 10)
    assert senders[1].credits == 4  # the rest of the pool
    assert lent(gate) == 4
    gate.poll()
    assert senders[1].credits == 5  # what channel 0 gave back went to the one in line
    for _ in range(3):
        gate.receive(0, make.ints(0, 1), 0)
        gate.poll()
    gate.validate()
    for left in range(4, -1, -1):
        gate.receive(1, make.ints(0, 1), left)
    while gate.poll() is not None:
        pass
    gate.validate()
    assert lent(gate) == 0


def test_pool_is_shared_one_by_one(remote_gate):
    gate, senders = remote_gate(2, exclusive_buffers=1, floating_buffers=0)
    gate.receive_backlog(0, 5)
    gate.receive_backlog(1, 5)
    assert [sender.credits for sender in senders] == [1, 1]
    gate, senders = remote_gate(2, exclusive_buffers=1, floating_buffers=4)
    gate.receive_backlog(0, 3)
    gate.receive_backlog(1, 9)
    assert [sender.credits for sender in senders] == [3, 3]


def test_batch_without_credit_is_an_error(remote_gate, make):
    gate, _ = remote_gate(1, exclusive_buffers=1, floating_buffers=0)
    gate.receive(0, make.ints(0, 1), 0)
    with pytest.raises(InternalError, match=r"batch without credit channel=`10`"):
        gate.receive(0, make.ints(0, 1), 0)


def test_unknown_and_repeated_senders_are_refused(remote_gate):
    gate, _ = remote_gate(1)
    with pytest.raises(ExchangeError, match="no such channel"):
        gate.attach(99, _Sender())
    with pytest.raises(ExchangeError, match="has a sender already"):
        gate.attach(10, _Sender())


def test_nothing_travels_before_the_gate_is_there(make, drain):
    channel = LocalOutputChannel(7, ExchangeSettings())
    channel.send(make.ints(0, 1))
    channel.send_control(Watermark(3))
    gate = InputGate([InputChannelSpec(7, 1)])
    assert gate.input_index_of(0) == 1
    channel.bind(gate)
    elements = [element for _, element in drain(gate)]
    assert isinstance(elements[0], ColumnBatch)
    assert elements[1:] == [Watermark(3)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_credits_are_kept_under_random_schedules(data):
    """Goal: no credit is lost or invented, order is kept, everything arrives. Method: random sends,
    polls, blocks and unblocks on local channels; the invariants are checked after each step."""
    channels_count = data.draw(st.integers(1, 4))
    options = ExchangeSettings(
        exclusive_buffers=data.draw(st.integers(1, 3)),
        floating_buffers=data.draw(st.integers(0, 5)),
    )
    gate = InputGate([InputChannelSpec(i, 0) for i in range(channels_count)], options)
    channels = [LocalOutputChannel(i, options) for i in range(channels_count)]
    for channel in channels:
        channel.bind(gate)
    sent = [0] * channels_count
    received = [[] for _ in range(channels_count)]
    limit = channels_count * options.exclusive_buffers + options.floating_buffers
    rng = random.Random(data.draw(st.integers(0, 2**32)))

    def step():
        at = rng.randrange(channels_count)
        match rng.choice(["send", "send", "control", "poll", "poll", "block", "unblock"]):
            case "send":
                channels[at].send(_numbered(sent[at]))
                sent[at] += 1
            case "control":
                channels[at].send_control(CheckpointBarrier(sent[at], 0))
                sent[at] += 1
            case "poll":
                take()
            case "block":
                gate.block(at)
            case "unblock":
                gate.unblock_all()
        gate.validate()
        assert gate.queued_buffers <= limit

    def take():
        polled = gate.poll()
        if polled is not None:
            position, element = polled
            received[position].append(_number_of(element))
        return polled

    for _ in range(data.draw(st.integers(0, 120))):
        step()
    gate.unblock_all()
    while take() is not None:
        gate.validate()
    assert received == [list(range(count)) for count in sent]
    assert gate._pool == options.floating_buffers
    assert all(channel.credits == options.exclusive_buffers for channel in channels)


def _numbered(number):
    import pyarrow as pa

    return ColumnBatch(pa.record_batch({"n": [number]}))


def _number_of(element):
    if isinstance(element, CheckpointBarrier):
        return element.checkpoint_id
    return element.data["n"][0].as_py()


# ---- control elements -----------------------------------------------------------------------------


def test_watermarks_behind_a_backlog_are_merged_but_never_pass_a_batch(make, drain):
    gate, (a,) = make.wired(1, ExchangeSettings(exclusive_buffers=1, floating_buffers=0))
    a.send(make.ints(0, 1))
    a.send(make.ints(1, 1))
    for n in range(1000):
        a.send_control(Watermark(n))
    a.send_control(CheckpointBarrier(1, 0))
    a.send_control(Watermark(5000))
    a.send_control(Watermark(5001))
    assert len(a.queue) == 4
    elements = [element for _, element in drain(gate)]
    assert elements[2:] == [Watermark(999), CheckpointBarrier(1, 0), Watermark(5001)]


def queued_controls(gate):
    return sum(len(channel.queue) - channel.queued for channel in gate._channels)


def test_queue_stays_short_under_any_watermarks_and_statuses(make):
    gate, (a,) = make.wired(1)
    rng = random.Random(1)
    for n in range(500):
        idle = rng.random() < 0.5
        a.send_control(WatermarkStatus(idle) if rng.random() < 0.5 else Watermark(n))
        assert queued_controls(gate) <= 3


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=12), st.booleans())
def test_merging_leaves_a_valve_in_the_same_state(steps, idle_before):
    """Goal: a valve that sees the merged run ends in the state it has after the whole run."""

    def valve(elements):
        idle, watermark = idle_before, -1
        for element in elements:
            if isinstance(element, WatermarkStatus):
                idle = element.idle
            elif not idle:
                watermark = element.timestamp
        return idle, watermark

    whole, now, idle = [], 0, idle_before
    for is_status, advance in steps:
        if is_status:
            idle = not idle
            whole.append(WatermarkStatus(idle))
        elif not idle:  # senders emit no watermarks while they are idle
            now += advance
            whole.append(Watermark(now))
    gate = InputGate([InputChannelSpec(0, 0)])
    channel = LocalOutputChannel(0, ExchangeSettings())
    channel.bind(gate)
    for element in whole:
        channel.send_control(element)
    merged = []
    while (polled := gate.poll()) is not None:
        merged.append(polled[1])
    assert len(merged) <= 3
    assert valve(merged) == valve(whole)


def test_one_latency_marker_per_source_waits(make):
    gate, (a,) = make.wired(1)
    for n in range(10):
        a.send_control(LatencyMarker(n, "s", 0))
        a.send_control(LatencyMarker(n, "s", 1))
    assert queued_controls(gate) == 2
    assert gate.poll() == (0, LatencyMarker(0, "s", 0))


def test_too_many_controls_fail_the_channel(make):
    channel = LocalOutputChannel(0, ExchangeSettings(queued_controls_max=10))
    for n in range(11):
        channel.send_control(CheckpointBarrier(n, 0))
    assert isinstance(channel.error, ExchangeError)
    assert "queued_controls_max=`10`" in str(channel.error)


# ---- waiting and ending ---------------------------------------------------------------------------


@pytest.fixture
def listened(make):
    """A gate with local channels, and the calls of its listener."""

    def listened(count):
        gate, channels = make.wired(count)
        calls = []
        gate.set_listener(lambda: calls.append(1))
        return gate, channels, calls

    return listened


def test_the_listener_is_called_whenever_there_is_something_to_take(listened, make):
    gate, (a,), calls = listened(1)
    a.send(make.ints(0, 1))
    assert len(calls) == 1
    assert gate.poll() is not None
    a.send_control(Watermark(1))
    assert len(calls) == 2


def test_the_listener_sleeps_on_while_only_blocked_channels_have_data(listened, make):
    gate, (a, _), calls = listened(2)
    gate.block(0)
    a.send(make.ints(0, 1))
    assert calls == []
    gate.unblock_all()
    assert len(calls) == 1
    assert gate.poll() is not None


def test_fail_reaches_poll_and_the_listener(listened, make):
    gate, (a,), calls = listened(1)
    gate.fail(ExchangeError("broken peer=`w7`"))
    gate.fail(ExchangeError("later"))
    assert len(calls) == 1
    with pytest.raises(ExchangeError, match="w7"):
        gate.poll()
    a.send(make.ints(0, 1))  # ignored
    assert gate.queued_buffers == 0


def test_closed_gate_ignores_senders_and_refuses_polls(make):
    gate, (a,) = make.wired(1)
    a.send(make.ints(0, 1))
    gate.close()
    gate.close()
    a.send(make.ints(1, 1))
    a.send_control(EndOfPartition())
    with pytest.raises(ExchangeError, match="closed"):
        gate.poll()
