"""Copies of state files on the worker's disk: what is kept, for how long, and what is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xxhash

from headgate.runtime.protocol import names
from headgate.runtime.task.local_files import LocalCopies
from headgate.state.snapshot import OperatorSnapshot, StateHandle


def handle_of(name: str, data: bytes, **more: Any) -> StateHandle:
    checksum = xxhash.xxh3_64_hexdigest(data)
    size = len(data)
    return StateHandle(
        state="s", kind="table", size_bytes=size, checksum=checksum, rows=1, file=name, **more
    )


class Disk:
    """A machine with the directories of some workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def worker(self, name: str, size_max: int = 1000, **switches: bool) -> LocalCopies:
        root = self.path / name
        root.mkdir()

        def siblings() -> list[Path]:
            return sorted(path for path in self.path.iterdir() if path != root)

        return LocalCopies([root], siblings, size_max=size_max, **switches)

    def files(self, worker: str) -> set[str]:
        return {path.name for path in (self.path / worker).iterdir()}

    def copy(self, worker: str, name: str) -> Path:
        return self.path / worker / names.local_copy(name)

    def damage(self, worker: str, name: str) -> None:
        """A link is replaced: the file it was linked from is as it was."""
        path = self.copy(worker, name)
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.unlink()
        path.write_bytes(data)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk")


def write(copies: LocalCopies, id_: int, new: list[str], shared: list[str], base: int = 0) -> None:
    copies.begun(id_, base)
    for name in new:
        copies.keep(name, name.encode(), id_)
    handles = tuple(handle_of(name, name.encode()) for name in [*new, *shared])
    copies.acked(id_, [OperatorSnapshot(operator="o", handles=handles)])


def test_only_the_newest_completed_checkpoint_and_pending_ones_are_kept(disk: Disk) -> None:
    copies = disk.worker("w")
    held = {"base", "one", "two", "three"}

    def present() -> set[str]:
        return {name for name in held if disk.copy("w", name).exists()}

    write(copies, 1, ["base", "one"], [])
    copies.completed(1)
    write(copies, 2, ["two"], ["base"], base=1)
    assert present() == {"base", "one", "two"}
    copies.completed(2)
    assert present() == {"base", "two"}
    write(copies, 3, ["three"], ["base", "two"], base=2)
    copies.aborted(3)
    assert present() == {"base", "two"}
    copies.keep("late", b"late", 3)
    assert not disk.copy("w", "late").exists(), "nobody needs what an aborted checkpoint writes"
    assert copies.bytes_kept == len("base" + "two")
    assert len(disk.files("w")) == 2


def test_what_a_pending_checkpoint_shares_with_its_base_stays(disk: Disk) -> None:
    copies = disk.worker("w")
    write(copies, 1, ["base"], [])
    copies.completed(1)
    write(copies, 2, ["two"], [], base=1)
    copies.begun(3, 1)
    copies.completed(2)
    assert disk.copy("w", "base").exists(), "3 is not acknowledged yet, and may share it"
    write(copies, 3, ["three"], ["two"], base=1)
    copies.completed(3)
    assert not disk.copy("w", "base").exists()


def test_a_savepoint_takes_nothing_away(disk: Disk) -> None:
    copies = disk.worker("w")
    write(copies, 1, ["one"], [])
    copies.completed(1)
    copies.acked(2, [OperatorSnapshot(operator="o", handles=(handle_of("sp", b"sp"),))])
    copies.completed(2)
    assert copies.read(handle_of("one", b"one")) == b"one"


def test_the_bound_holds_and_what_is_beyond_is_counted(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    copies = disk.worker("w", size_max=10)
    copies.begun(1, 0)
    copies.keep("small", b"12345678", 1)
    assert not caplog.records
    copies.keep("large", b"123", 1)
    copies.keep("larger", b"1234", 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "headgate.local-backup.size-max=`10b`" in caplog.text
    assert copies.bytes_kept == 8
    assert copies.bytes_refused == 7
    assert copies.read(handle_of("large", b"123")) is None
    assert copies.read(handle_of("small", b"12345678")) == b"12345678"


def test_a_file_is_linked_not_copied(disk: Disk, tmp_path: Path) -> None:
    source = tmp_path / "000012.sst"
    source.write_bytes(b"rows")
    copies = disk.worker("w")
    copies.begun(1, 0)
    copies.keep("file", source, 1)
    assert disk.copy("w", "file").stat().st_ino == source.stat().st_ino


def test_a_damaged_copy_is_not_believed_and_another_is_looked_for(
    disk: Disk, tmp_path: Path
) -> None:
    one, other, target = disk.worker("a"), disk.worker("b"), tmp_path / "target"
    handle = handle_of("file", b"rows")
    for copies in (one, other):
        copies.begun(1, 0)
        copies.keep("file", b"rows", 1)
    disk.damage("a", "file")
    assert one.read(handle) == b"rows", "of the other"
    assert (one.damaged, one.bytes_read) == (1, 4)
    assert not disk.worker("blind", reads=False, keeps=False).link(handle, target)
    reader = disk.worker("c")
    assert reader.link(handle, target)
    assert target.read_bytes() == b"rows"
    target.unlink()
    for worker in "abc":
        if disk.copy(worker, "file").exists():
            disk.damage(worker, "file")
    assert not reader.link(handle, target)
    assert not target.exists(), "a fetch of the file writes to this path, not into a copy"
    assert reader.read(handle_of("unknown", b"?")) is None


def test_a_successor_takes_over_what_it_needs(disk: Disk) -> None:
    dead, heir = disk.worker("dead"), disk.worker("heir")
    write(dead, 7, ["mine", "other"], [])
    dead.completed(7)
    heir.restoring()
    handle = handle_of("mine", b"mine")
    assert heir.read(handle) == b"mine"
    heir.restored(7, [handle])
    assert disk.copy("heir", "mine").exists()
    assert len(disk.files("heir")) == 1
    write(heir, 8, ["new"], [], base=7)
    heir.completed(8)
    assert disk.files("heir") == {names.local_copy("new")}


def test_a_piece_of_a_file_is_verified_alone(disk: Disk) -> None:
    copies = disk.worker("w")
    copies.begun(1, 0)
    copies.keep("channels", b"onetwo", 1)
    assert copies.read(handle_of("channels", b"two", offset=3)) == b"two"
    assert copies.read(handle_of("channels", b"xxx", offset=3)) is None
