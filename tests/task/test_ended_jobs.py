"""A job that has ended leaves none of its state behind, without a run of the garbage collector."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import blackhole, generator
from headgate.operators.base import Operator
from headgate.runtime.exchange.gate import InputGate
from headgate.runtime.task.subtask import Subtask

ROWS = 500
FIELDS = {
    "key": {"kind": "int", "low": 0, "high": 50},
    "price": {"kind": "int", "low": 1, "high": 1_000},
    "at": {"kind": "timestamp", "every": "10ms"},
}
STATE = (
    "headgate.operators.elements.",
    "headgate.state.keyed.cuts.",
    "headgate.state.keyed.memory.",
    "headgate.state.keyed.timers.",
    "headgate.state.rocksdb.",
    "headgate.state.runs.run_set.",
    "headgate.state.runs.spilling_table.SpillingTable",
    "headgate.state.slots.key_index.KeyIndex",
    "headgate.state.slots.table.",
)
"""The beginnings of the names of classes whose objects hold the state of a job."""


class Everything(hg.KeyedProcess[int, Any, tuple[int, int]]):
    """Uses state of each kind, and timers by both clocks."""

    last = hg.ValueState[dict[str, int]]()
    seen = hg.ListState[int]()
    by_price = hg.MapState[int, int]()

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[tuple[int, int]]:
        self.last.set({"price": record.price})
        self.seen.add(record.price)
        self.by_price.put(record.price, 1)
        ctx.event_time.at(ctx.timestamp or 0, tag="event")
        ctx.processing_time.after("1h", tag="clock")
        yield ctx.key, record.price

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> None:
        self.seen.clear()


class Size(hg.WindowProcess[int, Any, int]):
    """Counts the records of a window."""

    windows = hg.ValueState[int](default=0)

    def on_window(
        self, key: int, window: hg.Window, records: list[Any], ctx: hg.WindowContext[int]
    ) -> list[int]:
        self.windows.set(self.windows.get() + 1)
        return [len(records)]


class Shared(hg.BroadcastProcess[int, Any, Any, int]):
    """Keeps what was broadcast."""

    rules = hg.BroadcastState[int, int]()

    def on_record(self, record: Any, ctx: hg.Context[int]) -> None: ...

    def on_broadcast(self, record: Any, ctx: hg.BroadcastContext[int]) -> None:
        self.rules.put(record.key, record.price)


RISEN = hg.cep.begin("low").where("price < 500").followed_by("high").where("price > 500")


def everything(backend: str) -> hg.Job:
    job = hg.Job("everything", parallelism=1, options={"state.backend.type": backend})
    rows = job.read(generator(FIELDS, rows=ROWS), name="rows").event_time("at")
    other = job.read(generator(FIELDS, rows=ROWS), name="other").event_time("at")
    keyed, theirs = rows.key_by("key"), other.key_by("key")
    objects = rows.map(lambda row: (row.key, row.price)).key_with(lambda pair: pair[0])
    second = hg.tumbling("1s")
    results: list[Any] = [
        keyed.process(Everything(), name="process"),
        objects.reduce(lambda a, b: (a[0], a[1] + b[1]), name="reduce"),
        keyed.deduplicate(name="deduplicate", ttl="1h"),
        keyed.agg(n=hg.count(), most=hg.max("price"), name="running"),
        keyed.window(second).agg(n=hg.count(), name="tumbling"),
        keyed.window(hg.sliding("4s", every="1s")).agg(n=hg.count(), name="hopping"),
        keyed.window(hg.session("1s")).agg(n=hg.count(), name="session"),
        keyed.join(theirs, within=("-1s", "1s"), suffix="_r", name="interval"),
        keyed.join_as_of(theirs, suffix="_r", name="as-of"),
        keyed.window(second).join(theirs, suffix="_r", name="window join"),
        keyed.window(second, trigger=hg.triggers.Count(5)).process(Size(), name="triggered"),
        keyed.match(RISEN.within("1s"), select=str, name="pattern"),
        keyed.connect(other.broadcast()).process(Shared(), name="shared"),
    ]
    for number, result in enumerate(results):
        result.write(blackhole(), name=f"out {number}")
    return job


def held() -> Counter[str]:
    """Return how many objects there are that have state, or records on their way, by class."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        name = f"{type(each).__module__}.{type(each).__qualname__}"
        if name.startswith(STATE) or isinstance(each, Operator | Subtask | InputGate):
            found[name] += 1
    return found


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_an_ended_job_leaves_no_state(backend: str) -> None:
    everything(backend).run()  # what is made once in a process
    gc.collect()
    gc.disable()
    try:
        before = held()
        everything(backend).run()
        left = held() - before
    finally:
        gc.enable()
    assert not left, left
