"""What is refused, and which mode a job runs in: all of it before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import xxhash

import headgate as hg
from headgate.connectors import blackhole, from_list, generator, parquet_sink
from headgate.connectors.files.sink import PartName
from headgate.errors import ManifestErrors, PlanError, UsageError
from headgate.runtime.cli import run as cli
from headgate.runtime.cli.console import CANCELLED
from headgate.runtime.manifest import load_job

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
        made.spec()
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


def test_automatic_is_batch_if_all_sources_end() -> None:
    modes = []
    for source in (None, endless()):
        made, _ = job("AUTOMATIC", source)
        made.spec()
        modes.append(made.as_batch)
    assert modes == [True, False]


def test_a_batch_needs_no_checkpoints_for_exactly_once_and_restores_nothing() -> None:
    made, _ = job("BATCH", guarantee="exactly_once")
    made.spec()
    with pytest.raises(UsageError, match="cannot restore"):
        made.spec(restore_from="somewhere")


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


def test_an_interrupted_batch_ends_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(spec: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headgate.runtime.batch.run.run_batch", interrupted)
    assert cli._run_batch(job("BATCH")[0].spec()) == CANCELLED
