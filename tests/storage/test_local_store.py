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
