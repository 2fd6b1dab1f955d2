"""Jobs with async steps in the harness: barriers, backpressure, the end of data, crashes, savepoints."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.operators.async_calls.map_async import MapAsync
from headgate.testing import harness

T0 = datetime(2026, 3, 1, tzinfo=UTC)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.args)


@pytest.fixture
def asked() -> Iterator[list[Any]]:
    """The records that the function got; it travels with the job, so it cannot see a list of the test."""
    handler, logger = _Kept(), logging.getLogger("async-jobs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.removeHandler(handler)


async def ask(seconds: float) -> float:
    logging.getLogger("async-jobs").info("%s", seconds)
    await asyncio.sleep(seconds)
    return seconds * 10


def a_job(**given: Any) -> hg.Job:
    job = hg.Job("ask")
    job.checkpoint(every="1h", storage="never-made")
    given = {"timeout": "1m", "name": "ask", **given}
    stream = job.read(from_list([]), name="in").map_async(ask, **given)
    stream.write(collect(guarantee="exactly_once"), name="out")
    return job


def test_barriers_do_not_wait_for_calls(asked: list[Any]) -> None:
    with harness(a_job(max_in_flight=2)) as h:
        h.push("in", 20, 20, 20)
        h.push("in", 1)
        h.push("in", 2)
        assert len(asked) == 2
        h.checkpoint()
        assert len(asked) == 2
        h.crash()
        assert len(asked) == 4
        h.advance_time("50s")
        h.checkpoint()
        assert h.drain("out") == [200, 200, 200, 10, 20]


def test_backpressure_reaches_the_source(asked: list[Any]) -> None:
    """Records that are not taken stay where they are: the state of the calls does not grow with the
    input.
    """
    with harness(a_job(max_in_flight=3, timeout="10m")) as h:
        for _ in range(60):
            h.push("in", 7)
        assert len(asked) == 3
        assert held_records() == [3]
        h.advance_time("150s")
        h.checkpoint()
        assert h.drain("out") == [70] * 60


def held_records() -> list[int]:
    """Return the number of records that the subtasks hold."""
    gc.collect()
    return [len(each._calls) for each in gc.get_objects() if isinstance(each, MapAsync)]


def test_results_leave_between_batches(asked: list[Any]) -> None:
    with harness(a_job(ordered=False)) as h:
        h.push("in", 5, 1)
        h.advance_time("1s")
        assert h.pending("out") == [10]
        h.push("in", 2)
        h.advance_time("2s")
        assert h.pending("out") == [10, 20]


@pytest.mark.parametrize("ordered", [True, False])
def test_every_result_once_after_crashes(asked: list[Any], ordered: bool) -> None:
    with harness(a_job(ordered=ordered, max_in_flight=4), seed=3, parallelism=2) as h:
        pushed = []
        for number in range(12):
            pushed += [number, number / 2, 3]
            h.push("in", number, number / 2, 3)
            if number % 3 == 0:
                h.advance_time("2s")
            if number % 4 == 1:
                h.checkpoint()
            if number % 4 == 3:
                h.crash()
        h.rescale(3)
        h.advance_time("3s")
        h.crash()
        h.end()
        h.advance_time("2m")
        assert sorted(h.drain("out")) == sorted(each * 10 for each in pushed)


def test_the_end_of_data_waits_for_calls_and_barriers_do_not_wait_for_the_end(
    asked: list[Any],
) -> None:
    job = a_job(ordered=False)
    job.read(from_list([]), name="other").write(collect(guarantee="exactly_once"), name="rest")
    with harness(job) as h:
        h.push("in", 5, 30)
        h.end("in")
        h.advance_time("5s")
        h.checkpoint()
        assert h.drain("out") == [50]
        asked.clear()
        h.crash()
        assert [args[0] for args in asked] == [30]
        h.advance_time("30s")
        h.checkpoint()
        assert h.drain("out") == [300]
        h.end()
        assert h.drain("out") == []


def test_a_savepoint_has_the_records_under_way(asked: list[Any], tmp_path: Path) -> None:
    with harness(a_job(ordered=False), parallelism=2) as h:
        h.push("in", 1, 5, 7)
        h.advance_time("2s")
        path = h.savepoint(str(tmp_path / "one"))
        assert h.pending("out") == [10]
    asked.clear()
    with harness(a_job(), parallelism=1, restore_from=path) as h:
        assert sorted(asked) == [(5,), (7,)]
        h.advance_time("7s")
        h.end()
        assert h.drain("out") == [50, 70]


def timed_job() -> hg.Job:
    job = hg.Job("timed")
    job.checkpoint(every="1h", storage="never-made")
    records = job.read(from_list([]), name="in").event_time(lambda record: record["at"])
    asked = records.map_async(
        take, ordered=False, timeout="3s", on_timeout="side_output", into=ANSWER, name="ask"
    )
    counts = asked.key_by("user").window(hg.tumbling("1m")).agg(n=hg.count(), name="counts")
    counts.write(collect(guarantee="exactly_once"), name="out")
    return job


ANSWER = {"user": "string", "n": "int64"}


async def take(record: Any) -> Any:
    await asyncio.sleep(record["wait"])
    return {"user": record["user"], "n": 1}


@pytest.mark.parametrize("parallelism", [1, 2])
def test_no_record_is_late_because_its_call_was_slow(parallelism: int) -> None:
    with harness(timed_job(), parallelism=parallelism) as h:
        h.push("in", *[{"user": "a", "at": T0, "wait": wait} for wait in (0, 2, 1, 5)])
        h.push("in", {"user": "b", "at": T0 + timedelta(seconds=59), "wait": 2})
        h.advance_watermark("in", T0 + timedelta(minutes=1))
        h.advance_time("1s")
        assert h.pending("out") == []
        h.advance_time("2s")
        rows = sorted((row["user"], row["n"]) for row in h.pending("out"))
        assert rows == [("a", 3), ("b", 1)]
        assert h.drain("counts.late") == []
        assert [record["wait"] for record in h.drain("ask.timed_out")] == [5]


def test_keys_meet_their_records_again_after_a_rescale(asked: list[Any]) -> None:
    job = hg.Job("keyed")
    job.checkpoint(every="1h", storage="never-made")
    calls = job.read(from_list([]), name="in").key_with(lambda n: int(n) % 5)
    calls.map_async(ask, timeout="10m", max_in_flight=50, name="ask").write(
        collect(guarantee="exactly_once"), name="out"
    )
    with harness(job, parallelism=2) as h:
        h.push("in", *range(1, 21))
        h.advance_time("9s")
        h.rescale(3)
        h.push("in", *range(21, 31))
        h.advance_time("5m")
        h.rescale(1)
        h.end()
        h.advance_time("5m")
        found = h.drain("out")
        assert sorted(found) == [n * 10 for n in range(1, 31)]
        for key in range(5):
            of_key = [n for n in found if n / 10 % 5 == key]
            assert of_key == sorted(of_key)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_loop_waits_for_calls_and_for_rows_that_wait(parallelism: int) -> None:
    """Nothing overtakes what is under way: a loop that seems to be at rest would lose it."""

    def body(stream: Any) -> tuple[Any, Any]:
        less = stream.map_async(one_less, name="less", timeout="1m").map(
            lambda n: {"n": n}, into={"n": "int64"}
        )
        rows = less.map_batches(lambda batch: batch, rows=1_000, within="5s")
        numbers = rows.map(lambda row: row.n)
        return numbers.filter(lambda n: n > 0), numbers

    job = hg.Job("loop")
    job.checkpoint(every="1h", storage="never-made")
    job.read(from_list([]), name="in").iterate(body, name="loop").write(
        collect(guarantee="exactly_once"), name="out"
    )
    with harness(job, parallelism=parallelism) as h:
        h.push("in", 3, 1)
        h.push("in", 2)
        h.end()
        h.advance_time("2m")
        assert sorted(h.drain("out")) == [0, 0, 0, 1, 1, 2]


async def one_less(n: int) -> int:
    await asyncio.sleep(3)
    return n - 1
