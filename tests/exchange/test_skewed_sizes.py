"""Records of very uneven sizes: buffers, and records under way, still keep their bounds."""

from __future__ import annotations

import asyncio
import pickle
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace

from headgate.errors import DataError
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.exchange.partition import ResultPartition
from headgate.runtime.exchange.settings import ExchangeSettings
from headgate.runtime.exchange.slicing import RECORD_BYTES_MIN, BatchSizer, cut, cut_evenly
from headgate.runtime.protocol.failures import FailureKind

BUFFER = 1 << 20
SMALL, LARGE = 200, 50_000


class Record(msgspec.Struct):
    name: str
    body: bytes


@dataclass
class Data:
    name: str
    body: bytes


class Plain:
    def __init__(self, body: bytes) -> None:
        self.body = body


KINDS = {
    "bytes": lambda n: b"x" * n,
    "str": lambda n: "é" * (n // 2),
    "tuple": lambda n: ("k", 1, b"x" * n),
    "dict": lambda n: {"k": 1, "body": "x" * n},
    "nested": lambda n: {"k": [(1, {"body": "x" * n})]},
    "struct": lambda n: Record("k", b"x" * n),
    "dataclass": lambda n: Data("k", b"x" * n),
    "class": lambda n: Plain(b"x" * n),
    "large numbers": lambda n: (1 << 100, b"x" * n),
}


def skewed(kind: str, count: int, every: int, seed: int = 0) -> list[Any]:
    """Mostly small records; about one of `every` is large. Never the one in the middle."""
    rng = random.Random(seed)
    make = KINDS[kind]
    sizes = [LARGE if rng.random() < 1 / every else SMALL for _ in range(count)]
    sizes[count // 2] = SMALL
    return [make(size) for size in sizes]


def pickled(records: list[Any]) -> int:
    return sum(max(RECORD_BYTES_MIN, len(pickle.dumps(record, 5))) for record in records)


@pytest.mark.parametrize("every", [3, 50, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_a_batch_is_that_of_all_its_records(kind: str, every: int) -> None:
    records = skewed(kind, 2000, every)
    measured = BatchSizer().nbytes(ObjectBatch(records))
    assert measured == pytest.approx(pickled(records), rel=0.3)


@pytest.mark.parametrize("every", [3, 50, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_no_slice_is_larger_than_a_buffer(kind: str, every: int) -> None:
    records = skewed(kind, 2000, every)
    slices = list(cut(ObjectBatch(records), ExchangeSettings(), BatchSizer(), BUFFER))
    assert [record for piece, _ in slices for record in piece.records] == records
    for piece, size in slices:
        assert len(piece) == 1 or pickled(piece.records) <= 1.3 * BUFFER
        assert size == pytest.approx(pickled(piece.records), rel=0.3)
    # Not more slices than needed, either: two that follow each other do not fit into one buffer.
    for (_, one), (_, other) in pairwise(slices):
        assert one + other > BUFFER // 2


@pytest.mark.parametrize("rows", [1, 2047, 2048, 4095, 4096, 4100, 8192, 16_385, 40_000])
@pytest.mark.parametrize("known", [True, False])
def test_slices_of_small_records_are_of_one_size(rows: int, known: bool) -> None:
    """A small rest would cost a frame, and the receiver would copy it behind the next batch."""
    target = ExchangeSettings().object_rows_per_buffer
    batch = ObjectBatch(list(range(rows)))
    size = rows * RECORD_BYTES_MIN
    slices = list(cut_evenly(batch, target, size) if known else cut_all(batch, 1 << 30))
    assert [record for piece, _ in slices for record in piece.records] == batch.records
    counts = [len(piece) for piece, _ in slices]
    assert max(counts) - min(counts) <= 1
    assert min(rows, target) <= min(counts)
    assert max(counts) < 2 * target
    assert sum(each for _, each in slices) == pytest.approx(size, rel=0.001)


@pytest.mark.parametrize("rows", [4_100, 8_192])
def test_records_that_need_several_buffers_leave_no_small_rest(rows: int) -> None:
    batch = ObjectBatch([b"x" * 300] * rows)
    counts = [len(piece) for piece, _ in cut_all(batch, BUFFER)]
    assert sum(counts) == rows
    assert min(counts) > ExchangeSettings().object_rows_per_buffer // 2


def cut_all(batch: ObjectBatch, bytes_max: int) -> list[tuple[Any, int]]:
    return list(cut(batch, ExchangeSettings(), BatchSizer(), bytes_max))


def test_a_record_larger_than_a_buffer_travels_alone() -> None:
    records = [b"a", b"b" * (2 * BUFFER), b"c", b"d"]
    slices = list(cut(ObjectBatch(records), ExchangeSettings(), BatchSizer(), BUFFER))
    assert [piece.records for piece, _ in slices] == [[b"a"], [b"b" * (2 * BUFFER)], [b"c", b"d"]]


def test_what_is_no_record_for_pickle_is_left_to_the_encoder() -> None:
    records = [lambda: 1, object()]
    assert BatchSizer().nbytes(ObjectBatch(records)) == 2 * RECORD_BYTES_MIN


@pytest.mark.parametrize("receivers", [1, 4])
def test_what_waits_in_a_gate_is_bounded(make, clock, drain, receivers: int) -> None:
    """A receiver that takes nothing: at most its credits arrive, each of at most one buffer."""
    settings = ExchangeSettings()
    gate, channels = make.wired(receivers, settings)

    def deal(batch: ObjectBatch) -> list[tuple[int, ObjectBatch]]:
        return [(index, ObjectBatch(batch.records[index::receivers])) for index in range(receivers)]

    partition = ResultPartition(channels, deal, settings, clock)
    for seed in range(20):
        partition.emit(ObjectBatch(skewed("tuple", 1000, 50, seed)))
    partition.flush()
    assert partition.backlogged
    taken = drain_once(gate)
    credits = receivers * settings.exclusive_buffers + settings.floating_buffers
    assert sum(pickled(batch.records) for batch in taken) <= 1.3 * credits * BUFFER


def drain_once(gate: InputGate) -> list[ObjectBatch]:
    """Take the contents of the gate, without giving credits back."""
    return [
        element
        for channel in gate._channels
        for element in channel.queue
        if isinstance(element, ObjectBatch)
    ]


# -- frames --------------------------------------------------------------------------------------------


@pytest.fixture
def wired(hubs, clock):
    """`await wired(...)`: a partition that sends frames of at most 64 KiB over a socket, and its gate."""

    async def wired(sender: str = ""):
        small = ExchangeSettings(frame_size_max_bytes=64 << 10)
        pair = await hubs(settings=small)
        gate = InputGate([InputChannelSpec(0, 0)], small)
        pair.b.register_gate(gate, 1)
        channel = pair.a.output_channel(0, pair.addresses[1], 1, sender)
        await pair.a.connect(pair.addresses, 1)
        settings = replace(small, buffer_timeout_ms=0)
        return pair, ResultPartition([channel], lambda b: [(0, b)], settings, clock), gate

    return wired


BATCHES = {
    "objects": ObjectBatch([b"%d" % n * 10_000 for n in range(40)]),
    "columns": ColumnBatch(pa.record_batch({"v": [str(n) * 10_000 for n in range(40)]})),
    "dictionaries": ColumnBatch(
        pa.record_batch({"v": pa.array([str(n) * 10_000 for n in range(40)]).dictionary_encode()})
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_frame_that_is_too_large_is_split(run, wired, take, kind: str) -> None:
    """A buffer that is larger than a frame becomes several, in order, each with a credit of its own."""

    async def scenario():
        pair, partition, gate = await wired()
        batch = BATCHES[kind]
        for _ in range(3):
            partition.emit(batch)
        received = []
        while sum(map(len, received)) < 3 * len(batch):
            _, element = await take(gate)
            received.append(element)
        assert not partition.backlogged
        assert len(received) > 3
        if kind == "objects":
            assert [r for each in received for r in each.records] == 3 * batch.records
        else:
            values = [v.as_py() for each in received for v in each.data.column(0)]
            assert values == 3 * batch.data.column(0).to_pylist()
        await pair.close()

    run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("kind", ["objects", "columns"])
def test_a_record_above_the_limit_of_a_frame_fails_the_job_for_good(run, wired, kind) -> None:
    """Another try would fail the same way. The error names the step, the size and the limit."""

    async def scenario():
        pair, partition, _ = await wired("parse")
        large = "x" * 100_000
        batch = {
            "objects": ObjectBatch(["a", large, "b"]),
            "columns": ColumnBatch(pa.record_batch({"v": ["a", large, "b"]})),
        }[kind]

        async def emit() -> None:
            partition.emit(batch)
            while partition.backlogged:  # noqa: ASYNC110  raises once the channel has failed
                await asyncio.sleep(0)

        message = "operator=`parse` bytes=`100[0-9]{3}` limit=`65536`"
        with pytest.raises(DataError, match=message) as told:
            await emit()
        assert not FailureKind.of(told.value).recoverable
        await pair.close()

    run(asyncio.wait_for(scenario(), 60))
