"""Checks of sources whose messages are acknowledged when a checkpoint has them: at least once."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any, Final

import cloudpickle

from ...errors import HeadgateError
from ...operators.clock import SystemClock
from ...operators.source import Source, SourceReader
from .cases import Feature, SourceCase
from .context import expect, make_context, open_reader, records_of
from .reading import CALL_S_MAX, LOOKS_MAX, copied, in_time
from .source_checks import ATTEMPTS_MAX, CHECKS, CUTS

_QUIET_S: Final = 1.0
"""If nothing has come for this long, a reader is taken to have as many messages as it may have."""


class _Point(Enum):
    """A place in the life of a job at which it crashes."""

    READ = "behind records that no checkpoint has"
    BARRIER = "behind the barrier of a checkpoint"
    ABORTED = "behind a checkpoint that was aborted"
    COMPLETE = "behind a checkpoint that was completed"


class _Job:
    """A job whose state is the set of the records that it has seen.

    Attributes:
        state: the records, as texts.
        kept: those of the last complete checkpoint.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._splits = source.splits(1)
        self._ids = itertools.count(1)
        self._cuts: dict[int, tuple[set[str], list[bytes]]] = {}
        self._readers: list[SourceReader] = []
        self.state: set[str] = set()
        self.kept: set[str] = set()

    def start(self, parallelism: int = 1) -> None:
        """Start the subtasks with what the last complete checkpoint has."""
        self.state = set(self.kept)
        self._cuts.clear()
        for number in range(parallelism):
            context = make_context(subtask_index=number, parallelism=parallelism)
            splits = self._splits[number::parallelism]
            reader = open_reader(copied(self._source), splits, context)
            reader.rows_wanted = 1
            self._readers.append(reader)

    async def read(self, count: int) -> int:
        """Process this many records or a few more; return their number."""
        found = 0
        while found < count:
            found += (came := self._poll())
            if not came:
                await asyncio.sleep(0.002)
        return found

    async def read_until(self, wanted: set[str]) -> None:
        """Process records, with a checkpoint behind each batch, until the state has all of these."""

        async def read() -> None:
            while not wanted <= self.kept:
                await self.read(1)
                self.complete(self.begin_checkpoint())

        try:
            await in_time(read(), "all records")
        except AssertionError as error:
            lost = sorted(wanted - self.kept)
            raise AssertionError(f"{len(lost)} lost: {lost[:5]}: {error}") from error

    async def read_until_quiet(self) -> int:
        """Process records until no more come; return their number."""
        clock = SystemClock()
        found = await in_time(self.read(1), "the first record")
        last_s = clock.monotonic()
        while clock.monotonic() - last_s < _QUIET_S:
            if came := self._poll():
                found += came
                last_s = clock.monotonic()
            else:
                await asyncio.sleep(0.01)
        return found

    def _poll(self) -> int:
        found = 0
        for reader in self._readers:
            batch = reader.poll()
            if batch is not None:
                self.state |= set(map(repr, records_of(batch)))
                found += len(batch)
        return found

    def begin_checkpoint(self) -> int:
        """Begin a checkpoint in all subtasks; return its number."""
        number = next(self._ids)
        for reader in self._readers:
            reader.begin_checkpoint(number)
        positions = [split for reader in self._readers for split in reader.snapshot()]
        self._cuts[number] = (set(self.state), positions)
        return number

    def complete(self, number: int) -> None:
        """Complete a checkpoint."""
        self.kept, self._splits = self._cuts.pop(number)
        for reader in self._readers:
            reader.on_checkpoint_complete(number)

    def abort(self, number: int) -> None:
        """Abort a checkpoint."""
        for reader in self._readers:
            reader.on_checkpoint_aborted(number)

    async def end(self) -> None:
        """Close all subtasks."""
        readers, self._readers = self._readers, []
        for reader in readers:
            await in_time(asyncio.to_thread(reader.close), "close")

    async def crash_at(self, point: _Point) -> None:
        """Go on to a point, and crash there."""
        await in_time(self.read(2), "two records")
        if point is not _Point.READ:
            number = self.begin_checkpoint()
            if point is _Point.ABORTED:
                self.abort(number)
            elif point is _Point.COMPLETE:
                await in_time(self.read(1), "a record behind the barrier")
                self.complete(number)
        await self.end()


def _texts(records: Sequence[Any]) -> set[str]:
    return set(map(repr, records))


@CHECKS.check(Feature.ACKNOWLEDGES)
async def nothing_is_lost_after_any_crash(case: SourceCase) -> None:
    """At least once: wherever the job crashes, and at any parallelism, its state gets each message.

    At the end all messages are acknowledged.
    """
    wanted = _texts(case.records())
    for point in _Point:
        with case.place() as place:
            case.put(place, case.records())
            source = case.source(place)
            expect(source.needs_checkpoints, "it does not say that it needs checkpoints")
            job = _Job(source)
            for parallelism in (1, 2):
                job.start(parallelism)
                await job.crash_at(point)
            job.start()
            try:
                await job.read_until(wanted)
                job.complete(job.begin_checkpoint())
                await _until_all_confirmed(case, place, len(wanted), f"crashes {point.value}")
            except AssertionError as error:
                raise AssertionError(f"crashes {point.value}: {error}") from error
            finally:
                await job.end()


