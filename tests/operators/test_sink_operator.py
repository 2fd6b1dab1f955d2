"""The operator around a sink's writer: what it still holds, and what a later snapshot says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headgate.errors import InternalError
from headgate.operators.clock import Clock
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.sink import Sink, SinkOperator, SinkWriter
from headgate.runtime.observe.metrics import MetricsRegistry, Scope
from headgate.runtime.protocol.redistribution import spread_splits
from headgate.state.snapshot import CommitPermit, RestoredState
from headgate.testing.connectors import make_context


class _Writer(SinkWriter):
    """Stages what is written; a commit may be held up, or fail."""

    def __init__(self) -> None:
        self.staged: list[bytes] = []
        self.committed: list[bytes] = []
        self.fails = False
        self.while_committing: Callable[[], None] = lambda: None

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ObjectBatch)
        self.staged += batch.records

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]]:
        staged, self.staged = self.staged, []
        return lambda: staged

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        self.while_committing()
        if self.fails:
            raise OSError("the storage is away")
        self.committed += committables


class _Sink(Sink):
    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def writer(self) -> SinkWriter:
        return self._writer


def _items(operator: SinkOperator, checkpoint_id: int) -> Callable[[], list[bytes]]:
    """The synchronous part of a snapshot; what it returns is the asynchronous one."""
    snapshot = operator.snapshot(checkpoint_id)
    assert snapshot is not None
    make = snapshot.items["committables"].items
    assert callable(make)
    return make


async def _opened(writer: _Writer, restored: int = 0) -> SinkOperator:
    operator = SinkOperator(_Sink(writer))
    opening = operator.open(make_context(restored_checkpoint=restored))
    if opening is not None:
        await opening
    return operator


async def _complete(operator: SinkOperator, checkpoint_id: int) -> None:
    waiting = operator.on_checkpoint_complete(CommitPermit("job", 1, checkpoint_id))
    if waiting is not None:
        await waiting


async def _restored_commits(items: list[bytes], checkpoint_id: int) -> list[bytes]:
    """Return the commits of a new attempt that begins with these items."""
    writer = _Writer()
    operator = await _opened(writer, restored=checkpoint_id)
    waiting = operator.restore(RestoredState(items={"committables": items}))
    if waiting is not None:
        await waiting
    return writer.committed


def test_a_snapshot_written_during_a_commit_holds_what_is_not_committed_yet() -> None:
    """Its checkpoint may complete, and the process die, before the commit is done."""

    async def run() -> None:
        writer = _Writer()
        operator = await _opened(writer)
        operator.process(ObjectBatch([b"one"]), 0)
        _items(operator, 1)()
        operator.process(ObjectBatch([b"two"]), 0)
        make_second = _items(operator, 2)  # its barrier overtook the notice of checkpoint 1
        seen: list[Any] = []
        writer.while_committing = lambda: seen.append(make_second())
        await _complete(operator, 1)
        assert await _restored_commits(seen[0], 2) == [b"one", b"two"]
        assert writer.committed == [b"one"]
        make_third = _items(operator, 3)
        assert await _restored_commits(make_third(), 3) == [b"two"]

    asyncio.run(run())


def test_what_was_not_committed_is_in_the_next_snapshot() -> None:
    async def run() -> None:
        writer = _Writer()
        operator = await _opened(writer)
        operator.process(ObjectBatch([b"one"]), 0)
        _items(operator, 1)()
        writer.fails = True
        with pytest.raises(OSError, match="away"):
            await _complete(operator, 1)
        assert await _restored_commits(_items(operator, 2)(), 2) == [b"one"]

    asyncio.run(run())


def test_what_two_checkpoints_left_is_committed_by_one_subtask_behind_a_rescale() -> None:
    """Two subtasks would commit it in any order, and the records of a key lie in both."""

    async def run() -> None:
        operator = await _opened(_Writer())
        for number in (1, 2):
            operator.process(ObjectBatch([b"%d" % number]), 0)
            items = _items(operator, number)()
        shares = spread_splits({"committables": items}, 2)["committables"]
        committed = [await _restored_commits(share, 2) for share in shares]
        assert sorted(committed) == [[], [b"1", b"2"]]

    asyncio.run(run())


def test_a_notice_that_was_lost_is_made_up_for_by_the_next() -> None:
    async def run() -> None:
        writer = _Writer()
        operator = await _opened(writer)
        for number in (1, 2):
            operator.process(ObjectBatch([b"%d" % number]), 0)
            _items(operator, number)()
        await _complete(operator, 2)
        await _complete(operator, 1)
        assert writer.committed == [b"1", b"2"]

    asyncio.run(run())


class _Stopped(Clock):
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


async def _measured(
    writer: _Writer, clock: _Stopped, restored: int = 0
) -> tuple[SinkOperator, Callable[[str], float]]:
    """A sink that is open, and how to read one of its metrics."""
    registry = MetricsRegistry()
    scope: Scope = registry.group(job_name="job").operator("task", "sink", 0)
    operator = SinkOperator(_Sink(writer))
    opening = operator.open(make_context(restored_checkpoint=restored, metrics=scope, clock=clock))
    if opening is not None:
        await opening

    def metric(name: str) -> float:
        samples = [sample for family in registry.collect() for sample in family.samples]
        (value,) = [each.value for each in samples if each.name == f"headgate_sink_{name}"]
        return value

    return operator, metric


def test_metrics_tell_what_is_prepared_and_for_how_long() -> None:
    async def run() -> None:
        writer, clock = _Writer(), _Stopped()
        operator, metric = await _measured(writer, clock)
        assert (metric("uncommitted_seconds"), metric("prepared_seconds")) == (0, 0)
        operator.process(ObjectBatch([b"one", b"two"]), 0)
        make = _items(operator, 1)
        clock.ms += 5_000
        assert (metric("uncommitted_seconds"), metric("prepared_seconds")) == (5, 0)
        assert metric("pending_transactions") == 0
        make()
        assert (metric("uncommitted_seconds"), metric("prepared_seconds")) == (5, 5)
        assert metric("pending_transactions") == 2
        operator.process(ObjectBatch([b"three"]), 0)
        _items(operator, 2)()
        assert metric("pending_transactions") == 3
        writer.while_committing = lambda: setattr(clock, "ms", clock.ms + 2_000)
        await _complete(operator, 1)
        assert (metric("uncommitted_seconds"), metric("pending_transactions")) == (2, 1)
        await _complete(operator, 2)
        assert (metric("uncommitted_seconds"), metric("prepared_seconds")) == (0, 0)
        assert (metric("commits_total"), metric("commit_seconds_sum")) == (2, 4)

    asyncio.run(run())


def test_a_barrier_with_nothing_to_commit_waits_for_nothing() -> None:
    async def run() -> None:
        clock = _Stopped()
        operator, metric = await _measured(_Writer(), clock)
        _items(operator, 1)()
        clock.ms += 5_000
        assert metric("uncommitted_seconds") == 0

    asyncio.run(run())


def test_the_age_of_what_is_prepared_outlives_a_restart() -> None:
    """A system outside counts its limit for transactions over restarts, too."""

    async def run() -> None:
        writer, clock = _Writer(), _Stopped()
        operator, _ = await _measured(writer, clock)
        operator.process(ObjectBatch([b"one"]), 0)
        items = _items(operator, 1)()
        clock.ms += 60_000
        again, metric = await _measured(failing := _Writer(), clock, restored=1)
        failing.fails = True
        waiting = again.restore(RestoredState(items={"committables": items}))
        assert waiting is not None
        with pytest.raises(OSError, match="away"):
            await waiting
        assert (metric("prepared_seconds"), metric("uncommitted_seconds")) == (60, 60)
        assert metric("pending_transactions") == 1

    asyncio.run(run())


class _Naming(_Writer):
    """Names its committables, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def name_of(self, committable: bytes) -> bytes:
        return b"name of " + committable

    def restored(self, names: frozenset[bytes] | None) -> None:
        self.told.append((names, list(self.committed)))

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.told.append((checkpoint_id, list(self.committed)))


