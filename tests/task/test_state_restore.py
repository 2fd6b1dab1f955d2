"""Reading, merging and verifying state at a restore (runtime/task/state_restore.py and its formats)."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InternalError, StateError, StorageError
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task import parquet_files, state_restore
from headgate.runtime.task.parquet_files import encode_tables
from headgate.runtime.task.state_restore import merge_chain
from headgate.state.checked_files import ARROW_TAIL_BYTES
from headgate.state.keygroups import KeyGroupRange, key_group_range


class RecordingStore(MemoryStore):
    """Counts the bytes that are read."""

    def __init__(self, objects=None):
        super().__init__("recorded", {} if objects is None else objects)
        self.bytes_read = 0

    async def read_file(self, name):
        data = await super().read_file(name)
        self.bytes_read += len(data)
        return data

    async def read_range(self, name, start, length):
        before = self.bytes_read
        data = await super().read_range(name, start, length)
        self.bytes_read = before + len(data)
        return data


@pytest.fixture
def small_pieces(monkeypatch):
    """Row groups, tails and blocks as they are in files a thousand times as large."""
    monkeypatch.setattr(parquet_files, "ROW_GROUP_ROWS", 1000)
    monkeypatch.setattr(state_restore, "BLOCK_ROWS", 3000)


async def written(make_bench, rows=50_000, *, delta=True, **arguments):
    """A bench with a base and a delta, and the snapshots of its head."""
    bench = make_bench(RecordingStore(), **arguments)
    for key in range(rows):
        bench.table.put(key, key * 0x9E3779B97F4A7C15 % 2**62)
    snapshots = await bench.checkpoint(1)
    if delta:
        for key in range(0, rows, 100):
            bench.table.put(key, -1)
            bench.table.delete(key + 1)
        snapshots = await bench.checkpoint(2, base=1)
    return bench, [s for s in snapshots if s.operator == "head"]


def test_a_rescaled_subtask_reads_its_part_only(make_bench, model, small_pieces):
    async def main():
        bench, snapshots = await written(make_bench)
        sizes = sum(h.size_bytes for s in snapshots for h in s.handles)
        found, read = {}, 0
        for index in range(4):
            own = key_group_range(index, 4, model.groups)
            bench.store.bytes_read = 0
            table = (await bench.reader(own=own).load("head", snapshots)).tables["rows"]
            groups = set(table["key_group"].to_pylist())
            assert groups == set(range(own.first, own.last + 1))
            found |= model.rows_of(table)
            read += bench.store.bytes_read
            assert bench.store.bytes_read < sizes / 2
        assert read < 1.1 * sizes + 8 * ARROW_TAIL_BYTES, "each row once, and all ends"
        assert found == bench.table.rows

    asyncio.run(main())


def test_state_of_several_old_subtasks_comes_together(make_bench, model, small_pieces):
    async def main():
        store = RecordingStore()
        rng = random.Random(3)
        rows = {key: rng.randrange(1000) for key in range(5000)}
        snapshots = []
        for index in range(3):
            bench = make_bench(store, index=index, parallelism=3)
            for key, value in rows.items():
                if model.group_of(key) in bench.own:
                    bench.table.put(key, value)
            snapshots += [s for s in await bench.checkpoint(1) if s.operator == "head"]
        rng.shuffle(snapshots)
        for own in (model.all_groups, KeyGroupRange(4, 12)):
            table = (await bench.reader(own=own).load("head", snapshots)).tables["rows"]
            assert model.rows_of(table) == {
                k: v for k, v in rows.items() if model.group_of(k) in own
            }
            groups = table["key_group"].to_pylist()
            assert groups == sorted(groups)

    asyncio.run(main())


def test_local_files_without_own_key_groups_are_left_where_they_are(make_bench, model, tmp_path):
    async def main():
        bench = make_bench(RecordingStore())
        files = bench.operators["head"].files = model.files(tmp_path / "runs")
        for key in range(model.groups):
            files.add({key: key})
        snapshots = [s for s in await bench.checkpoint(1) if s.operator == "head"]
        own = KeyGroupRange(3, 5)
        restored = (await bench.reader(own=own).load("head", snapshots)).files["runs"][0]
        expected = {file.id for file in files.files if file.first_key_group in own}
        assert set(restored.files) == expected
        assert len(expected) == 3

    asyncio.run(main())


def test_downloads_are_deleted_and_what_was_linked_away_stays(make_bench, model, tmp_path):
    async def main():
        bench = make_bench(RecordingStore())
        files = bench.operators["head"].files = model.files(tmp_path / "runs")
        files.add({1: 1})
        snapshots = [s for s in await bench.checkpoint(1) if s.operator == "head"]
        reader = bench.reader()
        (path,) = (await reader.load("head", snapshots)).files["runs"][0].files.values()
        kept = tmp_path / "kept"
        os.link(path, kept)
        content = path.read_bytes()
        await reader.delete_downloads()
        assert not path.parent.exists()
        assert kept.read_bytes() == content

    asyncio.run(main())


def test_progress_adds_up_to_the_whole(make_bench, small_pieces):
    async def main():
        bench, snapshots = await written(make_bench, 3000)
        total = sum(h.size_bytes for s in snapshots for h in s.handles)
        for own in (bench.own, KeyGroupRange(0, 7)):
            counts = []
            await bench.reader(progress=counts.append, own=own).load("head", snapshots)
            assert sum(counts) == total
            assert len(counts) == 2

    asyncio.run(main())


# -- what is not as it was written ------------------------------------------------------------------


def assert_precise(error, what, handle, store):
    text = str(error)
    for part in (what, "operator=`head`", "state=`rows`", "subtask=`count (1/1)`", handle.file):
        assert part in text
    assert store.describe() in text
    assert "older checkpoint" in text


@pytest.mark.parametrize("part", [False, True])
def test_any_flipped_bit_is_found_and_named(make_bench, model, small_pieces, part):
    """Read whole, any byte; read in part, any byte that is read."""

    async def main():
        bench, snapshots = await written(make_bench, 3000)
        own = KeyGroupRange(5, 9) if part else bench.own
        expected = (await bench.reader(own=own).load("head", snapshots)).tables["rows"]
        rng = random.Random(1)
        found = 0
        for handle in (h for s in snapshots for h in s.handles):
            sound = bench.store._objects[handle.file]
            for _ in range(25):
                position = rng.randrange(len(sound))
                broken = bytearray(sound)
                broken[position] ^= 1 << rng.randrange(8)
                bench.store._objects[handle.file] = bytes(broken)
                try:
                    table = (await bench.reader(own=own).load("head", snapshots)).tables["rows"]
                except StateError as error:
                    assert_precise(error, "state is corrupt", handle, bench.store)
                    found += 1
                else:
                    assert part, "a file that is read whole is compared whole"
                    assert table.equals(expected)
            bench.store._objects[handle.file] = sound
        assert found == 50 or (part and found > 10)

    asyncio.run(main())


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("damage", ["missing", "cut off", "other file"])
def test_a_file_that_is_missing_or_not_the_one_is_named(
    make_bench, model, small_pieces, damage, part
):
    async def main():
        bench, snapshots = await written(make_bench, 3000)
        own = KeyGroupRange(5, 9) if part else bench.own
        base, delta = snapshots[0].handles
        objects = bench.store._objects
        match damage:
            case "missing":
                del objects[delta.file]
            case "cut off":
                objects[delta.file] = objects[delta.file][:-20]
            case "other file":
                objects[delta.file] = objects[base.file]
        what = "is missing" if damage == "missing" else "is corrupt"
        with pytest.raises(StateError) as refused:
            await bench.reader(own=own).load("head", snapshots)
        assert_precise(refused.value, what, delta, bench.store)

    asyncio.run(main())


def test_damaged_local_files_are_named(make_bench, model, tmp_path):
    async def main():
        bench = make_bench(RecordingStore())
        files = bench.operators["head"].files = model.files(tmp_path / "runs")
        files.add({1: 1})
        snapshots = [s for s in await bench.checkpoint(1) if s.operator == "head"]
        handle = next(h for s in snapshots for h in s.handles if h.kind == "file")
        bench.store._objects[handle.file] += b"more"
        with pytest.raises(StateError, match="state is corrupt") as refused:
            await bench.reader().load("head", snapshots)
        assert handle.file in str(refused.value)
        assert "state=`runs`" in str(refused.value)

    asyncio.run(main())


def test_a_store_in_trouble_is_not_taken_for_damage(make_bench):
    """A StateError ends the job; a StorageError is tried again."""

    async def main():
        bench, snapshots = await written(make_bench, 10)

        async def refuses(name):
            raise StorageError("try later")

        bench.store.read_file = refuses
        with pytest.raises(StorageError, match="try later"):
            await bench.reader().load("head", snapshots)

    asyncio.run(main())


# -- tables -----------------------------------------------------------------------------------------

changes = st.lists(
    st.dictionaries(st.integers(0, 40), st.one_of(st.none(), st.integers(0, 9)), max_size=20),
    max_size=5,
)


@given(st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=30), changes)
def test_a_merged_chain_is_what_the_changes_left(base, deltas):
    def table_of(rows, delta):
        keys = sorted(rows, key=lambda key: (key % 7, -key))
        table = pa.table(
            {
                "key_group": pa.array([key % 7 for key in keys], pa.int32()),
                "key": pa.array([f"k{key}" for key in keys], pa.string()),
                "value": pa.array([rows[key] for key in keys], pa.int64()),
            }
        )
        gone = pa.array([rows[key] is None for key in keys], pa.bool_())
        return table.append_column("deleted", gone) if delta else table

    expected = dict(base)
    for delta in deltas:
        expected |= delta
    expected = {f"k{key}": value for key, value in expected.items() if value is not None}
    block_rows, state_restore.BLOCK_ROWS = state_restore.BLOCK_ROWS, 8
    try:
        parts = [table_of(base, False), *(table_of(delta, True) for delta in deltas)]
        merged = merge_chain(parts, ["key"])
    finally:
        state_restore.BLOCK_ROWS = block_rows
    assert merged.column_names == ["key_group", "key", "value"]
    assert (
        dict(zip(merged["key"].to_pylist(), merged["value"].to_pylist(), strict=True)) == expected
    )
    assert merged.num_rows == len(expected)
    groups = merged["key_group"].to_pylist()
    assert groups == sorted(groups)


def test_columns_go_by_name_and_what_a_part_lacks_is_null():
    base = pa.table(
        {"key_group": pa.array([0, 1], pa.int32()), "key": [1, 2], "old": ["a", "b"], "n": [1, 2]}
    )
    delta = pa.table(
        {
            "key_group": pa.array([0, 1], pa.int32()),
            "n": [10.5, None],
            "key": [1, 2],
            "new": [b"x", None],
            "deleted": [False, True],
        }
    )
    merged = merge_chain([base, delta], ["key"])
    assert merged.to_pylist() == [{"key_group": 0, "n": 10.5, "key": 1, "new": b"x", "old": None}]
    kept = merge_chain([base, delta.slice(0, 0)], ["key"])
    assert kept["new"].to_pylist() == [None, None]


def test_keys_of_any_kind_identify_rows():
    import decimal
    import uuid

    ids = [uuid.UUID(int=i).bytes for i in range(3)]
    columns = {
        "key_group": pa.array([0, 0, 0], pa.int32()),
        "id": pa.array(ids, pa.binary(16)),
        "amount": pa.array([decimal.Decimal(i) / 4 for i in range(3)], pa.decimal128(10, 2)),
        "pair": pa.array([{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": None, "b": "x"}]),
        "when": pa.array([1, 2, None], pa.timestamp("ns", "UTC")),
        "value": pa.array([1, 2, 3]),
    }
    base = pa.table(columns)
    delta = base.set_column(5, "value", pa.array([10, 20, 30])).slice(0, 2)
    delta = delta.append_column("deleted", pa.array([False, True]))
    merged = merge_chain([base, delta], ["id", "amount", "pair", "when"])
    assert sorted(merged["value"].to_pylist()) == [3, 10]
    assert merged.schema == base.schema


def test_rows_out_of_order_are_never_written(tmp_path):
    def table(*groups):
        return pa.table({"key_group": pa.array(groups, pa.int32())})

    for tables in ([table(1, 0)], [table(3), table(2)]):
        with pytest.raises(InternalError, match="not sorted by key group"):
            encode_tables(tables, lambda: tmp_path / "spill")
    assert not list(tmp_path.iterdir())
    assert encode_tables([table()], lambda: tmp_path / "spill") is None


def test_large_tables_go_through_a_local_file_and_leave_none(
    make_bench, model, monkeypatch, small_pieces
):
    monkeypatch.setattr(parquet_files, "SPILL_BYTES", 1000)
    monkeypatch.setattr("headgate.runtime.task.state_restore.SPILL_BYTES", 1000)

    async def main():
        bench, snapshots = await written(make_bench, 3000)
        table = (await bench.reader().load("head", snapshots)).tables["rows"]
        assert model.rows_of(table) == bench.table.rows
        assert [p for p in bench.path.rglob("*") if p.is_file()] == []
        assert bench.path.exists()

    asyncio.run(main())


def test_other_tools_read_the_files(make_bench, model):
    async def main():
        bench, snapshots = await written(make_bench, 3000, delta=False)
        data = bench.store._objects[snapshots[0].handles[0].file]
        table = pq.read_table(io.BytesIO(data))
        assert table.schema == model.schema
        assert np.array_equal(table["key_group"], np.sort(table["key_group"]))
        assert model.rows_of(table) == bench.table.rows
        assert re.fullmatch(
            r"chk/1-1/head-0-rows-[0-9a-f]{16}\.parquet", snapshots[0].handles[0].file
        )

    asyncio.run(main())


@pytest.mark.parametrize("large", ["from the start", "only when it is given up"])
def test_a_file_that_could_not_be_finished_is_gone(tmp_path, monkeypatch, large):
    """Also what the Parquet writer still wants to write when it is collected goes nowhere."""
    spill_bytes = 100 if large == "from the start" else 1 << 30
    monkeypatch.setattr(parquet_files, "SPILL_BYTES", spill_bytes)
    paths = []

    def path_for_large():
        paths.append(tmp_path / f"{len(paths)}")
        return paths[-1]

    def tables():
        for group in range(3):
            yield pa.table({"key_group": pa.array([group] * 1000, pa.int32())})
        monkeypatch.setattr(parquet_files, "SPILL_BYTES", 1)
        raise OSError("the disk is broken")

    with pytest.raises(OSError, match="broken") as failed:
        encode_tables(tables(), path_for_large)
    del failed  # with its frames, and the writer in them
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert len(paths) == (large == "from the start")


def test_a_full_local_disk_is_not_taken_for_corrupt_state(make_bench, model, tmp_path):
    """Or the job would fall back to an older checkpoint although nothing is wrong with this one."""

    async def main():
        bench = make_bench(RecordingStore())
        files = bench.operators["head"].files = model.files(tmp_path / "runs")
        files.add({1: 1})
        snapshots = [s for s in await bench.checkpoint(1) if s.operator == "head"]

        async def download(name, path):
            raise OSError(errno.ENOSPC, "No space left on device")

        bench.store.download = download
        with pytest.raises(StorageError, match=r"state=`runs`.*No space left") as refused:
            await bench.reader().load("head", snapshots)
        assert "io.tmp.dirs" in str(refused.value)

    asyncio.run(main())
