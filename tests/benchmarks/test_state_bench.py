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
        import aggregation
        import bare_kernel
        import premade
        import state_incremental
        import state_jobs
        import state_operators
        import state_run

        yield SimpleNamespace(
            aggregation=aggregation,
            bare=bare_kernel,
            premade=premade,
            incremental=state_incremental,
            jobs=state_jobs,
            operators=state_operators,
            run=state_run,
        )
        names = (
            "aggregation",
            "bare_kernel",
            "metering",
            "premade",
            "state_incremental",
            "state_jobs",
        )
        for name in (*names, "state_operators", "state_run"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["running", "tumbling"])
def test_a_job_sees_every_record(bench: Any, kind: str) -> None:
    job = bench.jobs.run_job(kind, 100, ROWS)
    assert job.rate > 0
    # 200 seconds of event time are one window; running results come once per batch and key
    assert job.rows_out == 100 if kind == "tumbling" else job.rows_out >= 100


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("kind", ["running", "tumbling"])
def test_job_and_bare_kernel_do_the_same_work(bench: Any, kind: str, scattered: bool) -> None:
    plan = bench.premade.Premade(5_000, scattered, 4 * 8_192, 3, 8_192)
    found = bench.aggregation.compare(kind, plan, 1)
    ((bare,), (job,)) = found.bare, found.jobs
    if kind == "tumbling":
        # two windows are over while batches come, the last one at the end
        assert bare.rows_out == job.rows_out
        assert 14_900 <= job.rows_out <= 15_000
    else:
        # a key comes once per batch, and a job cuts and joins batches
        assert bare.rows_out >= 3 * 5_000 * 0.99
        assert job.rows_out >= 5_000 * 0.99
    assert found.ratios[0] > 0


@pytest.mark.parametrize("scattered", [False, True])
def test_the_bare_kernel_is_right(bench: Any, scattered: bool) -> None:
    plan = bench.premade.Premade(5_000, scattered, 3 * 8_192, 1, 8_192)
    table, expected = bench.bare.BareTable(), {}
    for keys, values, _ in map(bench.premade.columns_of, bench.premade.made(plan)):
        table.add(keys, values)
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            count, total, highest = expected.get(key, (0, 0, 0))
            expected[key] = count + 1, total + value, max(highest, value)
    keys, *columns = (column.tolist() for column in table.results())
    assert dict(zip(keys, zip(*columns, strict=True), strict=True)) == expected
    assert len(keys) == len(expected)


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