class _NamingSink(_Sink):
    names_committables = True


async def _named(writer: _Writer, restored: int = 0) -> SinkOperator:
    operator = SinkOperator(_NamingSink(writer))
    opening = operator.open(make_context(restored_checkpoint=restored))
    if opening is not None:
        await opening
    return operator


def test_each_writer_learns_the_names_of_all_committables_before_the_first_commit() -> None:
    async def run() -> None:
        writer = _Naming()
        operator = await _named(writer)
        operator.process(ObjectBatch([b"one", b"two"]), 0)
        snapshot = operator.snapshot(1)
        assert snapshot is not None
        cut = snapshot.items["committable-names"]
        assert cut.redistribution == "union"
        assert callable(cut.items)
        make = snapshot.items["committables"].items
        assert callable(make)
        names, items = cut.items(), make()  # in whichever order
        empty = (await _named(_Naming())).snapshot(1)
        assert empty is not None
        none = empty.items["committable-names"].items
        assert callable(none)
        restored = _Naming()
        other = await _named(restored, restored=1)
        state = {"committables": items, "committable-names": [*names, *none()]}
        waiting = other.restore(RestoredState(items=state))
        assert waiting is not None
        await waiting
        assert restored.told == [({b"name of one", b"name of two"}, [])]
        assert restored.committed == [b"one", b"two"]

    asyncio.run(run())


@pytest.mark.parametrize("lists", [None, []])
def test_a_checkpoint_without_names_is_told_from_one_without_committables(lists: Any) -> None:
    async def run() -> None:
        writer = _Naming()
        operator = await _named(writer, restored=1)
        items = {} if lists is None else {"committable-names": lists}
        waiting = operator.restore(RestoredState(items=items))
        assert waiting is not None
        await waiting
        assert writer.told == [(None if lists is None else frozenset(), [])]

    asyncio.run(run())


def test_a_name_that_is_too_long_is_refused() -> None:
    async def run() -> None:
        operator = await _named(_Naming())
        operator.process(ObjectBatch([b"x" * 256]), 0)
        snapshot = operator.snapshot(1)
        assert snapshot is not None
        make = snapshot.items["committable-names"].items
        assert callable(make)
        with pytest.raises(InternalError, match="too long"):
            make()

    asyncio.run(run())


def test_a_writer_learns_of_every_completed_checkpoint_behind_its_commit() -> None:
    async def run() -> None:
        writer = _Naming()
        operator = await _opened(writer)
        await _complete(operator, 1)  # it has nothing to commit
        operator.process(ObjectBatch([b"one"]), 0)
        _items(operator, 2)()
        writer.fails = True
        with pytest.raises(OSError, match="away"):
            await _complete(operator, 2)
        writer.fails = False
        await _complete(operator, 2)
        assert writer.told == [(1, []), (2, [b"one"])]

    asyncio.run(run())
