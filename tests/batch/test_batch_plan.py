"""Refusals, and the mode a job runs in, both before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import xxhash
from typer.testing import CliRunner

import headgate as hg
from headgate.connectors import blackhole, from_list, generator, parquet_sink
from headgate.connectors.files.sink import PartName
from headgate.errors import ManifestErrors, PlanError, StateError, UsageError
from headgate.runtime.batch import run as batch_run
from headgate.runtime.cli import run as cli
from headgate.runtime.cli.app import app
from headgate.runtime.cli.console import CANCELLED
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.tests.support.global_sink import TableSink, visible

MODE = "execution.runtime-mode"
ROWS = [{"k": 1, "v": 2}]
SCHEMA = {"k": "long", "v": "long"}


def job(mode: str, source: Any = None, guarantee: str = "none") -> tuple[hg.Job, Any]:
    made = hg.Job("refused", options={MODE: mode})
    read = made.read(source or from_list(ROWS, schema=SCHEMA), name="rows")
    read.write(blackhole(guarantee=guarantee), name="out")
    return made, read


def refusal(made: hg.Job) -> str:
    with pytest.raises(PlanError) as refused:
        runnable(made).spec()
    assert "test_batch_plan.py" in str(refused.value)
    return str(refused.value)


def endless() -> Any:
    return generator({"k": "sequence", "v": "sequence"})


def test_a_source_without_end_is_refused_with_the_users_line() -> None:
    made, _ = job("BATCH", endless())
    assert "source `rows` has none" in refusal(made)


def test_windows_by_the_clock_and_loops_are_refused() -> None:
    made, read = job("BATCH")
    counted = (
        read.key_by("k").window(hg.tumbling("1m", time="processing")).agg(n=hg.count(), name="w")
    )
    counted.write(blackhole(guarantee="none"), name="windows")
    assert "step `w` cannot run as a batch" in refusal(made)


class Waits(hg.KeyedProcess[int, Any, Any]):
    def on_record(self, record: Any, ctx: hg.Context[int]) -> None:
        self.wait_for(ctx)

    def wait_for(self, ctx: hg.Context[int]) -> None:
        ctx.processing_time.after("1h")

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> list[Any]:
        return [timer.timestamp]


class WaitsUnseen(Waits):
    """No look at the class says what it does."""

    def wait_for(self, ctx: hg.Context[int]) -> None:
        getattr(ctx, "processing" + "_time").at(0)


class LooksAtTheClock(Waits):
    def wait_for(self, ctx: hg.Context[int]) -> None:
        assert ctx.processing_time.now > 0


class ByTheClock(hg.Trigger[Any]):
    def on_element(self, record: Any, timestamp: int, window: Any, ctx: Any) -> hg.TriggerResult:
        ctx.processing_time.at(timestamp + 1_000)
        return hg.TriggerResult.CONTINUE

    def on_processing_time(self, time: int, window: Any, ctx: Any) -> hg.TriggerResult:
        return hg.TriggerResult.FIRE


def early(keyed: Any) -> Any:
    return keyed.window(hg.global_window(emit_every="1s")).agg(n=hg.count(), name="w")


def triggered(trigger: Any) -> Any:
    def step(keyed: Any) -> Any:
        windows = keyed.window(hg.global_window(), trigger=trigger)
        return windows.reduce(lambda one, other: other, name="w")

    return step


@pytest.mark.parametrize(
    ("step", "why", "fix"),
    [
        (early, "emit_every", "leave emit_every out"),
        (triggered(hg.triggers.ProcessingTime()), "trigger", "event-time"),
        (triggered(hg.triggers.Purging(hg.triggers.ProcessingTime())), "trigger", "event-time"),
        (
            triggered(hg.triggers.Purging(hg.triggers.ContinuousProcessingTime("1s"))),
            "trigger",
            "event-time",
        ),
        (triggered(hg.triggers.Purging(ByTheClock())), "trigger", "event-time"),
        (lambda keyed: keyed.process(Waits(), name="w"), "ctx.processing_time", "ctx.event_time"),
    ],
)
def test_what_goes_by_the_clock_is_refused(step: Any, why: str, fix: str) -> None:
    made, read = job("BATCH")
    step(read.key_by("k")).write(blackhole(guarantee="none"), name="w-out")
    with pytest.raises(PlanError, match="step `w` cannot run as a batch") as refused:
        runnable(made).spec()
    assert why in refused.value.message
    assert fix in refused.value.fix
    assert "test_batch_plan.py" in refused.value.where


def test_a_timer_that_nobody_saw_coming_fails_the_batch(run_batch_here: Any) -> None:
    made, read = job("BATCH")
    read.key_by("k").process(WaitsUnseen(), name="w").write(blackhole(guarantee="none"), name="o")
    with pytest.raises(StateError, match="step `w` sets a timer by the machine's clock") as failed:
        run_batch_here(made)
    assert "test_batch_plan.py" in failed.value.where


def test_to_look_at_the_clock_is_no_reason_and_count_triggers_are_none(run_batch_here: Any) -> None:
    made, read = job("BATCH")
    keyed = read.key_by("k")
    keyed.process(LooksAtTheClock(), name="looks").write(blackhole(guarantee="none"), name="o")
    counted = triggered(hg.triggers.Purging(hg.triggers.Count(2)))(keyed)
    counted.write(blackhole(guarantee="none"), name="o2")
    assert run_batch_here(made)["looks.records_in"] == 1


def test_automatic_is_batch_if_all_sources_end() -> None:
    modes = []
    for source in (None, endless()):
        made, _ = job("AUTOMATIC", source)
        runnable(made).spec()
        modes.append(runnable(made).as_batch)
    assert modes == [True, False]


def test_a_batch_needs_no_checkpoints_for_exactly_once_and_restores_nothing() -> None:
    made, _ = job("BATCH", guarantee="exactly_once")
    runnable(made).spec()
    with pytest.raises(UsageError, match="cannot restore"):
        runnable(made).spec(restore_from="somewhere")


MANIFEST = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: endless}
spec:
  options: {execution.runtime-mode: BATCH}
  sources:
    rows: {generator: {fields: {n: sequence}}}
  sinks:
    out: {from: rows, blackhole: , guarantee: exactly_once}
"""


