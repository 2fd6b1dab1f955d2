"""Loops in whole jobs that fail, take several checkpoints at once, stop, and go on in another width."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.runtime.job import runnable
from headgate.tests.support.held import Paced

ROWS = 240
HOPS = 6
KEYS = 11


class Hop(hg.KeyedProcess[int, Any, Any]):
    """Passes (id, left) on as (id, left - 1). Its state would not take a record twice, or miss one."""

    last = hg.ValueState[int]()

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[Any]:
        id_, left = record
        expected = self.last.get()
        if expected is None:
            expected = HOPS + id_ % 3
        if left != expected:
            raise AssertionError(f"record {record} instead of left={expected}")
        self.last.set(left - 1)
        yield (id_, left - 1)


def hops(stream: Any) -> tuple[Any, Any]:
    done = stream.key_with(lambda r: r[0]).process(Hop(), name="hop")
    return done.filter(lambda r: r[1] > 0), done


def all_hops(rows: int = ROWS) -> list[Any]:
    return sorted((id_, left) for id_ in range(rows) for left in range(HOPS + id_ % 3))


def loop_job(lab: Any, sink: Any, parallelism: int, body: Any = hops, **given: Any) -> hg.Job:
    job = hg.Job(
        "loop",
        parallelism=parallelism,
        max_parallelism=12,
        options={"headgate.iteration.memory": "2 kb"},
    )
    checkpoint = {"every": "30ms", **given}
    job.checkpoint(storage=lab.storage, **checkpoint)
    job.restart(attempts=20, delay="10ms")
    (
        job.read(Paced(numbers(ROWS, batch_rows=4, splits=2), 1), name="numbers")
        .map(lambda n: (n, HOPS + n % 3))
        .iterate(body, name="loop")
        .write(sink, name="out", parallelism=1)
    )
    return job


@pytest.mark.parametrize("parallelism", [1, 2])
def test_workers_die(lab: Any, faults: Any, parallelism: int) -> None:
    sink = collect(guarantee="exactly_once")
    ran = lab.run(loop_job(lab, sink, parallelism), faults.kills(parallelism, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert sorted(sink.rows) == all_hops()


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_die_while_checkpoints_overlap(lab: Any, faults: Any, seed: int) -> None:
    sink = collect(guarantee="exactly_once")
    job = loop_job(lab, sink, 2, every="20ms", max_concurrent=4)
    ran = lab.run(job, faults.kills(seed, 4))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(sink.rows) == all_hops()


def test_the_coordinator_dies(lab: Any, faults: Any) -> None:
    sink = collect(guarantee="exactly_once")
    ran = lab.run(loop_job(lab, sink, 2), faults.takeovers(2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(sink.rows) == all_hops()


def test_checkpoints_that_fail_in_the_loop(lab: Any, faults: Any, trouble: Any) -> None:
    """The state of a step in the loop cannot be written, again and again: its barriers are back, and the
    heads' logs are cut, or not yet; others are under way meanwhile. Between failures workers die."""
    sink = collect(guarantee="exactly_once")
    job = loop_job(lab, sink, 2, every="20ms", max_concurrent=3, tolerable_failures=1_000)
    runnable(job).override(
        {
            "execution.checkpointing.data-inline-threshold": "0 b",
            # A file of its own, so that its name tells whose state it is.
            "execution.checkpointing.file-merging.enabled": "false",
        }
    )
    trouble.only = "hop"

    async def script(running: Any) -> None:
        for seed in range(3):
            await running.checkpoint()
            trouble.fail["write_file"] = 2
            await running.until("checkpoint", status="FAILED")
            await running.checkpoint()
            running.kill(random.Random(seed))
            await running.until("status", status="RUNNING")

    ran = lab.run(job, script, opener=trouble.open)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert sorted(sink.rows) == all_hops()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_it_stops_and_goes_on_at_another_parallelism(lab: Any, before: int, after: int) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.checkpoint()
        await running.request("stop")

    ran = lab.run(loop_job(lab, sink, before), script)
    assert ran.outcome.status == "SUSPENDED", ran.failures
    assert len(sink.rows) < len(all_hops())
    ran = lab.run(loop_job(lab, sink, after))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores[0] > 0
    assert sorted(sink.rows) == all_hops()


def test_it_drains(lab: Any) -> None:
    """The sources end early; whatever has entered the loop still goes all its ways."""
    sink = collect(guarantee="exactly_once")

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.request("stop", drain=True)

    ran = lab.run(loop_job(lab, sink, 2), script)
    assert ran.outcome.status == "SUSPENDED", ran.failures
    ids = {id_ for id_, _ in sink.rows}
    assert sorted(sink.rows) == [each for each in all_hops() if each[0] in ids]


def test_behind_the_savepoint_of_a_stop_nothing_goes_round(lab: Any) -> None:
    """A record that went round then would be in the output of the last checkpoint, and again in that of
    the job that goes on from the savepoint."""
    sink, taken = collect(guarantee="exactly_once"), []

    def make(storage: str, parallelism: int, every: str) -> hg.Job:
        job = hg.Job("long", parallelism=parallelism, max_parallelism=12)
        job.checkpoint(every=every, storage=storage)
        (
            job.read(Paced(numbers(20, batch_rows=4, splits=2), 1), name="numbers")
            .map(lambda n: (n, 200))
            .iterate(long_way, name="loop")
            .write(sink, name="out", parallelism=1)
        )
        return job

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        await running.request("checkpoint")
        driver = running.coordinator._context.checkpoints
        write = driver._write_savepoint

        async def slowly(*arguments: Any) -> None:
            for _ in range(4):
                await running.tick()  # in which the loop would go on
            await write(*arguments)

        driver._write_savepoint = slowly
        taken.append((await running.request("stop", savepoint=str(lab.path)))["savepoint"])

    assert lab.run(make(lab.storage, 2, "1h"), script).outcome.status == "SUSPENDED"
    assert len(sink.rows) < 20 * 200
    ran = lab.run(make(f"{lab.storage}-again", 3, "20ms"), restore_from=taken[0])
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(sink.rows) == [(n, left) for n in range(20) for left in range(200)]


