"""A source's subtask that is ahead of its group reads nothing, and ends if it has nothing more to read."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import headgate as hg
from headgate.connectors import blackhole, from_list, hybrid_source, numbers
from headgate.operators.elements import ObjectBatch
from headgate.operators.source import Source, SourceReader
from headgate.operators.splits import History
from headgate.runtime.job import runnable
from headgate.runtime.protocol.split_discovery import LedgerStart
from headgate.runtime.task.source_subtask import SourceSubtask
from headgate.state.snapshot import ItemsCut
from headgate.tests.support.tasks import task_environment

ALIGNED = {"align": "g", "max_drift": "1s", "idle_after": "1h", "name": "times"}


class Mute(Source):
    """A source of one batch, whose reader does not report its splits."""

    bounded = True

    def splits(self, parallelism):
        return [b""]

    def reader(self):
        return MuteReader()


class MuteReader(SourceReader):
    finished = False

    def add_splits(self, splits):
        pass

    def poll(self):
        if self.finished:
            return None
        self.finished = True
        return ObjectBatch([5])

    def snapshot(self):
        return []


def with_subtask(source, scenario, tmp_path, ledger=None):
    """Run `scenario(subtask, ended)` on a subtask of source, event_time and a sink."""
    job = hg.Job("one", options={"pipeline.auto-watermark-interval": "0 ms"})
    timed = job.read(source, name="in").event_time(lambda n: n, **ALIGNED)
    timed.write(blackhole(), name="out")
    plan = runnable(job).spec().plan
    ended = []

    async def main():
        with ThreadPoolExecutor(1) as threads:
            env = task_environment(
                plan,
                plan.vertices[0],
                tmp_path / "local",
                threads,
                options={"pipeline.auto-watermark-interval": "0 ms"},
                reports=SimpleNamespace(finished=lambda: ended.append(True)),
            )
            subtask = SourceSubtask(env, {}, tuple(source.splits(1)), ledger)
            await subtask.prepare(None, False)
            await scenario(subtask, ended)
            await subtask.cancel()

    asyncio.run(main())


def read(subtask):
    return subtask.chain.head.output.records_out


def test_a_whole_reader_waits_and_goes_on(tmp_path):
    async def scenario(subtask, ended):
        subtask.env.splits.announce("g", 1)
        steps = [await subtask.step() for _ in range(6)]
        assert (steps, read(subtask)) == ([True, True, True, True, False, False], 4)
        position = b"\x83\xa5index\x00\xa2of\x01\xa8position\x04"
        assert subtask.extra_items() == {"splits": ItemsCut([position])}
        subtask.announce("g", 3)
        subtask._mails.popleft()()
        steps = [await subtask.step() for _ in range(3)]
        assert (steps, read(subtask)) == ([True, True, False], 6)

    with_subtask(from_list(list(range(8)), batch_rows=1), scenario, tmp_path)


def test_single_splits_wait_where_the_reader_can_do_that(tmp_path):
    async def scenario(subtask, ended):
        splits = subtask.env.splits
        assert [await subtask.step() for _ in range(2)] == [
            True,
            True,
        ]  # rows 0 and 1, then 2 and 3
        splits.announce("g", 1)
        assert splits.paused == {"split 1"}
        assert await subtask.step()  # 4 and 5, of split 0
        assert splits.paused == {"split 0", "split 1"}
        assert not await subtask.step()
        splits.announce("g", 4)
        assert splits.paused == frozenset()
        assert [await subtask.step() for _ in range(3)] == [True, True, False]
        assert read(subtask) == 10

    with_subtask(numbers(100, batch_rows=2, splits=2), scenario, tmp_path)


def test_who_waits_and_has_nothing_left_to_read_ends(tmp_path):
    async def scenario(subtask, ended):
        subtask.env.splits.announce("g", -100)
        assert await subtask.step()
        assert subtask.env.splits.paused
        assert ended == []
        assert await subtask.step()
        assert ended == [True]

    with_subtask(Mute(), scenario, tmp_path)


def test_who_waits_for_the_history_of_others_is_idle_until_it_is_live(tmp_path):
    async def scenario(subtask, ended):
        splits, times = subtask.env.splits, subtask.chain.operators[1].operator
        told = []
        splits.on_history = lambda: told.append(splits.history)
        assert [await subtask.step() for _ in range(3)] == [True, True, False]
        assert told == [History.BEING_READ, History.OVER]
        assert times.status().idle
        before = subtask.extra_items()
        subtask.history_over()
        subtask._mails.popleft()()
        assert await subtask.step()
        assert told[2:] == [History.NONE]
        assert not times.status().idle
        assert subtask.extra_items() == before
        assert [await subtask.step() for _ in range(3)] == [True, True, True]
        assert (read(subtask), ended) == (4, [True])

    source = hybrid_source(from_list([1, 2], batch_rows=1), from_list([3, 4], batch_rows=1))
    with_subtask(source, scenario, tmp_path)


class Found(Source):
    """Numbers, of which each split is found while the job runs."""

    discovers = True

    def splits(self, parallelism):
        return []

    def split_key(self, split):
        return split.decode()

    def reader(self):
        return FoundReader()


class FoundReader(SourceReader):
    def __init__(self):
        self.left = []

    def add_splits(self, splits):
        for split in splits:
            self.left.append(split)
            self.context.splits.opened(split.decode())

    def poll(self):
        if not self.left:
            return None
        split = self.left.pop(0)
        self.context.splits.reading(split.decode())
        self.context.splits.ended(split.decode())
        return ObjectBatch([int(split)])

    @property
    def finished(self):
        return not self.left

    def snapshot(self):
        return self.left


def test_a_subtask_without_splits_is_idle_until_it_is_given_some(tmp_path):
    """Nothing waits for its event time meanwhile, and a split comes once."""

    async def scenario(subtask, ended):
        (times,) = [
            each.operator for each in subtask.chain.operators if hasattr(each.operator, "status")
        ]
        assert [await subtask.step() for _ in range(2)] == [True, False]
        assert times.status().idle
        subtask.offer({"5": b"5", "7": b"7"})
        assert not subtask.extra_items()["known-splits"].items
        subtask._mails.popleft()()
        assert not times.status().idle
        assert subtask.extra_items() == {
            "splits": ItemsCut([b"5", b"7"]),
            "known-splits": ItemsCut([b"5", b"7"], "union"),
        }
        assert [await subtask.step() for _ in range(4)] == [True, True, True, False]
        assert (read(subtask), times.status().idle, ended) == (2, True, [])
        subtask.offer({"7": b"7", "5": b"5"})
        subtask._mails.popleft()()
        assert await subtask.step() is False
        assert subtask.extra_items()["splits"].items == []
        subtask.end_early()
        await subtask._mails.popleft()()
        assert ended == [True]

    with_subtask(Found(), scenario, tmp_path, LedgerStart((), 1))


def test_a_subtask_ends_if_nobody_looks_for_splits(tmp_path):
    async def scenario(subtask, ended):
        assert await subtask.step()
        assert ended == [True]

    with_subtask(Found(), scenario, tmp_path, LedgerStart((), 1, enabled=False))


def test_what_has_come_is_read_before_an_idle_source_ends(tmp_path):
    """The coordinator decides from reports, after which something may have come."""

    async def scenario(subtask, ended):
        assert [await subtask.step() for _ in range(2)] == [True, False]
        assert subtask.quiet_ms >= 0
        subtask.offer({"5": b"5", "7": b"7"})
        subtask.end_when_quiet()
        for _ in range(2):
            subtask._mails.popleft()()
        assert [await subtask.step() for _ in range(3)] == [True, True, True]
        assert (read(subtask), ended) == (2, [True])

    with_subtask(Found(), scenario, tmp_path, LedgerStart((), 1))


def test_an_idle_source_that_is_being_stopped_does_not_end(tmp_path):
    """Its windows would give results behind the savepoint, and once more after the restore."""

    async def scenario(subtask, ended):
        assert [await subtask.step() for _ in range(2)] == [True, False]
        subtask._stopping = True
        subtask.end_when_quiet()
        subtask._mails.popleft()()
        assert await subtask.step() is False
        assert ended == []

    with_subtask(Found(), scenario, tmp_path, LedgerStart((), 1))


def test_a_source_is_not_idle_while_splits_wait_for_others(tmp_path):
    """Otherwise it would end before the children of its splits were read."""

    async def scenario(subtask, ended):
        assert [await subtask.step() for _ in range(2)] == [True, False]
        assert subtask._quiet_since_s is not None
        subtask.offer({}, ["parent"], more=True)
        subtask._mails.popleft()()
        assert await subtask.step() is False
        assert subtask.quiet_ms == 0
        subtask.end_when_quiet()
        subtask._mails.popleft()()
        assert await subtask.step() is False
        assert ended == []

    with_subtask(Found(), scenario, tmp_path, LedgerStart((), 1))
