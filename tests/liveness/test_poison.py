"""A record that fails the job again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import HeadgateError, InternalError, JobError
from headgate.operators.functions.user_code import Several, record_id
from headgate.runtime.protocol.restart import FORGET_MS, KEPT_MAX, PoisonCounter, RepeatCounter


class Plain:
    def __init__(self, n: int) -> None:
        self.n = n


def test_equal_failures_are_counted_each_for_itself() -> None:
    counter = PoisonCounter(3)
    seen = [counter.failed("map", record, now) for now, record in enumerate("aabab")]
    assert seen == [None, None, None, 3, None]
    assert counter.failed("map", "a", 10) == 4
    assert counter.failed("other", "a", 11) is None
    assert all(counter.failed("map", "", now) is None for now in range(10))


def test_what_failed_long_ago_is_forgotten() -> None:
    counter = PoisonCounter(2)
    assert counter.failed("map", "a", 0) is None
    assert counter.failed("map", "a", FORGET_MS + 1) is None
    assert counter.failed("map", "a", 2 * FORGET_MS + 1) == 2
    for number in range(KEPT_MAX):
        counter.failed("map", str(number), 2 * FORGET_MS + 2)
    assert counter.failed("map", "a", 2 * FORGET_MS + 3) is None


def test_ids_tell_records_apart() -> None:
    records = [1, 2, "1", (1,), {"n": 1}, Plain(1), Plain(2)]
    assert len({record_id(record) for record in records}) == len(records)
    assert record_id(Plain(1)) == record_id(Plain(1)) != ""
    assert record_id({"a": 1.5}) == record_id({"a": 1.5})
    assert record_id(None) == record_id(Several("a batch of 3")) == record_id(lambda: 1) == ""


def make_job(function: Any, exchange: bool, **options: str) -> hg.Job:
    job = hg.Job("poisoned", options={"headgate.restart.same-record-max": "3", **options})
    job.restart(attempts=100, delay="1ms")
    numbers = job.read(from_list(range(5)), name="numbers")
    numbers = numbers.rebalance() if exchange else numbers
    numbers.map(function, name="divide").write(blackhole(), name="out")
    return job


def test_a_record_that_fails_the_job_again_and_again_fails_it_for_good(virtual: Any) -> None:
    outcome = virtual.run(make_job(lambda n: 1 // (n - 3), exchange=False))
    assert outcome.status == "FAILED"
    assert [kind for kind, _ in virtual.failures] == ["user_code", "user_code", "poison"]
    text = str(outcome.error)
    assert "the same record failed the job 3 times; the source had read up to its end:" in text
    assert "the function of `divide` raised ZeroDivisionError" in text
    assert "record=`3`" in text
    assert 'on_error="side_output"' in text


def test_the_position_of_the_source_is_told(virtual: Any) -> None:
    job = hg.Job("poisoned", options={"headgate.restart.same-record-max": "2"})
    job.restart(attempts=100, delay="1ms")
    numbers = job.read(from_list(range(5), batch_rows=1), name="numbers")
    numbers.map(lambda n: 1 // (n - 3), name="divide").write(blackhole(), name="out")
    outcome = virtual.run(job)
    assert "the source had read up to [{" in str(outcome.error)


def test_a_record_behind_an_exchange_is_known_by_what_it_says(virtual: Any) -> None:
    outcome = virtual.run(make_job(lambda n: 1 // (n - 3), exchange=True))
    assert outcome.status == "FAILED"
    assert "the same record failed the job 3 times: the function" in str(outcome.error)


def test_other_failures_are_not_held_against_a_record(virtual: Any, tmp_path: Path) -> None:
    def fails_once_for_each(n: int) -> int:
        failed = tmp_path / str(n)
        if not failed.exists():
            failed.touch()
            raise ValueError("not yet")
        return n

    outcome = virtual.run(make_job(fails_once_for_each, exchange=True))
    assert outcome.status == "FINISHED"
    assert [kind for kind, _ in virtual.failures] == ["user_code"] * 5


@pytest.mark.parametrize(("error", "kind"), [(InternalError, "internal"), (JobError, "job")])
def test_a_bug_that_fails_the_job_the_same_way_fails_it_for_good(
    virtual: Any, error: type[HeadgateError], kind: str
) -> None:
    def fail(n: int) -> int:
        raise error("a step is broken")

    outcome = virtual.run(
        make_job(fail, exchange=False, **{"headgate.restart.same-failure-max": "4"})
    )
    assert outcome.status == "FAILED"
    assert [found for found, _ in virtual.failures] == [kind, kind, kind, "repeated"]
    text = "the job failed the same way 4 times, without a checkpoint in between: a step is broken"
    assert text in str(outcome.error)


def test_failures_that_differ_or_lie_behind_a_checkpoint_are_not_repeated() -> None:
    counter = RepeatCounter(2)
    assert counter.failed("map", "x", 1) is None
    assert counter.failed("map", "y", 1) is None
    assert counter.failed("sink", "y", 1) is None
    assert counter.failed("sink", "y", 2) is None
    assert counter.failed("sink", "y", 2) == 2
