"""Goal: a restored state equals the state at the barrier, always.

Method: random lives of a keyed step against plain dicts. A life is records, snapshots (at most three files
in a chain, so that deltas are merged and bases rewritten all the time), checkpoints that complete, fail or
are overtaken, deletion of what no checkpoint needs, and restores at random parallelism. All of it runs
through the runtime's own parts: SnapshotRunner, StateWriter, assign_state, StateReader. After each restore,
and at the end, all state is compared with the model at the barrier.
"""

from __future__ import annotations

import asyncio
import copy
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.state.keyed.keys import encode_token, token

ROCKSDB = {
    "state.backend.type": "rocksdb",
    "taskmanager.memory.managed.size": "16kb",
    "state.backend.rocksdb.writebuffer.size": "64kb",
}


class Everything(hg.KeyedProcess[Any, Any, Any]):
    """Does what records say: `(key, method, argument)`."""

    number = hg.ValueState[int]()
    elements = hg.ListState[int]()
    entries = hg.MapState[str, int]()

    def on_record(self, record: Any, ctx: Any) -> None:
        _, method, argument = record
        getattr(self, method)(argument)

    def put(self, n: int) -> None:
        self.number.set(n)

    def clear(self, n: int) -> None:
        self.number.clear()

    def append(self, n: int) -> None:
        self.elements.add_all([n, n + 1])

    def clear_list(self, n: int) -> None:
        self.elements.clear()

    def put_entry(self, n: int) -> None:
        self.entries.put("abc"[n % 3], n)

    def remove_entry(self, n: int) -> None:
        self.entries.remove("abc"[n % 3])


class ProcessSubject:
    """Per-key state, record by record."""

    keys = [*range(-4, 12), "a", "b", ("a", 1), None, True]
    methods = ("put", "put", "clear", "append", "clear_list", "put_entry", "remove_entry")

    def __init__(self) -> None:
        self.model: dict[str, dict[Any, Any]] = {
            name: {} for name in ("number", "elements", "entries")
        }

    @staticmethod
    def job() -> hg.Job:
        job = new_job()
        stream = job.read(from_list([1]), name="in").key_with(lambda record: record[0])
        stream.process(Everything(), name="step").write(blackhole(guarantee="none"), name="out")
        return job

    def feed(self, life: Any, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 12)):
            key, method, n = rng.choice(self.keys), rng.choice(self.methods), rng.randrange(1000)
            life.owner(key).operator.process(ObjectBatch([(key, method, n)]), 0)
            self._note(str(encode_token(token(key))), method, n)

    def _note(self, key: str, method: str, n: int) -> None:
        model = self.model
        if method == "put":
            model["number"][key] = n
        elif method == "clear":
            model["number"].pop(key, None)
        elif method == "append":
            model["elements"].setdefault(key, []).extend([n, n + 1])
        elif method == "clear_list":
            model["elements"].pop(key, None)
        elif method == "put_entry":
            model["entries"][key, "abc"[n % 3]] = n
        else:
            model["entries"].pop((key, "abc"[n % 3]), None)

    def read(self, tables: dict[str, list[dict[str, Any]]]) -> dict[str, dict[Any, Any]]:
        found: dict[str, dict[Any, Any]] = {name: {} for name in self.model}
        for name, rows in tables.items():
            for row in sorted(rows, key=lambda row: row.get("position", 0)):
                key = str(row["key"])
                if name == "elements":
                    found[name].setdefault(key, []).append(row["value"])
                    continue
                place = (key, row["map_key"]) if name == "entries" else key
                assert place not in found[name]
                found[name][place] = row["value"]
        return found


FIELDS = pa.schema(
    [("k", pa.int64()), ("v", pa.int64()), ("d", pa.decimal128(9, 2)), ("s", pa.string())]
)


