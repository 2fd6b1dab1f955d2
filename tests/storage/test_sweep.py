"""Which state files go, and what is said of those that stay (runtime/storage/sweep.py)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import xxhash

from headgate.runtime.protocol.checkpoints.manifest import (
    FileProblem,
    Manifest,
    ManifestOperator,
    ManifestSubtask,
    files_written_by,
    unshared_files,
)
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.sweep import Findings, examine, sweep_orphans
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
    return manifest_of(id_, [handle(file) for file in files])


def manifest_of(id_, handles):
    snapshot = OperatorSnapshot(operator="o", handles=tuple(handles))
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


@pytest.mark.parametrize("read", [True, False])
def test_an_examination_names_what_is_missing_cut_off_corrupt_or_unneeded(read):
    store = store_with("chk/1-1/good", "chk/1-1/bad", "chk/1-3/orphan", "chk/2-1/recent")
    store._objects["chk/1-1/bad"] = b"DATA"
    store._objects["chk/1-1/short"] = b"dat"
    manifests = [
        manifest(1, "chk/1-1/good", "chk/1-1/bad", "chk/1-1/short"),
        manifest(2, "chk/1-1/good", "chk/1-2/gone"),
    ]
    findings = asyncio.run(examine(store, manifests, 2, read=read))
    assert findings == Findings(
        {
            1: [FileProblem("chk/1-1/short", 4, 3)],
            2: [FileProblem("chk/1-2/gone", 4, None)],
        },
        ["chk/1-1/bad"] if read else [],
        ["chk/1-3/orphan"],
    )
    sound = asyncio.run(examine(store, [manifest(1, "chk/1-1/good")], 1, read=True))
    assert sound == Findings({}, [], [])


def test_a_file_of_several_pieces_is_sound_if_each_of_them_is():
    """Records on their way lie one channel behind the other."""
    pieces = [b"one", b"three"]
    handles = [
        msgspec.structs.replace(handle("chk/1-1/ways", data), offset=offset)
        for data, offset in zip(pieces, (0, 3), strict=True)
    ]
    store = MemoryStore("sweep", {"chk/1-1/ways": b"".join(pieces)})
    found = asyncio.run(examine(store, [manifest_of(1, handles)], 1, read=True))
    assert found == Findings({}, [], [])
    store._objects["chk/1-1/ways"] = b"onethree"[::-1]
    found = asyncio.run(examine(store, [manifest_of(1, handles)], 1, read=True))
    assert found.corrupt == ["chk/1-1/ways"]


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
