"""`headgate k8s delete-state`: the state of one StreamJob goes, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.errors import CorruptError, JobError
from headgate.k8s.cli import app
from headgate.k8s.delete_state import Deleted, StatePlace, belongs_to, delete_state, state_place
from headgate.operators.clock import SystemClock
from headgate.runtime.protocol import names
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.local import LocalStore
from headgate.runtime.storage.open_store import open_store
from headgate.tests.k8s.conftest import RESOURCE

OTHERS = ("savepoint-flights-0123456789ab/_metadata", "notes.txt")


async def begun(storage: str, *runs: str) -> None:
    """The state of a job after these runs, with a file of a checkpoint, and files of others."""
    store = open_store(storage, "flights", {})
    await store.open()
    for run in runs:
        log = JobLog(store, f"writer of {run}", SystemClock())
        await log.start_generation(parallelism=1, max_parallelism=128, run=run)
    await store.write_file(names.checkpoint_file(1, 1, "counts", 0, "windows", "table"), b"12345")
    await store.put(names.control_token(1), b"secret")
    for name in OTHERS:
        await store.write_file(name, b"x")
    await store.close()


def files(top: Path) -> set[str]:
    return {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}


def delete(storage: Path, uid: str) -> Deleted:
    return asyncio.run(delete_state(StatePlace("flights", str(storage), {}), uid))


def test_checkpoints_and_log_go_and_savepoints_stay(tmp_path: Path) -> None:
    asyncio.run(begun(str(tmp_path), "u-1-1", "u-1-2"))
    (tmp_path / "other" / "log").mkdir(parents=True)
    (tmp_path / "other" / "log" / "x").write_text("another job")
    before = files(tmp_path / "flights")
    deleted = delete(tmp_path, "u-1")
    assert files(tmp_path / "flights") == set(OTHERS)
    assert files(tmp_path / "other") == {"log/x"}
    assert deleted.files == len(before) - len(OTHERS)
    assert deleted.kept == tuple(sorted(OTHERS))
    assert "kept 2 other files" in str(deleted)
    assert "no state to delete" in str(delete(tmp_path, "u-1"))


@pytest.mark.parametrize("newest", ["u-2-1", "u-1", "by-hand", "u-1-1-1", ""])
def test_state_that_another_went_on_with_is_left_alone(tmp_path: Path, newest: str) -> None:
    asyncio.run(begun(str(tmp_path), "u-1-1", newest))
    before = files(tmp_path)
    with pytest.raises(JobError, match="belongs to another job"):
        delete(tmp_path, "u-1")
    assert files(tmp_path) == before


class Crash(Exception):
    """The process dies."""


def test_a_deletion_that_was_interrupted_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash behind any file, the owner of the rest is still known."""
    whole = LocalStore.delete_files
    left = 0

    async def delete_some(self: LocalStore, doomed: Sequence[str]) -> None:
        nonlocal left
        for name in doomed:
            if left == 0:
                raise Crash
            await whole(self, [name])
            left -= 1

    monkeypatch.setattr(LocalStore, "delete_files", delete_some)
    crashes, finished = 0, False
    while not finished:
        storage = tmp_path / f"crash-{crashes}"
        asyncio.run(begun(str(storage), "u-2-1", "u-1-1"))
        left = crashes
        try:
            delete(storage, "u-1")
            finished = True
        except Crash:
            crashes += 1
            left = 1000
            delete(storage, "u-1")
        assert files(storage / "flights") == set(OTHERS)
    assert crashes > 4


def test_state_that_nothing_claims_is_left_alone(tmp_path: Path) -> None:
    asyncio.run(begun(str(tmp_path), "u-1-1"))
    for path in (tmp_path / "flights" / "log" / "generation").iterdir():
        path.unlink()
    before = files(tmp_path)
    with pytest.raises(CorruptError, match="its owner is unknown"):
        delete(tmp_path, "u-1")
    assert files(tmp_path) == before


def test_the_storage_is_found_without_looking_at_the_steps() -> None:
    text = (
        "metadata: {name: flights}\n"
        "spec:\n"
        "  checkpoint: {every: 10s, storage: 's3://${BUCKET}/x'}\n"
        "  options: {s3.endpoint: 'http://minio:9000'}\n"
        "  operators: {wrong: {python: {function: 'gone:gone', password: '${UNSET}'}}}\n"
    )
    place = state_place(text, "job.yaml", {"BUCKET": "acme"})
    assert place.storage == "s3://acme/x"
    assert place.options["s3.endpoint"] == "http://minio:9000"
    with pytest.raises(Exception, match="BUCKET"):
        state_place(text, "job.yaml", {})
    by_option = "metadata: {name: a}\nspec: {options: {execution.checkpointing.dir: '/x'}}\n"
    assert state_place(by_option, "job.yaml", {}).storage == "/x"


def test_run_ids_of_a_stream_job() -> None:
    assert belongs_to("u-1-17", "u-1")
    assert not belongs_to("u-1-17", "u")
    assert not belongs_to("u-1-x", "u-1")
    assert not belongs_to("-1", "")


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    storage = tmp_path / "state"
    spec = RESOURCE["spec"] | {"checkpoint": {"every": "10s", "storage": str(storage)}}
    manifest.write_text(json.dumps(RESOURCE | {"spec": spec}))
    arguments = ["delete-state", "--job", str(manifest), "--uid", "u-1"]
    missing = CliRunner().invoke(app, arguments)
    assert missing.exit_code == 2
    assert "not mounted here" in missing.output
    asyncio.run(begun(str(storage), "u-1-1"))
    other = CliRunner().invoke(app, [*arguments[:-1], "u-2"])
    assert other.exit_code == 1
    assert "left alone" in other.output
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "job flights: deleted" in done.output
    del spec["checkpoint"]
    manifest.write_text(json.dumps(RESOURCE | {"spec": spec}))
    assert "no state to delete" in CliRunner().invoke(app, arguments).output