async def _until_all_confirmed(case: SourceCase, place: Any, count: int, situation: str) -> None:
    found = 0
    for _ in range(LOOKS_MAX):
        found = await asyncio.to_thread(case.confirmed, place)
        if found >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{situation}: {found} of {count} messages are acknowledged at the end")


@CHECKS.check(Feature.ACKNOWLEDGES)
async def a_killed_process_loses_nothing(case: SourceCase) -> None:
    """Messages that a process had received when `kill -9` ended it come again, except acknowledged ones."""
    records = case.records()
    with case.place() as place:
        case.put(place, records)
        source = case.source(place)
        acknowledged = _texts(await _killed_process(source))
        expect(acknowledged < _texts(records), "the process has acknowledged all messages")
        job = _Job(source)
        job.start()
        try:
            await job.read_until(_texts(records) - acknowledged)
        finally:
            await job.end()


async def _killed_process(source: Source) -> list[Any]:
    """Read in a process that kills itself; return the records of its complete checkpoint."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headgate.testing.connectors.reading_child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told = cloudpickle.dumps(sys.path) + cloudpickle.dumps(source)
    answer, trouble = await asyncio.wait_for(process.communicate(told), 2 * CALL_S_MAX)
    expect(process.returncode == -9, f"the process ended by itself: {trouble.decode()[-2000:]}")
    records: list[Any] = cloudpickle.loads(answer)
    return records


@CHECKS.check(Feature.ACKNOWLEDGES)
async def holds_a_bounded_number_of_messages(case: SourceCase) -> None:
    """A reader takes a bounded number of messages, and further ones when a checkpoint has some of them."""
    most = case.unacknowledged_max
    expect(most > len(case.records()), "the bound `unacknowledged_max` is too small")
    with case.place() as place:
        for _ in range(2 * most // len(case.records()) + 1):
            case.put(place, case.records())
        job = _Job(case.source(place))
        job.start()
        try:
            for _ in range(2):
                found = await job.read_until_quiet()
                expect(found <= most, f"{found} messages came without a checkpoint, and not {most}")
                job.complete(job.begin_checkpoint())
        finally:
            await job.end()


@CHECKS.check(Feature.ACKNOWLEDGES, Feature.SERVER)
async def messages_outlive_their_server(case: SourceCase) -> None:
    """When its server is killed and started again, each message is read at least once.

    A reader may fail meanwhile, which restarts the job from its last checkpoint. `close` must return while
    the server is away, and acknowledgements that it did not get must lose nothing.
    """
    server = case.server
    assert server is not None
    wanted = _texts(case.records())
    with case.place() as place:
        case.put(place, case.records())
        job = _Job(case.source(place))
        job.start()
        await in_time(job.read(2), "two records")
        number = job.begin_checkpoint()
        await in_time(job.read(1), "a record behind the barrier")
        server.kill()
        try:
            job.complete(number)
            await job.end()
        finally:
            server.start()
        job.start()
        await in_time(job.read(1), "a record after the server has come back")
        server.kill()
        reading = asyncio.ensure_future(job.read_until(wanted))
        try:
            await asyncio.sleep(0)
            server.start()
            await reading
        except HeadgateError:
            await job.end()
            job.start()
            await job.read_until(wanted)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await job.end()


@CHECKS.check(Feature.ACKNOWLEDGES, Feature.CUTS)
async def messages_outlive_broken_connections(case: SourceCase) -> None:
    """When a connection breaks in front of, within or behind an answer, each message is read at least once.

    A reader may connect again by itself, or fail with an error for users, which restarts the job.
    """
    with case.cutting() as proxy:
        before = proxy.passed("answers")
        await _read_in_attempts(case, lambda: None)
        size = proxy.passed("answers") - before
        expect(size > 0, "the source does not connect through the proxy of `cutting`")
        for at in sorted({0, 1, *(size * part // CUTS for part in range(1, CUTS))}):
            try:
                await _read_in_attempts(case, partial(proxy.cut_after, at, "answers"))
            except AssertionError as error:
                situation = f"connections broke behind byte {at} of {size} of the answers"
                raise AssertionError(f"{situation}: {error}") from error
            finally:
                proxy.calm()


async def _read_in_attempts(case: SourceCase, trouble: Any) -> None:
    """Read everything in a new place with a job that restarts when it fails."""
    wanted = _texts(case.records())
    with case.place() as place:
        case.put(place, case.records())
        job = _Job(case.source(place))
        trouble()
        for _ in range(ATTEMPTS_MAX):
            try:
                job.start()
                await job.read_until(wanted)
                return
            except (HeadgateError, AssertionError) as error:
                if isinstance(error, AssertionError):
                    raise
            except Exception as error:
                raise AssertionError(
                    f"{type(error).__name__} is not an error for users: {error}"
                ) from error
            finally:
                await job.end()
    raise AssertionError(f"{ATTEMPTS_MAX} readers have failed after one connection broke")
