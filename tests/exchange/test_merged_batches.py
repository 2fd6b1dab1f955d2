"""Batches of several channels are put together: order within channels, turns and credits stay right."""

from __future__ import annotations

import random

import pytest

from headgate.errors import ExchangeError, InternalError
from headgate.operators.elements import (
    WATERMARK_MAX,
    CheckpointBarrier,
    ColumnBatch,
    ObjectBatch,
    Watermark,
)
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.task.input_subtask import BatchMerger

SETTINGS = ExchangeSettings(rows_per_buffer_target=100, object_rows_per_buffer=50)


def values(batch):
    if isinstance(batch, ColumnBatch):
        return batch.data.column("n").to_pylist()
    return batch.records


def merger_of(gate):
    return BatchMerger(gate, range(len(gate)))


def test_one_batch_of_each_channel_is_put_together(make):
    gate, channels = make.wired(3, SETTINGS)
    for index, channel in enumerate(channels):
        channel.send(make.ints(100 * index, 10))
        channel.send(make.ints(100 * index + 50, 10))
    _, first = gate.poll()
    merged, rest = merger_of(gate).merge(first, 0, 1_000)
    assert rest is None
    # Channel 0 had its turn already, so its second batch is behind the others.
    assert values(merged) == [*range(10), *range(100, 110), *range(200, 210), *range(50, 60)]
    assert merged.timestamps.tolist() == [10 * n for n in values(merged)]
    assert [channel.credits for channel in channels] == [2, 1, 1]
    gate.validate()


def test_what_does_not_fit_is_the_rest_of_the_last_channel(make):
    gate, channels = make.wired(3, SETTINGS)
    for index, channel in enumerate(channels):
        channel.send(make.objects(100 * index, 10))
    _, first = gate.poll()
    merged, rest = merger_of(gate).merge(first, 0, 15)
    assert merged.records == [*range(10), *range(100, 105)]
    position, unread = rest
    assert (position, unread.records) == (1, [*range(105, 110)])
    assert gate.queued_buffers == 1
    gate.validate()


@pytest.mark.parametrize("rows", [10, 5])
def test_a_batch_that_is_large_enough_is_left_as_it_is(make, rows):
    gate, channels = make.wired(2, SETTINGS)
    for channel in channels:
        channel.send(make.objects(0, 10))
    _, first = gate.poll()
    assert merger_of(gate).merge(first, 0, rows) == (first, None)
    assert gate.queued_buffers == 1


def test_a_full_buffer_is_the_limit(make):
    gate, channels = make.wired(10, SETTINGS)
    for channel in channels:
        channel.send(make.ints(0, 30))
    _, first = gate.poll()
    merged, rest = merger_of(gate).merge(first, 0, 1_000)
    assert (len(merged), len(rest[1])) == (100, 20)
    assert gate.queued_buffers == 6


def test_bytes_are_a_limit_too(make):
    settings = ExchangeSettings(buffer_size_max_bytes=600)
    gate, channels = make.wired(10, settings)
    for channel in channels:
        channel.send(make.ints(0, 10))  # 160 bytes
    _, first = gate.poll()
    merged, rest = merger_of(gate).merge(first, 0, 1_000)
    assert (len(merged), rest) == (40, None)


def test_others_keep_their_turns(make):
    """Control elements, batches of another kind or another input, and blocked channels."""
    specs = [InputChannelSpec(i, int(i == 1)) for i in range(6)]
    gate = InputGate(specs, SETTINGS)
    channels = [LocalOutputChannel(i, SETTINGS) for i in range(6)]
    for channel in channels:
        channel.bind(gate)
    gate.block(5)
    channels[0].send(make.ints(0, 5))
    channels[1].send(make.ints(10, 5))
    channels[2].send_control(Watermark(3))
    channels[2].send(make.ints(20, 5))
    channels[3].send(make.objects(30, 5))
    channels[4].send(make.ints(40, 5))
    channels[5].send(make.ints(50, 5))
    _, first = gate.poll()
    merged, rest = merger_of(gate).merge(first, 0, 1_000)
    assert (values(merged), rest) == ([*range(5), *range(40, 45)], None)
    assert [gate.poll()[0] for _ in range(4)] == [1, 2, 3, 2]
    assert gate.poll() is None
    gate.validate()


def test_a_gate_that_fails_meanwhile(make):
    """A connection may break when a credit is sent back."""
    gate, channels = make.wired(3, SETTINGS)
    for channel in channels:
        channel.send(make.ints(0, 5))
    _, first = gate.poll()
    channels[1].add_credits = lambda count: gate.close()
    merged, _ = merger_of(gate).merge(first, 0, 100)
    assert len(merged) == 10
    with pytest.raises(ExchangeError, match="closed"):
        gate.poll()


def test_records_behind_the_end_of_data_are_refused(make):
    gate, channels = make.wired(2, SETTINGS)
    for channel in channels:
        channel.send(make.ints(0, 5))
    _, first = gate.poll()
    with pytest.raises(InternalError, match="records behind the end of data"):
        BatchMerger(gate, {0}).merge(first, 0, 100)


@pytest.mark.parametrize("seed", range(30))
def test_random_elements_stay_in_order(make, seed):
    """Each channel's records and control elements arrive once, in order, at any limits."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    gate, channels = make.wired(count, SETTINGS)
    merger = merger_of(gate)
    sent = [[] for _ in channels]
    seen = [[] for _ in channels]
    number = 0

    def note(batch):
        for value in values(batch):
            seen[value % count].append(value)

    for _ in range(300):
        index = rng.randrange(count)
        if rng.random() < 0.6:
            rows = rng.randint(1, 20)
            made = [count * (number + i) + index for i in range(rows)]
            number += rows
            channels[index].send(ObjectBatch(made))
            sent[index] += made
        elif rng.random() < 0.5:
            number += 1
            channels[index].send_control(CheckpointBarrier(number, 0))
            sent[index].append(("barrier", number))
        if rng.random() < 0.4 and (polled := gate.poll()) is not None:
            position, element = polled
            if isinstance(element, CheckpointBarrier):
                seen[position].append(("barrier", element.checkpoint_id))
            else:
                merged, rest = merger.merge(element, 0, rng.randint(1, 80))
                note(merged)
                if rest is not None:
                    note(rest[1])
            gate.validate()
    while (polled := gate.poll()) is not None:
        position, element = polled
        if isinstance(element, CheckpointBarrier):
            seen[position].append(("barrier", element.checkpoint_id))
        else:
            note(element)
    assert seen == sent


def test_watermarks_that_wait_are_taken_together(make):
    gate, channels = make.wired(5, SETTINGS)
    channels[0].send_control(Watermark(1))
    channels[1].send(make.ints(0, 3))
    channels[1].send_control(Watermark(20))
    channels[2].send_control(Watermark(30))
    channels[2].send(make.ints(10, 3))
    channels[3].send_control(Watermark(WATERMARK_MAX))
    channels[4].send_control(Watermark(50))
    gate.block(4)
    assert gate.poll() == (0, Watermark(1))
    assert gate.poll_watermarks() == [(2, Watermark(30))]
    gate.validate()
    position, first = gate.poll()
    assert (position, values(first)) == (1, [0, 1, 2])
    assert gate.poll() == (3, Watermark(WATERMARK_MAX))
    position, second = gate.poll()
    assert (position, values(second)) == (2, [10, 11, 12])
    assert gate.poll_watermarks() == [(1, Watermark(20))]
    assert gate.poll() is None
    gate.validate()
