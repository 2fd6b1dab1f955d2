"""Status, table and explain name the subtask and the split that hold event time back, and for how long."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list, numbers
from headgate.operators.elements import WATERMARK_MAX, WATERMARK_MIN
from headgate.runtime.cli import listing
from headgate.runtime.control.messages import (
    Statistics,
    StepTime,
    SubtaskStatistics,
    decode,
    encode,
)
from headgate.runtime.coordinator.status import describe_event_time
from headgate.runtime.job import runnable
from headgate.testing import harness

NOW_MS = 100_000


def plan(parallelism=3):
    job = hg.Job("who", parallelism=parallelism)
    rows = job.read(from_list([], schema={"at": "int64"}), name="in")
    timed = rows.event_time("at", max_out_of_order="10s", idle_after="1m", name="times")
    timed.write(blackhole(), name="out")
    return runnable(job).spec().plan


def time(watermark, held_ms=0, *, idle=False, split="", queued=False, counts=(1, 0, 0, 0)):
    return StepTime("times", watermark, idle, held_ms, split, queued, *counts)


def described(*times):
    statistics = {
        (0, index): SubtaskStatistics(0, index, 0, 0, 0, 0, 0, 0, 0, (each,))
        for index, each in enumerate(times)
        if each is not None
    }
    (step,) = describe_event_time(plan(), statistics, NOW_MS)
    return step


def test_the_slowest_subtask_and_its_split_are_named():
    step = described(time(5_000), time(3_000, 7_000, split="part-1"), time(4_000))
    assert step == {
        "step": "times",
        "watermark": 3_000,
        "lag_ms": 97_000,
        "held_by": {
            "subtask": 1,
            "task": "in -> times -> out (2/3)",
            "split": "part-1",
            "queued": False,
            "for_ms": 7_000,
        },
        "idle_subtasks": [],
        "splits": 3,
        "idle_splits": 0,
        "queued_splits": 0,
        "paused_splits": 0,
    }


def test_who_is_idle_or_has_ended_holds_nobody():
    step = described(time(1, idle=True), time(WATERMARK_MAX), time(4_000))
    assert step["held_by"]["subtask"] == 2
    assert step["idle_subtasks"] == [0]
    step = described(time(1, idle=True), time(WATERMARK_MAX))
    assert (step["watermark"], step["lag_ms"], step["held_by"]) == (None, None, None)


def test_without_a_watermark_there_is_no_lag_but_a_holder():
    step = described(time(5_000), time(WATERMARK_MIN, 60_000, split="b", queued=True))
    assert (step["watermark"], step["lag_ms"]) == (None, None)
    assert step["held_by"]["queued"]


def test_of_equals_the_one_that_has_stood_longest():
    assert described(time(5, 10), time(5, 30), time(5, 20))["held_by"]["subtask"] == 1


def test_counts_add_up():
    step = described(time(5, counts=(4, 1, 2, 1)), time(5, counts=(3, 1, 0, 0)))
    names = ("splits", "idle_splits", "queued_splits", "paused_splits")
    assert [step[name] for name in names] == [7, 2, 2, 1]


def test_before_the_first_report_nothing_is_known():
    assert described()["held_by"] is None


def test_statistics_travel():
    sent = Statistics(
        attempt=1, subtasks=(SubtaskStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, (time(5, split="a"),)),)
    )
    assert decode(encode(sent)) == sent


def test_a_step_knows_what_holds_it_and_for_how_long(step):
    run = step(idle_after_ms=10_000, wait_for_queued=True)
    run.splits.opened("a")
    run.splits.opened("b")
    run.splits.opened("c", queued=True)
    run.read("a", 5_000).wait(1_000)
    status = run.operator.status()
    assert (status.watermark, status.split, status.queued) == (WATERMARK_MIN, "c", True)
    assert (status.splits, status.queued_splits, status.held_ms) == (3, 1, 1_000)
    run.read("c", 4_000, last=True).read("b", 3_000).wait(200)
    run.read("a", 6_000).wait(3_000)
    status = run.operator.status()
    assert (status.watermark, status.split, status.held_ms) == (2_999, "b", 3_000)
    run.read("a", 7_000).wait(8_000)
    status = run.operator.status()
    assert (status.split, status.idle_splits) == ("a", 1)
    run.operator.on_watermark(WATERMARK_MAX)
    assert run.operator.status().watermark == WATERMARK_MAX


@pytest.mark.parametrize(
    ("held_by", "line"),
    [
        (None, None),
        ({"task": "in (2/3)", "split": None, "queued": False, "for_ms": 9_999}, None),
        (
            {"task": "in (2/3)", "split": "p[1]", "queued": False, "for_ms": 252_345},
            "job: event time of times is held by in (2/3), p[1] for 4m 12s",
        ),
        (
            {"task": "in (2/3)", "split": "p", "queued": True, "for_ms": 10_000},
            "job: event time of times is held by in (2/3), p (waits to be read) for 10s",
        ),
    ],
)
def test_the_list_of_jobs_says_who(capsys, held_by, line):
    row = {
        "name": "job",
        "status": "RUNNING",
        "uptime_ms": 0,
        "parallelism": 1,
        "restarts": 0,
        "last_checkpoint": None,
        "cluster": "local",
        "pid": 1,
        "event_time": [{"step": "times", "held_by": held_by}],
    }
    listing._print_jobs([row])
    below = capsys.readouterr().out.splitlines()[2:]
    assert " ".join(below) == (line or "")


def test_explain_says_what_can_hold_time():
    job = hg.Job("explained")
    rows = job.read(numbers(1), name="in")
    rows.event_time(
        lambda n: n, max_out_of_order="10s", idle_after="1m", name="a", align="g", max_drift="5s"
    ).write(blackhole(), name="out-a")
    rows.event_time(lambda n: n, per_split=False, close_after="30s", name="b").write(
        blackhole(), name="out-b"
    )
    rows.rebalance().event_time(
        lambda n: n, strategy=hg.WatermarkStrategy.custom(hg.WatermarkGenerator), name="c"
    ).write(blackhole(), name="out-c")
    text = job.explain()
    assert (
        "\nevent time\n"
        "  a: at most 10s out of order, idle after 1m, waiting for queued splits, "
        "aligned with group g to 5s; "
        "each split of in can hold it back\n"
        "  b: in order, by the clock after 30s of silence; each subtask can hold it back\n"
        "  c: by WatermarkGenerator; each subtask can hold it back\n"
    ) in text


def test_without_event_time_explain_says_nothing_of_it():
    job = hg.Job("explained")
    job.read(numbers(1), name="in").write(blackhole(), name="out")
    assert "event time" not in job.explain()


def test_the_status_of_a_job_has_it(monkeypatch):
    monkeypatch.setattr(
        "headgate.testing.run._PERIODIC", frozenset()
    )  # statistics go out each second
    job = hg.Job("status", options={"pipeline.auto-watermark-interval": "0 ms"})
    rows = job.read(from_list([], schema={"at": "int64"}), name="in")
    rows.event_time("at", name="times").write(blackhole(), name="out")
    with harness(job) as h:
        h.push("in", {"at": 5_000})
        h.advance_time("10s")
        (step,) = h._running._coordinator._describe()["event_time"]
    assert (step["step"], step["watermark"]) == ("times", 4_999)
    assert step["held_by"]["task"] == "in -> times -> out (1/1)"
    assert 8_000 <= step["held_by"]["for_ms"] <= 10_000
