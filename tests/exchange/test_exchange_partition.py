"""Result partitions: order under any slicing, buffer sizes, timeouts, backpressure."""

import asyncio
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headgate.errors import ExchangeError, OptionError
from headgate.operators.elements import (
    CheckpointBarrier,
    ColumnBatch,
    EndOfPartition,
    ObjectBatch,
    Watermark,
)
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate, LocalOutputChannel
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.settings import ExchangeSettings, exchange_settings
from headgate.runtime.exchange.slicing import BatchSizer, cut
from headgate.runtime.options.registry import Options

WIDE = ExchangeSettings(exclusive_buffers=1000)


def to_first(batch):
    return [(0, batch)]


@pytest.fixture
def wire_up(make, clock):
    """(gate, partition, clock) with `count` channels and settings."""

    def wire_up(settings=WIDE, count=1, partitioner=to_first):
        gate, channels = make.wired(count, settings)
        return gate, ResultPartition(channels, partitioner, settings, clock), clock

    return wire_up


def values(batch):
    if isinstance(batch, ObjectBatch):
        return batch.records
    return batch.data.column("n").to_pylist()


def test_full_buffer_passes_as_the_same_object(wire_up, make):
    """A batch of good size to one channel is not copied, cut or even looked into."""
    gate, partition, _ = wire_up()
    batch = make.ints(0, 65_536)
    partition.emit(batch)
    assert gate.poll()[1] is batch


def test_small_batches_wait_for_the_timeout_and_travel_as_one(wire_up, make, drain):
    gate, partition, clock = wire_up()
    clock.now_s = 5.0
    partition.emit(make.ints(0, 10))
    clock.now_s = 5.06
    partition.emit(make.ints(10, 10))
    assert gate.poll() is None
    assert partition.next_flush() == pytest.approx(5.1)
    assert not partition.flush_due(5.09)
    assert partition.flush_due(5.11)
    due = partition.next_flush()
    assert due is not None
    assert partition.flush_due(math.nextafter(due, 0)), "a sleep may end slightly early"
    partition.flush()
    ((_, batch),) = drain(gate)
    assert values(batch) == list(range(20))
    assert batch.timestamps.tolist() == [n * 10 for n in range(20)]
    assert partition.next_flush() is None
    assert not partition.flush_due(1e9)


def test_oldest_is_that_of_the_channels_still_unsent(wire_up, make):
    targets = iter([0, 1, 0])
    _, partition, clock = wire_up(count=2, partitioner=lambda b: [(next(targets), b)])
    partition.emit(make.ints(0, 1))
    clock.now_s = 1.0
    partition.emit(make.ints(0, 1))
    partition.emit(make.ints(0, 8192))  # flushes channel 0
    assert partition.next_flush() == pytest.approx(1.1)


def test_timeout_zero_sends_at_once_and_none_only_when_full(wire_up, make, drain):
    gate, partition, _ = wire_up(ExchangeSettings(buffer_timeout_ms=0))
    partition.emit(make.ints(0, 1))
    assert len(drain(gate)) == 1
    gate, partition, clock = wire_up(ExchangeSettings(buffer_timeout_ms=None))
    partition.emit(make.ints(0, 1))
    clock.now_s = 1e6
    assert partition.next_flush() is None
    assert not partition.flush_due(clock.now_s)
    partition.emit(make.ints(1, 8191))
    assert len(drain(gate)) == 1


