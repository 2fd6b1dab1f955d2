"""Whole jobs whose aggregates lie in runs on disk: crashes, restores, rescaling, and what is uploaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, generator, sequence
from headgate.errors import PlanError
from headgate.operators import extras
from headgate.operators.clock import SystemClock
from headgate.runtime.job import runnable
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.state.snapshot import StateHandle

ROWS, KEYS, WINDOW = 24_000, 6_000, 4_000
RATE = 16_000


def job_of(
    lab: Any, sinks: tuple[Any, Any], parallelism: int, rate: float | None, name: str = "disk"
) -> hg.Job:
    """Record n happens at n ms, and has one of the keys."""
    job = hg.Job(name, parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="100ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    job.options["state.backend.type"] = "rocksdb"
    job.options["taskmanager.memory.managed.size"] = "1mb"
    job.options["io.tmp.dirs"] = str(lab.path)
    rows = generator({"n": sequence()}, rows=ROWS, rate=rate, batch_rows=400, splits=1)
    stream = job.read(rows, name="rows", parallelism=1).select(
        "n", f"CAST(n * 7919 % {KEYS} AS VARCHAR) AS k", "n AS ts"
    )
    keyed = stream.event_time("ts", max_out_of_order="0s").key_by("k")
    keyed.agg(c=hg.count(), total=hg.sum("n"), top=hg.max("k"), name="totals").write(
        sinks[0], name="out"
    )
    keyed.window(hg.tumbling(f"{WINDOW}ms")).agg(c=hg.count(), s=hg.sum("n"), name="windows").write(
        sinks[1], name="windowed"
    )
    return job


def sinks() -> tuple[Any, Any]:
    return collect(guarantee="exactly_once"), collect(guarantee="exactly_once")


def assert_results(totals: Any, windows: Any) -> None:
    """Check that the results are those of a batch job."""
    expected: dict[str, list[int]] = defaultdict(list)
    by_window: Counter[tuple[str, int]] = Counter()
    for n in range(ROWS):
        key = str(n * 7919 % KEYS)
        expected[key].append(n)
        by_window[key, n // WINDOW] += n
    last: dict[str, Any] = {}
    seen: set[tuple[str, int]] = set()
    for row in totals.rows:
        assert (row["k"], row["c"]) not in seen
        seen.add((row["k"], row["c"]))
        if row["c"] >= last.get(row["k"], row)["c"]:
            last[row["k"]] = row
    assert last == {
        k: {"k": k, "c": len(ns), "total": sum(ns), "top": k} for k, ns in expected.items()
    }
    found = Counter(
        {
            (row["k"], int(row["window_start"].timestamp() * 1000) // WINDOW): row["s"]
            for row in windows.rows
        }
    )
    assert found == by_window
    assert len(windows.rows) == len(by_window)


async def manifest_of(lab: Any, job: str) -> Manifest:
    """The newest completed checkpoint's."""
    store = MemoryStore(f"{lab.storage.removeprefix('memory://')}/{job}")
    newest = (await JobLog(store, "reader", SystemClock()).load()).newest
    assert newest is not None
    return newest.manifest


def run_files(manifest: Manifest) -> dict[tuple[str, str], StateHandle]:
    """The handles of run files by state and id."""
    return {(h.state, h.file_id): h for h in manifest.handles() if h.kind == "file"}


@pytest.mark.parametrize("fault", ["none", "kills", "takeovers"])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_results_are_those_of_a_batch_job(
    lab: Any, faults: Any, parallelism: int, fault: str
) -> None:
    out = sinks()
    job = job_of(lab, out, parallelism, None if fault == "none" else RATE)
    scripts = {"kills": faults.kills(parallelism, 2), "takeovers": faults.takeovers(1)}
    ran = lab.run(job, scripts.get(fault))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == (2 if fault == "kills" else 0)
    assert_results(*out)
    assert not list(Path(lab.path).rglob("*.arrow"))


def test_run_files_that_did_not_change_are_not_uploaded_again(
    lab: Any, faults: Any, trouble: Any
) -> None:
    out, manifests = sinks(), list[Manifest]()

    async def script(job: Any) -> None:
        for _ in range(4):
            await job.checkpoint()
            manifests.append(await manifest_of(lab, "disk"))
        job.live()[0].kill()  # what was restored is not uploaded again either
        await job.until("status", status="RUNNING")
        await job.checkpoint()
        manifests.append(await manifest_of(lab, "disk"))

    job = job_of(lab, out, 2, RATE)
    # Otherwise small files share objects, and their pieces are rewritten once most of an object is garbage.
    job.options["execution.checkpointing.file-merging.enabled"] = "false"
    ran = lab.run(job, script, opener=trouble.open)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert_results(*out)
    shared: Counter[str] = Counter()
    for before, after in zip(
        map(run_files, manifests), map(run_files, manifests[1:]), strict=False
    ):
        for key in before.keys() & after.keys():
            assert before[key] == after[key]
            shared[key[0]] += 1
    assert shared["running"] > 3
    assert shared["windows"] > 0
    written = Counter(name for call, name in trouble.calls if call == "write_file")
    names = {h.file for manifest in manifests for h in run_files(manifest).values()}
    assert names
    assert {written[name] for name in names} == {1}


def test_only_state_by_single_keys_needs_the_package(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    job = job_of(lab, sinks(), 1, None)
    runnable(job).spec()

    class Count(hg.KeyedProcess[str, int, int]):
        total = hg.ValueState[int](default=0)

        def on_record(self, record: int, ctx: hg.Context[str]) -> None:
            self.total.set(self.total.get() + 1)

    rows = job.read(generator(function=int, rows=10), name="more")
    rows.key_with(str).process(Count(), name="count").write(collect(), name="counts")
    with pytest.raises(PlanError, match="rocksdict"):
        runnable(job).spec()
