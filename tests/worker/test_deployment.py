"""Files of an attempt on a worker's disk once its operators have their state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.operators.clock import SystemClock
from headgate.runtime.job import runnable
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task import state_restore
from headgate.runtime.task.state_restore import RESTORED


class Remember(hg.KeyedProcess[int, int, int]):
    seen = hg.ValueState[str]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[int]:
        self.seen.set("x" * 500)
        yield record


def make_job(lab: Any, merging: bool) -> hg.Job:
    job = hg.Job("job", parallelism=2, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    runnable(job).override(
        {
            "state.backend.type": "rocksdb",
            "state.backend.rocksdb.writebuffer.size": "64 kb",
            "io.tmp.dirs": str(lab.path),
            "execution.checkpointing.file-merging.enabled": str(merging).lower(),
        }
    )
    (
        job.read(numbers(10_000_000, rate=4_000, batch_rows=200, splits=2), name="numbers")
        .key_with(lambda n: n)
        .process(Remember(), name="remember")
        .write(collect(guarantee="exactly_once"), name="out")
    )
    return job


async def has_files(lab: Any) -> bool:
    """True once the newest checkpoint has files of the backend."""
    store = MemoryStore(f"{lab.storage.removeprefix('memory://')}/job")
    newest = (await JobLog(store, "reader", SystemClock()).load()).newest
    assert newest is not None
    return any(handle.kind == "file" for handle in newest.manifest.handles())


@pytest.mark.parametrize("merging", [True, False])
def test_downloaded_files_are_gone_before_the_first_record(
    lab: Any, monkeypatch: pytest.MonkeyPatch, merging: bool
) -> None:
    """Operators link away what they keep: the rest would fill the disk as long as the attempt lives."""
    downloads: list[Path] = []
    measure = state_restore.measure_file

    def noted(path: Path) -> tuple[int, str]:
        downloads.append(path)
        return measure(path)

    monkeypatch.setattr(state_restore, "measure_file", noted)

    async def stop(job: Any) -> None:
        await job.checkpoint()
        while not await has_files(lab):
            await job.checkpoint()
        await job.request("stop")

    async def look(job: Any) -> None:
        await job.until("status", status="RUNNING")
        assert {path.parent.name for path in downloads} == {RESTORED}
        assert not [path for path in downloads if path.parent.exists()]
        assert all(path.parents[1].is_dir() for path in downloads), "the operators' own stay"
        await job.request("cancel")

    assert lab.run(make_job(lab, merging), stop).outcome.status == "SUSPENDED"
    assert not downloads
    assert lab.run(make_job(lab, merging), look).outcome.status == "CANCELED"
