"""The values of a batch's keys are read together and written together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.state.codecs import codec_of
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.canonical import Layout, TableSpec
from headgate.state.keyed.keys import OPAQUE_KEYS, encode_token, key_of, token
from headgate.state.keygroups import KeyGroupRange
from headgate.state.rocksdb.backend import RocksDBBackend
from headgate.state.rocksdb.layout import encode_addresses, group_prefix, in_order
from headgate.state.settings import RocksDBSettings
from headgate.tests.support.keyed import visits


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    layout = Layout(OPAQUE_KEYS, "value", codec_of(bytes))
    backend = RocksDBBackend(
        OPAQUE_KEYS,
        {"one": TableSpec("one", layout)},
        16,
        directory=tmp_path / "state",
        key_groups=KeyGroupRange(0, 15),
        file_token="t",
        settings=RocksDBSettings(write_buffer_bytes=1 << 20),
    )
    yield backend
    backend.close()


some_keys = pytest.mark.parametrize(
    "keys",
    [[0, 1, -1, 2**63 - 1, -(2**63), 0], [2**63, 1], [1, True, "1", b"", None], ["", "é"], []],
    ids=["ints", "a long int", "mixed", "texts", "none"],
)


@some_keys
def test_addresses_of_a_batch_are_those_of_single_keys(keys: list[Any]) -> None:
    groups = [index * 7 % 300 for index in range(len(keys))]
    assert encode_addresses(groups, keys) == [
        group_prefix(group) + encode_token(token(key))
        for group, key in zip(groups, keys, strict=True)
    ]


@some_keys
def test_addresses_in_the_order_of_the_database(keys: list[Any]) -> None:
    tokens = {*map(token, [*keys, *range(-300, 300)] if keys and keys[0] == 0 else keys)}
    expected = sorted(
        (group_prefix(key_group_of(hash_key(key_of(each)), 128)) + encode_token(each), each)
        for each in tokens
    )
    found = in_order(tokens, 128)
    assert list(zip(*found, strict=True)) == expected
    assert [*map(type, found[1])] == [type(each) for _, each in expected]


def visit(backend: RocksDBBackend, keys: list[int], value: bytes) -> None:
    """Read and write the value of each key."""
    table = backend.value_table("one")
    for _ in visits(backend, keys):
        table.get()
        table.put(value)
    backend.clear_key()


@pytest.fixture
def calls(opened: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The reads and writes of the database, each with its number of keys."""
    database = opened.value_table("one").database
    found: list[tuple[str, int]] = []
    get, read_all, write = database.get, database.get_all, database.write

    def counted_get(key: bytes) -> Any:
        found.append(("read", 1))
        return get(key)

    def counted_read(wanted: list[bytes]) -> Any:
        found.append(("read", len(wanted)))
        return read_all(wanted)

    def counted_write(changes: list[Any], known_to: Any) -> None:
        found.append(("write", len(changes)))
        write(changes, known_to)

    monkeypatch.setattr(database, "get", counted_get)
    monkeypatch.setattr(database, "get_all", counted_read)
    monkeypatch.setattr(database, "write", counted_write)
    return found


def test_values_are_read_once_and_written_at_the_next_cut(
    opened: Any, calls: list[tuple[str, int]]
) -> None:
    keys = [index % 50 for index in range(200)]
    visit(opened, keys, b"first")
    assert calls == [("read", 1)] * 50  # whether values will be read was not known yet
    calls.clear()
    for _ in range(3):
        visit(opened, keys, b"second")
    assert not calls
    opened.snapshot({})["one"].collect()
    assert calls == [("write", 50)]


def test_keys_that_are_not_held_are_read_together(
    opened: Any, calls: list[tuple[str, int]]
) -> None:
    visit(opened, [1], b"")
    calls.clear()
    visit(opened, [*range(20), *range(20)], b"")
    visit(opened, [*range(20, 60), *range(20)], b"")
    assert calls == [("read", 19), ("read", 40)]


def test_as_much_is_held_as_there_is_memory(tmp_path: Path) -> None:
    """With values of a size that was not known before, and with one that is as large as all."""
    layout, limit = Layout(OPAQUE_KEYS, "value", codec_of(bytes)), 100_000
    backend = RocksDBBackend(
        OPAQUE_KEYS,
        {"one": TableSpec("one", layout)},
        16,
        directory=tmp_path / "state",
        key_groups=KeyGroupRange(0, 15),
        file_token="t",
        settings=RocksDBSettings(write_buffer_bytes=1 << 20, held_bytes=limit),
    )
    table: Any = backend.value_table("one")
    for value in (bytes(1_000), bytes(10), bytes(limit)):
        for first in range(0, 3_000, 100):
            visit(backend, list(range(first, first + 100)), value)
            backend.set_key(first)
            table.put(value)
        held = [*table._changed.values(), *table._known.values()]
        sizes = [100 if one is ABSENT else 100 + len(one) for one in held]
        assert sum(sizes) <= max(1.5 * limit, 4 * len(value))
        for key in range(0, 3_000, 7):
            backend.set_key(key)
            assert table.get() == value
    backend.close()


def test_a_walk_finds_values_that_are_not_written(
    opened: Any, calls: list[tuple[str, int]]
) -> None:
    visit(opened, list(range(300)), b"first")
    assert not any(kind == "write" for kind, _ in calls)
    walk = opened.walk("one")
    found = walk.next_piece()
    groups = {key: key_group_of(hash_key(key), 16) for key in range(300, 400)}
    later = [
        key
        for key, group in groups.items()
        if not walk.passed(group_prefix(group) + encode_token(token(key)))
    ]
    assert later
    visit(opened, list(groups), b"later")
    while piece := walk.next_piece():
        found += piece
    assert {key for _, key in found} == {*range(300), *later}
