"""Checks that a source or sink keeps its promises, for the built-in connectors and for your own.

    def test_my_source() -> None:
        asyncio.run(check_source(my_source(batch_rows=1)))

    def test_my_sink(tmp_path) -> None:
        asyncio.run(check_sink(lambda: my_sink(tmp_path), batches, lambda: my_rows(tmp_path), reset))

A check raises AssertionError, which names the broken promise and the place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import cloudpickle

from ..operators.base import Counter, Histogram, Metrics, OperatorContext
from ..operators.clock import Clock, SystemClock
from ..operators.elements import Batch, ColumnBatch
from ..operators.sink import Sink, SinkOperator
from ..operators.source import Source, SourceReader
from ..state.keygroups import KeyGroupRange
from ..state.snapshot import CommitPermit, RestoredState

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
    timers: CheckTimers | None = None,
    metrics: Metrics | None = None,
) -> OperatorContext:
    """Return a context outside of any job. Its threads are those of the running event loop."""

    def run_in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(None, call)

    return OperatorContext(
        job_name="conformance",
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


async def check_source(source: Source, parallelisms: Sequence[int] = (2, 3)) -> None:
    """Check a bounded source. With one record per batch, every offset is tried as a place to stop.

    * It survives pickling, and can be read again with the same result.
    * Stopped behind any batch and restored, another reader goes on with exactly the next record.
    * Taking a snapshot changes nothing; restoring one without reading gives the same positions.
    * Any parallelism yields the same records.
    * If the reader reports its splits to event time, it reports all of them: each is opened once and
      ended once, and every batch belongs to an open one.
    """
    _expect(source.bounded, "only bounded sources can be checked")
    source = cloudpickle.loads(cloudpickle.dumps(source))
    splits = source.splits(1)
    reader = open_reader(source, splits)
    batches = await read_batches(reader)
    reader.close()
    expected = [record for batch in batches for record in records_of(batch)]
    _expect(reader.snapshot() == [], "a finished reader still has positions")
    await _check_splits_told(source, splits)
    again = await read_all(source)
    _expect(again == expected, "a second reading gave other records")
    for stop in range(len(batches) + 1):
        await _check_stop(source, splits, stop, expected)
    for parallelism in parallelisms:
        found = await read_all(source, parallelism)
        _expect(
            sorted(map(repr, found)) == sorted(map(repr, expected)),
            f"other records at parallelism {parallelism}",
        )


class _Told:
    """The splits that a reader reports."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.any = False

    def split_opened(self, split: str, queued: bool) -> None:
        _expect(split not in self.open, f"split `{split}` was opened twice")
        self.open.add(split)
        self.any = True

    def split_ended(self, split: str) -> None:
        _expect(split in self.open, f"split `{split}` ended without being open")
        self.open.remove(split)

    def limit_announced(self, group: str, limit: int) -> None:
        return None


async def _check_splits_told(source: Source, splits: Sequence[bytes]) -> None:
    context, told = make_context(), _Told()
    context.splits.listen(told)
    reader = open_reader(source, splits, context)
    for _ in range(POLLS_MAX):
        batch = reader.poll()
        split = context.splits.current
        if batch is not None and told.any:
            _expect(split in told.open, f"a batch is of split `{split}`, which is not open")
        context.splits.batch_done()
        if reader.finished:
            break
        if batch is None:
            await reader.wait()
    reader.close()
    _expect(not told.open, f"splits of a finished reader are open: {sorted(told.open)}")


async def _check_stop(
    source: Source, splits: Sequence[bytes], stop: int, expected: list[Any]
) -> None:
    reader = open_reader(source, splits)
    before = await read_batches(reader, stop)
    positions = reader.snapshot()
    _expect(reader.snapshot() == positions, f"two snapshots differ behind batch {stop}")
    reader.close()
    restored = open_reader(cloudpickle.loads(cloudpickle.dumps(source)), positions)
    _expect(
        restored.snapshot() == positions,
        f"restoring and taking a snapshot changed the position behind batch {stop}",
    )
    after = await read_batches(restored)
    restored.close()
    found = [record for batch in [*before, *after] for record in records_of(batch)]
    _expect(
        found == expected,
        f"stopped behind batch {stop} and restored: {len(found)} records instead of {len(expected)}, "
        f"or others: {found[:20]}",
    )


