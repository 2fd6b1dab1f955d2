"""Checks of sources whose records come once: what is on its way when a job fails is lost, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import HeadgateError
from ...operators.source import Source, SourceReader
from ..proxy import CuttingProxy
from .cases import Feature, SourceCase
from .context import expect, make_context, open_reader, read_all, records_of
from .reading import at_least, copied, in_time
from .source_checks import ATTEMPTS_MAX, CHECKS, CUTS


class _Reading:
    """A job that takes a checkpoint behind each batch, and restarts when it fails.

    Attributes:
        found: the records that its attempts have read.
    """

    def __init__(self, source: Source, splits: Sequence[bytes], parallelism: int = 1) -> None:
        self._source = source
        self._splits = list(splits)
        self._parallelism = parallelism
        self._readers: list[SourceReader] = []
        self._failures = 0
        self.found: list[Any] = []

    async def until(self, done: Callable[[], bool], what: str) -> None:
        """Read until something is so, which `what` names."""

        async def read() -> None:
            while not done():
                await self._read_some()

        await in_time(read(), what)

    async def to_the_end(self, wanted: Sequence[Any], what: str) -> list[Any]:
        """Read until these records have come, and close; return all records."""
        try:
            await self.until(lambda: _all_there(self.found, wanted), what)
        finally:
            await self.end()
        return self.found

    async def _read_some(self) -> None:
        try:
            if not self._readers:
                self._start()
            came = [batch for each in self._readers if (batch := each.poll()) is not None]
            for batch in came:
                self.found += records_of(batch)
            if came:
                self._splits = [split for each in self._readers for split in each.snapshot()]
            elif all(each.finished for each in self._readers):
                raise AssertionError("it has ended although records may come")
            else:
                await asyncio.sleep(0.002)
        except HeadgateError as error:
            self._failures += 1
            expect(self._failures <= ATTEMPTS_MAX, f"{ATTEMPTS_MAX} attempts have failed: {error}")
            await self.end()
        except AssertionError:
            raise
        except Exception as error:
            name = type(error).__name__
            raise AssertionError(f"{name} is not an error for users: {error}") from error

    def _start(self) -> None:
        for number in range(self._parallelism):
            context = make_context(subtask_index=number, parallelism=self._parallelism)
            splits = self._splits[number :: self._parallelism]
            self._readers.append(open_reader(copied(self._source), splits, context))

    async def end(self) -> None:
        """Close all readers."""
        readers, self._readers = self._readers, []
        for reader in readers:
            await in_time(asyncio.to_thread(reader.close), "close")


def _halves(case: SourceCase) -> tuple[list[Any], list[Any]]:
    records = list(case.records())
    return records[: len(records) // 2], records[len(records) // 2 :]


def _all_there(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return all(record in found for record in wanted)


def _expect_once(found: Sequence[Any], records: Sequence[Any], situation: str) -> None:
    """Raise AssertionError unless what was found are some of the records, each once and in order."""
    others = [record for record in found if record not in records]
    expect(not others, f"{situation}: nobody has put {others[:5]}")
    places = [records.index(record) for record in found]
    expect(places == sorted(set(places)), f"{situation}: twice, or in another order: {found}")


@CHECKS.check(Feature.UNREPEATED)
async def reads_what_comes_once_in_order(case: SourceCase) -> None:
    """What comes is read once and in order, and the source says that it cannot be read again."""
    for parallelism in (1, 3):
        with case.place() as place:
            case.put(place, case.records())
            source = case.source(place)
            expect(not source.replays, "it says that records can be read again")
            found = await in_time(read_all(copied(source), parallelism), "the end")
            situation = f"read by {parallelism} subtasks"
            _expect_once(found, case.records(), situation)
            lost = [record for record in case.records() if record not in found]
            expect(not lost, f"{situation}: lost: {lost[:5]}")


@CHECKS.check(Feature.UNREPEATED, Feature.LIVE)
async def a_restart_reads_what_comes_later(case: SourceCase) -> None:
    """Stopped anywhere and restored, by one subtask or three, it reads what comes then, nothing twice."""
    first, rest = _halves(case)
    for stop in range(len(first) + 1):
        for parallelism in (1, 3):
            with case.place() as place:
                case.put(place, first)
                source = case.live(place)
                reader = open_reader(source, source.splits(1))
                found = await at_least(reader, stop)
                positions = reader.snapshot()
                expect(reader.snapshot() == positions, "two snapshots differ")
                await in_time(asyncio.to_thread(reader.close), "close")
                case.put(place, rest)
                situation = f"stopped behind {stop} records, restored by {parallelism} subtasks"
                restored = _Reading(source, positions, parallelism)
                found += await restored.to_the_end(rest, f"{situation}: what comes later")
                _expect_once(found, case.records(), situation)


@CHECKS.check(Feature.UNREPEATED, Feature.LIVE, Feature.SERVER)
async def reads_on_when_the_server_is_back(case: SourceCase) -> None:
    """When its server is killed and started again, what comes then is read, and nothing twice."""
    server = case.server
    assert server is not None
    first, rest = _halves(case)
    with case.place() as place:
        case.put(place, first)
        source = case.live(place)
        job = _Reading(source, source.splits(1))
        await job.until(lambda: bool(job.found), "the first record")
        server.kill()
        reading = asyncio.ensure_future(job.to_the_end(rest, "what comes when it is back"))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        case.put(place, rest)
        _expect_once(await reading, case.records(), "the server died")


@CHECKS.check(Feature.UNREPEATED, Feature.LIVE, Feature.CUTS)
async def reads_on_when_connections_break(case: SourceCase) -> None:
    """When a connection breaks in front of, within or behind a record, what comes then is read.

    Nothing is read twice or in part.
    """
    with case.cutting() as proxy:
        before = proxy.passed("answers")
        await _broken(case, proxy, None, "without any cut")
        size = proxy.passed("answers") - before
        expect(size > 0, "the source does not connect through the proxy of `cutting`")
        for at in sorted({0, 1, *(size * part // CUTS for part in range(1, CUTS))}):
            await _broken(case, proxy, at, f"connections broke behind byte {at} of {size}")
        expect(proxy.cuts > 0, "no connection was there to be broken")


async def _broken(case: SourceCase, proxy: CuttingProxy, at: int | None, situation: str) -> None:
    """Read in a new place: some records, or until a connection has broken, and then the others."""
    first, rest = _halves(case)
    with case.place() as place:
        case.put(place, first)
        source = case.live(place)
        job = _Reading(source, source.splits(1))
        cuts = proxy.cuts
        if at is not None:
            proxy.cut_after(at, "answers")
        await job.until(
            lambda: proxy.cuts > cuts or _all_there(job.found, first), f"{situation}: the beginning"
        )
        proxy.calm()
        case.put(place, rest)
        found = await job.to_the_end(rest, f"{situation}: what came then")
        _expect_once(found, case.records(), situation)
