"""Partitioners and connections."""

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import BadRecordError, UsageError, UserCodeError
from headgate.operators.elements import ColumnBatch, ObjectBatch, Positions
from headgate.operators.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashColumns,
    HashFunction,
    Rebalance,
    Rescale,
    Shuffle,
)
from headgate.runtime.exchange import partitioners
from headgate.runtime.exchange.partitioners import Connections, make_partitioner
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import key_group_range, owner_of


def partitioner(partitioning, targets, sender=0, max_parallelism=128, seed=1):
    return make_partitioner(
        partitioning,
        targets,
        sender=sender,
        max_parallelism=max_parallelism,
        rng=random.Random(seed),
    )


KEYS = st.lists(st.text(max_size=15) | st.none(), max_size=60)


@settings(max_examples=100, deadline=None)
@given(KEYS, st.just(2) | st.integers(2, 300), st.integers(0, 3))
def test_hash_split_equals_the_scalar_reference(keys, targets, offset):
    """Each row goes to the owner of its key group, in order, with its timestamp and all columns; also
    for slices of a larger batch. The object form sends equal keys to the same place."""
    max_parallelism = 512
    data = pa.record_batch({"k": pa.array(keys, pa.string()), "n": np.arange(len(keys))})
    batch = ColumnBatch(data, np.arange(len(keys)) * 3).slice(offset, max(0, len(keys) - offset))
    rows = list(enumerate(keys))[offset:]
    by_columns = partitioner(HashColumns(("k",)), targets, max_parallelism=max_parallelism)
    by_function = partitioner(
        HashFunction(lambda r: r[1]), targets, max_parallelism=max_parallelism
    )
    expected = {}
    for n, key in rows:
        group = key_group_of(hash_key(key), max_parallelism)
        expected.setdefault(owner_of(group, targets, max_parallelism), []).append((n, key))
    got = {}
    for index, part in by_columns(batch) if rows else []:
        assert part.timestamps.tolist() == [n * 3 for n in part.data["n"].to_pylist()]
        got[index] = list(zip(part.data["n"].to_pylist(), part.data["k"].to_pylist(), strict=True))
    assert got == expected
    if rows:
        assert {i: part.records for i, part in by_function(ObjectBatch(rows))} == expected


@pytest.mark.parametrize("rows", [1, 2, 1_000, partitioners.ONE_TAKE_ROWS_MAX + 1])
@pytest.mark.parametrize("channels", [2, 3])
def test_a_split_keeps_order_columns_nulls_and_times(rows, channels):
    """Parts of one channel, of all channels, of a slice, of columns and of objects."""
    rng = np.random.default_rng(rows)
    numbers = np.arange(rows + 5)
    data = pa.record_batch(
        {"n": numbers, "odd": pa.array(numbers, mask=numbers % 2 == 0), "s": numbers.astype(str)}
    )
    columns = ColumnBatch(data, numbers * 3).slice(5, rows)
    objects = ObjectBatch(numbers[5:].tolist(), numbers[5:] * 3)
    mixed = rng.integers(0, channels, rows, np.uint8)
    only_last = np.full(rows, channels - 1, np.uint8)
    for targets in (mixed, np.zeros(rows, np.uint8), only_last):
        for batch in (columns, objects):
            parts = partitioners.split(batch, targets, channels)
            assert [index for index, _ in parts] == sorted(set(targets.tolist()))
            for index, part in parts:
                wanted = (np.flatnonzero(targets == index) + 5).tolist()
                assert part.timestamps.tolist() == [n * 3 for n in wanted]
                if isinstance(part, ObjectBatch):
                    assert part.records == wanted
                else:
                    assert part.data.to_pydict() == data.take(pa.array(wanted)).to_pydict()


@given(st.lists(st.booleans()))
def test_records_that_a_mask_selects_keep_times_and_positions(chosen):
    rows, mask = len(chosen), np.array(chosen, np.bool_)
    numbers = np.arange(rows)
    batch = ObjectBatch(numbers.tolist(), numbers * 3, Positions("s", "file", range(7, 7 + rows)))
    kept, expected = batch.where(mask), batch.take(np.flatnonzero(mask))
    assert kept.records == expected.records
    assert kept.timestamps.tolist() == expected.timestamps.tolist()
    assert kept.positions.offsets.tolist() == expected.positions.offsets.tolist()


def test_two_key_columns_go_where_the_tuple_goes():
    batch = ColumnBatch(pa.record_batch({"a": [1, 2, 3] * 10, "b": ["x", "y"] * 15}))
    split = partitioner(HashColumns(("a", "b")), 4)
    for index, part in split(batch):
        for row in part.data.to_pylist():
            group = key_group_of(hash_key((row["a"], row["b"])), 128)
            assert group in key_group_range(index, 4, 128)


def test_a_part_for_a_single_target_is_the_batch_itself():
    batch = ColumnBatch(pa.record_batch({"k": ["same"] * 10}))
    ((_, part),) = partitioner(HashColumns(("k",)), 4)(batch)
    assert part is batch


@pytest.mark.parametrize(
    "partitioning", [HashColumns(("k",)), HashFunction(lambda r: 1 / 0), Forward(), Rebalance()]
)
def test_one_target_needs_no_hash(monkeypatch, partitioning):
    monkeypatch.setattr(partitioners, "hash_columns", None)
    batch = ColumnBatch(pa.record_batch({"k": [1.5]}))  # floats cannot even be hashed
    assert partitioner(partitioning, 1)(batch) == [(0, batch)]


