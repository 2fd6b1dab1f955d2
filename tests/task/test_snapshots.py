"""Snapshots of a subtask, from the cut to the restore (runtime/task/snapshots.py and what it uses)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import pyarrow as pa
import pytest

from headgate.errors import StorageError
from headgate.runtime.protocol import names
from headgate.runtime.protocol.checkpoints.manifest import files_written_by
from headgate.runtime.protocol.checkpoints.segments import is_piece
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.stored_jobs import sweep_orphans
from headgate.runtime.task import snapshots as runner
from headgate.runtime.task.segments import SegmentSettings
from headgate.state.snapshot import state_info


def files_of(snapshots):
    return {h.file for s in snapshots for h in s.handles if h.file is not None}


def kinds(snapshots, operator="head"):
    return [h.kind for s in snapshots if s.operator == operator for h in s.handles]


async def load(bench, snapshots, operator="head", **arguments):
    mine = [snapshot for snapshot in snapshots if snapshot.operator == operator]
    return await bench.reader(**arguments).load(operator, mine)


def test_deltas_build_on_the_completed_base_and_restore_to_the_same_rows(make_bench, model):
    async def main():
        bench = make_bench()
        for key in range(1000):
            bench.table.put(key, key)
        first = await bench.checkpoint(1)
        bench.runner.completed(1)
        bench.table.put(5, 500)
        bench.table.delete(6)
        bench.table.put(2000, 1)
        second = await bench.checkpoint(2, base=1)
        assert kinds(first) == ["table"]
        assert kinds(second) == ["table", "delta"]
        assert files_of(first) < files_of(second)
        assert bench.table.made == [None, 1]
        full, new = bench.reports.acks[1][1], bench.reports.acks[2][1]
        assert 0 < new.written_bytes < full.written_bytes
        state = await load(bench, second)
        assert model.rows_of(state.tables["rows"]) == bench.table.rows
        groups = state.tables["rows"]["key_group"].to_pylist()
        assert groups == sorted(groups)
        assert state.tables["rows"].schema == model.schema

    asyncio.run(main())


def test_a_base_that_was_never_acknowledged_here_is_not_built_on(make_bench):
    async def main():
        bench = make_bench()
        bench.table.put(1, 1)
        assert kinds(await bench.checkpoint(7, base=6)) == ["table"]
        bench.table.put(2, 1)
        assert kinds(await bench.checkpoint(8, base=0)) == ["table"], "not incremental"

    asyncio.run(main())


MERGING = SegmentSettings(piece_bytes_max=3000, bytes_max=8000, amplification_max=1.5)
"""Some tables are too large to be pieces, and some pieces have no room."""


def sparse_segments(snapshots):
    needed = Counter()
    for snapshot in snapshots:
        for handle in snapshot.handles:
            if is_piece(handle):
                needed[handle.file] += handle.size_bytes
    return {file for file, size in needed.items() if names.segment_bytes(file) > 1.5 * size}


@pytest.mark.parametrize("segments", [None, MERGING], ids=["files", "segments"])
@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_checkpoints_restores_to_the_rows_at_the_barrier(
    make_bench, model, seed, segments
):
    """Completed, aborted, overlapping and late checkpoints, crashes and restores; files are deleted as
    the coordinator deletes them, so that a file in use that went would be noticed."""

    async def main():
        rng = random.Random(seed)
        store = MemoryStore("job", {})
        bench = make_bench(store, segments=segments)
        completed = []  # (id, snapshots, rows)
        pending = {}
        next_id, base, generation = 1, 0, 1
        for _ in range(60):
            table = bench.table
            for _ in range(rng.choice([0, 1, 5, 60])):
                if rng.random() < 0.7:
                    table.put(rng.randrange(300), rng.randrange(1_000_000))
                else:
                    table.delete(rng.randrange(300))
            match rng.choice(["checkpoint"] * 6 + ["complete"] * 4 + ["abort", "crash"]):
                case "checkpoint":
                    snapshots = await bench.checkpoint(next_id, base=base)
                    if base and base == completed[-1][0]:
                        assert not sparse_segments(completed[-1][1]) & files_of(snapshots)
                    pending[next_id] = (next_id, snapshots, dict(table.rows))
                    next_id += 1
                case "complete" if pending:
                    id_ = rng.choice(sorted(pending))
                    base = id_
                    completed.append(pending.pop(id_))
                    bench.runner.completed(id_)
                    for older in [other for other in pending if other < id_]:
                        del pending[older]
                        await bench.abort(older)
                case "abort" if pending:
                    id_ = rng.choice(sorted(pending))
                    del pending[id_]
                    await bench.abort(id_)
                    assert id_ not in bench.env.segments.ledger._needed, "it would stay for ever"
                case "crash" if completed:
                    await bench.runner.cancel()
                    pending.clear()
                    generation += 1
                    bench = make_bench(store, generation=generation, segments=segments)
                    id_, snapshots, rows = completed[-1]
                    await sweep_orphans(store, files_of(snapshots), generation)
                    assert set(store._objects) == files_of(snapshots)
                    await bench.restore(id_, snapshots)
                    assert bench.table.rows == rows
                    base = rng.choice([id_, 0])
            for _, snapshots, rows in completed[-1:]:
                assert files_of(snapshots) <= set(store._objects)
                state = await load(bench, snapshots)
                assert model.rows_of(state.tables.get("rows", model.table_of({}))) == rows
                assert len(kinds(snapshots)) <= 5

    asyncio.run(main())


def test_a_crash_between_upload_and_acknowledgement_leaves_only_what_the_sweep_takes(
    make_bench, model
):
    async def main():
        bench = make_bench()
        for key in range(500):
            bench.table.put(key, key)
        first = await bench.checkpoint(1)
        bench.runner.completed(1)
        bench.table.put(1, 2)
        lost = await bench.checkpoint(2, base=1)  # uploaded; the coordinator never hears of it
        orphans = files_written_by(lost, 1, 2)
        assert orphans
        successor = make_bench(bench.store, generation=2)
        assert await sweep_orphans(bench.store, files_of(first), 2) == orphans
        await successor.restore(1, first)
        assert successor.table.rows == {key: key for key in range(500)}
        successor.table.put(9, 90)
        third = await successor.checkpoint(3, base=1)
        assert kinds(third) == ["table", "delta"], "the restored chain goes on"
        state = await load(successor, third)
        assert model.rows_of(state.tables["rows"]) == successor.table.rows

    asyncio.run(main())


def test_a_restored_chain_is_not_continued_if_the_state_is_another_now(make_bench):
    async def main():
        bench = make_bench()
        bench.operators["head"].infos = (state_info("rows", "value", pa.schema([]), version=1),)
        bench.table.put(1, 1)
        first = await bench.checkpoint(1)
        for version, expected in ((1, ["table", "delta"]), (2, ["table"])):
            successor = make_bench(bench.store, generation=version + 1)
            info = state_info("rows", "value", pa.schema([]), version=version)
            successor.operators["head"].infos = (info,)
            await successor.restore(1, first)
            for key in range(200):
                successor.table.put(key, 2)
            assert kinds(await successor.checkpoint(2, base=1)) == expected

    asyncio.run(main())


def test_a_table_restored_without_rows_begins_anew(make_bench):
    """Its cuts count from 1 again: a delta since the restored cut would miss the first of them."""

    async def main():
        bench = make_bench()
        for key in range(50):
            bench.table.put(key, 1)
        await bench.checkpoint(1)
        for key in range(50):
            bench.table.delete(key)
        emptied = await bench.checkpoint(2, base=1)
        assert kinds(emptied) == ["table", "delta"]
        successor = make_bench(bench.store, generation=2)
        await successor.restore(2, emptied)
        successor.table.put(2, 2)
        await successor.checkpoint(3, base=2)
        await successor.abort(3)
        successor.table.put(3, 3)
        assert kinds(await successor.checkpoint(4, base=2)) == ["table"]

    asyncio.run(main())


def test_small_state_travels_in_the_manifest(make_bench, model):
    async def main():
        bench = make_bench(inline_bytes_max=20_000)
        bench.table.put(1, 1)
        bench.operators["head"].items = [b"x", b"y"]
        snapshots = await bench.checkpoint(1)
        assert files_of(snapshots) == set()
        assert not bench.store._objects
        state = await load(bench, snapshots)
        assert model.rows_of(state.tables["rows"]) == {1: 1}
        assert state.items == {"list": [b"x", b"y"]}
        items = next(h for s in snapshots for h in s.handles if h.kind == "items")
        assert items.redistribution == "union"

    asyncio.run(main())


def test_local_files_go_up_once_and_come_back(make_bench, model, tmp_path):
    async def main():
        bench = make_bench()
        files = bench.operators["head"].files = model.files(tmp_path / "runs")
        files.add({1: 1})
        files.add({2: 2})
        first = await bench.checkpoint(1)
        files.add({3: 3})
        second = await bench.checkpoint(2, base=1)
        mine = files_written_by(second, 1, 2)
        assert sum(name.endswith(".bin") for name in mine) == 1, "the new file only"
        assert (files.collected, files.released) == (2, 2)
        restored = (await load(bench, second)).files["runs"]
        assert len(restored) == 1
        assert restored[0].meta == repr([f.id for f in files.files]).encode()
        assert (restored[0].first_key_group, restored[0].last_key_group) == (0, model.groups - 1)
        for file in files.files:
            assert restored[0].files[file.id].read_bytes() == file.path.read_bytes()
        successor = make_bench(bench.store, generation=2)
        successor.operators["head"].files = files
        await successor.restore(2, second)
        third = await successor.checkpoint(3, base=2)
        assert not [n for n in files_written_by(third, 2, 3) if n.endswith(".bin")]
        assert first

    asyncio.run(main())


@pytest.mark.parametrize("native", [False, True])
def test_savepoints_are_whole_and_change_nothing(make_bench, model, tmp_path, native):
    async def main():
        bench = make_bench()
        files = bench.operators["head"].files = model.files(tmp_path / "runs")
        files.add({1: 1})
        for key in range(300):
            bench.table.put(key, key)
        await bench.checkpoint(1)
        bench.runner.completed(1)
        before = set(bench.store._objects)
        bench.table.put(5, 50)
        snapshots = await bench.checkpoint(2, base=1, savepoint="memory://s", native=native)
        assert set(bench.store._objects) == before
        savepoint = bench.savepoints["memory://s"]
        assert files_of(snapshots) == set(savepoint._objects)
        assert kinds(snapshots) == ["table", "meta", "file"] if native else ["table", "table"]
        assert all(h.inline is None for s in snapshots for h in s.handles)
        other = make_bench(MemoryStore("other", {}), generation=9)
        state = await load(other, snapshots, store=savepoint)
        assert model.rows_of(state.tables["rows"]) == bench.table.rows
        if native:
            assert set(state.files["runs"][0].files) == {files.files[0].id}
        else:
            assert model.rows_of(state.tables["runs"]) == {1: 1, 3: 3}
        assert kinds(await bench.checkpoint(3, base=1))[:2] == ["table", "delta"]

    asyncio.run(main())


# -- every cut is made or discarded, once ----------------------------------------------------------


class HeldStore(MemoryStore):
    """Writes wait until they may go on, or fail."""

    def __init__(self):
        super().__init__("held", {})
        self.writing, self.go_on = asyncio.Event(), asyncio.Event()
        self.error = None

    async def write_file(self, name, data):
        self.writing.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        await super().write_file(name, data)


def prepared(make_bench, model, tmp_path, store):
    bench = make_bench(store)
    for name, operator in bench.operators.items():
        operator.table.put(1, 1)
        operator.files = model.files(tmp_path / name)
        operator.files.add({1: 1})
    return bench


def assert_settled(bench, snapshots=1):
    for operator in bench.operators.values():
        assert operator.files.released == snapshots
        assert len(operator.table.made) + operator.table.discarded == snapshots


@pytest.mark.parametrize("when", ["at once", "uploading", "after"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_given_up_snapshots_settle_their_cuts_and_leave_no_files(
    make_bench, model, tmp_path, when, how
):
    async def main():
        store = HeldStore()
        bench = prepared(make_bench, model, tmp_path, store)
        bench.take(1)
        if when == "uploading":
            await store.writing.wait()
        elif when == "after":
            store.go_on.set()
            await bench.runner.drain()
        if how == "abort":
            await bench.abort(1)
        else:
            await bench.runner.cancel()
        assert_settled(bench)
        assert not bench.reports.declines
        assert (1 in bench.reports.acks) == (when == "after")
        assert bool(store._objects) == (when == "after" and how == "cancel")

    asyncio.run(main())


@pytest.mark.parametrize("savepoint", ["", "memory://s"])
def test_a_snapshot_given_up_while_a_large_table_is_encoded_leaves_no_local_file(
    make_bench, model, tmp_path, monkeypatch, savepoint
):
    """The thread goes on to its end, and what it has made is nobody's: it goes at once."""
    monkeypatch.setattr("headgate.runtime.task.parquet_files.SPILL_BYTES", 100)

    async def main():
        bench = prepared(make_bench, model, tmp_path, MemoryStore("job", {}))
        loop, encoding, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        encode = runner.encode_tables
        large = []

        def held(tables, path_for_large):
            encoded = encode(tables, path_for_large)
            large.append(encoded.data.exists())
            loop.call_soon_threadsafe(encoding.set)
            go_on.wait()
            return encoded

        monkeypatch.setattr(runner, "encode_tables", held)
        bench.take(1, savepoint=savepoint)
        await encoding.wait()
        bench.runner.abort(1)
        for _ in range(5):  # until the thread is all that is left
            await asyncio.sleep(0)
        go_on.set()
        await bench.runner.drain()
        assert large
        assert all(large)
        assert not list((bench.path / "transfers").iterdir())
        assert_settled(bench)

    asyncio.run(main())