def long_way(stream: Any) -> tuple[Any, Any]:
    less = stream.key_with(lambda r: r[0]).process(Less(), name="less")
    return less.filter(lambda r: r[1] > 0), less


class Less(hg.KeyedProcess[int, Any, Any]):
    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[Any]:
        yield (record[0], record[1] - 1)


def two_streams(stream: Any) -> tuple[Any, Any]:
    """Steps of several widths in a loop, and feedback that is distributed again."""
    moved = stream.rebalance().map(lambda r: r, name="move").parallel(1)
    done = moved.key_with(lambda r: r[0]).process(Hop(), name="hop")
    return done.filter(lambda r: r[1] > 0).key_with(lambda r: r[0]).process(
        Same(), name="same"
    ), done


class Same(hg.KeyedProcess[int, Any, Any]):
    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[Any]:
        yield record


def test_steps_of_several_widths(lab: Any, faults: Any) -> None:
    sink = collect(guarantee="exactly_once")
    job = loop_job(lab, sink, 2, two_streams, every="20ms", max_concurrent=2)
    ran = lab.run(job, faults.kills(7, 2))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(sink.rows) == all_hops()


class Amount(msgspec.Struct, frozen=True):
    id: int
    left: int


def test_columns_that_spill(lab: Any) -> None:
    """Each record becomes three, for three rounds; the loop holds far more than its memory."""
    sink = collect(guarantee="exactly_once")
    job = hg.Job("wide", parallelism=2, options={"headgate.iteration.memory": "1 kb"})
    job.checkpoint(every="20ms", storage=lab.storage)

    def body(stream: Any) -> tuple[Any, Any]:
        thrice = stream.flat_map(triple, into=Amount)
        return thrice.filter("left > 0"), thrice.filter("left = 0")

    (
        job.read(Paced(numbers(40, batch_rows=5, splits=2), 2), name="numbers")
        .map(lambda n: Amount(n, 4), into=Amount)
        .iterate(body, name="loop")
        .map(lambda a: a.id)
        .write(sink, name="out", parallelism=1)
    )
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(sink.rows) == sorted(list(range(40)) * 81)


def triple(record: Any) -> list[Amount]:
    return [Amount(record.id, record.left - 1)] * 3


# --- rounds ------------------------------------------------------------------------------------


class Round(hg.KeyedProcess[int, Any, Any]):
    """Sums what comes in a round; when it is over, tells it, with the round."""

    sums = hg.MapState[str, int]()

    def on_record(self, record: Any, ctx: hg.Context[int]) -> None:
        number = str(ctx.timestamp)
        if any(int(other) > int(number) for other, _ in self.sums.items()):
            raise AssertionError(f"record {record} of round {number} came late")
        self.sums.put(number, (self.sums.get(number) or 0) + record[1])
        ctx.event_time.at(int(number), tag=number)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[Any]:
        total = self.sums.get(timer.tag)
        self.sums.remove(timer.tag)
        yield (ctx.key, total, int(timer.tag))


def spread(record: Any) -> list[Any]:
    key, total, _ = record
    half = total // 2
    return [((key + 1) % KEYS, half), ((key * 2) % KEYS, total - half)]


def rounds_of(rows: int, count: int) -> list[Any]:
    """Return the results of the first `count` rounds."""
    found: list[Any] = []
    records = [(n % KEYS, n) for n in range(rows)]
    for number in range(count):
        sums: dict[int, int] = {}
        for key, amount in records:
            sums[key] = sums.get(key, 0) + amount
        now = [(key, total, number) for key, total in sums.items()]
        found += now
        records = [each for it in now for each in spread(it)]
    return sorted(found)


def rounds_job(lab: Any, sink: Any, parallelism: int, ended: Path) -> hg.Job:
    """It goes on until there is a file `ended`."""
    job = hg.Job("rounds", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="10ms", storage=lab.storage, max_concurrent=2)
    job.restart(attempts=20, delay="10ms")

    where = str(ended)

    def body(stream: Any) -> tuple[Any, Any]:
        sums = stream.key_with(lambda r: r[0]).process(Round(), name="round")
        return sums.flat_map(spread), sums

    (
        job.read(numbers(ROWS, batch_rows=8, splits=2), name="numbers")
        .map(lambda n: (n % KEYS, n))
        .iterate_rounds(
            body, name="loop", max_rounds=10**9, while_any=lambda _: not os.path.exists(where)
        )
        .write(sink, name="out", parallelism=1)
    )
    return job


@pytest.mark.parametrize(("parallelism", "seed"), [(2, 2), (3, 3)])
def test_rounds_while_workers_die(
    lab: Any, faults: Any, tmp_path: Path, parallelism: int, seed: int
) -> None:
    sink = collect(guarantee="exactly_once")

    async def script(running: Any) -> None:
        await faults.kills(seed, 3)(running)
        (tmp_path / "ended").touch()

    ran = lab.run(rounds_job(lab, sink, parallelism, tmp_path / "ended"), script)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    last = max(number for _, _, number in sink.rows)
    assert sorted(sink.rows) == rounds_of(ROWS, last + 1)
