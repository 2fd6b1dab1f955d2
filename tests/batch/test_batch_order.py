"""`BlockOrder` puts the records of all blocks in order, and holds no more of them than overlap."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.elements import WATERMARK_MIN, ColumnBatch, ObjectBatch
from headgate.operators.partitioning import HashColumns, HashFunction
from headgate.runtime.batch import blocks as block_module
from headgate.runtime.batch import blocks as blocks_module
from headgate.runtime.batch.blocks import ORDER, Block, BlockOrder, BlockWriter, decode
from headgate.runtime.exchange.partitioners import make_partitioner


def batch(times: list[int], first_id: int) -> ColumnBatch:
    ids = pa.array(range(first_id, first_id + len(times)), pa.int64())
    return ColumnBatch(pa.RecordBatch.from_arrays([ids], ["id"]), np.array(times, np.int64))


def written(senders: list[list[ColumnBatch]], inputs: list[int]) -> list[Block]:
    """The blocks of some senders for the one receiver, as Spark sorts them."""
    found: list[Block] = []
    for sender, (batches, index) in enumerate(zip(senders, inputs, strict=True)):
        partitioner = make_partitioner(
            HashColumns(("id",)), 1, sender=sender, max_parallelism=8, rng=random.Random(1)
        )
        writer = BlockWriter(0, 1, index, sender, "s", [0], partitioner, found.append)
        for each in batches:
            writer.emit(each)
        writer.flush()
    return sorted(found, key=lambda block: block[2:7])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "SORTED_ROWS", 40)
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", 5)
    monkeypatch.setattr(block_module, "RELEASED_ROWS", 10)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_late_lost_or_out_of_order(exact: bool, seed: int) -> None:
    rng = random.Random(seed)
    arrived: list[tuple[int, int, int]] = []  # event time, sender, id: the order that is promised
    senders: list[list[ColumnBatch]] = []
    for sender in range(3):
        batches = []
        for number in range(20):
            first_id = 1_000 * sender + 10 * number
            times = [10 * number + rng.randrange(30) for _ in range(rng.randrange(1, 9))]
            batches.append(batch(times, first_id))
            arrived += [(time, sender, first_id + at) for at, time in enumerate(times)]
        senders.append(batches)
    order = BlockOrder(decode, exact)
    order._enough = 10
    watermark, most, got = WATERMARK_MIN, 0, []
    blocks = written(senders, [0, 0, 0])
    for release in itertools.chain(*(order.take(block) for block in blocks), order.end()):
        most = max(most, order._rows)
        if release.batch is None:
            assert release.watermark >= watermark
            watermark = release.watermark
            continue
        assert int(release.batch.timestamps.min()) > watermark
        times = release.batch.timestamps.tolist()
        got += list(zip(times, release.batch.data.column("id").to_pylist(), strict=True))
    assert got == [(time, id_) for time, _, id_ in sorted(arrived, key=lambda row: row[0::2])]
    assert watermark > 150  # time did not only come at the end
    assert most < len(arrived) / 2


def test_blocks_of_large_objects_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of an object is unknown before it is encoded."""
    monkeypatch.setattr(blocks_module, "SORTED_BYTES", 4_000)
    found: list[Block] = []
    partitioner = make_partitioner(
        HashFunction(lambda record: 0), 1, sender=0, max_parallelism=8, rng=random.Random(1)
    )
    writer = BlockWriter(0, 1, 0, 0, "s", [0], partitioner, found.append)
    records = [f"{number:03d}" * 500 for number in range(12)] + ["x" * 9_000]
    writer.emit(ObjectBatch(records, np.arange(13, dtype=np.int64)))
    writer.flush()
    assert [block.seq for block in found] == list(range(len(found)))
    decoded = [decode(block.payload) for block in found]
    assert [record for batch in decoded for record in batch.records] == records
    assert [block.first_ms for block in found] == [int(b.timestamps[0]) for b in decoded]
    assert [len(batch) for batch in decoded if len(batch.records[-1]) == 9_000] == [1]
    assert max(len(block.payload) for block in found[:-1]) <= 4_000


def test_rows_are_handed_over_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "SORTED_BYTES", 100)
    blocks = [
        Block(0, 0, 1, 0, 0, 0, seq, b"x" * size) for seq, size in enumerate([90, 90, 5, 5, 400])
    ]
    given = list(blocks_module.in_batches(blocks))
    assert [block for some in given for block in some] == blocks
    assert [len(some) for some in given] == [1, 3, 1]
    assert [len(some) for some in blocks_module.in_batches([blocks[2]] * 40)] == [16, 16, 8]


def test_exactly_means_that_time_stands_between_any_two_records_of_any_input() -> None:
    blocks = written([[batch([1, 3, 3], 0)], [batch([2, 3], 10)]], [0, 1])
    order = BlockOrder(decode, exact=True)
    steps = [
        release.watermark
        if release.batch is None
        else (release.input_index, release.batch.data.column("id").to_pylist())
        for release in itertools.chain(*(order.take(block) for block in blocks), order.end())
    ]
    assert steps == [0, (0, [0]), 1, (1, [10]), 2, (0, [1, 2]), (1, [11])]


@pytest.mark.parametrize("turned", [False, True])
def test_two_exchanges_of_one_sender_have_an_order(turned: bool) -> None:
    """Spark hands out rows that are equal in what it sorts by as they come."""
    first, second = written([[batch([5, 5], 0)], [batch([5, 5], 10)]], [0, 0])
    second = second._replace(edge=1, sender=0)
    given = [second, first] if turned else [first, second]
    given.sort(key=lambda block: [getattr(block, name) for name in ORDER])
    order = BlockOrder(decode, exact=False)
    (release,) = itertools.chain(*(order.take(block) for block in given), order.end())
    assert release.batch.data.column("id").to_pylist() == [0, 1, 10, 11]


def test_what_is_read_first_is_before_all_event_time() -> None:
    broadcast = [block._replace(phase=0) for block in written([[batch([500], 7)]], [1])]
    order = BlockOrder(decode, exact=True)
    steps = [
        release.watermark if release.batch is None else release.input_index
        for block in [*broadcast, *written([[batch([4], 0)]], [0])]
        for release in order.take(block)
    ]
    steps += [r.watermark if r.batch is None else r.input_index for r in order.end()]
    assert steps == [1, 3, 0]
