"""The benchmarks of state run over whatever the state layer is now, and measure what they say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headgate

BENCHMARKS = Path(headgate.__file__).parent / "benchmarks"
ROWS = 200_000


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import state_incremental
        import state_jobs
        import state_operators
        import state_run

        yield SimpleNamespace(
            incremental=state_incremental,
            jobs=state_jobs,
            operators=state_operators,
            run=state_run,
        )
        for name in ("metering", "state_incremental", "state_jobs", "state_operators", "state_run"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["running", "tumbling"])
def test_kernel_and_job_see_every_record(bench: Any, kind: str) -> None:
    alone = bench.operators.kernel(kind, 100, ROWS)
    assert sum(alone.rows) == ROWS
    assert len(alone.seconds) == len(alone.making) == -(-ROWS // bench.operators.BATCH_ROWS)
    job = bench.jobs.run_job(kind, 100, ROWS)
    assert job.rate > 0
    # 200 seconds of event time are one window; running results come once per batch and key
    assert job.rows_out == 100 if kind == "tumbling" else job.rows_out >= 100


@pytest.mark.parametrize("kind", ["running", "tumbling"])
def test_snapshots_have_all_keys(bench: Any, kind: str) -> None:
    taken, times = bench.operators.snapshot_pauses(kind, 5_000, 3, 2)
    assert len(taken.seconds) == 3
    assert len(times.seconds) == 6


def test_every_case_gives_ratios(bench: Any) -> None:
    assert set(bench.run.CASES) == {"aggregation", "snapshots", "incremental", "interval"}


@pytest.mark.parametrize("subject", range(4))
def test_incremental_checkpoints_stay_within_three_percent(bench: Any, subject: int) -> None:
    """The target of the state layer, at a size that is quick: 5 million keys come to the same shares."""
    name = bench.incremental.SUBJECTS[subject]
    made = bench.incremental.checkpoints(name, 200_000, 0.01, 30)
    assert made.full_bytes > 300_000
    assert len(made.shares) == 30
    assert all(share > 0.008 for share in made.first + made.shares), "what changed is written"
    assert max(made.shares) > 0.05, "with the files that were merged"
    assert made.mean <= 0.03
    assert made.mean_of_all <= 0.03
