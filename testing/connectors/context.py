"""Readers and writers outside of any job: their context, and ways to drive them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter as Counted
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from ...operators.base import Counter, Histogram, Metrics, OperatorContext
from ...operators.clock import Clock, SystemClock
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import Sink, SinkOperator
from ...operators.source import Source, SourceReader
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import RestoredState

_NO_LABELS: Final[Mapping[str, str]] = {}
POLLS_MAX = 100_000
"""A reader that has not ended after this many polls is assumed to hang."""


class CheckMetrics:
    """Metrics that only remember their counts."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def counter(self, name: str, labels: Mapping[str, str] = _NO_LABELS) -> Counter:
        return _Count(self.counts, name)

    def gauge(
        self, name: str, read: Callable[[], float | None], labels: Mapping[str, str] = _NO_LABELS
    ) -> None:
        return None

    def histogram(
        self,
        name: str,
        buckets: Sequence[float] | None = None,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> Histogram:
        return _Unheard()


@dataclass(slots=True)
class _Count:
    counts: dict[str, float]
    name: str

    def inc(self, amount: float = 1) -> None:
        self.counts[self.name] = self.counts.get(self.name, 0) + amount


class _Unheard:
    def observe(self, value: float) -> None:
        return None


class CheckTimers:
    """Timers that run only when `fire` is called."""

    def __init__(self) -> None:
        self.due: dict[int, tuple[int, Callable[[], None]]] = {}
        self._next = 0

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        self._next += 1
        key = self._next
        self.due[key] = (delay_ms, callback)

        def cancel() -> None:
            self.due.pop(key, None)

        return cancel

    def fire(self) -> None:
        """Run all pending timers."""
        due, self.due = self.due, {}
        for _, callback in due.values():
            callback()


def make_context(
    *,
    attempt: int = 1,
    subtask_index: int = 0,
    parallelism: int = 1,
    restored_checkpoint: int = 0,
    options: dict[str, str] | None = None,
    clock: Clock | None = None,
    operator_name: str = "sink",
    job_name: str = "conformance",
    run_id: str = "conformance",
    timers: CheckTimers | None = None,
    metrics: Metrics | None = None,
) -> OperatorContext:
    """Return a context outside of any job. Its threads are those of the running event loop."""

    def run_in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(None, call)

    @cache
    def scratch() -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="headgate-conformance-")

    return OperatorContext(
        job_name=job_name,
        run_id=run_id,
        operator_name=operator_name,
        subtask_index=subtask_index,
        parallelism=parallelism,
        max_parallelism=128,
        attempt=attempt,
        key_groups=KeyGroupRange(0, 127),
        clock=clock or SystemClock(),
        timers=timers or CheckTimers(),
        metrics=metrics or CheckMetrics(),
        logger=logging.getLogger("headgate.conformance"),
        run_in_thread=run_in_thread,
        options=dict(options or {}),
        restored_checkpoint=restored_checkpoint,
        local_directory=lambda: Path(scratch().name),  # deleted with the context
    )


def records_of(batch: Batch) -> list[Any]:
    """Return the records of a batch in a form that can be compared: objects, or a dict per row."""
    return batch.data.to_pylist() if isinstance(batch, ColumnBatch) else list(batch.records)


def open_reader(
    source: Source,
    splits: Sequence[bytes],
    context: OperatorContext | None = None,
    reject: Callable[[Batch], None] = lambda batch: None,
) -> SourceReader:
    """Return a reader of these splits, made as a subtask makes it."""
    reader = source.reader()
    reader.open(context or make_context(), reject)
    reader.add_splits(splits)
    return reader


async def read_batches(reader: SourceReader, count: int | None = None) -> list[Batch]:
    """Return the next `count` batches, or all remaining ones."""
    batches: list[Batch] = []
    for _ in range(POLLS_MAX):
        if reader.finished or (count is not None and len(batches) >= count):
            return batches
        batch = reader.poll()
        if batch is not None:
            batches.append(batch)
        elif not reader.finished:
            await reader.wait()
    raise AssertionError(f"the reader does not end: {POLLS_MAX} polls, {len(batches)} batches")


async def read_all(source: Source, parallelism: int = 1) -> list[Any]:
    """Return all records, subtask by subtask."""
    splits = source.splits(parallelism)
    records = []
    for subtask in range(parallelism):
        reader = open_reader(source, splits[subtask::parallelism])
        for batch in await read_batches(reader):
            records += records_of(batch)
        reader.close()
    return records


async def finished(waiting: Awaitable[None] | None) -> None:
    """Wait for what an operator has left to a thread, if anything."""
    if waiting is not None:
        await waiting


Items: TypeAlias = dict[str, list[bytes]]
"""A sink's part of a checkpoint, by state."""


async def open_sink(
    sink: Sink, context: OperatorContext, items: Items | None = None
) -> SinkOperator:
    """Open a subtask of a sink; with `items` of a checkpoint, restore it as well."""
    operator = SinkOperator(sink)
    await finished(operator.open(context))
    if items is not None:
        await finished(operator.restore(RestoredState(items=items)))
    return operator


async def pre_commit(operator: SinkOperator, checkpoint_id: int) -> Items | None:
    """Return the sink's part of a checkpoint, with the pre-commit done in a thread; None: it has none."""
    snapshot = operator.snapshot(checkpoint_id)
    if snapshot is None:
        return None
    return {
        name: await asyncio.to_thread(cut.items) if callable(cut.items) else cut.items
        for name, cut in snapshot.items.items()
    }


def expect(condition: object, message: str) -> None:
    """Raise AssertionError with this message, the broken promise, if the condition is false."""
    if not condition:
        raise AssertionError(message)


def expect_same(found: Sequence[Any], wanted: Sequence[Any], situation: str) -> None:
    """Raise AssertionError unless both have the same records, in any order."""
    counts = Counted(map(repr, found)), Counted(map(repr, wanted))
    lost, more = counts[1] - counts[0], counts[0] - counts[1]
    expect(
        not lost and not more,
        f"{situation}: {len(found)} records instead of {len(wanted)}; "
        f"lost: {list(lost)[:5]}; too many: {list(more)[:5]}",
    )