class CrashPoint(Enum):
    """The point in the life of a checkpoint at which an attempt dies."""

    WHILE_WRITING = "behind the records, before the barrier"
    BEFORE_PREPARE = "behind the barrier, before the pre-commit"
    AFTER_PREPARE = "behind the pre-commit, before the checkpoint is complete"
    BEFORE_COMMIT = "behind the completed checkpoint, before the commit"
    AFTER_COMMIT = "behind the commit"


@dataclass(slots=True)
class _Log:
    """The durable state: the last completed checkpoint."""

    checkpoint_id: int = 0
    epoch: int = 0
    """The first epoch that the checkpoint does not contain."""
    items: dict[str, list[bytes]] = field(default_factory=dict)
    attempt: int = 0
    next_id: int = 0


class _SinkJob:
    """Runs a sink through attempts and checkpoints. Checkpoint i closes epoch i, one batch each."""

    def __init__(
        self,
        sink: Sink,
        batches: Sequence[Batch],
        options: dict[str, str] | None,
    ) -> None:
        self._sink = sink
        self._batches = batches
        self._options = options
        self.log = _Log()

    async def start(self) -> SinkOperator:
        """Start a new attempt, restored from the last completed checkpoint."""
        self.log.attempt += 1
        sink: Sink = cloudpickle.loads(cloudpickle.dumps(self._sink))
        operator = SinkOperator(sink)
        context = make_context(
            attempt=self.log.attempt,
            restored_checkpoint=self.log.checkpoint_id,
            options=self._options,
        )
        await _wait(operator.open(context))
        if self.log.checkpoint_id:
            await _wait(operator.restore(RestoredState(items=self.log.items)))
        return operator

    async def run(self, operator: SinkOperator, crash: tuple[int, CrashPoint] | None) -> bool:
        """Run from the last completed checkpoint to the end or to the crash; return True for the crash.
        Closes the operator.
        """
        try:
            for epoch in range(self.log.epoch, len(self._batches)):
                point = crash[1] if crash is not None and crash[0] == epoch else None
                operator.process(self._batches[epoch], 0)
                if point is CrashPoint.WHILE_WRITING:
                    return True
                if epoch + 1 == len(self._batches):
                    await _wait(operator.finish())
                if await self.checkpoint(operator, epoch + 1, point):
                    return True
            return False
        finally:
            operator.close()

    async def checkpoint(
        self, operator: SinkOperator, epoch: int, point: CrashPoint | None = None
    ) -> bool:
        """Take a checkpoint; return True if it reached the crash point."""
        items = await self.prepare(operator, point is CrashPoint.BEFORE_PREPARE)
        if items is None or point is CrashPoint.AFTER_PREPARE:
            return True
        self.log.checkpoint_id, self.log.epoch, self.log.items = self.log.next_id, epoch, items
        if point is CrashPoint.BEFORE_COMMIT:
            return True
        await commit(operator, self.log.checkpoint_id)
        return point is CrashPoint.AFTER_COMMIT

    async def prepare(
        self, operator: SinkOperator, crash: bool = False
    ) -> dict[str, list[bytes]] | None:
        """Return the snapshot of the next checkpoint, with the pre-commit done in a thread."""
        self.log.next_id += 1
        snapshot = operator.snapshot(self.log.next_id)
        if crash or snapshot is None:
            return None
        return {
            name: await asyncio.to_thread(cut.items) if callable(cut.items) else cut.items
            for name, cut in snapshot.items.items()
        }


async def commit(operator: SinkOperator, checkpoint_id: int) -> None:
    """Notify a sink that a checkpoint is complete, and wait until it has committed."""
    await _wait(operator.on_checkpoint_complete(CommitPermit("conformance", 1, checkpoint_id)))


async def _wait(waiting: Awaitable[None] | None) -> None:
    if waiting is not None:
        await waiting