def test_an_idle_subtask_sends_to_receivers_that_wait(wire_up, make, drain):
    """One small buffer at most is on its way on a channel; the next follows when it was taken."""
    settings = ExchangeSettings(exclusive_buffers=2)
    targets = iter([0, 1, 0, 1])
    gate, partition, clock = wire_up(settings, 2, lambda b: [(next(targets), b)])
    woken = []
    partition.set_listener(lambda: woken.append(True))
    partition.emit(make.ints(0, 1))
    partition.emit(make.ints(1, 1))
    assert gate.poll() is None
    partition.flush_early(clock.now_s, 0.0)
    position, _ = gate.poll()
    assert position == 0
    assert partition.next_early() is None
    # Channel 0 was read, channel 1 was not.
    partition.emit(make.ints(2, 1))
    partition.emit(make.ints(3, 1))
    clock.now_s = partition.next_early()
    partition.flush_early(clock.now_s, 0.0)
    assert [values(batch) for _, batch in drain(gate)] == [[1], [2]]
    assert woken == [True], "the credit of channel 1 came"
    clock.now_s = partition.next_early()
    partition.flush_early(clock.now_s, 0.0)
    assert [values(batch) for _, batch in drain(gate)] == [[3]]
    assert partition.next_early() is None
    gate.validate()


def test_a_receiver_that_does_not_read_gets_no_small_buffers(wire_up, make):
    gate, partition, clock = wire_up(ExchangeSettings(exclusive_buffers=2, floating_buffers=0))
    for n in range(10):
        partition.emit(make.ints(n, 1))
        partition.flush_early(clock.now_s, 0.0)
        clock.now_s += 1.0
    assert gate.queued_buffers == 1
    assert not partition.backlogged
    assert partition.next_early() is None, "only credit, or the buffer timeout, sends the rest"
    assert partition.flush_due(clock.now_s)


def test_small_buffers_take_a_part_of_the_idle_time_only(wire_up, make, drain):
    pauses = {}
    for count in (1, 4):
        for load in (0.0, 0.5, 1.0):
            gate, partition, clock = wire_up(count=count)
            for _ in range(2):
                partition.emit(make.ints(0, 1))
                partition.flush_early(clock.now_s, load)
            assert len(drain(gate)) == 1
            pauses[count, load] = partition.next_early() - clock.now_s
            clock.now_s = partition.next_early()
            partition.flush_early(clock.now_s, load)
            assert len(drain(gate)) == 1
    assert pauses[4, 0.0] == pytest.approx(4 * pauses[1, 0.0])
    assert pauses[1, 0.5] == pytest.approx(2 * pauses[1, 0.0])
    assert pauses[1, 1.0] > 0.1, "longer than the buffer timeout"


def test_a_sleep_that_ends_slightly_early_is_long_enough(wire_up, make, drain):
    """Otherwise an idle subtask would wake, find nothing due and sleep for no time, again and again."""
    gate, partition, clock = wire_up()
    for _ in range(2):
        partition.emit(make.ints(0, 1))
        partition.flush_early(clock.now_s, 0.0)
    assert len(drain(gate)) == 1
    clock.now_s = partition.next_early() - 1e-9
    partition.flush_early(clock.now_s, 0.0)
    assert len(drain(gate)) == 1


def test_nothing_leaves_early_without_a_buffer_timeout(wire_up, make):
    gate, partition, clock = wire_up(ExchangeSettings(buffer_timeout_ms=None))
    partition.emit(make.ints(0, 1))
    partition.flush_early(clock.now_s, 0.0)
    assert gate.poll() is None
    assert partition.next_early() is None


def test_a_barrier_in_line_is_not_passed_and_nothing_is_added_behind_it_early(wire_up, make, drain):
    """While a channel holds something back, early buffers wait: they could only make the line longer."""
    settings = ExchangeSettings(exclusive_buffers=1, floating_buffers=0)
    gate, partition, clock = wire_up(settings)
    for n in range(2):  # the second one finds no credit
        partition.emit(make.ints(n, 1))
        partition.flush()
    barrier = CheckpointBarrier(1, 0)
    partition.broadcast(barrier)
    partition.emit(make.ints(2, 1))
    partition.flush_early(clock.now_s, 0.0)
    taken = [element for _, element in drain(gate)]
    assert [values(e) if isinstance(e, ColumnBatch) else e for e in taken] == [[0], [1], barrier]
    partition.flush_early(clock.now_s, 0.0)
    ((_, batch),) = drain(gate)
    assert values(batch) == [2]


