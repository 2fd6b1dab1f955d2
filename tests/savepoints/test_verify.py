"""`verify_at` names files of checkpoints and savepoints that are missing, cut off, corrupt or unneeded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import xxhash
from msgspec.structs import replace

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import StateError, UsageError
from headgate.operators.clock import SystemClock
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
)
from headgate.runtime.protocol.joblog import LogView
from headgate.runtime.savepoint import store as savepoints
from headgate.runtime.savepoint import verify
from headgate.runtime.savepoint.verify import Verification, verify_at
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import open_store_at
from headgate.state.snapshot import OperatorSnapshot, StateHandle


def verified(path: Path | str, **how: Any) -> Verification:
    return asyncio.run(verify_at(open_store_at, str(path), {}, SystemClock(), **how))


def damage(found: Verification) -> dict[str, str]:
    return {Path(file.file).name: file.damage for file in found.damaged}


@pytest.fixture
def job_directory(lab: Any) -> Path:
    """The directory of a stopped job that keeps two checkpoints, with all state in files."""
    return stopped_job(lab, merging=False)


def stopped_job(lab: Any, *, merging: bool) -> Path:
    directory = Path(lab.path) / "job"
    job = hg.Job(
        "job",
        parallelism=4,
        max_parallelism=12,
        options={
            "execution.checkpointing.data-inline-threshold": "0 b",
            "execution.checkpointing.file-merging.enabled": str(merging).lower(),
        },
    )
    job.checkpoint(every="50ms", storage=str(lab.path), retain=2)
    (
        job.read(numbers(600, rate=600, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n % 9, 1))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]), name="Count.All")
        .write(collect(), name="out")
    )

    async def script(running: Any) -> None:
        await running.checkpoint()
        while len(state_files(directory)) < (1 if merging else job.parallelism):
            await running.checkpoint()  # a slow source has not reached all subtasks yet
        await running.request("stop")

    lab.run(job, script)
    return directory


def state_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "chk").rglob("*") if path.is_file())


def test_what_was_written_is_sound_and_its_bytes_are_read(job_directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = verified(job_directory, progress=lambda done, total: seen.append((done, total)))
    assert (found.kind, found.damaged, found.orphans, found.dropped) == ("checkpoint", (), {}, ())
    assert len(found.checkpoints) == 2
    assert found.files == len(state_files(job_directory)) > 0
    assert found.bytes == sum(path.stat().st_size for path in state_files(job_directory))
    assert seen[-1] == (found.bytes, found.bytes)


@pytest.mark.parametrize("read", [True, False])
def test_missing_truncated_corrupt_and_unneeded_files_are_named(
    job_directory: Path, read: bool
) -> None:
    gone, short, long, changed = state_files(job_directory)[:4]
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    long.write_bytes(long.read_bytes() + b"x")
    changed.write_bytes(bytes([changed.read_bytes()[0] ^ 1]) + changed.read_bytes()[1:])
    (job_directory / "chk" / "1-99").mkdir()
    (job_directory / "chk" / "1-99" / "left").write_bytes(b"left")
    found = verified(job_directory, read=read)
    assert damage(found) == {
        gone.name: "missing",
        short.name: "truncated",
        long.name: "too long",
        **({changed.name: "corrupt"} if read else {}),
    }
    assert found.orphans == {"chk/1-99/left": 4}
    named = next(file for file in found.damaged if file.damage == "truncated")
    assert named.found_bytes == named.expected_bytes - 1
    assert set(named.checkpoints) <= set(found.checkpoints)
    assert all("/" in state for state in named.states)


def test_segments_are_verified_by_what_is_needed_of_them(lab: Any) -> None:
    directory = stopped_job(lab, merging=True)
    seen: list[tuple[int, int]] = []
    found = verified(directory, progress=lambda *done: seen.append(done))
    assert not found.damaged
    assert found.bytes == sum(path.stat().st_size for path in state_files(directory))
    assert seen[-1][0] == seen[-1][1] <= found.bytes
    newest = state_files(directory)[-1]
    assert newest.suffix == ".segment"
    newest.write_bytes(newest.read_bytes()[:-1])
    (truncated,) = verified(directory).damaged
    assert (truncated.damage, truncated.expected_bytes - 1) == (
        "truncated",
        truncated.found_bytes,
    )


def test_one_checkpoint_is_verified_alone(job_directory: Path) -> None:
    newest = verified(job_directory).checkpoints[-1]
    (job_directory / "chk" / "1-99").mkdir()
    (job_directory / "chk" / "1-99" / "left").write_bytes(b"left")
    found = verified(f"{job_directory}@{newest}")
    assert (found.checkpoints, found.damaged, found.orphans) == ((newest,), (), {})
    with pytest.raises(StateError, match="no such checkpoint"):
        verified(f"{job_directory}@{newest + 1}")


def test_a_checkpoint_that_the_job_drops_meanwhile_does_not_count(
    job_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = verified(job_directory).checkpoints
    views: list[LogView] = []

    class Log(verify.JobLog):
        async def load(self) -> LogView:
            view = await super().load()
            views.append(view)
            return view if len(views) == 1 else replace(view, checkpoints=view.checkpoints[1:])

    monkeypatch.setattr(verify, "JobLog", Log)
    for path in state_files(job_directory):
        path.unlink()
    found = verified(job_directory)
    assert (found.checkpoints, found.dropped) == ((newer,), (older,))
    assert {file.checkpoints for file in found.damaged} == {(newer,)}


def savepoint_with(handles: tuple[StateHandle, ...], content: bytes) -> MemoryStore:
    """A store with a savepoint in it whose state is in one file."""
    snapshot = OperatorSnapshot(operator="o", handles=handles)
    manifest = Manifest(
        checkpoint_id=1,
        trigger_ms=0,
        completed_ms=0,
        duration_ms=0,
        max_parallelism=128,
        operators=(
            ManifestOperator(
                name="o",
                parallelism=1,
                subtasks=(ManifestSubtask(subtask=0, snapshots=(snapshot,)),),
            ),
        ),
    )
    store = MemoryStore("savepoint", {"o/ways": content})
    asyncio.run(savepoints.publish(store, savepoints.savepoint_of(manifest, "job", native=False)))
    return store


def test_a_file_of_several_pieces_is_sound_if_each_of_them_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are read in chunks, and pieces end where they end."""
    monkeypatch.setattr(verify, "CHUNK_BYTES", 2)
    pieces, offsets = (b"one", b"three"), (0, 3)
    handles = tuple(
        StateHandle(
            state="s",
            kind="input",
            size_bytes=len(data),
            checksum=xxhash.xxh3_64_hexdigest(data),
            rows=1,
            file="o/ways",
            offset=offset,
        )
        for data, offset in zip(pieces, offsets, strict=True)
    )

    def check(store: MemoryStore) -> Verification:
        address = "memory://savepoint"
        return asyncio.run(verify_at(lambda *_: store, address, {}, SystemClock()))

    sound = check(savepoint_with(handles, b"onethree"))
    assert (sound.kind, sound.files, sound.bytes, sound.damaged) == ("savepoint", 1, 8, ())
    assert damage(check(savepoint_with(handles, b"onethrEe"))) == {"ways": "corrupt"}
    assert damage(check(savepoint_with(handles, b"onethree!"))) == {"ways": "too long"}
    store = savepoint_with(handles, b"onethree")
    store._objects["o/more"] = b"more"
    assert check(store).orphans == {"o/more": 4}


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no such directory"):
        verified(tmp_path / "nowhere")
    with pytest.raises(StateError, match="neither a savepoint nor the checkpoints"):
        verified(tmp_path)
    with pytest.raises(UsageError):
        verified("ftp://host/path")