async def check_sink(
    make: Callable[[], Sink],
    batches: Sequence[Batch],
    read: Callable[[], list[Any]],
    reset: Callable[[], None],
    options: dict[str, str] | None = None,
    crash_twice: bool = True,
) -> None:
    """Check that a sink is exactly-once.

    * Records appear when their checkpoint is complete and committed, and not before.
    * After a crash at any point of any checkpoint, and at any two, each record is there once.
    * An aborted checkpoint loses nothing. Committing twice changes nothing, even if an attempt does it
      that does not know that it is dead.

    Args:
        make: returns a new sink with guarantee `exactly_once` that always writes to the same place.
        batches: the batches to write, one per checkpoint; all records must be different.
        read: returns the records visible in that place, in any order, in the form of `records_of`.
        reset: empties the place; it is called before each scenario.
        options: the options of the job.
        crash_twice: also try all pairs of crash points; several hundred runs of the sink.
    """
    expected = [records_of(batch) for batch in batches]

    def new_job() -> _SinkJob:
        reset()
        return _SinkJob(make(), batches, options)

    def expect(epochs: int, story: str) -> None:
        wanted = [record for records in expected[:epochs] for record in records]
        found = read()
        _expect(
            sorted(map(repr, found)) == sorted(map(repr, wanted)),
            f"{story}: {len(found)} records visible, not {len(wanted)}: {found[:20]}",
        )

    await _without_crash(new_job(), expect, len(batches))
    await _aborted_checkpoint(new_job(), expect, batches)
    await _committed_twice(new_job(), expect, batches)
    crashes = [(epoch, point) for epoch in range(len(batches)) for point in CrashPoint]
    for first in crashes:
        await _with_crashes(new_job(), expect, len(batches), [first])
        for second in crashes if crash_twice else []:
            if second[0] >= first[0]:
                await _with_crashes(new_job(), expect, len(batches), [first, second])


Expect = Callable[[int, str], None]


async def _without_crash(job: _SinkJob, expect: Expect, epochs: int) -> None:
    await job.run(await job.start(), None)
    expect(epochs, "without a crash")


async def _with_crashes(
    job: _SinkJob, expect: Expect, epochs: int, crashes: list[tuple[int, CrashPoint]]
) -> None:
    story = ""
    for epoch, point in crashes:
        story += f"crash in epoch {epoch}, {point.value}; "
        committed_by_restore = job.log.epoch
        operator = await job.start()
        expect(committed_by_restore, f"{story}at its start")
        crashed = await job.run(operator, (epoch, point))
        uncommitted = crashed and point is CrashPoint.BEFORE_COMMIT
        expect(job.log.epoch - uncommitted, f"{story}before the restart")
    operator = await job.start()
    expect(job.log.epoch, f"{story}after the restore")
    await job.run(operator, None)
    expect(epochs, f"{story}at the end")


async def _aborted_checkpoint(job: _SinkJob, expect: Expect, batches: Sequence[Batch]) -> None:
    """Prepare checkpoint 1 but never complete it; the next one must contain its records."""
    operator = await job.start()
    operator.process(batches[0], 0)
    await job.prepare(operator)
    operator.on_checkpoint_aborted(job.log.next_id)
    expect(0, "a checkpoint was aborted")
    for batch in batches[1:]:
        operator.process(batch, 0)
    await job.checkpoint(operator, len(batches), CrashPoint.BEFORE_COMMIT)
    operator.close()
    (await job.start()).close()
    expect(len(batches), "a checkpoint was aborted, the next one completed and restored")


async def _committed_twice(job: _SinkJob, expect: Expect, batches: Sequence[Batch]) -> None:
    """Let an attempt that does not know that it is dead commit what its successors have committed
    already.
    """
    zombie = await job.start()
    zombie.process(batches[0], 0)
    await job.checkpoint(zombie, 1, CrashPoint.BEFORE_COMMIT)
    (await job.start()).close()
    expect(1, "committed by the restore")
    (await job.start()).close()
    expect(1, "committed by a second restore")
    await commit(zombie, job.log.checkpoint_id)
    zombie.close()
    expect(1, "committed again by a dead attempt")


def _expect(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)