def test_a_store_that_fails_declines_the_checkpoint_and_the_next_one_works(
    make_bench, model, tmp_path
):
    async def main():
        store = HeldStore()
        store.go_on.set()
        bench = prepared(make_bench, model, tmp_path, store)
        store.error = StorageError("no space")
        bench.take(1)
        await bench.runner.drain()
        assert bench.reports.declines[1][0] == "io"
        assert "no space" in bench.reports.declines[1][1]
        assert_settled(bench)
        store.error = None
        await bench.checkpoint(2, base=1)
        assert_settled(bench, 2)

    asyncio.run(main())


def test_a_cut_that_fails_declines_the_checkpoint_with_its_text(make_bench, model, tmp_path):
    async def main():
        bench = prepared(make_bench, model, tmp_path, MemoryStore("job", {}))
        bench.table.fails = ValueError("cannot encode")
        bench.take(1)
        await bench.runner.drain()
        assert bench.reports.declines[1] == ("async_exception", "ValueError: cannot encode")
        assert_settled(bench)
        assert not bench.store._objects

    asyncio.run(main())


def test_if_an_operator_cannot_be_cut_the_cuts_of_the_others_are_given_up(
    make_bench, model, tmp_path
):
    async def main():
        bench = prepared(make_bench, model, tmp_path, MemoryStore("job", {}))
        bench.operators["head"].raises = ValueError("no cut")  # the tail's is made before
        with pytest.raises(Exception, match="no cut"):
            bench.take(1)
        await bench.runner.drain()
        tail = bench.operators["tail"]
        assert (tail.table.made, tail.table.discarded, tail.files.released) == ([], 1, 1)
        assert not bench.reports.acks
        assert not bench.reports.declines, "the attempt has failed: nobody waits for this one"

    asyncio.run(main())


def test_deleting_what_was_begun_takes_bounded_time(make_bench, model, tmp_path, monkeypatch):
    async def main():
        monkeypatch.setattr("headgate.runtime.task.snapshots.CLEAN_UP_S", 0.02)
        store = HeldStore()

        async def never(names):
            await asyncio.Event().wait()

        store.delete_files = never
        bench = prepared(make_bench, model, tmp_path, store)
        bench.take(1)
        await store.writing.wait()
        await asyncio.wait_for(bench.runner.cancel(), 60)
        assert_settled(bench)

    asyncio.run(main())


def test_without_a_store_only_precommits_are_made(make_bench, model, tmp_path):
    async def main():
        bench = prepared(make_bench, model, tmp_path, MemoryStore("job", {}))
        bench.env.store = None
        made = []
        bench.operators["head"].items = [b"x"]
        bench.take(1)
        await bench.runner.drain()
        snapshots, _ = bench.reports.acks[1]
        assert all(not snapshot.handles for snapshot in snapshots)
        assert not made
        for operator in bench.operators.values():
            assert operator.table.discarded == operator.files.released == 1

    asyncio.run(main())
