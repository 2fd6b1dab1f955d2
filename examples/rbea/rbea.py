"""A service for standing queries: analysts add and remove scripts while events flow through them.

The pipeline of King's RBEA, as described in section 5.1 of the paper on Flink's state management:

    events ──by user──────────> query processor ──by query and group──> window aggregator ──> results
    queries ──to all subtasks──────^

A script sees the events of a user in order, has variables of its own per user, and gives values to be
aggregated in windows, whose kind it chooses as it runs. `README.md` shows how to run it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from query_file import Message, QueryFile

import headgate as hg
from headgate.connectors import generator, parquet_sink, random_int, sequence
from headgate.operators.durations import parse_duration

QUERIES = os.environ.get("QUERIES", "examples/rbea/queries.jsonl")
RESULTS = os.environ.get("RESULTS", "examples/data/rbea/results")
BROKEN = os.environ.get("BROKEN", "examples/data/rbea/broken")
CHECKPOINTS = os.environ.get("CHECKPOINTS", "examples/data/rbea/checkpoints")
EVENTS = int(os.environ.get("EVENTS", "200000"))
EVENTS_PER_SECOND = float(os.environ.get("EVENTS_PER_SECOND", "20000"))
USERS = int(os.environ.get("USERS", "500"))

KINDS = ("game_start", "game_end", "purchase")
EVERY_MS = 10
"""Event time between two events."""


class Event(msgspec.Struct, frozen=True):
    """An action of a user."""

    user: int
    at: int
    kind: str
    level: int
    amount: int


class Query(msgspec.Struct, frozen=True):
    """A standing query; it sees the events of [since, until)."""

    script: str
    since: int
    until: int | None = None

    def sees(self, at: int) -> bool:
        """True for events of that time."""
        return self.since <= at and (self.until is None or at < self.until)


class Value(msgspec.Struct, frozen=True):
    """A value that a script gives to be aggregated."""

    query: str
    name: str
    group: str
    kind: str
    value: int
    size_ms: int
    every_ms: int


class Result(msgspec.Struct, frozen=True):
    """One window of one aggregate."""

    query: str
    name: str
    group: str
    start: int
    value: int


class Failure(msgspec.Struct, frozen=True):
    """A script that could not be run on an event."""

    query: str
    user: int
    at: int
    error: str


class Out:
    """The functions that a script may call."""

    def __init__(self, query: str) -> None:
        self._query = query
        self.values: list[Value] = []

    def sum(self, name: str, value: int, *, group: Any = "", window: str, every: str = "") -> None:
        """Add a whole number to the sum of `name` and `group` in windows of that size."""
        self._aggregate("sum", name, value, group, window, every)

    def max(self, name: str, value: int, *, group: Any = "", window: str, every: str = "") -> None:
        """The greatest of the values of `name` and `group`."""
        self._aggregate("max", name, value, group, window, every)

    def _aggregate(
        self, kind: str, name: str, value: int, group: Any, window: str, every: str
    ) -> None:
        size_ms = parse_duration(window, "window")
        every_ms = parse_duration(every, "every") if every else size_ms
        if not 0 < every_ms <= size_ms:
            raise ValueError(f"a window of {window} cannot begin every {every}")
        value = int(value)
        self.values.append(Value(self._query, name, str(group), kind, value, size_ms, every_ms))


Script = Callable[[Event, dict[str, int], Out], None]


def compiled(name: str, text: str) -> Script:
    """The function `query(event, user, out)` of a script. Scripts are trusted: they are Python."""
    found: dict[str, Any] = {}
    exec(compile(text, f"<query {name}>", "exec"), found)
    script: Script = found["query"]
    return script


def run_script(
    scripts: dict[str, Script], name: str, query: Query, event: Event, user: dict[str, int]
) -> list[Value] | Failure:
    """Call a script with an event; what it raises is its author's to see, and stops nobody else."""
    out = Out(name)
    try:
        script = scripts.get(query.script)
        if script is None:
            script = scripts[query.script] = compiled(name, query.script)
        script(event, user, out)
    except Exception as error:
        return Failure(name, event.user, event.at, f"{type(error).__name__}: {error}")
    return out.values


def window_starts(at: int, size_ms: int, every_ms: int) -> range:
    """Return the starts of the windows that an event time lies in."""
    last = at - at % every_ms
    return range(last, at - size_ms, -every_ms)


def combine(kind: str, before: int | None, value: int) -> int:
    """An aggregate with one more value."""
    if before is None:
        return value
    return before + value if kind == "sum" else max(before, value)


