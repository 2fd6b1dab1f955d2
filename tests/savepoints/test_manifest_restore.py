"""A manifest that says what its run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.tests.support.lab import stop_with_savepoint

MANIFEST = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: ticker}
spec:
  parallelism: PARALLELISM
  checkpoint: {every: 50ms, storage: "STORAGE"}
  options: OPTIONS
  sources:
    ticks:
      generator:
        fields: {n: sequence, user: {kind: pattern, prefix: u, distinct: 10}}
        rows: 2000
        rate: RATE
        batchRows: 20
  operators:
    counts: {from: ticks, keyBy: user, aggregate: {n: count()}}
  sinks:
    out: {from: counts, blackhole: {}, guarantee: exactly_once}
"""


def load(lab: Any, *, options: str, parallelism: int, rate: int) -> Any:
    path = lab.path / "ticker.yaml"
    text = MANIFEST.replace("PARALLELISM", str(parallelism)).replace("OPTIONS", options)
    path.write_text(text.replace("STORAGE", lab.storage).replace("RATE", str(rate)))
    return load_job(path)


def test_options_name_the_savepoint_and_whose_it_is(lab: Any) -> None:
    taken: list[str] = []
    first = load(lab, options="{}", parallelism=1, rate=1000)
    lab.run(first, stop_with_savepoint(lab.path / "kept", taken))
    options = f'{{execution.state-recovery.path: "{taken[0]}", execution.state-recovery.claim-mode: CLAIM}}'
    job = load(lab, options=options, parallelism=2, rate=100_000)
    assert runnable(job).spec().restore_from == taken[0]
    assert runnable(job).spec(restore_from="elsewhere").restore_from == str(
        Path.cwd() / "elsewhere"
    )

    async def look(running: Any) -> None:
        await running.until("disposed")

    ran = lab.run(job, look)
    assert ran.outcome.status == "FINISHED"
    (restored,) = ran.job.texts("restored")
    assert restored.startswith(f"restored savepoint {ran.restores[0]} in {taken[0]} (")
    assert not Path(taken[0]).exists()
