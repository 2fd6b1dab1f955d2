"""Arrays by slot: the same content whatever they grew through, and no copies once they are large."""

from __future__ import annotations

import mmap

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.state.slots import arrays, key_index
from headgate.state.slots import table as slot_table
from headgate.state.slots.arrays import SlotArray, reserved_zeros
from headgate.state.slots.key_index import BatchKeys, KeyHasher, KeyIndex
from headgate.state.slots.table import SlotTable


def grow(initial):
    array, arrays = SlotArray(np.int64, initial), set()
    for size in (3, 70, 200, 900, 901, 5_000):
        array.reserve(size)
        array.data[size - 1] = size
        arrays.add(id(array.data))
    held = array.data[:5_000]
    written = {2: 3, 69: 70, 199: 200, 899: 900, 900: 901, 4_999: 5_000}
    assert {at: held[at] for at in written} == written
    assert (np.delete(held, list(written)) == initial).all()
    return array, arrays


@pytest.mark.parametrize("initial", [0, -7])
@pytest.mark.parametrize("refused", [False, True])
def test_entries_and_initial_values_survive_growth(monkeypatch, initial, refused):
    monkeypatch.setattr(arrays, "RESERVE_FROM", 100)
    monkeypatch.setattr(arrays, "RESERVED_ENTRIES", 1_000)
    monkeypatch.setattr(arrays, "_FILL_BLOCK", 16)
    if refused:

        def refuse(*_, **__):
            raise OSError("no address space")

        monkeypatch.setattr(mmap, "mmap", refuse)
    grow(initial)


def test_a_large_array_grows_in_place(monkeypatch):
    monkeypatch.setattr(arrays, "RESERVE_FROM", 100)
    array = SlotArray(np.int64, -1)
    array.reserve(101)
    data = array.data
    for size in (1_000, 100_000, 1_000_000):
        array.reserve(size)
        assert array.data is data
        assert array.data[size - 1] == -1
    assert array.nbytes < 9_000_000


def test_reserved_memory_that_the_system_refuses_is_none():
    assert reserved_zeros(1 << 62, np.int64) is None


def test_the_next_index_has_its_memory_before_the_keys_move(monkeypatch):
    monkeypatch.setattr(slot_table, "_PREPARE_FROM", 1)
    table, prepared = SlotTable(), False
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 2**64, 4_000, dtype=np.uint64)
    for low in range(0, 4_000, 10):
        cells = table._cells
        ready = table._next
        table.lookup(hashes[low : low + 10])
        if table._cells is not cells:
            prepared = table._cells is ready
    assert prepared
    assert sorted(table.lookup(hashes)[0].tolist()) == list(range(4_000))


def test_pieces_of_keys_stay_bounded_and_few(monkeypatch):
    monkeypatch.setattr(key_index, "PIECE_BYTES_MAX", 8_000)
    hasher = KeyHasher([pa.int64()], 1)
    index = KeyIndex(hasher)
    for number in range(5_000):
        index.lookup(BatchKeys(hasher, [pa.array([number])]))
    assert max(piece.nbytes for piece in index._pieces) <= 8_000
    assert len(index._pieces) < 30
    assert index.keys()[0].to_pylist() == list(range(5_000))
    assert index.keys(990, 2_010)[0].to_pylist() == list(range(990, 2_010))
    some = np.array([4_999, 0, 3_000, 0])
    assert index.take(some)[0].to_pylist() == some.tolist()


def test_a_cleared_index_uses_close_integers_directly_again():
    hasher = KeyHasher([pa.int64()], 1)
    index = KeyIndex(hasher)
    index.lookup(BatchKeys(hasher, [pa.array([1, 2**60])]))
    assert index._dense is None
    index.clear()
    assert index.lookup(BatchKeys(hasher, [pa.array([7, 8, 7])])).tolist() == [0, 1, 0]
    assert index._dense is not None


def test_more_text_than_an_array_can_hold_says_what_to_do(monkeypatch):
    def overflow(_):
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(pa, "concat_arrays", overflow)
    with pytest.raises(StateError, match="2 GiB") as error:
        key_index.plain_column(pa.chunked_array([["a"], ["b"]]))
    assert "large_string" in error.value.fix