def test_a_manifest_is_refused_with_its_line() -> None:
    with pytest.raises(ManifestErrors, match="source `rows` has none") as refused:
        load_job(MANIFEST)
    assert "manifest:7" in str(refused.value)
    load_job(MANIFEST.replace("sequence}}", "sequence}, rows: 5}"))


def test_drafts_that_a_stream_of_the_job_may_still_commit_are_left_alone(
    tmp_path: Path, run_batch_here: Any
) -> None:
    tag = f"{xxhash.xxh32_intdigest(b'refused/files'):08x}"
    draft = tmp_path / ".headgate/refused/files" / f"{PartName(tag, 65_537, 3, 0, 0)}.parquet"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"written, and named by a checkpoint")
    made, rows = job("BATCH")
    rows.write(parquet_sink(str(tmp_path), guarantee="none"), name="files")
    run_batch_here(made)
    assert draft.exists()
    (file,) = tmp_path.glob("*.parquet")
    assert pq.read_table(file).to_pylist() == ROWS


def test_the_command_runs_a_stream_as_a_batch_if_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(spec: Any) -> JobOutcome:
        ran.append(spec.name)
        return JobOutcome("FINISHED", "")

    monkeypatch.setattr("headgate.runtime.batch.run.run_batch", run)
    file = tmp_path / "job.yaml"
    stream = MANIFEST.replace("options: {execution.runtime-mode: BATCH}", "parallelism: 1")
    file.write_text(stream.replace("sequence}}", "sequence}, rows: 5}"))
    done = CliRunner().invoke(app, ["run", str(file), "--runtime-mode", "batch"])
    assert (done.exit_code, ran) == (0, ["endless"]), done.output


def test_an_interrupted_batch_ends_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(spec: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headgate.runtime.batch.run.run_batch", interrupted)
    assert cli._run_batch(runnable(job("BATCH")[0]).spec()) == CANCELLED


def test_two_runs_of_the_same_second_write_to_one_table(
    run_batch_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "_attempt", lambda: 1_800_000_000)
    for name, first in (("one", 0), ("two", 10)):
        job = hg.Job(name)
        numbers = job.read(from_list([{"n": n} for n in range(first, first + 10)]), name="numbers")
        numbers.write(TableSink(tmp_path), name="table")
        run_batch_here(job)
    assert sorted(record["n"] for record in visible(tmp_path)) == list(range(20))
