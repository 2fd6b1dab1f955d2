"""Goal: a run that overwrites keeps the old output until its own is committed, whatever fails, and when.

Method: the old output, an exactly-once file sink, and a machine whose power goes at the first, second,
third ... effect on the outside: an entry of the job log, a commit, a deletion. Nothing has any effect
behind that, until another coordinator of the same run begins.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import collect, csv_sink, generator, parquet_sink, sequence
from headgate.connectors.files import drafts
from headgate.errors import JobError, StorageError, UsageError
from headgate.operators.clock import SystemClock
from headgate.operators.sink import Sink
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.coordinator import output
from headgate.runtime.coordinator.output import OutputReplacer
from headgate.runtime.job import runnable
from headgate.runtime.protocol.old_output import OldOutput
from headgate.runtime.storage.base import Created, Existed
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.worker import worker
from headgate.tests.support.held import sources_held

OLD = list(range(1_000, 1_040))
NEW = list(range(100))


def job_of(storage: Path | str, sink: Sink, rows: list[int] = NEW, every: str = "1h") -> hg.Job:
    job = hg.Job("numbers", parallelism=2)
    job.checkpoint(every=every, storage=str(storage))
    job.restart(attempts=0)
    source = generator({"n": sequence(rows[0])}, rows=len(rows), batch_rows=10)
    job.read(source, name="numbers").rebalance().write(sink, name="out")
    return job


def to(out: Path, **options: Any) -> Sink:
    return parquet_sink(str(out), guarantee="exactly_once", **options)


def rows_in(out: Path) -> list[int]:
    """Return the rows that a reader sees."""
    files = out.glob("*.parquet")
    return sorted(n for file in files for n in pq.read_table(file).column("n").to_pylist())


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers tell what they have committed without waiting for a second."""
    monkeypatch.setattr(worker, "STATISTICS_S", 0.01)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The output of a finished run, in several files."""
    out = tmp_path / "out"
    job_of(tmp_path / "before", to(out), OLD).run()
    assert rows_in(out) == OLD
    assert len(list(out.glob("*.parquet"))) == 2
    return out


class Power:
    """Goes out at one effect; nothing has an effect from then on, until it is `on` again."""

    def __init__(self, out_at: int) -> None:
        self._out_at = out_at
        self._lock = threading.Lock()
        self._effects = 0
        self.is_out = False
        self.went_out = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.last = ""

    def effect(self, name: str) -> None:
        """Something is about to change outside of the job."""
        with self._lock:
            self._effects += 1
            if self._effects == self._out_at:
                self.is_out = True
                self.last = name
                self._loop.call_soon_threadsafe(self.went_out.set)
            if self.is_out:
                raise StorageError(f"no power for {name}")

    def on(self) -> None:
        self.is_out = False
        self._out_at = 0


class Store(MemoryStore):
    def __init__(self, root: str, power: Power) -> None:
        super().__init__(root)
        self._power = power

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        self._power.effect(f"entry {name}")
        return await super().create_if_absent(name, data)

    async def delete(self, name: str) -> None:
        self._power.effect(f"trim {name}")
        await super().delete(name)


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Callable[[Power], None]:
    """Commits and deletions of files need power."""
    publish, delete = drafts._publish, drafts.delete_files

    def wire(power: Power) -> None:
        def _publish(committable: Any) -> None:
            power.effect("commit")
            publish(committable)

        def delete_files(directory: Any, files: Any) -> int:
            count = 0
            for file in files:
                power.effect("delete")
                count += delete(directory, [file])
            return count

        monkeypatch.setattr(drafts, "_publish", _publish)
        monkeypatch.setattr(drafts, "delete_files", delete_files)

    return wire


@pytest.mark.parametrize("deleted_while_running", [True, False])
def test_no_moment_at_which_the_power_goes_loses_the_old_and_the_new_output(
    lab: Any,
    tmp_path: Path,
    out: Path,
    wired: Callable[[Power], None],
    deleted_while_running: bool,
) -> None:
    """The old output is there until the new one is; in the end there is the new one alone."""
    moments: list[str] = []
    first = out
    for out_at in range(1, 60):
        out = Path(shutil.copytree(first, tmp_path / f"out-{out_at}"))
        storage = f"{lab.storage}-{out_at}"
        last = asyncio.run(
            life(lab, job_of(storage, to(out)), out, out_at, wired, deleted_while_running)
        )
        assert rows_in(out) == NEW, f"behind {last or 'no cut'}"
        MemoryStore.forget(f"{storage.removeprefix('memory://')}/numbers")
        if not last:
            break
        moments.append(last)
    assert {"commit", "delete"} <= set(moments), moments
    assert len([each for each in moments if each.startswith("entry")]) >= 5, moments
    assert len(moments) < 59, "it never came through"


async def life(
    lab: Any,
    job: hg.Job,
    out: Path,
    out_at: int,
    wired: Callable[[Power], None],
    deleted_while_running: bool,
) -> str:
    """Run the job; the power goes at effect `out_at`. Returns at which; empty: it never came to that."""
    power = Power(out_at)
    wired(power)

    def opener(uri: str, name: str, options: Any) -> Store:
        return Store(f"{uri.removeprefix('memory://')}/{name}", power)

    spec = runnable(job).spec(if_exists="overwrite", run_id="one")
    while True:
        cluster = InProcessCluster(clock=SystemClock(), open_store=opener)
        over = asyncio.Event()
        if not deleted_while_running:
            over.set()
        with sources_held(over):
            running = lab.running(spec, cluster, opener)
            script = asyncio.create_task(until_deleted(running, over))
            cut = asyncio.create_task(power.went_out.wait())
            await asyncio.wait([running.task, cut], return_when=asyncio.FIRST_COMPLETED)
            for task in (cut, script, running.task):
                if power.is_out or task is not running.task:
                    task.cancel()
            await asyncio.gather(cut, script, running.task, return_exceptions=True)
            await running.coordinator.close()
            await cluster.close()
        if not power.is_out:
            assert running.task.result().status == "FINISHED"
            return power.last
        seen = rows_in(out)
        assert set(OLD) <= set(seen) or set(NEW) <= set(seen), f"at {power.last}: {seen}"
        assert len(seen) == len(set(seen)), "nothing is there twice"
        power.went_out.clear()
        power.on()


async def until_deleted(running: Any, over: asyncio.Event) -> None:
    """A checkpoint behind all records makes the old output due: the data ends when that is deleted."""
    await running.until("status", status="RUNNING")
    await behind_all_records(running)
    if state_of(running).sinks:
        await running.request("checkpoint")
    await until_true(lambda: not state_of(running).sinks)
    over.set()


def state_of(running: Any) -> OldOutput:
    """Return the files that the coordinator has still to delete."""
    state: OldOutput = running.coordinator._context.old_output.state
    return state


async def behind_all_records(running: Any) -> None:
    """Wait until the sinks have taken all records, in this attempt or in front of what it restored."""
    status = await running.status()
    while not status["restored_checkpoint"]:
        if sum(vertex["records_written"] for vertex in status["vertices"]) == len(NEW):
            return
        await asyncio.sleep(0.005)
        status = await running.status()


async def until_true(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  no event comes from a directory
        await asyncio.sleep(0.005)


def fails(batch: object) -> object:
    raise ValueError("broken")


def drops(batch: Any) -> Any:
    return batch.slice(0, 0)


def test_a_run_that_fails_before_its_first_checkpoint_leaves_the_old_output(
    tmp_path: Path, out: Path
) -> None:
    job = hg.Job("numbers")
    job.checkpoint(every="1h", storage=str(tmp_path / "chk"))
    job.restart(attempts=0)
    rows = job.read(generator({"n": "sequence"}, rows=10), name="numbers")
    rows.map_batches(fails, name="check").write(to(out), name="out")
    with pytest.raises(JobError, match="broken"):
        job.run(if_exists="overwrite")
    assert rows_in(out) == OLD


def test_a_checkpoint_without_output_is_no_reason_to_delete_and_the_end_is(
    lab: Any, out: Path
) -> None:
    """As with windows: the first results may be hours behind the first checkpoint."""
    job = hg.Job("numbers")
    job.checkpoint(every="1h", storage=lab.storage)
    rows = job.read(generator({"n": "sequence"}, rows=10), name="numbers")
    rows.map_batches(drops, name="drop").write(to(out, if_exists="overwrite"), name="out")

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        for _ in range(2):
            await running.request("checkpoint")
            assert state_of(running).due == {}
        assert rows_in(out) == OLD

    ran = lab.run(job, script)
    assert ran.outcome.status == "FINISHED"
    assert rows_in(out) == [], "the new output is complete, and empty"


def test_nothing_is_deleted_while_a_commit_is_under_way(
    lab: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, publish = threading.Event(), drafts._publish
    looks: list[bool] = []
    look = OutputReplacer.look

    def slow(committable: Any) -> None:
        release.wait()
        publish(committable)

    def looking(self: OutputReplacer, *given: Any) -> None:
        look(self, *given)
        looks.append(bool(self.state.due))

    monkeypatch.setattr(drafts, "_publish", slow)
    monkeypatch.setattr(OutputReplacer, "look", looking)

    async def script(running: Any) -> None:
        try:
            await running.until("status", status="RUNNING")
            await behind_all_records(running)
            await running.request("checkpoint")
            await until_true(lambda: sum(looks) >= 6)
            await state_idle(running)
            assert rows_in(out) == OLD
        finally:
            release.set()
        await until_true(lambda: not state_of(running).sinks)
        assert rows_in(out) == NEW

    lab.run(job_of(lab.storage, to(out, if_exists="overwrite")), script)


async def state_idle(running: Any) -> None:
    await running.coordinator._context.old_output.idle()


def test_a_stopped_run_has_replaced_what_it_has_output_for(lab: Any, out: Path) -> None:
    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        await behind_all_records(running)
        await running.request("stop")

    ran = lab.run(job_of(lab.storage, to(out, if_exists="overwrite")), script)
    assert ran.outcome.status == "SUSPENDED"
    assert rows_in(out) == NEW


def test_a_run_that_resumes_replaces_what_the_stopped_one_had_not(lab: Any, out: Path) -> None:
    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        await running.request("stop")

    job = job_of(lab.storage, to(out, if_exists="overwrite"))
    assert lab.run(job, script, batches=0).outcome.status == "SUSPENDED"
    assert rows_in(out) == OLD
    assert lab.run(job).outcome.status == "FINISHED"
    assert rows_in(out) == NEW


def test_what_an_at_least_once_run_writes_early_is_never_taken_for_old(lab: Any, out: Path) -> None:
    """Its files are visible before the first checkpoint, when its coordinator is replaced."""
    sink = parquet_sink(str(out), guarantee="at_least_once", roll_bytes=1, if_exists="overwrite")

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        await until_true(lambda: set(NEW) <= set(rows_in(out)))
        assert set(OLD) <= set(rows_in(out)), "nothing is committed yet"
        for _ in range(2):
            await running.crash_coordinator()
            await running.until("status", status="RUNNING")
        await running.request("checkpoint")

    ran = lab.run(job_of(lab.storage, sink), script)
    assert ran.outcome.status == "FINISHED"
    assert set(rows_in(out)) == set(NEW)


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose only number says how many deletions are refused."""
    left = [0]
    delete = drafts.delete_files

    def delete_files(directory: Any, files: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise StorageError("a file could not be deleted: it is read-only")
        return delete(directory, files)

    monkeypatch.setattr(drafts, "delete_files", delete_files)
    return left


def test_a_deletion_that_fails_is_tried_again(
    lab: Any, out: Path, refuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "RETRY_PAUSES_S", (0.01,))
    refuses[0] = 3

    async def script(running: Any) -> None:
        await until_deleted(running, running.over)

    ran = lab.run(job_of(lab.storage, to(out, if_exists="overwrite")), script)
    assert ran.outcome.status == "FINISHED"
    assert rows_in(out) == NEW
    assert len(ran.job.texts("waiting")) == 3
    assert "replaced output could not be deleted" in ran.job.texts("waiting")[0]


def test_a_run_that_cannot_delete_what_it_replaces_fails_and_the_next_one_does_it(
    tmp_path: Path, out: Path, refuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "RETRY_PAUSES_S", (0.0,))
    refuses[0] = 1_000_000
    job = job_of(tmp_path / "chk", to(out))
    with pytest.raises(StorageError, match="read-only"):
        job.run(if_exists="overwrite")
    assert rows_in(out) == NEW + OLD, "both are there"
    refuses[0] = 0
    assert job.run().status == "FINISHED"
    assert rows_in(out) == NEW


def test_a_file_that_somebody_has_written_since_stays(lab: Any, out: Path) -> None:
    touched = sorted(out.glob("*.parquet"))[0]
    theirs = touched.read_bytes()

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        touched.unlink()
        touched.write_bytes(theirs + b"theirs")

    lab.run(job_of(lab.storage, to(out, if_exists="overwrite")), script)
    assert touched.read_bytes() == theirs + b"theirs"
    touched.unlink()
    assert rows_in(out) == NEW


def test_more_files_than_the_bound_are_refused(tmp_path: Path, out: Path) -> None:
    job = job_of(tmp_path / "chk", to(out))
    job.options["headgate.sink.replaced-files-max"] = "1"
    with pytest.raises(UsageError, match="would replace 2 files of earlier runs"):
        job.run(if_exists="overwrite")
    assert rows_in(out) == OLD
    assert not list((tmp_path / "chk").rglob("log/0*")), "nothing was begun"


# Without checkpoints.


def unlogged(out: Path, rows: int | None, step: Callable[[Any], Any] | None = None) -> hg.Job:
    job = hg.Job("numbers")
    job.restart(attempts=0)
    fields = {"n": sequence(NEW[0])}
    source = generator(fields, batch_rows=10) if rows is None else generator(fields, rows=rows)
    stream = job.read(source, name="numbers")
    if step is not None:
        stream = stream.map_batches(step, name="step")
    stream.write(csv_sink(str(out), guarantee="none"), name="out")
    return job


def test_without_checkpoints_a_bounded_run_replaces_at_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    unlogged(out, 10).run()
    (old,) = out.glob("*.csv")
    with pytest.raises(JobError, match="broken"):
        unlogged(out, 10, fails).run(if_exists="overwrite")
    assert old.exists()
    unlogged(out, 20).run(if_exists="overwrite")
    assert not old.exists()
    (new,) = out.glob("*.csv")
    assert len(new.read_text().splitlines()) == 21


def test_without_checkpoints_and_without_an_end_it_replaces_once_it_writes(
    lab: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    unlogged(out, 10).run()
    (old,) = out.glob("*.csv")
    job = unlogged(out, None)

    async def script(running: Any) -> None:
        await until_true(lambda: not old.exists())
        await running.request("stop")

    spec = replace(runnable(job).spec(if_exists="overwrite"))

    async def main() -> None:
        cluster = InProcessCluster(clock=SystemClock(), open_store=None)  # type: ignore[arg-type]
        running = lab.running(spec, cluster, None)
        await script(running)
        assert (await running.task).status == "SUSPENDED"
        await running.coordinator.close()
        await cluster.close()

    asyncio.run(main())
    assert list(out.glob("*.csv")), "its own"


def test_collect_keeps_the_old_records_until_new_ones_are_committed(
    lab: Any, tmp_path: Path
) -> None:
    """Also those whose files a run in another storage would name in the same way."""
    sink = collect(path=str(tmp_path / "rows"), guarantee="exactly_once", if_exists="overwrite")
    job_of(tmp_path / "before", sink, OLD).run()

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        await behind_all_records(running)
        assert sorted(row["n"] for row in sink.rows) == OLD

    lab.run(job_of(lab.storage, sink), script)
    assert sorted(row["n"] for row in sink.rows) == NEW