@pytest.mark.parametrize(("enabled", "timeout_ms"), [("true", 40), ("false", None)])
def test_without_the_timeout_buffers_leave_only_when_full(enabled, timeout_ms):
    options = Options(
        {
            "execution.buffer-timeout.enabled": enabled,
            "execution.buffer-timeout.interval": "40 ms",
        }
    )
    assert exchange_settings(options).buffer_timeout_ms == timeout_ms


def test_control_elements_flush_what_is_before_them(wire_up, make, drain):
    gate, partition, _ = wire_up()
    partition.emit(make.ints(0, 3))
    partition.broadcast(Watermark(9))
    partition.emit(make.ints(3, 2))
    partition.broadcast(Watermark(10))
    elements = [element for _, element in drain(gate)]
    assert [values(e) if isinstance(e, ColumnBatch) else e for e in elements] == [
        [0, 1, 2],
        Watermark(9),
        [3, 4],
        Watermark(10),
    ]


@pytest.mark.parametrize("kind", ["ints", "objects"])
def test_buffers_are_sent_when_full(wire_up, make, drain, kind):
    gate, partition, _ = wire_up()
    for n in range(25):
        partition.emit(getattr(make, kind)(n * 400, 400))
    target = 8192 if kind == "ints" else 2048
    sizes = [len(batch) for _, batch in drain(gate)]
    assert sizes
    assert all(target <= size < target + 400 for size in sizes)


def test_batches_that_cannot_share_a_buffer_do_not(wire_up, make, drain):
    gate, partition, _ = wire_up()
    other = ColumnBatch(pa.record_batch({"m": [1]}))
    for batch in (make.ints(0, 1), make.ints(1, 1, timestamps=False), other, make.objects(0, 2)):
        partition.emit(batch)
    partition.flush()
    assert [len(batch) for _, batch in drain(gate)] == [1, 1, 1, 2]


def test_wide_rows_are_cut_by_bytes(wire_up, drain):
    gate, partition, _ = wire_up()
    text = ["x" * 10_000] * 1000
    partition.emit(ColumnBatch(pa.record_batch({"n": text})))
    partition.flush()
    batches = [batch for _, batch in drain(gate)]
    assert all(batch.nbytes <= 1 << 20 for batch in batches)
    assert sum(map(len, batches)) == 1000
    assert len(batches) < 13


def test_one_huge_row_among_small_ones_travels_alone_or_nearly(clock):
    rows = ["x"] * 100 + ["y" * (3 << 20)] + ["z"] * 100
    batch = ColumnBatch(pa.record_batch({"n": rows}))
    pieces = list(cut(batch, ExchangeSettings(), BatchSizer(), 1 << 20))
    assert [v for piece, _ in pieces for v in values(piece)] == rows
    assert [len(piece) for piece, size in pieces if size > 1 << 20] == [1]


def test_many_small_batches_of_wide_rows_stay_within_the_byte_limit(wire_up, drain):
    gate, partition, _ = wire_up()
    for _ in range(40):
        partition.emit(ColumnBatch(pa.record_batch({"n": ["x" * 100_000]})))
    sent = partition.stats().records_out
    assert sent >= 20  # not held back until the row target
    partition.flush()
    assert sum(len(batch) for _, batch in drain(gate)) == 40


def test_large_dictionary_does_not_force_single_rows():
    names = pa.array([f"{n:0100d}" for n in range(20_000)])
    column = pa.DictionaryArray.from_arrays(np.arange(60_000, dtype=np.int32) % 20_000, names)
    batch = ColumnBatch(pa.record_batch({"n": column}))
    assert len(list(cut(batch, ExchangeSettings(), BatchSizer(), 1 << 20))) <= 4


def test_batches_without_columns_keep_their_rows(wire_up, drain):
    gate, partition, _ = wire_up()
    empty = pa.record_batch({"a": [1, 2, 3]}).select([])
    partition.emit(ColumnBatch(empty))
    partition.emit(ColumnBatch(empty))
    partition.flush()
    assert [len(batch) for _, batch in drain(gate)] == [6]


