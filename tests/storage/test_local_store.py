"""The local store: never a torn file, whatever happens to the writer."""

from __future__ import annotations

import asyncio
import os

import pytest

from headgate.errors import InternalError, StorageError
from headgate.runtime.storage import local
from headgate.runtime.storage.local import LocalStore


def visible(root):
    """Files below the root, as (relative name, bytes); temporary ones are marked by their prefix."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def run(root, scenario):
    async def main():
        store = LocalStore(root)
        await store.open()
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(main())


def test_opening_and_closing_leaves_no_file(tmp_path):
    async def scenario(store):
        assert visible(tmp_path / "job") == {}

    run(tmp_path / "job", scenario)
    assert visible(tmp_path / "job") == {}


@pytest.mark.parametrize("call", ["write_file", "create_if_absent", "put"])
@pytest.mark.parametrize("broken", ["write", "fsync", "publish"])
def test_a_failing_disk_leaves_neither_file_nor_garbage(tmp_path, monkeypatch, call, broken):
    async def scenario(store):
        def fail(*arguments):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            if broken == "write":
                patch.setattr(local, "WRITE_CHUNK_BYTES", 4)
                patch.setattr(local, "_check_wanted", CheckCounter(fail))
            elif broken == "fsync":
                patch.setattr(os, "fsync", fail)
            else:
                patch.setattr(os, "link", fail)
                patch.setattr(os, "replace", fail)
            with pytest.raises(StorageError, match="No space left"):
                await getattr(store, call)("chk/1-1/a", b"0123456789")
        assert visible(tmp_path) == {}

    run(tmp_path, scenario)


class CheckCounter:
    """Stands at the place between two chunks; fails at the second."""

    def __init__(self, fail):
        self.calls, self.fail = 0, fail

    def __call__(self, abandoned):
        self.calls += 1
        if self.calls == 2:
            self.fail()


def test_a_writer_cancelled_half_way_leaves_nothing(tmp_path, monkeypatch):
    async def scenario(store):
        loop, half_way = asyncio.get_running_loop(), asyncio.Event()
        released = asyncio.Event()
        check_wanted, chunks = local._check_wanted, []

        def stop_half_way(abandoned):
            chunks.append(1)
            if len(chunks) == 2:
                partial = [name for name, data in visible(tmp_path).items() if data == b"0123"]
                assert len(partial) == 1
                assert local.TEMPORARY_PREFIX in partial[0]
                loop.call_soon_threadsafe(half_way.set)
                asyncio.run_coroutine_threadsafe(released.wait(), loop).result(10)
            check_wanted(abandoned)

        monkeypatch.setattr(local, "WRITE_CHUNK_BYTES", 4)
        monkeypatch.setattr(local, "_check_wanted", stop_half_way)
        writer = asyncio.ensure_future(store.write_file("chk/1-1/a.parquet", b"0123456789"))
        await half_way.wait()
        writer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writer
        released.set()
        await asyncio.get_running_loop().run_in_executor(None, store._threads.shutdown)
        assert visible(tmp_path) == {}

    run(tmp_path, scenario)


def test_files_are_durable_before_they_are_visible(tmp_path, monkeypatch):
    """Method: record the system calls. Data is fsynced before its name appears, the directory after."""
    trace, fsync = [], os.fsync

    def record(name, call):
        def wrapper(*arguments):
            trace.append(name)
            return call(*arguments)

        return wrapper

    def record_fsync(handle):
        trace.append(
            "fsync directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "fsync data"
        )
        fsync(handle)

    async def scenario(store):
        await store.put("log/x", b"")
        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "link", record("link", os.link))
        monkeypatch.setattr(os, "replace", record("replace", os.replace))
        await store.create_if_absent("log/1", b"1")
        assert trace == ["fsync data", "link", "fsync directory"]
        trace.clear()
        await store.write_file("log/2", b"2")
        assert trace == ["fsync data", "replace", "fsync directory"]

    run(tmp_path, scenario)


def test_a_lost_answer_is_found_again(tmp_path, monkeypatch):
    """The link succeeds and the directory fsync fails: the retry must report success, not a rival."""

    async def scenario(store):
        with monkeypatch.context() as patch:

            def fail(directory):
                raise OSError(5, "Input/output error")

            patch.setattr(local, "_sync_directory", fail)
            with pytest.raises(StorageError):
                await store.create_if_absent("a", b"mine")
        assert await store.create_if_absent("a", b"mine") == local.Created()
        assert await store.create_if_absent("a", b"other") == local.Existed(b"mine")

    run(tmp_path, scenario)


def test_an_unusable_directory_is_refused_with_its_path(tmp_path):
    (tmp_path / "file").write_text("not a directory")

    async def main():
        await LocalStore(tmp_path / "file" / "job").open()

    with pytest.raises(StorageError, match="file"):
        asyncio.run(main())


def test_a_file_system_that_ignores_the_condition_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda source, target: target.write_bytes(source.read_bytes()))

    async def main():
        await LocalStore(tmp_path).open()

    with pytest.raises(StorageError, match="ignored the condition and overwrote"):
        asyncio.run(main())
    assert visible(tmp_path) == {}


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/./b", "", ".tmp-1", "a/.."])
def test_names_cannot_leave_the_root(tmp_path, name):
    async def scenario(store):
        with pytest.raises(InternalError):
            await store.put(name, b"")

    run(tmp_path, scenario)


def test_files_that_dead_writers_left_are_removed_and_never_listed(tmp_path):
    async def main():
        store = LocalStore(tmp_path)
        await store.open()
        await store.write_file("chk/1-1/whole", b"whole")
        (tmp_path / "chk/1-1/.tmp-0123456789abcdef").write_bytes(b"half")
        (tmp_path / ".tmp-fedcba9876543210").write_bytes(b"a record being written")
        assert [name async for name, _ in store.list_files("")] == ["chk/1-1/whole"]
        assert await store.delete_incomplete("chk") == 1
        assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
            ".tmp-fedcba9876543210",
            "whole",
        ]
        await store.close()

    asyncio.run(main())


def directories(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())


def test_no_directory_is_left_empty(tmp_path):
    async def scenario(store):
        assert directories(tmp_path) == []
        await store.write_file("chk/1-1/a", b"a")
        await store.write_file("chk/1-2/b", b"b")
        await store.put("log/entry", b"e")
        await store.delete_files(["chk/1-1/a"])
        assert directories(tmp_path) == ["chk", "chk/1-2", "log"]
        (tmp_path / "chk" / "1-3").mkdir()
        (tmp_path / "chk" / "1-3" / ".tmp-left").write_bytes(b"half")
        assert await store.delete_incomplete("chk") == 1
        assert directories(tmp_path) == ["chk", "chk/1-2", "log"]
        await store.delete("log/entry")
        assert directories(tmp_path) == ["chk", "chk/1-2"]
        await store.delete_files(["chk/1-2/b"])
        assert not tmp_path.exists()
        await store.put("log/entry", b"again")
        assert directories(tmp_path) == ["log"]

    run(tmp_path, scenario)


def test_writers_and_deleters_of_one_directory_do_not_disturb_each_other(tmp_path):
    async def churn(store, name):
        for _ in range(60):
            await store.create_if_absent(f"a/b/{name}", b"content")
            assert await store.read(f"a/b/{name}") == b"content"
            await store.delete(f"a/b/{name}")

    async def scenario(store):
        async with asyncio.TaskGroup() as group:
            for name in range(6):
                group.create_task(churn(store, name))
        assert directories(tmp_path) == []

    run(tmp_path, scenario)
