"""Read-modify-write over a delta and runs against a dict; snapshots, restores, failures."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headgate.errors import StateError, StorageError
from headgate.state.keygroups import key_group_range
from headgate.state.runs import run as runs_of_files
from headgate.state.runs import run_set, spilling_table
from headgate.state.runs.cut import RunsMeta
from headgate.state.snapshot import CollectedFiles, FilesCut, RestoredFiles


class Model:
    """The expected contents of the table, and random batches."""

    def __init__(self, runs: SimpleNamespace, seed: int, keys: int = 200) -> None:
        self.runs, self.chance, self.keys = runs, random.Random(seed), keys
        self.rows: dict[str, dict[str, Any]] = {}

    def step(self, table: Any) -> None:
        # `a#1` and `a#2` have one hash: only their check lanes differ.
        some = [
            f"{self.chance.randint(0, self.keys // 2)}#{self.chance.randint(1, 2)}"
            for _ in range(25)
        ]
        seed = self.chance.randint(0, 9_999)
        self.runs.upsert(table, some, seed)
        for name in some:
            times = (self.rows[name]["small"] if name in self.rows else 0) + 1
            self.rows[name] = {**self.runs.row(name, seed), "small": times}


def copied(cut: FilesCut, store: Path, range_: Any) -> RestoredFiles:
    """Return the files of a cut as a restore gets them: copies, in another directory."""
    collected = cut.collect()
    files = {}
    for file in collected.files:
        files[file.id] = store / file.id
        shutil.copy(file.path, files[file.id])
    cut.release()
    return RestoredFiles(collected.meta, files, range_.first, range_.last)


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_state_is_found_again(
    runs: SimpleNamespace, tmp_path: Path, threads: Any, threaded: bool, seed: int
) -> None:
    table = runs.new_table(tmp_path, "a", submit=threads if threaded else runs.inline)
    model = Model(runs, seed)
    for step in range(40):
        model.step(table)
        if step % 20 == 19:
            assert runs.everything(table) == model.rows
    assert table.spilled
    table.close()
    assert not files_in(tmp_path)


def test_memory_stays_within_the_budget(runs: SimpleNamespace, tmp_path: Path) -> None:
    table = runs.new_table(tmp_path, "a")
    model = Model(runs, 1, keys=2_000)
    for _ in range(50):
        model.step(table)
        assert table.delta.nbytes <= runs.TINY.memory_bytes // 2 + 2_500  # one batch beyond
    table.close()


def test_a_snapshot_is_of_its_moment_and_keeps_its_files(
    runs: SimpleNamespace, tmp_path: Path, threads: Any
) -> None:
    table = runs.new_table(tmp_path / "table", "a", submit=threads)
    model = Model(runs, 4)
    cuts: list[tuple[FilesCut, dict[str, Any]]] = []
    for step in range(36):
        model.step(table)
        if step % 10 == 5:
            cuts.append((table.snapshot(), dict(model.rows)))
    for cut, rows in cuts:
        collected = cut.collect()
        assert all(file.path.exists() for file in collected.files)
        assert runs.content(cut.tables()) == rows
    table.close()
    for cut, rows in cuts:  # the cuts outlive the table
        assert runs.content(cut.tables()) == rows
        cut.release()
    assert not files_in(tmp_path / "table")


def test_unchanged_files_keep_their_ids(runs: SimpleNamespace, tmp_path: Path) -> None:
    large = replace(runs.TINY, memory_bytes=10**6, runs_per_level=4, file_bytes=10**6)
    table = runs.new_table(tmp_path, "a", settings=large)
    seen: list[set[str]] = []
    for seed in range(3):
        runs.upsert(table, [f"{seed}-{number}" for number in range(1000 // 10**seed)], seed)
        cut = table.snapshot()
        seen.append({file.id for file in cut.collect().files})
        cut.release()
    assert seen[0] < seen[1] < seen[2]
    assert len(seen[2]) == 3
    cut = table.snapshot()  # nothing changed
    assert {file.id for file in cut.collect().files} == seen[2]
    cut.release()
    table.close()


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 3), (3, 2), (2, 5)])
def test_restored_at_another_parallelism(
    runs: SimpleNamespace, tmp_path: Path, old: int, new: int
) -> None:
    """Keys go to the subtask that owns them; all go on counting."""
    names = [f"{number}#{number % 2}" for number in range(300)]

    def owned(parallelism: int, subtask: int) -> tuple[Any, list[str]]:
        range_ = key_group_range(subtask, parallelism, runs.MAX_PARALLELISM)
        hashes, _ = runs.lanes_of(names)
        groups = [(int(h) >> 32) * runs.MAX_PARALLELISM >> 32 for h in hashes]
        return range_, [name for name, group in zip(names, groups, strict=True) if group in range_]

    written: list[RestoredFiles] = []
    for subtask in range(old):
        range_, mine = owned(old, subtask)
        table = runs.new_table(tmp_path / f"old{subtask}", f"old{subtask}", key_groups=range_)
        for seed in range(4):
            runs.upsert(table, mine[seed:], seed)
        written.append(copied(table.snapshot(), tmp_path, range_))
        table.close()
    found: dict[str, int] = {}
    for subtask in range(new):
        range_, mine = owned(new, subtask)
        table = runs.new_table(tmp_path / f"new{subtask}", f"new{subtask}", key_groups=range_)
        overlapping = [
            one
            for one in written
            if one.first_key_group <= range_.last and one.last_key_group >= range_.first
        ]
        table.restore_files(overlapping)
        runs.upsert(table, mine, 9)
        rows = runs.everything(table)
        assert rows.keys() == set(mine)
        found |= {name: row["small"] for name, row in rows.items()}
        table.close()
        assert not files_in(tmp_path / f"new{subtask}")
    assert len(found) == len(names)
    assert sorted(found.values())[-1] == 5


def test_check_lanes_of_another_identity_are_computed_anew(
    runs: SimpleNamespace, tmp_path: Path
) -> None:
    table = runs.new_table(tmp_path / "old", "old")
    model = Model(runs, 7)
    for _ in range(20):
        model.step(table)
    restored = copied(table.snapshot(), tmp_path, key_group_range(0, 1, runs.MAX_PARALLELISM))
    table.close()

    def other_lanes(names: list[str]) -> tuple[Any, Any]:
        hashes, checks = runs.lanes_of(names)
        return hashes, ~checks

    table = runs.new_table(
        tmp_path / "new",
        "new",
        identity="2",
        identify=lambda table: other_lanes(table.column("name").to_pylist()),
    )
    table.restore_files([restored])
    assert len(files_in(tmp_path / "new")) > 0
    names = list(model.rows)[:50]
    slots, fresh = table.delta.add(names)
    runs.fetch(table, slots, *other_lanes(fresh))
    assert {row["name"]: row for row in table.delta.rows} == {n: model.rows[n] for n in names}
    table.delta.clear()
    assert runs.everything(table) == model.rows
    table.close()
    assert not files_in(tmp_path / "new")


class Held:
    """Threads that do nothing until they are let go."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Future[Any]]] = []

    def __call__(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((call, future))
        return future

    def let_go(self) -> None:
        for call, future in self.calls:
            future.set_result(call())
        self.calls = []


def test_keys_are_found_while_they_are_being_written(runs: SimpleNamespace, tmp_path: Path) -> None:
    held = Held()
    table = runs.new_table(tmp_path, "a", submit=held)
    runs.upsert(table, [f"k{number}" for number in range(20)], 1)
    assert len(held.calls) == 1  # the budget is used up: a flush is under way
    assert table.delta.size == 0
    runs.upsert(table, ["k3", "new"], 2)
    rows = {row["name"]: row["small"] for row in table.delta.rows}
    assert rows == {"k3": 2, "new": 1}
    held.let_go()
    runs.upsert(table, ["k3", "k4"], 3)
    rows = {row["name"]: row["small"] for row in table.delta.rows}
    assert rows == {"k3": 3, "new": 1, "k4": 2}
    table.close()


def test_a_merge_that_ends_before_the_flush_takes_nothing_from_a_cut(
    runs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that expire behind the barrier are dropped by a merge, but a restore of the barrier needs
    them.
    """
    late = False

    def expired(records: Any) -> Any:
        return np.full(len(records), late)

    held = Held()
    table = runs.new_table(tmp_path / "table", "a", submit=held, expired=expired)
    model = Model(runs, 6)
    with monkeypatch.context() as patch:
        patch.setattr(run_set.RunSet, "wants_merge", False)
        for _ in range(8):
            model.step(table)
            held.let_go()
        table.wait_for_flush()
        runs.upsert(table, ["in the delta"], 1)
    rows = {**model.rows, "in the delta": {**runs.row("in the delta", 1), "small": 1}}
    cut = table.snapshot(expired=lambda records: np.zeros(len(records), np.bool_))
    late = True
    table.poll()  # which begins a merge
    assert len(held.calls) == 2
    held.calls.reverse()  # the merge ends first
    held.let_go()
    assert runs.content(cut.tables()) == rows
    cut.release()
    table.close()
    assert not files_in(tmp_path / "table")


class OnDemand(Future[Any]):
    """A thread that begins when somebody waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self.set_result(self.call())
        return super().exception(timeout)


def test_only_one_flush_is_under_way(runs: SimpleNamespace, tmp_path: Path) -> None:
    flushes: list[OnDemand] = []

    def submit(call: Callable[[], Any]) -> OnDemand:
        assert all(flush.done() for flush in flushes), "two at a time"
        flushes.append(OnDemand(call))
        return flushes[-1]

    table = runs.new_table(tmp_path, "a", submit=submit)
    runs.upsert(table, [f"k{number}" for number in range(20)], 1)
    assert [flush.done() for flush in flushes] == [False]
    runs.upsert(table, [f"l{number}" for number in range(20)], 1)
    assert [flush.done() for flush in flushes] == [True, False]
    table.close()
    assert not files_in(tmp_path)


def test_a_failed_write_fails_every_later_call(
    runs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("disk full")

    table = runs.new_table(tmp_path, "a")
    runs.upsert(table, ["a"], 1)
    monkeypatch.setattr(runs_of_files, "write_run_file", refuse)
    cut = table.snapshot()
    with pytest.raises(StorageError, match="disk full"):
        cut.collect()
    cut.release()
    for _ in range(2):
        with pytest.raises(StorageError, match="disk full"):
            runs.upsert(table, ["b"], 1)
    table.close()
    assert not files_in(tmp_path)


def test_a_missing_file_is_named(runs: SimpleNamespace, tmp_path: Path) -> None:
    table = runs.new_table(tmp_path / "a", "a")
    runs.upsert(table, ["a"], 1)
    whole = key_group_range(0, 1, runs.MAX_PARALLELISM)
    restored = copied(table.snapshot(), tmp_path, whole)
    table.close()
    table = runs.new_table(tmp_path / "b", "b")
    with pytest.raises(StateError, match=r"was not restored file=`a-0`"):
        table.restore_files([replace(restored, files={})])
    with pytest.raises(StateError, match="list of run files is damaged"):
        table.restore_files([replace(restored, meta=b"\x00")])
    future = RunsMeta(version=2, identity="", runs=[])
    with pytest.raises(StateError, match="format this version does not know found=`2`"):
        table.restore_files([replace(restored, meta=msgspec.msgpack.encode(future))])
    table.close()


def test_a_file_that_cannot_be_taken_over_is_a_storage_error(
    runs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong with the checkpoint: no older one is wanted in its place."""
    table = runs.new_table(tmp_path / "a", "a")
    runs.upsert(table, ["a"], 1)
    restored = copied(table.snapshot(), tmp_path, key_group_range(0, 1, runs.MAX_PARALLELISM))
    table.close()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    table = runs.new_table(tmp_path / "b", "b")
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(StorageError, match=r"cannot take over a run file file=`.*a-0.*No space"):
        table.restore_files([restored])
    table.close()


def test_an_empty_table_has_an_empty_snapshot(runs: SimpleNamespace, tmp_path: Path) -> None:
    table = runs.new_table(tmp_path / "a", "a")
    cut = table.snapshot()
    collected: CollectedFiles = cut.collect()
    assert collected.files == []
    cut.release()
    other = runs.new_table(tmp_path / "b", "b")
    other.restore_files([RestoredFiles(collected.meta, {}, 0, runs.MAX_PARALLELISM - 1)])
    assert runs.everything(other) == {}


def test_a_scan_has_no_empty_piece_behind_many_rows_of_one_key(
    runs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilling_table, "_PACK_ROWS", 2)
    table = runs.new_table(tmp_path, "a")
    runs.upsert(table, ["a", "b"], 1)
    table.flush()
    runs.upsert(table, ["c", "d", "e"], 2)
    (packed,) = table.packed_on_disk()
    # The rows in memory are of the key whose rows are the last on disk.
    held, hashes = np.arange(3), np.repeat(packed.hashes[-1], 3)
    pieces = list(table.scan(held, hashes, lambda records: np.ones(len(records), np.bool_)))
    assert [len(piece) for piece in pieces] == [5]
    table.close()


def test_closing_ends_a_merge_early(
    runs: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = runs.new_table(tmp_path, "a", settings=replace(runs.TINY, memory_bytes=10**6))
    merging = run_set.merged

    def stop_first(*args: Any, **options: Any) -> Any:
        for number, piece in enumerate(merging(*args, **options)):
            assert number < 2, "it went on"
            if number == 1:
                table._runs.stop()
            yield piece

    monkeypatch.setattr(run_set, "merged", stop_first)
    for seed in range(2):
        runs.upsert(table, [f"k{number}" for number in range(100)], seed)
        table.snapshot().release()
    runs.upsert(table, ["k1"], 3)
    table.close()
    assert not files_in(tmp_path)
