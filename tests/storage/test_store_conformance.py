"""The promises of every checkpoint store (runtime/storage/base.py), on each of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headgate.errors import MissingFileError, StorageError
from headgate.runtime.storage.base import Created, Existed


@contextlib.asynccontextmanager
async def opened(make_store, job="job"):
    store = make_store(job)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run(scenario, make_store):
    async def main():
        async with opened(make_store) as store:
            await scenario(store)

    asyncio.run(main())


def test_an_absent_record_reads_as_none(make_store):
    async def scenario(store):
        assert await store.read("log/a.json") is None

    run(scenario, make_store)


def test_put_replaces_and_the_newest_bytes_are_read(make_store):
    async def scenario(store):
        for data in (b"one", b"", b"three"):
            await store.put("log/hint.json", data)
            assert await store.read("log/hint.json") == data

    run(scenario, make_store)


def test_directories_are_those_directly_below_the_root(make_store):
    async def scenario(store):
        for name in ("log/1.json", "log/generation/1.json", "chk/1-1/a"):
            await store.put(name, b"x")
        assert [each for each in await store.list_directories() if each != "probe"] == [
            "chk",
            "log",
        ]

    run(scenario, make_store)


def test_create_if_absent_keeps_the_first_bytes(make_store):
    async def scenario(store):
        assert await store.create_if_absent("log/1.json", b"first") == Created()
        assert await store.create_if_absent("log/1.json", b"second") == Existed(b"first")
        assert await store.read("log/1.json") == b"first"

    run(scenario, make_store)


def test_repeating_ones_own_create_reports_created(make_store):
    async def scenario(store):
        assert await store.create_if_absent("log/1.json", b"mine") == Created()
        assert await store.create_if_absent("log/1.json", b"mine") == Created()

    run(scenario, make_store)


def test_of_many_concurrent_creators_exactly_one_wins_and_the_others_see_it(make_store):
    async def scenario(store):
        async with opened(make_store) as other:
            for slot in range(5):
                results = await asyncio.gather(
                    *(
                        (store, other)[writer % 2].create_if_absent(
                            f"log/{slot}.json", b"writer %d" % writer
                        )
                        for writer in range(8)
                    )
                )
                kept = await store.read(f"log/{slot}.json")
                winners = [n for n, result in enumerate(results) if result == Created()]
                assert [b"writer %d" % n for n in winners] == [kept]
                losers = [result for result in results if result != Created()]
                assert losers == [Existed(kept)] * 7

    run(scenario, make_store)


def test_a_deleted_record_is_gone_and_deleting_twice_is_fine(make_store):
    async def scenario(store):
        await store.create_if_absent("log/1.json", b"x")
        await store.delete("log/1.json")
        await store.delete("log/1.json")
        await store.delete("never/there.json")
        assert await store.read("log/1.json") is None
        assert await store.create_if_absent("log/1.json", b"y") == Created()

    run(scenario, make_store)


def test_another_store_object_sees_the_same_objects(make_store):
    async def scenario(store):
        await store.create_if_absent("log/1.json", b"record")
        await store.write_file("chk/1-1/a.parquet", b"file")
        async with opened(make_store) as other:
            assert await other.read("log/1.json") == b"record"
            assert await other.read_file("chk/1-1/a.parquet") == b"file"
            assert await other.create_if_absent("log/1.json", b"other") == Existed(b"record")

    run(scenario, make_store)


@pytest.mark.parametrize("size", [0, 1, 100_000, (8 << 20), (8 << 20) + 1, (17 << 20) + 7])
def test_a_file_is_read_back_whole(make_store, size):
    async def scenario(store):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        await store.write_file("chk/1-1/op-0-state.parquet", memoryview(data))
        assert await store.read_file("chk/1-1/op-0-state.parquet") == data

    run(scenario, make_store)


def test_reading_a_missing_file_names_it(make_store):
    async def scenario(store):
        with pytest.raises(StorageError, match=r"chk/1-1/gone\.parquet"):
            await store.read_file("chk/1-1/gone.parquet")

    run(scenario, make_store)


def test_delete_files_takes_any_number_also_absent_ones(make_store):
    async def scenario(store):
        present = [f"chk/1-{n % 3}/{n}.parquet" for n in range(30)]
        for name in present:
            await store.write_file(name, b"x")
        await store.write_file("chk/1-1/kept.parquet", b"kept")
        absent = [f"chk/2-2/{n}.parquet" for n in range(1010)]
        await store.delete_files([*absent, *present])
        await store.delete_files([])
        for name in present:
            assert await store.read(name) is None
        assert await store.read_file("chk/1-1/kept.parquet") == b"kept"
        # A directory that became empty is no obstacle to the next file in it.
        await store.write_file("chk/1-2/again.parquet", b"again")
        assert await store.read_file("chk/1-2/again.parquet") == b"again"

    run(scenario, make_store)


def test_two_jobs_below_one_address_do_not_see_each_other(make_store):
    async def scenario(store):
        await store.put("log/1.json", b"x")
        async with opened(make_store, "other") as other:
            assert await other.read("log/1.json") is None
            assert await other.create_if_absent("log/1.json", b"y") == Created()
        assert await store.read("log/1.json") == b"x"

    run(scenario, make_store)


def test_opening_leaves_nothing_behind_and_does_not_disturb(make_store):
    async def scenario(store):
        await store.put("log/1.json", b"x")
        async with opened(make_store), opened(make_store):
            assert await store.read("log/1.json") == b"x"

    run(scenario, make_store)


@pytest.mark.parametrize("size", [0, 1, 100_000, (17 << 20) + 7])
def test_a_local_file_is_stored_whole_and_comes_back_whole(make_store, tmp_path, size):
    async def scenario(store):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        (tmp_path / "local").write_bytes(data)
        await store.write_file("chk/1-1/op-0-state.bin", tmp_path / "local")
        (tmp_path / "local").unlink()
        assert await store.read_file("chk/1-1/op-0-state.bin") == data
        await store.download("chk/1-1/op-0-state.bin", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data

    run(scenario, make_store)


def test_a_range_is_read_alone_and_ends_with_the_file(make_store):
    async def scenario(store):
        await store.write_file("chk/1-1/f", bytes(range(100)))
        assert await store.read_range("chk/1-1/f", 0, 100) == bytes(range(100))
        assert await store.read_range("chk/1-1/f", 10, 5) == bytes(range(10, 15))
        assert await store.read_range("chk/1-1/f", 95, 50) == bytes(range(95, 100))
        assert await store.read_range("chk/1-1/f", 100, 5) == b""
        assert await store.read_range("chk/1-1/f", 3, 0) == b""

    run(scenario, make_store)


def test_missing_files_are_told_from_trouble(make_store, tmp_path):
    async def scenario(store):
        for read in (
            store.read_file("chk/1-1/gone"),
            store.read_range("chk/1-1/gone", 0, 5),
            store.download("chk/1-1/gone", tmp_path / "back"),
        ):
            with pytest.raises(MissingFileError, match=r"chk/1-1/gone"):
                await read
        assert not (tmp_path / "back").exists()

    run(scenario, make_store)


def test_files_are_listed_by_prefix_with_their_sizes(make_store):
    async def listed(store, prefix):
        return sorted([item async for item in store.list_files(prefix)])

    async def scenario(store):
        assert await listed(store, "chk/") == []
        sizes = {f"chk/1-{n % 3}/{n}.parquet": n for n in range(1, 25)}
        for name, size in sizes.items():
            await store.write_file(name, b"x" * size)
        await store.put("log/1.json", b"{}")
        assert await listed(store, "chk/") == sorted(sizes.items())
        second = sorted(item for item in sizes.items() if item[0].startswith("chk/1-2/"))
        assert await listed(store, "chk/1-2/") == second
        assert await listed(store, "chk/1-2") == second
        assert ("log/1.json", 2) in await listed(store, "")

    run(scenario, make_store)


def test_removing_what_is_incomplete_leaves_whole_files_alone(make_store):
    async def scenario(store):
        await store.write_file("chk/1-1/whole", b"whole")
        assert await store.delete_incomplete("chk") == 0
        assert await store.read_file("chk/1-1/whole") == b"whole"

    run(scenario, make_store)
