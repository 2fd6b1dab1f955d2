"""A sink cannot promise more than the checkpoints it is part of."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.connectors import blackhole, collect, from_list, parquet_sink
from headgate.errors import PlanError

MODE = {"execution.checkpointing.mode": "AT_LEAST_ONCE"}
SINKS = {
    "collect": lambda tmp, guarantee: collect(guarantee=guarantee),
    "files": lambda tmp, guarantee: parquet_sink(str(tmp / "out"), guarantee=guarantee),
    "blackhole": lambda tmp, guarantee: blackhole(guarantee=guarantee),
}


def job_of(tmp_path, kind, guarantee, options):
    job = hg.Job("j", options=options)
    job.checkpoint(every="1s", storage=str(tmp_path / "checkpoints"))
    rows = job.read(from_list([{"n": 1}], schema={"n": "int64"}), name="rows")
    rows.write(SINKS[kind](tmp_path, guarantee), name="out")
    return job


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("asked", ["validate", "explain", "run"])
def test_an_exactly_once_sink_is_refused(tmp_path, kind, asked):
    job = job_of(tmp_path, kind, "exactly_once", MODE)
    with pytest.raises(PlanError) as caught:
        getattr(job, asked)()
    assert str(caught.value).splitlines()[0] == (
        "sink `out` promises exactly_once, and execution.checkpointing.mode=`AT_LEAST_ONCE` "
        "lets records count twice after a failure"
    )
    assert "test_at_least_once_mode.py" in caught.value.where
    assert 'guarantee="at_least_once"' in caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("guarantee", ["at_least_once", "none"])
def test_explain_says_that_records_may_count_twice(tmp_path, guarantee):
    text = job_of(tmp_path, "collect", guarantee, MODE).explain()
    assert "state: at-least-once: after a failure records may count twice" in text
    assert "exactly-once" not in text


def test_without_the_mode_nothing_changes(tmp_path):
    text = job_of(tmp_path, "collect", "exactly_once", {}).explain()
    assert "out: exactly-once" in text
    assert "at-least-once" not in text
