"""The values of a batch's keys are read together and written together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.state.codecs import codec_of
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.canonical import Layout, TableSpec
from headgate.state.keyed.keys import OPAQUE_KEYS, encode_token, token
from headgate.state.keygroups import KeyGroupRange
from headgate.state.rocksdb import backend as rocksdb
from headgate.state.rocksdb.backend import RocksDBBackend
from headgate.state.rocksdb.layout import encode_addresses, group_prefix
from headgate.state.settings import RocksDBSettings


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


@pytest.mark.parametrize(
    "keys",
    [[0, 1, -1, 2**63 - 1, -(2**63), 0], [2**63, 1], [1, True, "1", b"", None], ["", "é"], []],
    ids=["ints", "a long int", "mixed", "texts", "none"],
)
def test_addresses_of_a_batch_are_those_of_single_keys(keys: list[Any]) -> None:
    groups = [index * 7 % 300 for index in range(len(keys))]
    assert encode_addresses(groups, keys) == [
        group_prefix(group) + encode_token(token(key))
        for group, key in zip(groups, keys, strict=True)
    ]


def visit(backend: RocksDBBackend, keys: list[int], value: bytes) -> None:
    """Read and write the value of each key."""
    table = backend.value_table("one")
    for _ in backend.visit(keys, [key % 16 for key in keys]):
        table.get()
        table.put(value)
    backend.clear_key()


def test_a_batch_is_one_read_and_one_write(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [index % 50 for index in range(200)]
    visit(opened, keys, b"first")  # whether its values will be read is not known yet
    database = opened.value_table("one").database
    calls: list[tuple[str, int]] = []
    read_all, write = database.get_all, database.write

    def counted_read(wanted: list[bytes]) -> Any:
        calls.append(("read", len(wanted)))
        return read_all(wanted)

    def counted_write(changes: list[Any]) -> None:
        calls.append(("write", len(changes)))
        write(changes)

    monkeypatch.setattr(database, "get_all", counted_read)
    monkeypatch.setattr(database, "write", counted_write)
    monkeypatch.setattr(database, "get", lambda key: pytest.fail("a single read"))
    visit(opened, keys, b"second")
    assert calls == [("read", 50), ("write", 50)]


def test_large_values_are_held_for_few_keys_at_a_time(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocksdb, "_VISIT_BYTES", 10_000)
    keys = list(range(40))
    visit(opened, keys, bytes(1_000))
    table = opened.value_table("one")
    most = 0
    for _ in opened.visit(keys, [key % 16 for key in keys]):
        assert table.get() != ABSENT
        most = max(most, len(table._held))
    opened.clear_key()
    assert 1 <= most <= 10
    assert not table._held
