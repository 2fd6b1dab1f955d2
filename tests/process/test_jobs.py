"""Process functions in whole jobs that fail, stop, and go on at another parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headgate as hg
from headgate.connectors import collect, generator, numbers, sequence
from headgate.tests.support.held import Paced
from headgate.tests.support.lab import stop_with_savepoint

ROWS = 900
KEYS = 7
BACKENDS = ["hashmap", "rocksdb"]


class Buckets(hg.KeyedProcess[int, int, Any]):
    """Sums per key and hundred, and says the sum when the hundred is over in event time."""

    sums = hg.MapState[str, int]()
    seen = hg.SideOutput[int]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        ctx.emit(self.seen, record)
        bucket = record // 100
        self.sums.put(str(bucket), (self.sums.get(str(bucket)) or 0) + record)
        ctx.event_time.at(bucket * 100 + 99, tag=str(bucket))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[Any]:
        yield ctx.key, int(timer.tag), self.sums.get(timer.tag)
        self.sums.remove(timer.tag)


def buckets() -> set[Any]:
    return {
        (key, bucket, sum(n for n in range(100 * bucket, 100 * bucket + 100) if n % KEYS == key))
        for bucket in range(ROWS // 100)
        for key in range(KEYS)
    }


def timers_job(
    lab: Any, sinks: tuple[Any, Any], parallelism: int, backend: str = "hashmap"
) -> hg.Job:
    job = hg.Job(
        "timers",
        parallelism=parallelism,
        max_parallelism=12,
        options={
            "state.backend.type": backend,
            "pipeline.auto-watermark-interval": "5ms",
        },
    )
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    source = Paced(numbers(ROWS, batch_rows=10, splits=1), 9)
    result = (
        job.read(source, name="numbers", parallelism=1)
        .event_time(lambda n: n, max_out_of_order="20ms")
        .key_with(lambda n: n % KEYS)
        .process(Buckets(), name="buckets")
    )
    result.write(sinks[0], name="out", parallelism=1)
    result.side(Buckets.seen).write(sinks[1], name="seen", parallelism=1)
    return job


@pytest.mark.parametrize("parallelism", [1, 2])
def test_timers_in_a_job_whose_workers_die(lab: Any, faults: Any, parallelism: int) -> None:
    out, seen = collect(guarantee="exactly_once"), collect(guarantee="exactly_once")
    job = timers_job(lab, (out, seen), parallelism)
    ran = lab.run(job, faults.kills(parallelism, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert sorted(out.rows) == sorted(buckets())
    assert sorted(seen.rows) == list(range(ROWS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_timers_at_another_parallelism(lab: Any, backend: str) -> None:
    """Stopped with timers pending, and gone on with three subtasks instead of two."""
    out, seen = collect(guarantee="exactly_once"), collect(guarantee="exactly_once")

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.checkpoint()
        await running.request("stop")

    job = timers_job(lab, (out, seen), 2, backend)
    assert lab.run(job, script).outcome.status == "SUSPENDED"
    assert len(out.rows) < len(buckets())
    ran = lab.run(timers_job(lab, (out, seen), 3, backend))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert ran.restores[0] > 0
    assert sorted(out.rows) == sorted(buckets())
    assert sorted(seen.rows) == list(range(ROWS))


class Bursts(hg.KeyedProcess[int, int, int]):
    """A timer for each number; those of a thousand are due together."""

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        ctx.event_time.at(record // 1_000 * 1_000 + 999)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> list[int]:
        return [ctx.key]


def test_bursts_of_timers_in_short_slices_in_a_job_whose_workers_die(lab: Any, faults: Any) -> None:
    options = {"headgate.task.slice": "1ms", "pipeline.auto-watermark-interval": "0s"}
    job = hg.Job("bursts", parallelism=2, max_parallelism=12, options=options)
    job.checkpoint(every="10ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    sink = collect(guarantee="exactly_once")
    (
        job.read(Paced(numbers(4_000, batch_rows=200, splits=1), 1), name="numbers", parallelism=1)
        .event_time(lambda n: n)
        .key_with(lambda n: n)
        .process(Bursts(), name="bursts")
        .write(sink, name="out", parallelism=1)
    )
    ran = lab.run(job, faults.kills(4, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert sorted(sink.rows) == list(range(4_000))


@pytest.mark.parametrize("backends", [BACKENDS, BACKENDS[::-1]])
def test_timers_in_a_savepoint_for_another_backend(
    lab: Any, tmp_path: Path, backends: list[str]
) -> None:
    out, seen = collect(guarantee="exactly_once"), collect(guarantee="exactly_once")
    taken: list[str] = []

    script = stop_with_savepoint(tmp_path, taken, checkpoints=2)
    job = timers_job(lab, (out, seen), 2, backends[0])
    assert lab.run(job, script).outcome.status == "SUSPENDED"
    assert len(out.rows) < len(buckets())
    tables = {path.parent.name for path in Path(taken[0]).rglob("*.parquet")}
    assert {"timers_event", "sums"} <= tables
    again = timers_job(lab, (out, seen), 3, backends[1])
    ran = lab.run(again, restore_from=taken[0])
    assert ran.outcome.status == "FINISHED", ran.failures
    assert sorted(out.rows) == sorted(buckets())


class Forgetful(hg.KeyedProcess[int, int, Any]):
    """The same without timers."""

    sums = hg.MapState[str, int]()
    seen = hg.SideOutput[int]()

    def on_record(self, record: int, ctx: hg.Context[int]) -> None:
        return None


def test_timers_are_not_forgotten_by_mistake(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that no longer handles timers is told that there are some."""
    out, seen = collect(guarantee="exactly_once"), collect(guarantee="exactly_once")

    async def script(running: Any) -> None:
        await running.checkpoint()
        await running.request("stop")

    lab.run(timers_job(lab, (out, seen), 1), script)
    monkeypatch.setitem(globals(), "Buckets", Forgetful)
    job = timers_job(lab, (out, seen), 1)
    ran = lab.run(job)
    assert ran.outcome.status == "FAILED"
    assert "timers_event" in " ".join(ran.failures)


