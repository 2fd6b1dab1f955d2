"""Packages that a job needs and that are not installed are named by validate."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list, json_sink
from headgate.errors import ManifestErrors, PlanError
from headgate.operators import extras
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job

MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: to-s3}
spec:
  checkpoint: {every: 10s, storage: checkpoints}
  sources:
    numbers: {generator: {rows: 10, fields: {n: {kind: sequence}}}}
  sinks:
    out: {from: numbers, json: {path: "s3://bucket/out"}, guarantee: exactly_once}
"""


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes packages look as if they were not installed."""

    def hide(*names: str) -> None:
        hidden = lambda name: None if name in names else find_spec(name)  # noqa: E731
        monkeypatch.setattr(extras, "find_spec", hidden)

    return hide


def numbers(job: hg.Job) -> Any:
    return job.read(from_list([{"n": 1}], schema={"n": int}), name="numbers")


def test_a_sink_on_s3(without: Callable[..., None]) -> None:
    job = hg.Job("to-s3")
    job.checkpoint(every="10s", storage="checkpoints")
    numbers(job).write(json_sink("s3://bucket/out", guarantee="exactly_once"), name="out")
    job.validate()
    without("boto3")
    with pytest.raises(PlanError) as missing:
        job.validate()
    assert missing.value.message.startswith("`out` (json(s3://bucket/out")
    assert missing.value.message.endswith("needs the package boto3, not installed here")
    assert "test_missing_extras.py" in missing.value.where
    assert missing.value.fix.startswith("run: pip install 'headgate[s3]'")


def test_storage_on_s3(without: Callable[..., None]) -> None:
    job = hg.Job("on-s3", options={"execution.checkpointing.savepoint-dir": "s3://bucket/saved"})
    job.checkpoint(every="10s", storage="s3://bucket/checkpoints")
    numbers(job).write(blackhole(), name="out")
    job.validate()
    without("aiobotocore", "boto3")
    assert [problem.message for problem in runnable(job).problems()] == [
        "checkpoint storage on S3 execution.checkpointing.dir=`s3://bucket/checkpoints` "
        "needs the packages aiobotocore and boto3, not installed here",
        "savepoint storage on S3 execution.checkpointing.savepoint-dir=`s3://bucket/saved` "
        "needs the packages aiobotocore and boto3, not installed here",
    ]


@pytest.mark.parametrize("step", ["reduce", "deduplicate", "process"])
def test_state_in_rocksdb(without: Callable[..., None], step: str) -> None:
    class Count(hg.KeyedProcess[Any, Any, Any]):
        seen = hg.ValueState[int]()

        def on_record(self, record: Any, ctx: Any) -> None:
            self.seen.value = (self.seen.value or 0) + 1

    job = hg.Job("on-disk", options={"state.backend.type": "rocksdb"})
    keyed = numbers(job).key_by("n")
    made = {
        "reduce": lambda: keyed.reduce(lambda a, b: a, name="kept"),
        "deduplicate": lambda: keyed.deduplicate(name="kept"),
        "process": lambda: keyed.process(Count(), name="kept"),
    }[step]()
    made.write(blackhole(), name="out")
    job.validate()
    without("rocksdict")
    with pytest.raises(PlanError, match="`kept` with .* needs the package rocksdict") as missing:
        job.validate()
    assert missing.value.fix.startswith("run: pip install 'headgate[rocksdb]'")


def test_a_batch(without: Callable[..., None]) -> None:
    job = hg.Job("batch", options={"execution.runtime-mode": "BATCH"})
    numbers(job).write(blackhole(), name="out")
    without("pyspark")
    with pytest.raises(PlanError, match="batch execution needs the package pyspark"):
        job.validate()


def test_a_manifest(without: Callable[..., None]) -> None:
    load_job(MANIFEST)
    without("boto3")
    with pytest.raises(ManifestErrors, match="needs the package boto3") as missing:
        load_job(MANIFEST)
    assert missing.value.problems[0].where == "manifest:10"


def test_ray_is_only_needed_where_a_job_runs_on_it(without: Callable[..., None]) -> None:
    without("ray")
    job = hg.Job("no-ray")
    numbers(job).write(blackhole(guarantee="none"), name="out")
    assert job.run(cluster="in-process").status == "FINISHED"
    with pytest.raises(
        PlanError, match="a job on the cluster `local` needs the package ray"
    ) as missing:
        job.run(cluster="local")
    assert "--cluster in-process" in missing.value.fix
