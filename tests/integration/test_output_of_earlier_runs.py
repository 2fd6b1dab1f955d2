"""A run that starts from the beginning does not silently double what its sinks hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import collect, csv_sink, generator, parquet_sink
from headgate.errors import JobError, UsageError
from headgate.operators.clock import SystemClock
from headgate.operators.sink import Sink
from headgate.runtime.cluster.launch import InProcessCluster
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.coordinator.output import starts_without_state
from headgate.runtime.job import runnable
from headgate.runtime.protocol.joblog import LogView
from headgate.runtime.protocol.old_output import OldOutput
from headgate.runtime.storage.open_store import open_store
from headgate.tests.conftest import S3Server

ROWS = 100


def numbers(storage: Path | str, sink: Sink) -> hg.Job:
    job = hg.Job("numbers", parallelism=2)
    job.checkpoint(every="1h", storage=str(storage))
    job.read(generator({"n": "sequence"}, rows=ROWS), name="numbers").write(sink, name="out")
    return job


def rows_in(out: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in out.glob("*.parquet"))


def to(out: Path, **options: str) -> Sink:
    return parquet_sink(str(out), guarantee="exactly_once", **options)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The output of a finished run."""
    out = tmp_path / "out"
    numbers(tmp_path / "chk", to(out)).run()
    assert rows_in(out) == ROWS
    return out


def test_a_finished_job_is_not_run_again_beside_its_output(tmp_path: Path, out: Path) -> None:
    with pytest.raises(UsageError) as caught:
        numbers(tmp_path / "chk", to(out)).run()
    text = str(caught.value)
    assert "sink `out` of job `numbers` has 1 file of earlier runs in" in text
    assert str(out) in text
    assert "--if-exists overwrite" in text
    assert rows_in(out) == ROWS


def test_append_writes_beside_it(tmp_path: Path, out: Path) -> None:
    numbers(tmp_path / "chk", to(out)).run(if_exists="append")
    assert rows_in(out) == 2 * ROWS


@pytest.mark.parametrize(
    ("if_exists", "kind", "said"),
    [
        ("append", "start", "writes beside {}"),
        ("overwrite", "start", "keeps {} until it has committed its own"),
        ("overwrite", "output", "deleted {}"),
    ],
)
def test_what_becomes_of_it_is_said(
    lab: Any, out: Path, if_exists: str, kind: str, said: str
) -> None:
    ran = lab.run(numbers(lab.storage, to(out, if_exists=if_exists)))
    files = f"1 file of earlier runs in {out}"
    assert f"sink out {said.format(files)}" in ran.job.texts(kind)


def test_overwrite_deletes_it_and_nothing_else(tmp_path: Path, out: Path) -> None:
    other = out / "part-00000000-0000000001-000000000-00000-000000.parquet"
    other.write_bytes(next(out.glob("*.parquet")).read_bytes())
    (out / "README").write_text("mine")
    numbers(tmp_path / "chk", to(out, if_exists="overwrite")).run()
    assert other.exists()
    assert (out / "README").exists()
    other.unlink()
    assert rows_in(out) == ROWS


def test_what_the_run_says_counts_more_than_the_sink(tmp_path: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="has 1 file of earlier runs"):
        numbers(tmp_path / "chk", to(out, if_exists="append")).run(if_exists="error")


def test_without_a_job_log_too(tmp_path: Path) -> None:
    def job() -> hg.Job:
        job = hg.Job("numbers")
        sink = csv_sink(str(tmp_path / "out"), guarantee="none")
        job.read(generator({"n": "sequence"}, rows=ROWS), name="numbers").write(sink, name="out")
        return job

    job().run()
    with pytest.raises(UsageError, match="has 1 file of earlier runs"):
        job().run()
    job().run(if_exists="overwrite")
    assert len(list((tmp_path / "out").glob("*.csv"))) == 1


@pytest.mark.parametrize(
    ("deployed_run", "listed_by", "begins"),
    [
        ("", "", True),
        ("an earlier one", "an earlier one", True),
        ("this", "", False),
        ("", "this", False),
    ],
)
def test_a_coordinator_that_takes_over_lists_only_until_the_run_has_been_listed_or_deployed(
    tmp_path: Path, deployed_run: str, listed_by: str, begins: bool
) -> None:
    spec = runnable(numbers(tmp_path / "chk", to(tmp_path / "out"))).spec(run_id="this")
    old_output = OldOutput(run=listed_by)
    view = LogView(1, 1, 1, run="this", deployed_run=deployed_run, old_output=old_output)
    assert starts_without_state(spec, view, fresh=False) is begins