def test_hash_columns_of_objects_says_what_to_do():
    with pytest.raises(UsageError, match=r"key_by=`k`(.|\n)*key_with"):
        partitioner(HashColumns(("k",)), 2)(ObjectBatch([1]))


def test_key_function_sees_rows_and_its_failure_names_the_record():
    batch = ColumnBatch(pa.record_batch({"k": ["a", "b"], "n": [1, 0]}))
    parts = partitioner(HashFunction(lambda row: row.k), 8)(batch)
    assert sorted(k for _, part in parts for k in part.data["k"].to_pylist()) == ["a", "b"]
    with pytest.raises(UserCodeError, match="key function failed") as caught:
        partitioner(HashFunction(lambda record: 1 // record), 2)(ObjectBatch([1, 0]))
    assert "record=`0`" in str(caught.value)
    assert "ZeroDivisionError" in caught.value.detail


@pytest.mark.parametrize("bad", [1.5, ("a", [1]), {}])
def test_what_cannot_be_a_key_is_a_bad_record_and_no_snapshot_that_cannot_be_restored(bad):
    with pytest.raises(BadRecordError, match="cannot be a key") as caught:
        partitioner(HashFunction(lambda record: record[0]), 2)(ObjectBatch([("a",), (bad,)]))
    assert f"record=`{(bad,)!r}`" in str(caught.value)
    assert caught.value.fix


def test_rebalance_goes_round_from_the_senders_own_index():
    batch = ObjectBatch([1])
    split = partitioner(Rebalance(), 3, sender=4)
    assert [split(batch)[0][0] for _ in range(5)] == [1, 2, 0, 1, 2]
    split = partitioner(Rescale(), 2, sender=0)
    assert [split(batch)[0][0] for _ in range(3)] == [0, 1, 0]


def test_shuffle_uses_the_given_randomness():
    batch = ObjectBatch([1])
    first, second = (partitioner(Shuffle(), 4, seed=9) for _ in range(2))
    picks = [first(batch)[0][0] for _ in range(400)]
    assert picks == [second(batch)[0][0] for _ in range(400)]
    assert set(Counter(picks)) == {0, 1, 2, 3}


def test_broadcast_and_global():
    batch = ObjectBatch([1])
    assert partitioner(Broadcast(), 3)(batch) == [(0, batch), (1, batch), (2, batch)]
    assert partitioner(Broadcast(), 1)(batch) == [(0, batch)]
    assert partitioner(Global(), 3)(batch) == [(0, batch)]


def test_custom_places_each_record():
    split = partitioner(Custom(lambda record, parallelism: record % parallelism), 3)
    parts = {i: part.records for i, part in split(ObjectBatch([5, 4, 3, 2, 1]))}
    assert parts == {0: [3], 1: [4, 1], 2: [5, 2]}


@pytest.mark.parametrize("wrong", [3, -1, None, "0", 1.0])
def test_custom_result_out_of_range_is_named(wrong):
    split = partitioner(Custom(lambda record, parallelism: wrong), 3)
    with pytest.raises(UserCodeError, match=r"integer in 0\.\.2 returned=`.*` record=`'r'`"):
        split(ObjectBatch(["r"]))


@pytest.mark.parametrize("partitioning", [HashColumns(("k",)), Broadcast(), Global(), Rebalance()])
def test_all_to_all(partitioning):
    assert list(Connections(partitioning, 2, 3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_forward_connections():
    assert list(Connections(Forward(), 3, 3)) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("senders", "receivers", "pairs"),
    [
        (4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (2, 4, [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (3, 2, [(0, 0), (1, 1), (2, 1)]),  # Flink: EdgeManagerBuildUtil
        (2, 3, [(0, 0), (0, 1), (1, 2)]),
        (2, 2, [(0, 0), (1, 1)]),
    ],
)
def test_rescale_connections(senders, receivers, pairs):
    assert list(Connections(Rescale(), senders, receivers)) == pairs


@given(st.integers(1, 40), st.integers(1, 40))
def test_rescale_connects_everyone_evenly(senders, receivers):
    connections = Connections(Rescale(), senders, receivers)
    pairs = list(connections)
    assert len(pairs) == len(set(pairs)) == max(senders, receivers)
    assert pairs == sorted(pairs)
    for side, count in ((0, senders), (1, receivers)):
        loads = Counter(pair[side] for pair in pairs)
        assert set(loads) == set(range(count))
        assert max(loads.values()) - min(loads.values()) <= 1


@given(st.sampled_from([Rescale(), Forward(), Rebalance()]), st.integers(1, 40), st.integers(1, 40))
def test_the_partners_of_one_subtask_are_those_in_the_list(partitioning, senders, receivers):
    if isinstance(partitioning, Forward):
        receivers = senders
    connections = Connections(partitioning, senders, receivers)
    pairs = list(connections)
    assert len(connections) == len(pairs)
    assert [connections.number(*pair) for pair in pairs] == list(range(len(pairs)))
    for sender in range(senders):
        assert list(connections.receivers_of(sender)) == [r for s, r in pairs if s == sender]
    for receiver in range(receivers):
        assert list(connections.senders_of(receiver)) == [s for s, r in pairs if r == receiver]
