"""Sessions in whole jobs, as a user writes them: crashes, rescales, mistakes."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta

import msgspec
import polars as pl
import pytest

import headgate as hg
from headgate.connectors import json_source, parquet_sink
from headgate.errors import PlanError
from headgate.testing import harness

T0 = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Click(msgspec.Struct, frozen=True):
    user: str
    at: datetime
    pause_ms: int = 10_000
    pause: timedelta = timedelta(seconds=10)


class Visit(msgspec.Struct, frozen=True):
    user: str
    clicks: int
    window_start: datetime
    window_end: datetime


def visits_job(gap, source=None, parallelism=1):
    job = hg.Job("visits", parallelism=parallelism)
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    clicks = job.read(json_source("in/*.json", Click), name="clicks")
    visits = (
        clicks.event_time("at", max_out_of_order="1h")
        .key_by("user")
        .window(hg.session(gap))
        .agg(clicks=hg.count(), into=Visit, name="visits")
    )
    visits.write(parquet_sink("out", guarantee="exactly_once"), name="out")
    visits.late.write(parquet_sink("late", guarantee="exactly_once"), name="late")
    return job


def at(seconds):
    return T0 + timedelta(seconds=seconds)


def seconds(visit):
    return (
        visit.user,
        visit.clicks,
        (visit.window_start - T0).total_seconds(),
        (visit.window_end - T0).total_seconds(),
    )


GAPS = ["10s", "pause_ms", "pause", "pause_ms + 0", pl.col("pause_ms").cast(pl.Duration("ms"))]


@pytest.mark.parametrize("gap", GAPS, ids=str)
def test_gaps_of_every_kind_survive_crashes_and_rescales(gap):
    clicks = [(f"user {n % 5}", (n * 7) % 200) for n in range(60)]
    expected = []
    by_user = defaultdict(list)
    for user, time in clicks:
        by_user[user].append(time)
    for user, times in by_user.items():
        for time in sorted(times):
            last = expected[-1] if expected else None
            if last and last[0] == user and time <= last[3]:
                expected[-1] = (user, last[1] + 1, last[2], time + 10)
            else:
                expected.append((user, 1, time, time + 10))
    with harness(visits_job(gap, parallelism=2)) as h:
        for step, (user, time) in enumerate(clicks):
            h.push("clicks", Click(user, at(time)))
            if step % 15 == 3:
                h.checkpoint()
            if step % 15 == 9:
                h.crash()
            if step == 40:
                h.rescale(3)
        h.end()
        found = [seconds(visit) for visit in h.drain("out")]
        assert h.drain("late") == []
    assert sorted(found) == sorted(expected)


def test_what_comes_too_late_is_a_stream():
    with harness(visits_job("10s")) as h:
        h.push("clicks", Click("ann", at(100)))
        h.advance_watermark("clicks", at(105))
        h.push("clicks", Click("ann", at(95)), Click("bob", at(90)))
        h.end()
        assert list(map(seconds, h.drain("out"))) == [("ann", 2, 95, 110)]
        assert [click["user"] for click in h.drain("late")] == ["bob"]


def test_sessions_of_all_records_together():
    job = hg.Job("busy")
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    clicks = job.read(json_source("in/*.json", Click), name="clicks").event_time("at")
    busy = clicks.window(hg.session("10s")).agg(n=hg.count(), name="busy")
    busy.write(parquet_sink("out", guarantee="exactly_once"), name="out")
    assert "session 10s" in job.explain()
    with harness(job) as h:
        h.push("clicks", Click("ann", at(0)), Click("bob", at(7)), Click("ann", at(40)))
        h.end()
        assert sorted(row["n"] for row in h.drain("out")) == [1, 2]


@pytest.mark.parametrize(
    ("gap", "what"),
    [
        ("user", "of type string"),
        ("paus_ms", "did you mean"),
        (lambda click: "5s", "is a function"),
        (pl.col("pause_ms").max(), "more than one record"),
    ],
    ids=["type", "name", "function", "aggregate"],
)
def test_gaps_that_do_not_fit_the_stream_are_refused_with_the_users_line(gap, what):
    with pytest.raises(PlanError) as caught:
        visits_job(gap)
    assert what in str(caught.value)
    assert "test_session_jobs.py" in str(caught.value)
