"""Jobs of which a worker dies: the others take their state over from memory, and read nothing again."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.runtime.storage.memory import MemoryStore

KEYS = 16


class Count(hg.KeyedProcess[int, int, tuple[int, int]]):
    """Counts the records of a key; a timer that moves on with each record never fires."""

    seen = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: Any) -> list[tuple[int, int]]:
        self.seen.set(self.seen.get() + 1)
        ctx.processing_time.after("1h")
        return [(record % KEYS, self.seen.get())]

    def on_timer(self, timer: Any, ctx: Any) -> None:
        raise AssertionError


def _key(record: int) -> int:
    return record % KEYS


class Noted(MemoryStore):
    """Notes of which subtasks state is read."""

    def __init__(self, root: str, reads: list[int]) -> None:
        super().__init__(root)
        self.reads = reads

    async def read_file(self, name: str) -> bytes:
        if (found := re.search(r"/count-(\d+)-", name)) is not None:
            self.reads.append(int(found[1]))
        return await super().read_file(name)


class Row(msgspec.Struct):
    """A record in columns."""

    key: int
    number: int


def per_record(job: hg.Job, endless: Any) -> Any:
    """Counts with a process function, which is called for each record."""
    counted = job.read(endless, name="numbers").key_with(_key)
    return counted.process(Count(), name="count")


def aggregated(job: hg.Job, endless: Any) -> Any:
    """Counts with a running aggregate; there is a result of each batch."""
    numbered = job.read(endless, name="numbers").map(
        lambda number: Row(key=number % KEYS, number=number), into=Row, name="rows"
    )
    counted = numbered.key_by("key").agg(
        n=hg.count(), total=hg.sum("number"), different=hg.count_distinct("number"), name="count"
    )
    return counted.map(_pair, name="pairs")


def reduced(job: hg.Job, endless: Any) -> Any:
    """Counts with a function of two records, whose classes travel with the code of the job."""

    class Kind(enum.Enum):
        ONE = "one"
        MORE = "more"

    @dataclass
    class Seen:
        number: int
        kind: Kind = Kind.ONE

    class Total(msgspec.Struct):
        key: int
        count: int
        last: Any

    def first(number: int) -> Total:
        return Total(number % KEYS, 1, Seen(number))

    def added(value: Total, record: Total) -> Total:
        assert isinstance(value, Total)
        assert type(value) is type(record)
        assert type(value.last) is Seen
        assert value.last.kind is (Kind.ONE if value.count == 1 else Kind.MORE)
        assert record.last.number > value.last.number
        return Total(value.key, value.count + 1, Seen(record.last.number, Kind.MORE))

    totals = job.read(endless, name="numbers").map(first, name="first")
    counted = totals.key_with(lambda total: total.key).reduce(added, name="count")
    return counted.map(lambda total: (total.key, total.count), name="pairs")


def _pair(row: Any) -> tuple[int, int]:
    """Return key and count; the numbers of a single split come in their order, each once."""
    assert row.n == row.different
    assert row.total == row.n * row.key + KEYS * row.n * (row.n - 1) // 2
    return row.key, row.n


class Scene:
    """A job of several workers, of which some are killed, one after the other."""

    def __init__(
        self,
        lab: Any,
        build: Callable[[hg.Job, Any], Any] = per_record,
        parallelism: int = 4,
        splits: int = 4,
        **options: str,
    ) -> None:
        self.lab, self.build = lab, build
        self.reads: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.out = collect(guarantee="exactly_once")
        self.job = hg.Job(
            "job",
            parallelism=parallelism,
            max_parallelism=KEYS,
            options={
                "io.tmp.dirs": str(lab.path),
                "headgate.recovery.keep-state": "true",
                "execution.checkpointing.data-inline-threshold": "0b",
                "execution.checkpointing.file-merging.enabled": "false",
                **options,
            },
        )
        self.job.checkpoint(every="50ms", storage=lab.storage)
        self.job.restart(attempts=9, delay="10ms")
        endless = numbers(10_000_000, rate=2_000, batch_rows=20, splits=splits)
        build(self.job, endless).write(self.out, name="out")

    def open(self, uri: str, job_name: str, options: Any) -> MemoryStore:
        return Noted(f"{uri.removeprefix('memory://')}/{job_name}", self.reads)

    def run(self, kills: int = 1) -> list[set[int]]:
        """Return the subtasks whose state was read behind each kill."""
        read: list[set[int]] = []

        async def script(job: Any) -> None:
            for _ in range(kills):
                await job.checkpoint()
                await job.checkpoint()
                self.reads.clear()
                sorted(job.live(), key=lambda worker: worker.worker_id)[0].kill()
                await job.until("restored")
                self.told.append(json.loads((await job.until("recovered")).body))
                read.append(set(self.reads))
            await job.request("stop")

        ran = self.lab.run(self.job, script, opener=self.open)
        assert ran.outcome.status == "SUSPENDED"
        assert len(ran.failures) == kills, ran.failures
        for key in range(KEYS):
            counts = [count for of, count in self.out.rows if of == key]
            assert counts == sorted(set(counts))
            if self.build is not aggregated:
                assert counts == list(range(1, len(counts) + 1))
        return read


def test_only_the_state_of_the_lost_worker_is_read(lab: Any) -> None:
    scene = Scene(lab)
    assert [len(read) for read in scene.run(kills=3)] == [1, 1, 1]
    for told in scene.told:
        assert told["lastRestartKeptStateSize"] > 2 * told["lastRestartRemoteStateSize"] > 0


@pytest.mark.parametrize("parallelism", [2, 3])
def test_values_of_a_reduce_are_taken_over(lab: Any, parallelism: int) -> None:
    """Their classes are those that the functions of the next attempt know."""
    scene = Scene(lab, reduced, parallelism, splits=1)
    assert [len(read) for read in scene.run(kills=3)] == [1, 1, 1]
    for told in scene.told:
        assert told["lastRestartKeptStateSize"] > 0


@pytest.mark.parametrize("parallelism", [2, 3])
def test_running_aggregates_are_taken_over(lab: Any, parallelism: int) -> None:
    scene = Scene(lab, aggregated, parallelism, splits=1)
    assert [len(read) for read in scene.run(kills=2)] == [1, 1]
    for told in scene.told:
        assert told["lastRestartKeptStateSize"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"headgate.recovery.keep-state": "false"},
        {"headgate.recovery.keep-state.timeout": "1ms", "restart-strategy.fixed-delay.delay": "1s"},
        {"state.backend.type": "rocksdb"},
    ],
)
def test_what_is_not_kept_is_read(lab: Any, options: dict[str, str]) -> None:
    scene = Scene(lab, **options)
    scene.run()
    assert scene.told[0]["lastRestartKeptStateSize"] == 0
