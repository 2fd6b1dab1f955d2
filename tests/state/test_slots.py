"""The slot table against a dict."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.state.hashing import INT, NULL_HASH, hash_key
from headgate.state.slots import table as slot_table
from headgate.state.slots.key_index import BatchKeys, KeyHasher, KeyIndex
from headgate.state.slots.table import SlotTable

quick = settings(max_examples=40, deadline=None)


class Model:
    """A model of the table: a dict from identity to slot."""

    def __init__(self, *, mostly_new: bool = False, expected: int = 0) -> None:
        self.table, self.slots = SlotTable(), {}
        self.table.expect(expected)
        self.mostly_new = mostly_new

    def batch(self, hashes: list[int], checks: list[int] | None = None) -> None:
        lanes = None if checks is None else np.array(checks, np.uint64)
        found, fresh = self.table.lookup(
            np.array(hashes, np.uint64), lanes, mostly_new=self.mostly_new
        )
        identities = list(zip(hashes, checks or [0] * len(hashes), strict=True))
        before = len(self.slots)
        for offset, row in enumerate(fresh.tolist()):
            assert identities[row] not in self.slots
            self.slots[identities[row]] = before + offset
        assert found.tolist() == [self.slots[identity] for identity in identities]
        assert self.table.size == len(self.slots)
        assert self.table._hashes.data[: self.table.size].tolist() == [
            hash_ for hash_, _ in self.slots
        ]


few = st.integers(0, 12).map(lambda n: n << 30)  # equal in the bits of the first probe
some = st.integers(0, 60)
many = st.integers(0, 2**64 - 1)


@quick
@given(st.lists(st.lists(few | some | many, max_size=60), max_size=12), st.booleans())
def test_agrees_with_a_dict(batches, mostly_new):
    model = Model(mostly_new=mostly_new)
    for batch in batches:
        model.batch(batch)


@quick
@given(
    st.lists(st.lists(st.tuples(some | few, st.integers(0, 3)), max_size=60), max_size=8),
    st.booleans(),
)
def test_equal_hashes_with_unequal_checks_are_other_keys(batches, mostly_new):
    model = Model(mostly_new=mostly_new)
    for batch in batches:
        model.batch([hash_ for hash_, _ in batch], [check for _, check in batch])


@quick
@given(st.lists(st.tuples(st.booleans(), st.lists(some, max_size=20)), max_size=8))
def test_batches_without_the_second_lane_mean_zeros(batches):
    model = Model()
    for checked, hashes in batches:
        model.batch(hashes, [h % 2 for h in hashes] if checked else None)


@pytest.mark.parametrize("expected", [0, 1_000, 30_000])
def test_a_table_that_expects_new_keys_may_meet_old_ones(expected):
    """Also while it grows, and its keys lie in two indexes."""
    rng = np.random.default_rng(expected)
    model = Model(mostly_new=True, expected=expected)
    for _ in range(12):
        model.batch(rng.integers(0, 40_000, 3_000).tolist())


@pytest.mark.parametrize("mostly_new", [False, True])
@pytest.mark.parametrize("rows", [1, 100, 5_000, 70_000])
def test_one_key_repeated_through_a_whole_batch(rows, mostly_new):
    model = Model(mostly_new=mostly_new)
    model.batch([7] * rows)
    model.batch([7, 8] * rows)


def test_growth_is_spread_over_batches_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(slot_table, "_INITIAL_CELLS", 16)
    monkeypatch.setattr(slot_table, "_MOVE_AT_LEAST", 1)
    rng = np.random.default_rng(1)
    model, moving = Model(), 0
    for size in (1, 3, 200, 2, 2, 500, 1, 1, 1, 5_000, 10, 10, 10, 10):
        model.batch(rng.integers(0, 6_000, size).astype(np.uint64).tolist())
        moving += model.table._old is not None
    assert moving > 3
    for _ in range(5):
        model.batch(rng.integers(0, 2**64, 3_000, dtype=np.uint64).tolist())


def test_hashes_that_agree_in_their_low_bits_stay_apart():
    model = Model()
    model.batch([n << 32 for n in range(3_000)])
    model.batch([n << 48 for n in range(3_000)])


def test_cleared_tables_start_anew():
    model = Model()
    model.batch([1, 2, 3], [0, 1, 2])
    table = model.table
    table.clear()
    model = Model()
    model.table = table
    model.batch([3, 3, 9])
    model.batch([3, 3, 9], [0, 1, 0])


keys = st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1) | st.none()


@quick
@given(st.lists(st.lists(keys, max_size=30), max_size=6))
def test_null_is_a_key_of_its_own_among_all_integers(batches):
    hasher, slots = KeyHasher([pa.int64()], 1), {}
    index = KeyIndex(hasher)
    for batch in batches:
        column = pa.array(batch, pa.int64())
        found = index.lookup(BatchKeys(hasher, [column])).tolist()
        for key, slot in zip(batch, found, strict=True):
            assert slots.setdefault(key, slot) == slot
    assert index.size == len(slots) == len(set(slots.values()))
    if slots:
        kept = index.keys()[0].to_pylist()
        assert [slots[key] for key in kept] == list(range(len(kept)))


def test_null_is_not_the_integer_with_its_hash():
    mask = 2**64 - 1
    number = NULL_HASH  # undo the mixing step by step
    number ^= (number >> 31) ^ (number >> 62)
    number = number * pow(0x94D049BB133111EB, -1, 2**64) & mask
    number ^= (number >> 27) ^ (number >> 54)
    number = number * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    number ^= (number >> 30) ^ (number >> 60)
    number = (number - INT) & mask
    assert hash_key(number) == hash_key(None)
    number -= 2**64 if number >= 2**63 else 0
    hasher = KeyHasher([pa.int64()], 1)
    index = KeyIndex(hasher)
    for values, slots in (([number], [0]), ([None, number], [1, 0]), ([number], [0])):
        column = pa.array(values, pa.int64())
        assert index.lookup(BatchKeys(hasher, [column])).tolist() == slots


@quick
@given(st.lists(st.lists(st.tuples(st.text("ab", max_size=20), keys), max_size=20), max_size=80))
def test_composite_keys_are_kept_as_they_came(batches):
    types = [pa.dictionary(pa.int32(), pa.string()), pa.int64()]
    hasher, slots = KeyHasher(types, 1), {}
    index = KeyIndex(hasher)
    for batch in batches:
        columns = [
            pa.array([a for a, _ in batch], pa.string()).dictionary_encode(),
            pa.array([b for _, b in batch], pa.int64()),
        ]
        found = index.lookup(BatchKeys(hasher, columns)).tolist()
        for key, slot in zip(batch, found, strict=True):
            assert slots.setdefault(key, slot) == slot
    if slots:
        kept = index.cut().take(slice(0, index.size))
        assert kept[0].type == pa.string()
        rows = list(zip(*(column.to_pylist() for column in kept), strict=True))
        assert [slots[key] for key in rows] == list(range(len(slots)))


def test_a_frozen_index_does_not_see_later_keys():
    hasher = KeyHasher([pa.int64()], 1)
    index = KeyIndex(hasher)
    for values in ([1, 2], [3]):
        column = pa.array(values)
        index.lookup(BatchKeys(hasher, [column]))
        if values == [1, 2]:
            frozen = index.cut()
    index.clear()
    assert frozen.take(slice(0, 2))[0].to_pylist() == [1, 2]
    assert frozen.take(np.array([1]))[0].to_pylist() == [2]