def test_sizer_agrees_with_arrow():
    sizer = BatchSizer()
    for batch in (
        ColumnBatch(pa.record_batch({"a": pa.array(range(800)), "b": pa.array([True] * 800)})),
        ColumnBatch(pa.record_batch({"s": ["abc"] * 800}), np.zeros(800, np.int64)),
        ColumnBatch(pa.record_batch({"a": pa.array([None, 1] * 400)}), np.zeros(800, np.int64)),
    ):
        assert sizer.nbytes(batch) == pytest.approx(batch.nbytes, rel=0.05)


@hypothesis_settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ifow"), st.integers(0, 60)), max_size=25),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(100, 4000),
)
def test_fifo_under_random_slicing(steps, target, rows_max, bytes_max):
    """Goal: whatever the buffer sizes, each channel delivers all records once, in order, with their
    timestamps, and watermarks at their places. Method: random emits, flushes and watermarks."""
    options = ExchangeSettings(
        rows_per_buffer_target=target,
        rows_per_buffer_max=rows_max,
        object_rows_per_buffer=target,
        buffer_size_max_bytes=bytes_max,
        exclusive_buffers=2,
    )
    gate = InputGate([InputChannelSpec(i, 0) for i in range(2)], options)
    channels = [LocalOutputChannel(i, options) for i in range(2)]
    for channel in channels:
        channel.bind(gate)

    def halves(batch):
        middle = len(batch) // 2
        parts = [(0, batch.slice(0, middle)), (1, batch.slice(middle, len(batch) - middle))]
        return [(i, part) for i, part in parts if len(part)]

    from headgate.operators.clock import SystemClock

    partition = ResultPartition(channels, halves, options, SystemClock())
    expected, received = [[], []], [[], []]

    def poll_all():
        while (polled := gate.poll()) is not None:
            position, element = polled
            if isinstance(element, Watermark):
                received[position].append(element)
            else:
                assert 0 < len(element) <= max(target + 60, rows_max)
                times = element.timestamps
                rows = values(element)
                received[position] += rows if times is None else zip(rows, times, strict=True)

    number = 0
    for step, size in steps:
        if step == "f":
            partition.flush()
        elif step == "w":
            partition.broadcast(Watermark(number))
            for each in expected:
                if each and isinstance(each[-1], Watermark):
                    each.pop()  # only the newest of adjacent watermarks counts
                each.append(Watermark(number))
        else:
            rows = np.arange(number, number + size)
            if step == "i":
                partition.emit(ColumnBatch(pa.record_batch({"n": rows}), rows * 2))
                rows = list(zip(rows.tolist(), (rows * 2).tolist(), strict=True))
            else:
                partition.emit(ObjectBatch(rows.tolist()))
                rows = rows.tolist()
            expected[0] += rows[: size // 2]
            expected[1] += rows[size // 2 :]
        number += size
    partition.flush()
    poll_all()
    assert received == expected
    assert not partition.backlogged
    gate.validate()


# ---- backpressure ---------------------------------------------------------------------------------


def test_memory_is_bounded_while_the_producer_waits_for_the_end_of_the_backlog(make, clock, run):
    """Goal: with a slow consumer, queued buffers never exceed credits plus one emission."""
    settings = ExchangeSettings(exclusive_buffers=2, floating_buffers=3)

    async def scenario():
        gate, channels = make.wired(2, settings)
        targets = iter(range(10_000))
        partition = ResultPartition(channels, lambda b: [(next(targets) % 2, b)], settings, clock)
        rows, total, most = 8192, 200, 0

        async def produce():
            for n in range(total):
                while partition.backlogged:  # noqa: ASYNC110  as simple as can be
                    await asyncio.sleep(0)
                partition.emit(make.ints(n * rows, rows))
            partition.broadcast(EndOfPartition())

        producer = asyncio.create_task(produce())
        received, ended = 0, 0
        while ended < 2:
            for _ in range(3):
                await asyncio.sleep(0)
            most = max(most, gate.queued_buffers + partition.stats().queued_buffers)
            polled = gate.poll()
            if polled is None:
                continue
            _, element = polled
            if isinstance(element, EndOfPartition):
                ended += 1
            else:
                received += len(element)
            gate.validate()
        await producer
        assert received == rows * total
        assert 4 <= most <= 2 * 2 + 3 + 1

    run(scenario())


def test_backlog_and_listener(wire_up, make):
    gate, partition, _ = wire_up(ExchangeSettings(exclusive_buffers=1, floating_buffers=0))
    wakes = []
    partition.set_listener(lambda: wakes.append(partition.backlogged))
    partition.emit(make.ints(0, 8192))
    assert not partition.backlogged
    partition.emit(make.ints(0, 8192))
    partition.emit(make.ints(0, 8192))
    assert partition.backlogged
    assert partition.stats().queued_buffers == 2
    gate.poll()
    assert partition.backlogged
    gate.poll()
    assert not partition.backlogged
    assert wakes == [False]


def test_broken_channel_raises_everywhere_and_calls_the_listener(make, clock):
    settings = ExchangeSettings(exclusive_buffers=1, floating_buffers=0)
    _, channels = make.wired(1, settings)
    partition = ResultPartition(channels, to_first, settings, clock)
    wakes = []
    partition.set_listener(lambda: wakes.append(1))
    partition.emit(make.ints(0, 8192))
    partition.emit(make.ints(0, 8192))
    assert wakes == []
    channels[0].fail(ExchangeError("broken"))
    assert wakes
    for use in (
        lambda: partition.emit(make.ints(0, 1)),
        lambda: partition.broadcast(Watermark(1)),
        lambda: partition.backlogged,
    ):
        with pytest.raises(ExchangeError, match="broken"):
            use()


def test_close_after_the_end_still_delivers_and_before_it_gives_up(make, clock, drain):
    settings = ExchangeSettings(exclusive_buffers=1, floating_buffers=0)
    for ended in (True, False):
        gate, channels = make.wired(1, settings)
        partition = ResultPartition(channels, to_first, settings, clock)
        for n in range(3):
            partition.emit(make.ints(n, 8192))
        if ended:
            partition.broadcast(EndOfPartition())
        partition.close()
        partition.close()
        assert len(drain(gate)) == (4 if ended else 1)
        with pytest.raises(ExchangeError, match="closed"):
            partition.emit(make.ints(0, 1))


def test_stats_count_what_left(wire_up, make):
    _, partition, _ = wire_up(count=2, partitioner=lambda b: [(0, b), (1, b)])
    partition.emit(make.ints(0, 8192))
    stats = partition.stats()
    assert (stats.records_out, stats.buffers_out) == (2 * 8192, 2)
    assert stats.bytes_out == pytest.approx(2 * 8192 * 16, rel=0.05)


def test_settings_must_make_sense():
    with pytest.raises(OptionError, match="exclusive_buffers=`0`"):
        ExchangeSettings(exclusive_buffers=0)
    ExchangeSettings(floating_buffers=0, buffer_timeout_ms=0)
    with pytest.raises(OptionError, match="too large frame_size_max_bytes="):
        ExchangeSettings(frame_size_max_bytes=2**32)


def test_large_objects_are_cut_by_bytes_too():
    settings = ExchangeSettings()
    batch = ObjectBatch([b"x" * 100_000 for _ in range(500)])
    parts = list(cut(batch, settings, BatchSizer(), settings.buffer_size_max_bytes))
    assert [record for part, _ in parts for record in part.records] == batch.records
    assert max(len(part) for part, _ in parts) * 100_000 <= settings.buffer_size_max_bytes


def test_dictionaries_of_a_narrow_index_are_not_put_together(wire_up, drain):
    gate, partition, _ = wire_up()
    for first in (0, 100):
        words = pa.array([str(first + n) for n in range(100)])
        column = words.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
        partition.emit(ColumnBatch(pa.record_batch({"w": column})))
    partition.flush()
    found = [value for _, batch in drain(gate) for value in batch.data.column(0).to_pylist()]
    assert found == [str(n) for n in range(200)]