def test_another_step_name_has_its_own_files(tmp_path: Path, out: Path) -> None:
    job = hg.Job("numbers")
    job.read(generator({"n": "sequence"}, rows=ROWS), name="numbers").write(
        parquet_sink(str(out), guarantee="none"), name="copy"
    )
    job.run()
    assert rows_in(out) == 2 * ROWS


def test_fresh_with_checkpoints_left_changes_nothing_when_it_is_refused(tmp_path: Path) -> None:
    """The state that the refused run was to leave behind is still there for the next one."""
    out = tmp_path / "out"

    def broken() -> hg.Job:
        job = hg.Job("numbers")
        job.checkpoint(every="10ms", storage=str(tmp_path / "chk"))
        job.restart(attempts=0)
        rows = job.read(
            generator({"n": "sequence"}, rows=ROWS, rate=200, batch_rows=1), name="numbers"
        )
        rows.map_batches(fails_at_the_end, name="check").write(to(out), name="out")
        return job

    with pytest.raises(JobError):
        broken().run()
    written = rows_in(out)
    assert 0 < written < ROWS
    with pytest.raises(UsageError, match="of earlier runs"):
        broken().run(fresh=True)
    assert rows_in(out) == written
    with pytest.raises(JobError, match="the end"):
        broken().run()  # resumes: what it wrote is part of this run's output
    assert written <= rows_in(out) < ROWS


def fails_at_the_end(batch: object) -> object:
    if max(batch.column("n").to_pylist()) == ROWS - 1:  # type: ignore[attr-defined]
        raise ValueError("the end")
    return batch


@pytest.mark.server
def test_on_s3(s3_server: S3Server, tmp_path: Path) -> None:
    def job() -> hg.Job:
        sink = parquet_sink(
            f"s3://{s3_server.bucket}/out",
            guarantee="exactly_once",
            storage_options=s3_server.options,
        )
        return numbers(tmp_path / "chk", sink)

    job().run()
    with pytest.raises(UsageError, match="has 1 file of earlier runs in s3://"):
        job().run()
    job().run(if_exists="overwrite")
    with pytest.raises(UsageError, match="has 1 file of earlier runs in s3://"):
        job().run()


def test_collect_begins_with_no_rows(tmp_path: Path) -> None:
    rows, filed = collect(), collect(path=str(tmp_path / "rows"))
    job = hg.Job("numbers")
    numbers = job.read(generator({"n": "sequence"}, rows=3), name="numbers")
    job.checkpoint(every="1h", storage=str(tmp_path / "chk"))
    numbers.write(rows, name="rows")
    numbers.write(filed, name="filed")
    job.run()
    with pytest.raises(
        UsageError, match=r"sink `filed` of job `numbers` has \d+ files? of earlier"
    ):
        job.run()
    job.run(if_exists="overwrite")
    assert rows.rows == filed.rows == [{"n": 0}, {"n": 1}, {"n": 2}]
    job.run(if_exists="append")
    assert len(rows.rows) == 6


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_replaced_coordinator_without_a_log_does_not_refuse_its_own_run(
    tmp_path: Path, takes_over: bool
) -> None:
    job = hg.Job("numbers")
    sink = csv_sink(str(tmp_path / "out"), guarantee="none")
    job.read(generator({"n": "sequence"}, rows=ROWS), name="numbers").write(sink, name="out")
    job.run()  # stands for what the coordinator before had written

    async def replaced() -> str:
        cluster = InProcessCluster(clock=SystemClock(), open_store=open_store)
        coordinator = JobCoordinator(
            runnable(job).spec(),
            cluster=cluster,
            clock=SystemClock(),
            open_store=open_store,
            takes_over=takes_over,
        )
        try:
            await coordinator.server.listen(str(tmp_path / "s"))
            return (await coordinator.run()).status
        finally:
            await coordinator.close()
            await cluster.close()

    if takes_over:
        assert asyncio.run(replaced()) == "FINISHED"
    else:
        with pytest.raises(UsageError, match="of earlier runs"):
            asyncio.run(replaced())
