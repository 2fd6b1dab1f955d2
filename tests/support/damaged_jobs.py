"""A job with every kind of state, crashed, and restored from storage in which one object was damaged.

The job runs on virtual time with the whole runtime: coordinator, worker, checkpoints, job log. A damaged
object must give an error that names the object and says that it is corrupt, or the result of a job whose
storage was not damaged. Anything else is a finding: a wrong result, an error of a user's function, or
a job that does not end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import msgspec

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.runtime.job import runnable
from headgate.testing import harness

from .corruption import damaged, judge

BACKENDS = ("hashmap", "rocksdb")
SINKS = ("kept", "reduced", "ran", "windowed")
KEYS = 11
T0 = datetime(2026, 3, 1, tzinfo=UTC)
INLINE = {"in files": "0b", "inline": "1mb"}


class Reading(msgspec.Struct, frozen=True):
    """One record of the input."""

    key: int
    n: int
    name: str
    at: datetime


class Keeper(hg.KeyedProcess[int, Any, Any]):
    """A process function with state of each kind."""

    total = hg.ValueState[int](default=0)
    names = hg.MapState[str, int]()
    last = hg.ListState[int]()
    met = hg.OperatorListState[int]()
    everywhere = hg.OperatorListState[str](redistribution="union")
    rules = hg.BroadcastState[str, str]()

    def open(self, ctx: Any) -> None:
        if not self.rules.contains("rule"):
            self.rules.put("rule", "one")
        if not self.everywhere.get():
            self.everywhere.add("everywhere")

    def on_record(self, record: Any, ctx: Any) -> Iterator[Any]:
        if not self.total.exists():
            self.met.add(record.key)
            ctx.event_time.at(T0 + timedelta(hours=1))
        self.total.set(self.total.get() + record.n)
        self.names.put(record.name, (self.names.get(record.name) or 0) + 1)
        self.last.update([*self.last.get()[-3:], record.n])
        yield "record", record.key, self.total.get(), sorted(self.names.items()), self.last.get()

    def on_timer(self, timer: Any, ctx: Any) -> Iterator[Any]:
        rules = sorted(self.rules.items())
        yield "timer", ctx.key, self.total.get(), rules, sorted(set(self.everywhere.get()))


def make_job(backend: str, inline: str) -> hg.Job:
    """Make a job with a process function, reduce, aggregate and windows, in two subtasks."""
    job = hg.Job("damaged", parallelism=2, max_parallelism=8)
    job.checkpoint(every="1h", storage="never-made")
    runnable(job).override(
        {
            "state.backend.type": backend,
            "execution.checkpointing.data-inline-threshold": INLINE[inline],
        }
    )
    records = job.read(from_list([], schema=Reading), name="records").event_time("at")
    keyed = records.key_by("key")
    keyed.process(Keeper(), name="keeper").write(collect(), name="kept")
    pairs = records.map(lambda record: (record.key, record.n)).key_with(lambda pair: pair[0])
    pairs.reduce(lambda one, other: (one[0], one[1] + other[1]), name="reduce").write(
        collect(), name="reduced"
    )
    keyed.agg(name="running", n=hg.count(), total=hg.sum("n"), top=hg.max("name")).write(
        collect(), name="ran"
    )
    keyed.window(hg.tumbling("10s")).agg(name="windows", n=hg.count(), total=hg.sum("n")).write(
        collect(), name="windowed"
    )
    return job


def records(start: int, stop: int) -> list[Reading]:
    """Return records `start` to `stop` of an input that is always the same."""
    return [
        Reading(n % KEYS, n, f"name {n % 5}", T0 + timedelta(seconds=n // 3))
        for n in range(start, stop)
    ]


Damage = Callable[[dict[str, bytes]], None]


def run(backend: str, inline: str, damage: Damage | None = None) -> list[list[str]]:
    """Return the records of the sinks after two checkpoints, a crash, and the rest of the input.

    Args:
        damage: called with the objects of the storage before they are read again.

    Raises:
        HeadgateError: the job could not be restored, or failed.
    """
    with harness(make_job(backend, inline), seed=1) as h:
        h.push("records", *records(0, 60))
        h.checkpoint()
        h.push("records", *records(60, 90))
        h.checkpoint()
        for sink in SINKS:
            h.drain(sink)
        if damage is not None:
            damage(h._running._objects)
        h.crash()
        h.push("records", *records(90, 120))
        h.end()
        return [sorted(map(repr, h.drain(sink))) for sink in SINKS]


@cache
def undamaged(backend: str, inline: str) -> tuple[list[list[str]], dict[str, bytes]]:
    """Return the right result, and the objects that the restore reads."""
    objects: dict[str, bytes] = {}
    return run(backend, inline, objects.update), objects


def kind_of(name: str) -> str:
    """Return the kind of an object in the storage."""
    if name.startswith("log/generation/"):
        return "generation record"
    if name.startswith("log/"):
        return "log entry"
    return name[name.index(".", name.rindex("/")) :]


def check_damage(name: str, rng: random.Random, backend: str, inline: str) -> str:
    """Damage the object called `name` between the crash and the restore; see `judge`."""
    expected, objects = undamaged(backend, inline)
    kind, data = damaged(objects[name], rng)
    return judge(
        lambda: run(backend, inline, lambda found: found.update({name: data})),
        expected,
        name,
        f"{kind} in {name} ({backend}, {inline})",
    )
