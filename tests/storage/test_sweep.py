"""State files that are deleted, and those that checkpoints share."""

from __future__ import annotations

import asyncio

import xxhash

from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
    files_written_by,
    unshared_files,
)
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.stored_jobs import sweep_orphans
from headgate.state.snapshot import OperatorSnapshot, StateHandle


def handle(file, data=b"data"):
    return StateHandle(
        state="s",
        kind="table",
        size_bytes=len(data),
        checksum=xxhash.xxh3_64_hexdigest(data),
        rows=1,
        file=file,
    )


def manifest(id_, *files):
    handles = tuple(handle(file) for file in files)
    snapshot = OperatorSnapshot(operator="o", handles=handles)
    subtask = ManifestSubtask(subtask=0, snapshots=(snapshot,))
    return Manifest(
        checkpoint_id=id_,
        trigger_ms=0,
        completed_ms=0,
        duration_ms=0,
        max_parallelism=128,
        operators=(ManifestOperator(name="o", parallelism=1, subtasks=(subtask,)),),
    )


def store_with(*files):
    return MemoryStore("sweep", dict.fromkeys(files, b"data"))


def test_only_files_of_dead_generations_that_nobody_needs_are_swept():
    kept = ["chk/1-1/shared", "chk/3-9/own", "chk/4-2/newer", "log/1.json", "chk/stray"]
    orphaned = ["chk/1-2/a", "chk/2-5/b"]
    store = store_with(*kept, *orphaned)
    swept = asyncio.run(sweep_orphans(store, {"chk/1-1/shared"}, generation=3))
    assert swept == orphaned
    assert sorted(store._objects) == sorted(kept)
    assert asyncio.run(sweep_orphans(store, {"chk/1-1/shared"}, generation=3)) == []


def test_shared_files_outlive_the_checkpoint_that_wrote_them():
    first = manifest(1, "chk/1-1/base")
    second = manifest(2, "chk/1-1/base", "chk/1-2/delta")
    third = manifest(3, "chk/1-3/base")
    assert unshared_files([first], [second]) == []
    assert unshared_files([first, second], [third]) == ["chk/1-1/base", "chk/1-2/delta"]


def test_an_aborted_checkpoint_owns_only_what_it_wrote():
    snapshots = manifest(2, "chk/1-1/base", "chk/1-2/delta").operators[0].subtasks[0].snapshots
    assert files_written_by(snapshots, 1, 2) == ["chk/1-2/delta"]
    assert files_written_by(snapshots, 2, 2) == []
