"""A changed job goes on with its state only if that state means the same, or if the user says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, generator
from headgate.errors import StateError
from headgate.operators.clock import SystemClock
from headgate.runtime.job import runnable
from headgate.runtime.savepoint.compare import check
from headgate.runtime.savepoint.locate import locate
from headgate.runtime.storage.open_store import open_store_at
from headgate.tests.support.lab import stop_with_savepoint

FIELDS = {
    "k": {"kind": "sequence", "start": 0},
    "v": {"kind": "int", "low": 1, "high": 9},
    "w": {"kind": "int", "low": 100, "high": 900},
    "at": {"kind": "timestamp", "every": "1s"},
}
ACCEPT = "execution.state-recovery.accept-changes"


def rows_of(job: hg.Job, name: str) -> Any:
    rows = job.read(generator(FIELDS, rows=400, rate=2000), name=name)
    return rows.select("k % 5 AS k", "v % 3 AS j", "v", "w", "at").event_time(
        "at", max_out_of_order="1m"
    )


def keyed(job: hg.Job, name: str = "rows", key: str = "k") -> Any:
    return rows_of(job, name).key_by(key)


def joined(job: hg.Job, window: str, key: str = "k") -> Any:
    left, right = keyed(job, "left", key), keyed(job, "right", key)
    return left.window(hg.tumbling(window)).join(right, suffix="_r", name="step")


def between(job: hg.Job, key: str, within: str = "5s") -> Any:
    left, right = keyed(job, "left", key), keyed(job, "right", key)
    return left.join(right, within=(f"-{within}", within), suffix="_r", name="step")


class Most(hg.WindowProcess[Any, Any, Any]):
    def on_window(self, key: Any, window: Any, records: Any, ctx: Any) -> Any:
        yield {"n": len(records)}


INTO = {"n": "int64"}
STEPS: dict[str, Any] = {
    "sum(v)": lambda j: keyed(j).agg(x=hg.sum("v"), name="step"),
    "sum(w)": lambda j: keyed(j).agg(x=hg.sum("w"), name="step"),
    "sum(v * 2)": lambda j: keyed(j).agg(x=hg.sum("v * 2"), name="step"),
    "sum(v*2)": lambda j: keyed(j).agg(x=hg.sum("v*2 -- twice"), name="step"),
    "avg(v)": lambda j: keyed(j).agg(x=hg.avg("v"), name="step"),
    "sum(v), n": lambda j: keyed(j).agg(x=hg.sum("v"), n=hg.count(), name="step"),
    "min_by v": lambda j: keyed(j).agg(x=hg.min_by("w", "v"), name="step"),
    "min_by at": lambda j: keyed(j).agg(x=hg.min_by("w", "at"), name="step"),
    "count": lambda j: keyed(j).agg(x=hg.count(), name="step"),
    "count(v)": lambda j: keyed(j).agg(x=hg.count("v"), name="step"),
    "top 2": lambda j: keyed(j).agg(x=hg.top_n("v", 2), name="step"),
    "top 3": lambda j: keyed(j).agg(x=hg.top_n("v", 3), name="step"),
    "q 0.5": lambda j: keyed(j).agg(x=hg.quantile("v", 0.5), name="step"),
    "q 0.9": lambda j: keyed(j).agg(x=hg.quantile("v", 0.9), name="step"),
    "by j": lambda j: keyed(j, key="j").agg(x=hg.sum("v"), name="step"),
    "1h": lambda j: keyed(j).window(hg.tumbling("1h")).agg(x=hg.sum("v"), name="step"),
    "1h w": lambda j: keyed(j).window(hg.tumbling("1h")).agg(x=hg.sum("w"), name="step"),
    "2h": lambda j: keyed(j).window(hg.tumbling("2h")).agg(x=hg.sum("v"), name="step"),
    "1h late": lambda j: (
        keyed(j).window(hg.tumbling("1h", allowed_lateness="1m")).agg(x=hg.sum("v"), name="step")
    ),
    "1h offset": lambda j: (
        keyed(j).window(hg.tumbling("1h", offset="7m")).agg(x=hg.sum("v"), name="step")
    ),
    "slide 2m": lambda j: (
        keyed(j).window(hg.sliding("1h", every="2m")).agg(x=hg.sum("v"), name="step")
    ),
    "slide 2m w": lambda j: (
        keyed(j).window(hg.sliding("1h", every="2m")).agg(x=hg.sum("w"), name="step")
    ),
    "slide 4m": lambda j: (
        keyed(j).window(hg.sliding("1h", every="4m")).agg(x=hg.sum("v"), name="step")
    ),
    "session": lambda j: keyed(j).window(hg.session("1h")).agg(x=hg.sum("v"), name="step"),
    "session w": lambda j: keyed(j).window(hg.session("1h")).agg(x=hg.sum("w"), name="step"),
    "session 2h": lambda j: keyed(j).window(hg.session("2h")).agg(x=hg.sum("v"), name="step"),
    "50 rows": lambda j: keyed(j).window(hg.count_window(50)).agg(x=hg.sum("v"), name="step"),
    "50 rows w": lambda j: keyed(j).window(hg.count_window(50)).agg(x=hg.sum("w"), name="step"),
    "process 1h": lambda j: (
        keyed(j).window(hg.tumbling("1h")).process(Most(), name="step", into=INTO)
    ),
    "process 2h": lambda j: (
        keyed(j).window(hg.tumbling("2h")).process(Most(), name="step", into=INTO)
    ),
    "join 1h": lambda j: joined(j, "1h"),
    "join 2h": lambda j: joined(j, "2h"),
    "join by j": lambda j: joined(j, "1h", "j"),
    "within 5s": lambda j: between(j, "k"),
    "within 9s": lambda j: between(j, "k", "9s"),
    "within by j": lambda j: between(j, "j"),
}
REFUSED = [
    ("sum(v)", "sum(w)", "aggregate `x` was sum(v), now sum(w)"),
    ("sum(v)", "sum(v * 2)", 'aggregate `x` was sum(v), now sum("v * 2")'),
    ("sum(v * 2)", "sum(v)", 'aggregate `x` was sum("v * 2"), now sum(v)'),
    ("sum(v)", "avg(v)", "aggregate `x` was sum(v), now avg(v)"),
    ("min_by v", "min_by at", "aggregate `x` was min_by(w, by=v), now min_by(w, by=at)"),
    ("count", "count(v)", "aggregate `x` was count(), now count(v)"),
    ("sum(v)", "by j", "keys"),
    ("1h", "1h w", "aggregate `x` was sum(v), now sum(w)"),
    ("1h", "2h", "windows"),
    ("1h", "1h offset", "windows"),
    ("slide 2m", "slide 2m w", "aggregate `x` was sum(v), now sum(w)"),
    ("slide 2m", "slide 4m", "windows"),
    ("session", "session w", "aggregate `x` was sum(v), now sum(w)"),
    ("50 rows", "50 rows w", "aggregate `x` was sum(v), now sum(w)"),
    ("process 1h", "process 2h", "the window was"),
    ("join 1h", "join 2h", "the window was tumbling 1h, now tumbling 2h"),
    ("join 1h", "join by j", "the key of the left stream was k, now j"),
    ("within 5s", "within by j", "the key of the left stream was k, now j"),
]
TAKEN = [
    ("sum(v)", "sum(v)"),
    ("sum(v * 2)", "sum(v*2)"),
    ("sum(v)", "sum(v), n"),
    ("sum(v), n", "sum(v)"),
    ("top 2", "top 3"),
    ("q 0.5", "q 0.9"),
    ("1h", "1h late"),
    ("session", "session 2h"),
    ("within 5s", "within 9s"),
]


def make_job(lab: Any, step: str, **options: str) -> hg.Job:
    job = hg.Job("job", parallelism=2, max_parallelism=8, options=options)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=2, delay="10ms")
    STEPS[step](job).write(collect(guarantee="at_least_once"), name="out")
    return job


def saved(lab: Any, step: str) -> str:
    taken: list[str] = []
    script = stop_with_savepoint(lab.path, taken)
    assert lab.run(make_job(lab, step), script, batches=3).outcome.status == "SUSPENDED"
    return taken[0]


@pytest.mark.parametrize(("before", "after", "why"), REFUSED)
def test_state_that_means_something_else_is_refused(
    lab: Any, before: str, after: str, why: str
) -> None:
    savepoint = saved(lab, before)
    ran = lab.run(make_job(lab, after), restore_from=savepoint)
    assert ran.outcome.status == "FAILED"
    assert isinstance(ran.outcome.error, StateError)
    assert why in str(ran.outcome.error)
    assert not ran.job.texts("restart")


@pytest.mark.parametrize(("before", "after"), TAKEN)
def test_what_may_change_is_taken(lab: Any, before: str, after: str) -> None:
    ran = lab.run(make_job(lab, after), restore_from=saved(lab, before))
    assert ran.outcome.status == "FINISHED", ran.failures


def test_the_newest_checkpoint_is_asked_as_well(lab: Any) -> None:
    saved(lab, "sum(v)")  # which takes a checkpoint before
    ran = lab.run(make_job(lab, "sum(w)"))
    assert "aggregate `x` was sum(v), now sum(w)" in str(ran.outcome.error)
    assert f"-D {ACCEPT}=step" in str(ran.outcome.error)


def test_the_user_can_say_that_it_is_meant(lab: Any) -> None:
    """A column that was only renamed: the state goes on, and the next savepoint has the new meaning."""
    savepoint = saved(lab, "sum(v)")
    other = lab.run(make_job(lab, "sum(w)", **{ACCEPT: "another"}), restore_from=savepoint)
    assert other.outcome.status == "FAILED"
    ran = lab.run(make_job(lab, "sum(w)", **{ACCEPT: "another, step"}), restore_from=savepoint)
    assert ran.outcome.status == "FINISHED", ran.failures


def test_savepoint_check_says_the_same(lab: Any) -> None:
    path = saved(lab, "sum(v)")
    located = asyncio.run(locate(open_store_at, path, {}, SystemClock()))
    refused = check(located, runnable(make_job(lab, "sum(w)")).spec())
    assert refused.incompatible == ["operator `step`: aggregate `x` was sum(v), now sum(w)"]
    accepted = check(located, runnable(make_job(lab, "sum(w)", **{ACCEPT: "step"})).spec())
    assert accepted.ok()
    assert accepted.migrated