class Match(hg.CoProcess[int, int, int, Any]):
    """Pairs each number of the first stream with that of the second, whichever comes first."""

    waiting = hg.MapState[int, str]()

    def on_first(self, record: int, ctx: hg.Context[int]) -> Iterator[Any]:
        return self.meet(record, "first")

    def on_second(self, record: int, ctx: hg.Context[int]) -> Iterator[Any]:
        return self.meet(record, "second")

    def meet(self, record: int, side: str) -> Iterator[Any]:
        other = self.waiting.get(record)
        if other is None:
            self.waiting.put(record, side)
            return
        assert other != side
        self.waiting.remove(record)
        yield record


@pytest.mark.parametrize("parallelism", [1, 2])
def test_two_inputs_in_a_job_whose_workers_die(lab: Any, faults: Any, parallelism: int) -> None:
    job = hg.Job("match", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    sink = collect(guarantee="exactly_once")
    first, second = (
        job.read(Paced(numbers(ROWS, batch_rows=10), batches), name=name).key_with(
            lambda n: n % KEYS
        )
        for name, batches in (("first", 9), ("second", 6))
    )
    first.connect(second).process(Match(), name="match").write(sink, name="out", parallelism=1)
    ran = lab.run(job, faults.kills(parallelism + 10, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert sorted(sink.rows) == list(range(ROWS))


class Versions(hg.BroadcastProcess[int, int, int, Any]):
    """Passes records on with how many rules it knows; that number never goes back."""

    rules = hg.BroadcastState[int, int]()
    known = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[Any]:
        count = len(list(self.rules.keys()))
        assert count >= self.known.get()
        self.known.set(count)
        yield record

    def on_broadcast(self, record: int, ctx: hg.BroadcastContext[int]) -> Iterator[Any]:
        assert not self.rules.contains(record), "a broadcast record came twice"
        self.rules.put(record, record)
        yield "rule", record


@pytest.mark.parametrize("parallelism", [1, 3])
def test_broadcast_state_in_a_job_whose_workers_die(
    lab: Any, faults: Any, parallelism: int
) -> None:
    job = hg.Job("rules", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    sink = collect(guarantee="exactly_once")
    rules = job.read(
        Paced(numbers(100, batch_rows=1, splits=1), 10), name="rules", parallelism=1
    ).broadcast(name="all rules")
    (
        job.read(Paced(numbers(ROWS, batch_rows=10), 3), name="numbers")
        .key_with(lambda n: n % KEYS)
        .connect(rules)
        .process(Versions(), name="versions")
        .write(sink, name="out", parallelism=1)
    )
    ran = lab.run(job, faults.kills(parallelism + 20, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    assert sorted(r for r in sink.rows if isinstance(r, int)) == list(range(ROWS))
    made = sorted(r for r in sink.rows if not isinstance(r, int))
    assert made == sorted([("rule", n) for n in range(100)] * parallelism)


def test_event_time_is_that_of_the_slower_input(lab: Any) -> None:
    """Timers of a record of the fast stream wait until the slow one has come as far."""

    class Order(hg.CoProcess[int, int, int, Any]):
        newest = hg.ValueState[int](default=-1)

        def on_first(self, record: int, ctx: hg.Context[int]) -> None:
            ctx.event_time.at(record, tag=str(record))

        def on_second(self, record: int, ctx: hg.Context[int]) -> None:
            self.newest.set(record)

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[Any]:
            yield timer.timestamp, self.newest.get()

    job = hg.Job("slower", max_parallelism=12, options={"pipeline.auto-watermark-interval": "0s"})
    sink = collect(guarantee="none")
    first, second = (
        job.read(numbers(100, rate=rate, batch_rows=1, splits=1), name=name)
        .event_time(lambda n: n)
        .key_with(lambda n: 0)
        for name, rate in (("first", None), ("second", 500))
    )
    first.connect(second).process(Order(), name="order").write(sink, name="out")
    assert lab.run(job).outcome.status == "FINISHED"
    assert [at for at, _ in sink.rows] == list(range(100))
    assert all(newest >= at for at, newest in sink.rows)


def test_processing_timers_fire_in_a_running_job(lab: Any) -> None:
    """A timer that is due after the record, while the job waits for the next one."""

    class Later(hg.KeyedProcess[int, int, Any]):
        def on_record(self, record: int, ctx: hg.Context[int]) -> None:
            ctx.processing_time.after("1ms" if record < 50 else "1d", tag=str(record))

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[Any]:
            yield int(timer.tag)

    job = hg.Job("clock", parallelism=2, max_parallelism=12)
    job.checkpoint(every="1h", storage=lab.storage)
    sink = collect(guarantee="at_least_once")
    (
        job.read(numbers(None, rate=100, batch_rows=1, splits=1), name="numbers", parallelism=1)
        .key_with(lambda n: n % KEYS)
        .process(Later(), name="later")
        .write(sink, name="out")
    )

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        while len(sink.rows) < 50:
            await running.tick()
        await running.request("stop")

    assert lab.run(job, script).outcome.status == "SUSPENDED"
    assert sorted(sink.rows) == list(range(50))


class Sizes(hg.CoProcess[int, Any, Any, Any]):
    """Counts the rows of either stream per key."""

    first = hg.ValueState[int](default=0)
    second = hg.ValueState[int](default=0)

    def on_first(self, record: Any, ctx: hg.Context[int]) -> None:
        self.first.set(self.first.get() + record.n)
        ctx.event_time.at(10**12)

    def on_second(self, record: Any, ctx: hg.Context[int]) -> None:
        self.second.set(self.second.get() + record.m)

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> list[Any]:
        return [(ctx.key, self.first.get(), self.second.get())]


def test_keys_of_columns_of_other_widths_meet(lab: Any) -> None:
    job = hg.Job("widths", parallelism=3, max_parallelism=12)
    sink = collect(guarantee="none")
    rows = generator({"n": sequence()}, rows=ROWS, batch_rows=50)
    first = job.read(rows, name="first").select("n", "CAST(n % 10 AS SMALLINT) AS k")
    second = job.read(rows, name="second").select("n % 10 AS id", "n AS m", "n AS unused")
    joined = first.key_by("k").connect(second.key_by("id")).process(Sizes(), name="sizes")
    joined.write(sink, name="out")
    assert lab.run(job).outcome.status == "FINISHED"
    totals = [sum(n for n in range(ROWS) if n % 10 == key) for key in range(10)]
    assert sorted(sink.rows) == [(key, total, total) for key, total in enumerate(totals)]


class Running(hg.KeyedBatchProcess[int, Any, Any]):
    """Adds the sum so far to the first row of each slice, and drops the odd numbers."""

    total = hg.ValueState[int](default=0)

    def on_batch(self, groups: hg.Groups[int], ctx: hg.Context[int]) -> Iterator[pa.RecordBatch]:
        for _, rows in groups:
            n = rows.column("n")
            before = self.total.get()
            self.total.set(before + pc.sum(n).as_py())
            sums = pc.add(pc.cumulative_sum(n), before)
            made = rows.append_column("total", sums)
            yield made.filter(pc.equal(pc.bit_wise_and(n, 1), 0))


@pytest.mark.parametrize("parallelism", [1, 2])
def test_batches_in_a_job_whose_workers_die(lab: Any, faults: Any, parallelism: int) -> None:
    job = hg.Job("batches", parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    sink = collect(guarantee="exactly_once")
    source = Paced(generator({"n": sequence()}, rows=ROWS, batch_rows=10), 9)
    into = pa.schema([("n", pa.int64()), ("k", pa.int64()), ("total", pa.int64())])
    (
        job.read(source, name="rows", parallelism=1)
        .select("n", f"n % {KEYS} AS k")
        .parallel(1)
        .event_time("n")
        .parallel(1)
        .key_by("k")
        .process(Running(), name="running", into=into)
        .write(sink, name="out", parallelism=1)
    )
    ran = lab.run(job, faults.kills(parallelism + 30, 3))
    assert ran.outcome.status == "FINISHED", ran.failures
    assert len(ran.failures) == 3
    expected = {n: sum(range(n % KEYS, n + 1, KEYS)) for n in range(0, ROWS, 2)}
    assert len(sink.rows) == len(expected)
    assert {row["n"]: row["total"] for row in sink.rows} == expected
