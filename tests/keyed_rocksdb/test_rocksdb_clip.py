"""The files of a RocksDB after a change of parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.state.keygroups import KeyGroupRange
from headgate.state.rocksdb.database import Database
from headgate.state.rocksdb.layout import group_of, group_prefix
from headgate.state.settings import RocksDBSettings


@pytest.mark.parametrize(("first", "last"), [(0, 7), (4, 7), (4, 15), (0, 15)])
def test_the_bounds_of_clipped_files_are_keys(tmp_path: Path, first: int, last: int) -> None:
    """Merged with others, a file may have a mark of deletion as its first key; a cut reads its group."""
    settings = RocksDBSettings(memory_bytes=32 << 20, write_buffer_bytes=1 << 20)
    database = Database(tmp_path / "db", settings, KeyGroupRange(first, last))
    for group in range(16):
        database.put(group_prefix(group) + b"f", b"value")
    database._db.flush(True)
    database.clip()
    database._db.flush(True)
    for file in database._db.live_files():
        assert 0 <= group_of(file["start_key"]) <= group_of(file["end_key"])
    assert [group_of(key) for key, _ in database.all()] == list(range(first, last + 1))
    database.groups = KeyGroupRange(0, 15)
    assert [group_of(key) for key, _ in database.all()] == list(range(first, last + 1))
    database.close()


def test_a_database_that_could_not_be_replaced_can_be_closed(tmp_path: Path) -> None:
    settings = RocksDBSettings(memory_bytes=32 << 20, write_buffer_bytes=1 << 20)
    database = Database(tmp_path / "db", settings, KeyGroupRange(0, 15))

    def fails(directory: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        database.replace(fails, {})
    database.close()
    assert not (tmp_path / "db").exists()