class AggregateSubject:
    """Running aggregates, batch by batch."""

    windowed = False
    state = "running"

    def __init__(self) -> None:
        self.model: dict[Any, tuple[Any, ...]] = {}
        self.watermark = 0

    @classmethod
    def job(cls) -> hg.Job:
        job = new_job()
        rows = job.read(from_list([], schema=FIELDS), name="in")
        if cls.windowed:
            rows = rows.event_time("v")
        keyed: Any = rows.key_by("k")
        if cls.windowed:
            keyed = keyed.window(hg.tumbling("10ms"))
        stream = keyed.agg(
            n=hg.count(), total=hg.sum("v"), low=hg.min("d"), word=hg.max("s"), name="step"
        )
        stream.write(blackhole(guarantee="none"), name="out")
        return job

    def feed(self, life: Any, rng: random.Random) -> None:
        low, size = rng.choice([(0, 8), (0, 300), (300, 600)]), rng.randrange(1, 150)
        rows = [self._row(rng, *low) for _ in range(size)]
        for subtask in life.subtasks:
            mine = [row for row in rows if life.owner(row[0]) is subtask]
            if mine:
                arrays = [
                    pa.array([row[at] for row in mine], field.type)
                    for at, field in enumerate(FIELDS)
                ]
                times = np.array([row[-1] for row in mine], np.int64)
                data = pa.RecordBatch.from_arrays(arrays, schema=FIELDS)
                subtask.operator.process(ColumnBatch(data, times), 0)
        for row in rows:
            self._note(*row)

    def _row(self, rng: random.Random, low: int, high: int) -> tuple[Any, ...]:
        price = rng.choice([None, Decimal(rng.randrange(-999, 999)) / 100])
        text = rng.choice([None, "a", "b" * rng.randrange(30)])
        return (
            rng.choice([rng.randrange(low, high), None])
            if rng.random() < 0.1
            else rng.randrange(low, high),
            rng.choice([None, rng.randrange(-99, 99)]),
            price,
            text,
            self.watermark + rng.randrange(1, 40),
        )

    def _note(self, key: Any, v: Any, d: Any, s: Any, time: int) -> None:
        place = (key, time // 10 * 10) if self.windowed else key
        n, total, low, word = self.model.get(place, (0, None, None, None))
        self.model[place] = (
            n + 1,
            total if v is None else (total or 0) + v,
            low if d is None else d if low is None else min(low, d),
            word if s is None else s if word is None else max(word, s),
        )

    def read(self, tables: dict[str, list[dict[str, Any]]]) -> dict[Any, tuple[Any, ...]]:
        found: dict[Any, tuple[Any, ...]] = {}
        for row in tables.get(self.state, ()):
            place = row["k"]
            if self.windowed:
                place = (row["k"], round(row["window_start"].timestamp() * 1000))
            assert place not in found
            found[place] = (row["n"], row["total"], row["low"], row["word"])
        return found


class WindowSubject(AggregateSubject):
    """Aggregates of windows, of which some go at each watermark."""

    windowed = True
    state = "windows"

    def feed(self, life: Any, rng: random.Random) -> None:
        super().feed(life, rng)
        if rng.random() < 0.4:
            self.watermark += rng.randrange(25)
            for subtask in life.subtasks:
                subtask.operator.on_watermark(self.watermark)
            for place in [place for place in self.model if place[1] + 9 <= self.watermark]:
                del self.model[place]


def new_job() -> hg.Job:
    job = hg.Job("lives", max_parallelism=12)
    job.options["pipeline.operator-chaining.enabled"] = "false"
    return job


SUBJECTS = {"process": ProcessSubject, "running": AggregateSubject, "windows": WindowSubject}
CASES = {
    ("process", "memory"): 120,
    ("process", "rocksdb"): 25,
    ("running", "memory"): 200,
    ("running", "rocksdb"): 80,
    ("windows", "memory"): 150,
    ("windows", "rocksdb"): 100,
}
ACTIONS = ("feed", "feed", "trigger", "trigger", "complete", "complete", "abort", "restore", "look")


class Story:
    """The events of one life."""

    def __init__(self, life: Any, subject: Any, rng: random.Random) -> None:
        self.life, self.subject, self.rng = life, subject, rng

    async def run(self, actions: list[str]) -> None:
        await self.life.start(self.rng.randrange(1, 4))
        try:
            for action in [*actions, "trigger", "complete", "restore", "feed", "look"]:
                await getattr(self, action)()
        finally:
            await self.life.end()
        assert self.life.unreachable() == set()

    async def feed(self) -> None:
        self.subject.feed(self.life, self.rng)

    async def trigger(self) -> None:
        if len(self.life.pending) < 2:
            subject = self.subject
            self.life.trigger((copy.deepcopy(subject.model), getattr(subject, "watermark", 0)))
            await asyncio.sleep(0)  # its threads begin, and records go on

    async def complete(self) -> None:
        if self.life.pending:
            await self.life.complete(self.rng.choice(self.life.pending), self.rng.randrange(1, 3))

    async def abort(self) -> None:
        if self.life.pending:
            await self.life.abort(self.rng.choice(self.life.pending))

    async def restore(self) -> None:
        await self.life.end()
        restored = self.rng.choice([*self.life.kept, max(self.life.kept, default=0)])
        self.subject = type(self.subject)()
        if restored:
            model, watermark = self.life.kept[restored][1]
            self.subject.model, self.subject.watermark = copy.deepcopy(model), watermark
        await self.life.start(self.rng.choice([1, 2, 3, len(self.life.subtasks)]), restored)
        await self.look()

    async def look(self) -> None:
        assert self.subject.read(await self.life.tables()) == self.subject.model


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_a_restored_state_is_that_of_the_barrier(new_life: Any, kind: str, backend: str) -> None:
    subject = SUBJECTS[kind]
    job = subject.job()

    @settings(
        max_examples=CASES[kind, backend],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.integers(0, 2**32), st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=16))
    def lives(seed: int, actions: list[str]) -> None:
        life = new_life(job, ROCKSDB if backend == "rocksdb" else {})
        asyncio.run(Story(life, subject(), random.Random(seed)).run(actions))

    lives()
