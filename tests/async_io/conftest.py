"""One operator with calls under way, on virtual time: records, watermarks, snapshots, other parallelism."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headgate.api.job_definition import WrittenJob
from headgate.api.stream import output_of
from headgate.connectors import from_list
from headgate.operators.base import OperatorContext
from headgate.operators.elements import WATERMARK_MAX, Batch, ColumnBatch, ObjectBatch
from headgate.runtime.protocol.redistribution import spread_splits
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState
from headgate.testing.loop import VirtualClock, VirtualLoop
from headgate.tests.support.operators import operator_context

MAX_PARALLELISM = 12


class Output:
    """Keeps `(kind, record, time)` and marks in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.batches = 0

    def emit(self, batch: Batch) -> None:
        self.batches += 1
        self._add("main", batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self._add(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp, None))

    def emit_idle(self, idle: bool) -> None:
        self.events.append(("idle", idle, None))

    def _add(self, kind: str, batch: Batch) -> None:
        assert len(batch)
        records = batch.data.to_pylist() if isinstance(batch, ColumnBatch) else batch.records
        times = [None] * len(batch) if batch.timestamps is None else batch.timestamps.tolist()
        self.events += [(kind, *pair) for pair in zip(records, times, strict=True)]


class Bench:
    """The subtasks of one step. Calls of their timers are all there is of a mailbox."""

    def __init__(
        self, stream: Any, parallelism: int = 1, options: dict[str, str] | None = None
    ) -> None:
        self.options = options or {}
        self.node = output_of(stream).node
        self.loop = VirtualLoop(seed=1)
        self.clock = VirtualClock(self.loop)
        self.counts: dict[str, int] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.observed: dict[str, list[float]] = {}
        self._handles: list[asyncio.TimerHandle] = []
        self._start(parallelism)

    def _start(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self.operators = [self.node.factory() for _ in range(parallelism)]
        self.outputs = [Output() for _ in range(parallelism)]
        for index, operator in enumerate(self.operators):
            operator.output = self.outputs[index]
            operator.open(self._context(index))

    def _context(self, index: int) -> OperatorContext:
        metrics = SimpleNamespace(
            counter=self._counter, gauge=self.gauges.__setitem__, histogram=self._histogram
        )
        return operator_context(
            index,
            self.parallelism,
            MAX_PARALLELISM,
            operator_name=self.node.name,
            clock=self.clock,
            timers=SimpleNamespace(call_later=self._call_later),
            metrics=metrics,
            run_in_thread=self._no_threads,
            options=self.options,
        )

    def _call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        handle = self.loop.call_later(delay_ms / 1000, callback)
        self._handles.append(handle)
        return handle.cancel

    def _counter(self, name: str) -> Any:
        def inc(amount: int = 1) -> None:
            self.counts[name] = self.counts.get(name, 0) + amount

        return SimpleNamespace(inc=inc)

    def _histogram(self, name: str) -> Any:
        return SimpleNamespace(observe=self.observed.setdefault(name, []).append)

    def _no_threads(self, function: Callable[[], Any]) -> Any:
        raise AssertionError("nothing here blocks")

    # what happens to it

    def within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call in the event loop, and run until nothing is left to do without time passing."""
        found: list[Any] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call(*arguments))
            except BaseException as error:
                failures.append(error)

        self.loop.call_soon(run)
        self._drive()
        if failures:
            raise failures[0]
        return found[0]

    def _drive(self, until_s: float | None = None) -> None:
        failures: list[Any] = []

        def note(loop: Any, context: dict[str, Any]) -> None:
            failures.append(context.get("exception") or AssertionError(context))

        self.loop.set_exception_handler(note)
        self.loop.drive(until_s)
        if failures:
            raise failures[0]

    def push(self, records: list[Any], times: list[int] | None = None, at: int = 0) -> Bench:
        stamps = None if times is None else np.array(times, np.int64)
        self.within(self.operators[at].process, ObjectBatch(records, stamps), 0)
        return self

    def push_columns(self, data: pa.RecordBatch, times: list[int] | None = None) -> Bench:
        stamps = None if times is None else np.array(times, np.int64)
        self.within(self.operators[0].process, ColumnBatch(data, stamps), 0)
        return self

    def owner(self, key: Any) -> int:
        group = key_group_of(hash_key(key), MAX_PARALLELISM)
        ranges = [
            key_group_range(i, self.parallelism, MAX_PARALLELISM) for i in range(self.parallelism)
        ]
        return next(index for index, own in enumerate(ranges) if group in own)

    def watermark(self, timestamp: int) -> Bench:
        for operator in self.operators:
            self.within(operator.on_watermark, timestamp)
        return self

    def idle(self, idle: bool) -> Bench:
        for operator in self.operators:
            self.within(operator.on_idle, idle)
        return self

    def barrier(self) -> Bench:
        for operator in self.operators:
            self.within(operator.prepare_snapshot, 1)
        return self

    def advance(self, ms: int) -> Bench:
        self._drive(self.loop.time() + ms / 1000)
        return self

    def end(self) -> Bench:
        """The end of the input, as a subtask handles it."""
        self.watermark(WATERMARK_MAX)
        for _ in range(10_000):
            if all(operator.settled() for operator in self.operators):
                break
            self.advance(1_000)
        for operator in self.operators:
            assert operator.settled()
            self.within(operator.finish)
        return self

    def restart(self, parallelism: int | None = None) -> Bench:
        """A barrier; then all is lost but the snapshot."""
        self.barrier()
        infos = {info.name: info for info in self.operators[0].states()}
        snapshots = [operator.snapshot(1) for operator in self.operators]
        taken = [event for output in self.outputs for event in output.events]
        self.close()
        before = self.parallelism
        self._start(parallelism or before)
        self.outputs[0].events = taken
        for index, state in enumerate(self._shares(snapshots, before)):
            state.states.update(infos)
            self.within(self.operators[index].restore, state)
        return self

    def _shares(self, snapshots: list[Any], before: int) -> list[RestoredState]:
        shares = [RestoredState() for _ in range(self.parallelism)]
        snapshots = [snapshot for snapshot in snapshots if snapshot is not None]
        names = {name for snapshot in snapshots for name in snapshot.items}
        for name in names:
            lists = [snapshot.items[name].items() for snapshot in snapshots]
            if before != self.parallelism:
                lists = spread_splits({name: sum(lists, [])}, self.parallelism)[name]
            for share, items in zip(shares, lists, strict=True):
                share.items[name] = items
        for name in {name for snapshot in snapshots for name in snapshot.tables}:
            table = pa.concat_tables([snapshot.tables[name].make(None) for snapshot in snapshots])
            for index, share in enumerate(shares):
                own = key_group_range(index, self.parallelism, MAX_PARALLELISM)
                group = table["key_group"]
                mine = pc.and_(pc.greater_equal(group, own.first), pc.less_equal(group, own.last))
                share.tables[name] = table.filter(mine)
        return shares

    def close(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
        for operator in self.operators:
            operator.close()
        self.loop.drive()

    # what came of it

    def take(self, kind: str = "main") -> list[Any]:
        """The records that came out since the last time."""
        return [record for record, _ in self.take_timed(kind)]

    def take_timed(self, kind: str = "main") -> list[Any]:
        found = []
        for output in self.outputs:
            found += [event[1:] for event in output.events if event[0] == kind]
            output.events = [event for event in output.events if event[0] != kind]
        return found

    @property
    def events(self) -> list[tuple[Any, Any]]:
        """Return all output of the only subtask, in order, without times."""
        (output,) = self.outputs
        events, output.events = output.events, []
        return [event[:2] for event in events]


def source(schema: Any = None) -> Any:
    """A stream, of Python objects if no schema is given."""
    return WrittenJob("test").read(from_list([], schema=schema), name="in")


class Service:
    """Answers `n * 10` after as many ms as `wait` says, and remembers how it was used."""

    def __init__(self, wait: Callable[[Any], float] = lambda n: n) -> None:
        self.wait = wait
        self.asked: list[Any] = []
        self.now = 0
        self.most = 0
        self.cancelled: list[Any] = []

    async def ask(self, n: Any) -> Any:
        self.asked.append(n)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.wait(n) / 1000)
            return n * 10
        except asyncio.CancelledError:
            self.cancelled.append(n)
            raise
        finally:
            self.now -= 1


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes the subtasks of a step."""
    made: list[Bench] = []

    def make(stream: Any, parallelism: int = 1, options: dict[str, str] | None = None) -> Bench:
        made.append(Bench(stream, parallelism, options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.loop.close()


@pytest.fixture
def world() -> Any:
    """The building blocks of tests of async steps."""
    return SimpleNamespace(source=source, service=Service, bench=Bench)
