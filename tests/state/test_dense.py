"""Goal: the array index of close integer keys gives the same slots as a dict, and knows its limits."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.state.slots.key_index import BatchKeys, KeyHasher, KeyIndex
from headgate.state.slots.table import SPAN_ALWAYS, DenseSlots

near = st.lists(st.integers(-50, 50), max_size=40)
far = st.lists(st.sampled_from([-(2**63), -7, 0, 3, 2**40, 2**63 - 1]), max_size=8)


def check_batch(slots, keys, found):
    for key, slot in zip(keys, found, strict=True):
        assert slots.setdefault(key, slot) == slot


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**62), 2**62), st.lists(near, max_size=8))
def test_slots_equal_a_dict_at_any_base(base, batches):
    dense, slots = DenseSlots(), {}
    for batch in batches:
        keys = [base + key for key in batch]
        found = dense.lookup(np.array(keys, np.int64))
        assert found is not None
        check_batch(slots, keys, found[0].tolist())
        # each new slot, in order, comes with a row that holds its key
        for row in found[1].tolist():
            assert slots[keys[row]] >= 0
    assert sorted(slots.values()) == list(range(dense.size))


@settings(max_examples=200, deadline=None)
@given(st.lists(near | far, max_size=8), st.lists(near, max_size=3))
def test_an_index_moves_to_hashes_without_losing_a_key(batches, after_clear):
    hasher = KeyHasher([pa.int64()], 1)
    index, slots = KeyIndex(hasher), {}
    for batch in batches:
        found = index.lookup(BatchKeys(hasher, [pa.array(batch, pa.int64())]))
        check_batch(slots, batch, found.tolist())
    kept = index.keys()[0].to_pylist() if slots else []
    assert [slots[key] for key in kept] == list(range(index.size))
    index.clear()
    again = {}
    for batch in after_clear:
        found = index.lookup(BatchKeys(hasher, [pa.array(batch, pa.int64())]))
        check_batch(again, batch, found.tolist())
    assert index.size == len(again)


def test_keys_that_spread_too_far_change_nothing():
    dense = DenseSlots()
    dense.lookup(np.array([5, 6], np.int64))
    assert dense.lookup(np.array([5, 5 + 8 * SPAN_ALWAYS], np.int64)) is None
    assert dense.size == 2
    found = dense.lookup(np.array([6, 5], np.int64))
    assert found is not None
    assert found[0].tolist() == [1, 0]


@pytest.mark.parametrize("edge", [-(2**63), 2**63 - 1])
def test_the_ends_of_the_number_range(edge):
    dense = DenseSlots()
    inward = 1 if edge < 0 else -1
    found = dense.lookup(np.array([edge, edge + inward, edge], np.int64))
    assert found is not None
    assert found[0].tolist() == [0, 1, 0]


def test_keys_beside_one_that_is_null_are_found():
    hasher = KeyHasher([pa.int64()], 1)
    index = KeyIndex(hasher)
    slots = index.lookup(BatchKeys(hasher, [pa.array([7, 8], pa.int64())])).tolist()
    wanted = BatchKeys(hasher, [pa.array([8, None, 0, 7], pa.int64())])
    assert index.find_keys(wanted).tolist() == [slots[1], -1, -1, slots[0]]
