"""Aligned sources in whole jobs, on virtual time: who is ahead waits, and takes barriers meanwhile."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.connectors import collect, from_list, numbers
from headgate.testing import harness

SCHEMA = {"at": "int64"}


def two_sources(max_drift="1s", idle_after="10s", per_split=True):
    job = hg.Job("aligned", options={"pipeline.auto-watermark-interval": "0 ms"})
    job.checkpoint(every="1h", storage="never-made")
    for name in ("fast", "slow"):
        rows = job.read(from_list([], schema=SCHEMA), name=name)
        rows.event_time(
            "at",
            align="group",
            max_drift=max_drift,
            idle_after=idle_after,
            per_split=per_split,
            name=f"{name}-times",
        ).write(collect(guarantee="exactly_once"), name=f"{name}-out")
    return job


def push(h, source, *times):
    h.push(source, *({"at": time} for time in times))


def arrived(h, source):
    """Return the records that have come to the sink, committed or not."""
    return [row["at"] for row in h.pending(f"{source}-out")]


def fast_waits(h):
    """Get the fast source to where its second record must wait for the slow one."""
    push(h, "slow", 1_000)
    push(h, "fast", 9_000)
    h.advance_time("2s")
    push(h, "fast", 9_100)
    assert arrived(h, "fast") == [9_000]


@pytest.mark.parametrize("per_split", [True, False])
def test_who_is_ahead_waits_for_the_other(per_split):
    with harness(two_sources(per_split=per_split)) as h:
        push(h, "slow", 1_000)
        push(h, "fast", 1_000)
        push(h, "fast", 9_000)
        h.advance_time("2s")
        push(h, "fast", 9_100)
        push(h, "fast", 9_200)
        assert arrived(h, "fast") == [1_000, 9_000]
        push(h, "slow", 8_500)
        h.advance_time("2s")
        assert arrived(h, "fast") == [1_000, 9_000, 9_100, 9_200]


def test_who_waits_takes_barriers_and_its_records_are_not_lost():
    with harness(two_sources()) as h:
        fast_waits(h)
        h.checkpoint()
        assert [row["at"] for row in h.drain("fast-out")] == [9_000]
        h.crash()
        push(h, "slow", 9_000)
        h.advance_time("3s")
        h.checkpoint()
        assert [row["at"] for row in h.drain("fast-out")] == [9_100]


def test_nobody_waits_for_who_is_idle():
    with harness(two_sources()) as h:
        fast_waits(h)
        h.advance_time("11s")
        assert arrived(h, "fast") == [9_000, 9_100]


def test_nobody_waits_for_who_has_ended():
    with harness(two_sources()) as h:
        fast_waits(h)
        h.end("slow")
        h.advance_time("2s")
        assert arrived(h, "fast") == [9_000, 9_100]


def test_a_job_that_waits_can_be_drained_to_its_end():
    with harness(two_sources()) as h:
        fast_waits(h)
        h.end("fast")
        assert arrived(h, "fast") == [9_000]
        h.end()
        assert [row["at"] for row in h.drain("fast-out")] == [9_000, 9_100]


def test_parallel_subtasks_of_one_source_wait_for_each_other():
    with harness(two_sources(), parallelism=2) as h:
        push(h, "fast", 1_000)  # one subtask after the other
        push(h, "fast", 9_000)
        h.advance_time("2s")
        push(h, "fast", 1_100)
        push(h, "fast", 9_100)
        assert sorted(arrived(h, "fast")) == [1_000, 1_100, 9_000]


@pytest.mark.parametrize(("parallelism", "per_split"), [(1, True), (3, True), (2, False)])
def test_a_job_of_real_sources_runs_to_its_end(tmp_path, parallelism, per_split):
    """Single splits wait where the reader can do that; checkpoints go through, and nothing is lost."""
    job = hg.Job(
        "real", parallelism=parallelism, options={"pipeline.auto-watermark-interval": "0 ms"}
    )
    job.checkpoint(every="20ms", storage=str(tmp_path))
    sinks = {}
    for name, factor in (("dense", 1), ("sparse", 7)):
        sinks[name] = collect()
        timed = job.read(numbers(700 // factor, batch_rows=5, splits=4), name=name).event_time(
            lambda n, factor=factor: n * factor,
            align="group",
            max_drift="20ms",
            align_every="10ms",
            idle_after="1s",
            per_split=per_split,
            name=f"{name}-times",
        )
        timed.write(sinks[name], name=f"{name}-out")
    assert job.run().status == "FINISHED"
    assert sorted(sinks["dense"].rows) == list(range(700))
    assert sorted(sinks["sparse"].rows) == list(range(100))
