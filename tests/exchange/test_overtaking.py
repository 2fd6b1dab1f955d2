"""A barrier that overtakes: each record is in front of it or behind it, and lost or doubled nowhere."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.elements import (
    CheckpointBarrier,
    CheckpointOptions,
    ColumnBatch,
    ObjectBatch,
    Watermark,
)
from headgate.runtime.exchange.channel_state import InFlightRecords, decode
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.partition import OutgoingBarrier
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.state.snapshot import ChannelAddress

SETTINGS = ExchangeSettings(exclusive_buffers=1, floating_buffers=2)


def address(sender: int, receiver: int = 0) -> ChannelAddress:
    return ChannelAddress(
        source="s", side="", target="t", input_index=0, sender=sender, receiver=receiver
    )


def numbers(batch: ColumnBatch | ObjectBatch) -> list[int]:
    return (
        list(batch.records) if isinstance(batch, ObjectBatch) else batch.data.column(0).to_pylist()
    )


def kept(records: InFlightRecords, channel: ChannelAddress) -> list[int]:
    found = []
    for own, data, rows in records.encoded():
        of_run = [number for batch in decode(data) for number in numbers(batch)]
        assert len(of_run) == rows
        found += of_run if own == channel else []
    return found


def barrier(checkpoint_id: int, *, unaligned: bool = True, timeout: int | None = None):
    return CheckpointBarrier(
        checkpoint_id, 0, CheckpointOptions(unaligned=unaligned, aligned_timeout_ms=timeout)
    )


class Lab:
    """Some senders, a gate, and a reader that takes what it is allowed to."""

    def __init__(self, senders: int, seed: int) -> None:
        self.rng = random.Random(seed)
        specs = [InputChannelSpec(i, 0, address(i)) for i in range(senders)]
        self.gate = InputGate(specs, SETTINGS, overtaking=True)
        self.channels = [LocalOutputChannel(i, SETTINGS) for i in range(senders)]
        for channel in self.channels:
            channel.bind(self.gate)
        self.sent: list[list[int]] = [[] for _ in range(senders)]
        self.read: list[list[int]] = [[] for _ in range(senders)]
        self.next = 0

    def send(self, sender: int) -> None:
        count = self.rng.randrange(1, 4)
        values = list(range(self.next, self.next + count))
        self.next += count
        self.sent[sender] += values
        batch: ColumnBatch | ObjectBatch = ObjectBatch(values)
        if self.rng.random() < 0.5:
            times = np.array(values) if self.rng.random() < 0.5 else None
            batch = ColumnBatch(pa.record_batch({"n": pa.array(values, pa.int64())}), times)
        self.channels[sender].send(batch)
        if self.rng.random() < 0.3:
            self.channels[sender].send_control(Watermark(self.next))

    def poll(self) -> None:
        polled = self.gate.poll()
        if polled is not None and isinstance(polled[1], ColumnBatch | ObjectBatch):
            self.read[polled[0]] += numbers(polled[1])
        self.gate.validate()


@pytest.mark.parametrize("seed", range(150))
def test_records_in_front_of_an_unaligned_barrier_are_read_or_kept_once_and_in_order(seed):
    lab = Lab(senders := 1 + seed % 3, seed)
    cut_sent: list[int | None] = [None] * senders
    barriers: list[OutgoingBarrier | None] = [None] * senders
    cut_read: list[int] = []
    capture: InFlightRecords | None = None
    arrived: set[int] = set()
    for _ in range(400):
        urgent = lab.gate.poll_urgent()
        if urgent is not None:
            assert urgent.read
            assert urgent.barrier.checkpoint_id == 1
            if capture is None:
                capture = lab.gate.start_capture(1)
                cut_read = [len(read) for read in lab.read]
            arrived.add(urgent.position)
            if len(arrived) == senders:
                lab.gate.end_capture()
            continue
        sender = lab.rng.randrange(senders)
        action = lab.rng.random()
        if action < 0.5:
            lab.send(sender)
        elif action < 0.9:
            lab.poll()
        elif cut_sent[sender] is None and lab.next > 10:
            cut_sent[sender] = len(lab.sent[sender])
            barriers[sender] = OutgoingBarrier(
                barrier(1), [lab.channels[sender]], [address(sender)]
            )
            barriers[sender].send()
    assert arrived == {i for i, cut in enumerate(cut_sent) if cut is not None}
    if len(arrived) < senders or capture is None:
        return
    for sender, (outgoing, cut) in enumerate(zip(barriers, cut_sent, strict=True)):
        before = lab.sent[sender][:cut]
        on_their_way = kept(capture, address(sender)) + kept(outgoing.overtaken, address(sender))
        assert lab.read[sender][: cut_read[sender]] + on_their_way == before
    while any(lab.read[i] != lab.sent[i] for i in range(senders)):
        lab.poll()  # what was overtaken is read all the same, in order


def test_a_barrier_in_line_is_announced_and_overtakes_only_what_is_in_front_of_it():
    lab = Lab(1, 0)
    for _ in range(8):
        lab.send(0)
    outgoing = OutgoingBarrier(barrier(1, unaligned=False, timeout=5), lab.channels, [address(0)])
    outgoing.send()
    in_front = list(lab.sent[0])
    lab.send(0)
    assert lab.channels[0].holds_barrier(1)
    outgoing.overtake()
    urgent = lab.gate.poll_urgent()
    assert urgent is not None
    assert urgent.read
    assert urgent.barrier.options.unaligned
    capture = lab.gate.start_capture(1)
    assert kept(capture, address(0)) + kept(outgoing.overtaken, address(0)) == in_front


def test_a_barrier_that_waits_in_the_gate_is_pulled_ahead_when_the_capture_starts():
    lab = Lab(2, 0)
    lab.send(0)
    for channel in lab.channels:
        channel.send_control(barrier(1, unaligned=False, timeout=5))
    announced = [lab.gate.poll_urgent(), lab.gate.poll_urgent()]
    assert [(a.position, a.read) for a in announced if a] == [(0, False), (1, False)]
    capture = lab.gate.start_capture(1)
    pulled = [lab.gate.poll_urgent(), lab.gate.poll_urgent()]
    assert [(p.position, p.read) for p in pulled if p] == [(0, True), (1, True)]
    assert kept(capture, address(0)) == lab.sent[0]
    assert kept(capture, address(1)) == []
    assert not lab.gate.holds_barrier


def test_a_channel_whose_barrier_was_read_in_line_keeps_nothing():
    lab = Lab(2, 0)
    lab.channels[0].send_control(barrier(1, unaligned=False, timeout=5))
    assert lab.gate.poll_urgent() is not None
    assert isinstance(lab.gate.poll()[1], CheckpointBarrier)
    lab.gate.block(0)
    lab.send(0)
    lab.send(1)
    capture = lab.gate.start_capture(1)
    assert [channel for channel, _, _ in capture.encoded()] == [address(1)]
    lab.send(1)
    assert kept(capture, address(1)) == lab.sent[1]


def test_records_taken_out_and_not_processed_come_first():
    lab = Lab(1, 0)
    lab.send(0)
    lab.channels[0].send_control(barrier(1))
    assert lab.gate.poll_urgent() is not None
    capture = lab.gate.start_capture(1, [(address(0), ObjectBatch([-2, -1]))])
    assert kept(capture, address(0)) == [-2, -1, *lab.sent[0]]


def test_what_was_recovered_is_kept_in_its_order_in_front_of_all_channels():
    """The records of a key may have been on another channel before the parallelism changed."""
    lab = Lab(2, seed=1)
    for channel in (0, 1):
        lab.channels[channel].send(ObjectBatch([channel]))
    lab.channels[0].send_control(barrier(1))
    assert lab.gate.poll_urgent() is not None
    recovered = [(address(1), -5), (address(1), -4), (address(0), -3), (address(1), -2)]
    unread = [(channel, ObjectBatch([number])) for channel, number in recovered]
    capture = lab.gate.start_capture(1, unread)
    runs = [
        (channel.sender, [number for batch in decode(data) for number in numbers(batch)])
        for channel, data, _ in capture.encoded()
    ]
    assert runs == [(1, [-5, -4]), (0, [-3]), (1, [-2, 1]), (0, [0])]


def test_objects_are_kept_as_they_were_when_the_barrier_passed():
    records = InFlightRecords()
    batch = ObjectBatch([{"n": 1}])
    records.add(address(0), batch)
    batch.records[0]["n"] = 2
    ((_, data, _),) = records.encoded()
    assert next(decode(data)).records == [{"n": 1}]


def test_what_cannot_be_pickled_is_an_error_of_the_checkpoint_not_of_the_job():
    records = InFlightRecords()
    records.add(address(0), ObjectBatch([(n for n in range(3))]))
    assert records.error is not None
    assert "must be picklable" in (records.error.fix or "")


def test_a_dictionary_travels_with_its_rows():
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    records = InFlightRecords()
    records.add(address(0), ColumnBatch(pa.record_batch({"s": column}), np.arange(3)).slice(1, 2))
    ((_, data, _),) = records.encoded()
    (batch,) = decode(data)
    assert batch.data.column(0).to_pylist() == ["b", "a"]
    assert batch.timestamps.tolist() == [1, 2]


def test_of_a_large_dictionary_only_what_the_rows_use_is_kept():
    column = pa.array([f"value {n}" for n in range(100_000)]).dictionary_encode()
    whole = ColumnBatch(pa.record_batch({"s": column}))
    records = InFlightRecords()
    for start in (0, 50_000):
        records.add(address(0), whole.slice(start, 10))
    ((_, data, rows),) = records.encoded()
    assert rows == 20
    assert len(data) < 10_000
    found = [text for batch in decode(data) for text in batch.data.column(0).to_pylist()]
    assert found == [f"value {n}" for start in (0, 50_000) for n in range(start, start + 10)]


def test_records_of_a_class_that_no_import_finds_are_kept():
    """As on workers, where the classes of the job exist by value only."""
    made: type = type("Reading", (), {"__init__": lambda self, n: setattr(self, "n", n)})
    records = InFlightRecords()
    records.add(address(0), ObjectBatch([made(1), made(2)]))
    ((_, data, _),) = records.encoded()
    assert [record.n for record in next(decode(data)).records] == [1, 2]


def test_where_barriers_keep_their_turn_none_is_urgent():
    gate = InputGate([InputChannelSpec(0, 0)], SETTINGS)
    channel = LocalOutputChannel(0, SETTINGS)
    channel.bind(gate)
    channel.send(ObjectBatch([1]))
    channel.send_control(barrier(1))
    assert gate.poll_urgent() is None
    assert isinstance(gate.poll()[1], ObjectBatch)
    assert isinstance(gate.poll()[1], CheckpointBarrier)


def test_a_barrier_that_nobody_waits_for_any_more_stays_in_line():
    lab = Lab(1, 0)
    for _ in range(8):
        lab.send(0)
    outgoing = OutgoingBarrier(barrier(1, unaligned=False, timeout=5), lab.channels, [address(0)])
    outgoing.send()
    outgoing.forget()
    outgoing.overtake()
    assert not outgoing.overtaken
    assert lab.gate.poll_urgent() is None
    assert lab.channels[0].holds_barrier(1)