class QueryProcessor(hg.BroadcastProcess[int, Event, Message, Value]):
    """Runs all standing queries over the events of each user.

    Events wait until event time has passed them. By then all messages up to there have come, so which
    queries see an event does not depend on who was faster.
    """

    queries = hg.BroadcastState[str, Query]()
    waiting = hg.MapState[int, list[Event]]()
    variables = hg.MapState[str, dict[str, int]]()
    broken = hg.SideOutput[Failure]()

    def __init__(self) -> None:
        self._scripts: dict[str, Script] = {}

    def on_broadcast(self, record: Message, ctx: hg.BroadcastContext[int]) -> None:
        if record.add is not None:
            # Under one name comes one query after another: each is kept for the events it sees.
            self.queries.put(f"{record.add}@{record.at}", Query(record.script, record.at))
        for key, query in list(self.queries.items()):
            if record.remove == key.rpartition("@")[0] and query.until is None:
                self.queries.put(key, Query(query.script, query.since, record.at))
            elif query.until is not None and query.until <= ctx.watermark:
                # No event that it sees can be waiting in any subtask at the next barrier, so it does not
                # matter that others may forget it a message later.
                self.queries.remove(key)
                ctx.for_each_key(self.variables, lambda _, state, key=key: state.remove(key))

    def on_record(self, record: Event, ctx: hg.Context[int]) -> None:
        self.waiting.put(record.at, [*(self.waiting.get(record.at) or []), record])
        ctx.event_time.at(record.at, tag=str(record.at))

    def on_timer(self, timer: hg.Timer, ctx: hg.Context[int]) -> Iterator[Value]:
        for event in self.waiting.get(timer.timestamp) or []:
            yield from self._run(event, ctx)
        self.waiting.remove(timer.timestamp)

    def _run(self, event: Event, ctx: hg.Context[int]) -> Iterator[Value]:
        for key, query in sorted(self.queries.items()):
            if not query.sees(event.at):
                continue
            user = self.variables.get(key) or {}
            name = key.rpartition("@")[0]
            done = run_script(self._scripts, name, query, event, user)
            self.variables.put(key, user)
            if isinstance(done, Failure):
                ctx.emit(self.broken, done)
            else:
                yield from done


class WindowAggregator(hg.KeyedProcess[tuple[str, str, str, str, int, int], Value, Result]):
    """Windows that differ by query: sizes and slides come with the values."""

    values = hg.MapState[int, int]()

    def on_record(
        self, record: Value, ctx: hg.Context[tuple[str, str, str, str, int, int]]
    ) -> None:
        at = ctx.timestamp or 0
        for start in window_starts(at, record.size_ms, record.every_ms):
            self.values.put(start, combine(record.kind, self.values.get(start), record.value))
            ctx.event_time.at(start + record.size_ms - 1, tag=str(start))

    def on_timer(
        self, timer: hg.Timer, ctx: hg.Context[tuple[str, str, str, str, int, int]]
    ) -> Iterator[Result]:
        start = int(timer.tag)
        query, name, group, *_ = ctx.key
        yield Result(query, name, group, start, self.values.get(start) or 0)
        self.values.remove(start)


def events(count: int, users: int, rate: float | None = None) -> Any:
    """A generator of events; the same ones every time."""
    columns = {
        "n": sequence(),
        "user": random_int(0, users),
        "kind": random_int(0, len(KINDS)),
        "level": random_int(1, 10),
        "amount": random_int(1, 100),
    }
    return generator(columns, rows=count, rate=rate, batch_rows=500, seed=11)


def to_event(row: Any) -> Event:
    """The event of a generated row."""
    return Event(row.user, row.n * EVERY_MS, KINDS[row.kind], row.level, row.amount)


def make_job(parallelism: int = 2) -> hg.Job:
    """The whole service."""
    job = hg.Job("rbea", parallelism=parallelism)
    job.checkpoint(every="500ms", storage=CHECKPOINTS)
    job.restart(attempts=10, delay="200ms")
    queries = job.read(QueryFile(QUERIES), name="queries").event_time(lambda message: message.at)
    processed = (
        job.read(events(EVENTS, USERS, EVENTS_PER_SECOND), name="events")
        .map(to_event, name="to events")
        .event_time(lambda event: event.at, max_out_of_order="1s")
        .key_with(lambda event: event.user)
        .connect(queries.broadcast(name="standing queries"))
        .process(QueryProcessor(), name="query-processor")
    )
    results = processed.key_with(
        lambda v: (v.query, v.name, v.group, v.kind, v.size_ms, v.every_ms)
    ).process(WindowAggregator(), name="window-aggregator", into=Result)
    results.write(parquet_sink(RESULTS, guarantee="exactly_once"), name="results")
    processed.side(QueryProcessor.broken).map(lambda failure: failure, into=Failure).write(
        parquet_sink(BROKEN, guarantee="exactly_once"), name="broken"
    )
    return job


job = make_job()

if __name__ == "__main__":
    job.run()
