"""Checks that a source keeps its promises: `check_source` for a single one, and those of the kit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import cloudpickle

from ...errors import HeadgateError
from ...operators.elements import Batch
from ...operators.source import Source, SourceReader
from .cases import Checks, Feature, SourceCase
from .context import (
    POLLS_MAX,
    expect,
    expect_same,
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from .reading import (
    LOOKS_MAX,
    at_least,
    confirmed_soon,
    copied,
    everything,
    in_time,
    next_records,
)
from .refusals import check_connections, expect_no_secrets, refused

CHECKS: Final[Checks[SourceCase]] = Checks()
CUTS: Final = 8
"""A connection is cut at this many places in the answers to a reader, and at both ends."""
ATTEMPTS_MAX: Final = 10


async def check_source(source: Source, parallelisms: Sequence[int] = (2, 3)) -> None:
    """Check a bounded source. With one record per batch, every offset is tried as a place to stop.

    * It survives pickling, and can be read again with the same result.
    * Stopped behind any batch and restored, another reader goes on with exactly the next record.
    * Taking a snapshot changes nothing; restoring one without reading gives the same positions.
    * Any parallelism yields the same records.
    * If the reader reports its splits to event time, it reports all of them: each is opened once and
      ended once, and every batch belongs to an open one.
    """
    expect(source.bounded, "only bounded sources can be checked")
    source = cloudpickle.loads(cloudpickle.dumps(source))
    splits = source.splits(1)
    reader = open_reader(source, splits)
    batches = await read_batches(reader)
    reader.close()
    expected = [record for batch in batches for record in records_of(batch)]
    expect(reader.snapshot() == [], "a finished reader still has positions")
    await _check_splits_told(source, splits)
    again = await read_all(source)
    expect(again == expected, "a second reading gave other records")
    for stop in range(len(batches) + 1):
        await _check_stop(source, splits, stop, expected)
    for parallelism in parallelisms:
        found = await read_all(source, parallelism)
        expect(
            sorted(map(repr, found)) == sorted(map(repr, expected)),
            f"other records at parallelism {parallelism}",
        )


class _Told:
    """The splits that a reader reports."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.any = False

    def split_opened(self, split: str, queued: bool) -> None:
        expect(split not in self.open, f"split `{split}` was opened twice")
        self.open.add(split)
        self.any = True

    def split_ended(self, split: str) -> None:
        expect(split in self.open, f"split `{split}` ended without being open")
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
            expect(split in told.open, f"a batch is of split `{split}`, which is not open")
        context.splits.batch_done()
        if reader.finished:
            break
        if batch is None:
            await reader.wait()
    reader.close()
    expect(not told.open, f"splits of a finished reader are open: {sorted(told.open)}")


async def _check_stop(
    source: Source, splits: Sequence[bytes], stop: int, expected: list[Any]
) -> None:
    reader = open_reader(source, splits)
    before = await read_batches(reader, stop)
    positions = reader.snapshot()
    expect(reader.snapshot() == positions, f"two snapshots differ behind batch {stop}")
    reader.close()
    restored = open_reader(cloudpickle.loads(cloudpickle.dumps(source)), positions)
    expect(
        restored.snapshot() == positions,
        f"restoring and taking a snapshot changed the position behind batch {stop}",
    )
    after = await read_batches(restored)
    restored.close()
    found = [record for batch in [*before, *after] for record in records_of(batch)]
    expect(
        found == expected,
        f"stopped behind batch {stop} and restored: {len(found)} records instead of {len(expected)}, "
        f"or others: {found[:20]}",
    )


@CHECKS.check(unless=[Feature.ACKNOWLEDGES, Feature.UNREPEATED])
async def resumes_behind_every_record(case: SourceCase) -> None:
    """Stopped anywhere and restored in another process, it goes on with exactly the next record.

    It can be read again with the same result, at any parallelism, and tells all of its splits.
    """
    with case.place() as place:
        case.put(place, case.records())
        source = case.source(place)
        expect_same(await read_all(copied(source)), case.records(), "read from its beginning")
        await check_source(source)


@CHECKS.check(unless=[Feature.ACKNOWLEDGES])
async def an_empty_place_ends_at_once(case: SourceCase) -> None:
    """Without any record a bounded source ends, and leaves no position behind."""
    with case.place() as place:
        source = case.source(place)
        expect(await read_all(source) == [], "records come from an empty place")


@CHECKS.check(unless=[Feature.ACKNOWLEDGES, Feature.UNREPEATED])
async def splits_move_to_other_subtasks(case: SourceCase) -> None:
    """Positions that one subtask has written are read on by three, and theirs by one, without a gap."""
    with case.place() as place:
        case.put(place, case.records())
        source = copied(case.source(place))
        splits = source.splits(1)
        found: list[Any] = []
        for parallelism in (1, 3, 1):
            splits = await _read_some(source, splits, parallelism, found)
        last = open_reader(copied(source), splits)
        found += await next_records(last)
        last.close()
        expect_same(found, case.records(), "read by one subtask, by three, and by one again")


async def _read_some(
    source: Source, splits: Sequence[bytes], parallelism: int, found: list[Any]
) -> list[bytes]:
    """Read a batch or two in each subtask, of which the last one has the first split.

    Returns:
        The positions of all of them.
    """
    positions: list[bytes] = []
    for number in range(parallelism):
        context = make_context(subtask_index=parallelism - 1 - number, parallelism=parallelism)
        reader = open_reader(copied(source), splits[number::parallelism], context)
        found += await next_records(reader, 2)
        positions += reader.snapshot()
        reader.close()
    return positions


@CHECKS.check(Feature.LIVE)
async def waits_for_records(case: SourceCase) -> None:
    """A source without an end returns nothing while nothing is there, and reads what is put later.

    Waiting can be cancelled. It moves no position.
    """
    with case.place() as place:
        source = case.live(place)
        expect(not source.bounded, "a source without an end says that it is bounded")
        reader = open_reader(source, source.splits(1))
        expect(await _polled(reader) is None, "a batch comes from an empty place")
        expect(not reader.finished, "it is finished although records may come")
        waiting = asyncio.ensure_future(reader.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        before = reader.snapshot()
        expect(reader.snapshot() == before, "two snapshots of an idle reader differ")
        case.put(place, case.records())
        found = await at_least(reader, len(case.records()))
        expect_same(found, case.records(), "put while the reader waited")
        reader.close()


async def _polled(reader: SourceReader) -> Batch | None:
    """Call `poll` a few times while the loop runs; return the first batch."""
    for _ in range(20):
        batch = reader.poll()
        if batch is not None:
            return batch
        await asyncio.sleep(0)
    return None


@CHECKS.check(Feature.BAD_RECORDS)
async def bad_records_follow_their_policy(case: SourceCase) -> None:
    """A record that cannot be read fails the job, is dropped, or is put aside, and no other one suffers.

    It does not matter whether it is the first, the last, or between others.
    """
    records = list(case.records())
    for at in (0, len(records) // 2, len(records)):
        with case.place() as place:
            case.put(place, records[:at])
            case.put_bad(place)
            case.put(place, records[at:])
            situation = f"a bad record behind {at} good ones"
            count = len(records)
            found = await everything(case.tolerant(place, "drop"), count)
            expect_same(found, records, f"{situation}, dropped")
            aside: list[Batch] = []
            source = case.tolerant(place, "side_output")
            reader = open_reader(source, source.splits(1), reject=aside.append)
            found = await (next_records(reader) if source.bounded else at_least(reader, count))
            expect_same(found, records, f"{situation}, put aside")
            if not source.bounded:
                await in_time(_put_aside(reader, aside), f"{situation}, put aside")
            expect(sum(map(len, aside)) == 1, f"{situation}: {sum(map(len, aside))} were put aside")
            await in_time(asyncio.to_thread(reader.close), "close")
            try:
                await everything(case.tolerant(place, "fail"), count + 1)
            except HeadgateError:
                continue
            raise AssertionError(f"{situation}: the policy is to fail, and nothing was raised")


async def _put_aside(reader: SourceReader, aside: list[Batch]) -> None:
    """Wait until a source without an end has put something aside; no good record is left."""
    for _ in range(POLLS_MAX):
        if reader.poll() is None and aside:
            return
        await asyncio.sleep(0.01)


@CHECKS.check(Feature.LAG, unless=[Feature.ACKNOWLEDGES])
async def tells_how_much_is_left(case: SourceCase) -> None:
    """`lag_records` becomes the number of records that are still to be read, seen from any thread.

    It may take a moment if a server has to tell it.
    """
    with case.place() as place:
        case.put(place, case.records())
        source = case.source(place)
        reader = open_reader(source, source.splits(1))
        left = len(case.records())
        while not reader.finished:
            batch = reader.poll()
            if batch is not None:
                left -= len(batch)
                await _until_left(reader, left)
            elif not reader.finished:
                await reader.wait()
        reader.close()


async def _until_left(reader: SourceReader, left: int) -> None:
    async def told() -> None:
        lag: Mapping[str, int] | None = None
        for _ in range(LOOKS_MAX):
            lag = await asyncio.to_thread(reader.lag_records)
            if lag is not None and sum(lag.values()) == left:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{left} records are left, and the lag is {lag}")

    await in_time(told(), f"a lag of {left} records")


@CHECKS.check(Feature.CONFIRMS)
async def confirms_completed_checkpoints_only(case: SourceCase) -> None:
    """A position or message is confirmed to the outside once a checkpoint has it, and not before."""
    with case.place() as place:
        case.put(place, case.records())
        source = case.source(place)
        reader = open_reader(source, source.splits(1))
        reader.rows_wanted = 1  # otherwise the first batch of a queue may be all there is
        confirmed = partial(case.confirmed, place)
        count = len(await next_records(reader, 2))
        reader.begin_checkpoint(1)
        reader.snapshot()
        ahead = len(await next_records(reader, 1))
        expect(case.confirmed(place) == 0, "a position was confirmed before its checkpoint")
        reader.begin_checkpoint(2)
        reader.snapshot()
        reader.on_checkpoint_aborted(2)
        expect(case.confirmed(place) == 0, "the position of an aborted checkpoint was confirmed")
        reader.on_checkpoint_complete(1)
        await confirmed_soon(confirmed, count, "were in the checkpoint")
        reader.begin_checkpoint(3)
        reader.snapshot()
        reader.on_checkpoint_complete(3)
        await confirmed_soon(confirmed, count + ahead, "were in the checkpoint")
        reader.close()


@CHECKS.check(Feature.SERVER, unless=[Feature.ACKNOWLEDGES, Feature.UNREPEATED])
async def a_server_may_die(case: SourceCase) -> None:
    """When its server is killed and started again, each record is read once.

    A reader may fail meanwhile, which restarts the job from its last position; it must not end, and
    `close` must return while the server is away.
    """
    server = case.server
    assert server is not None
    with case.place() as place:
        case.put(place, case.records())
        source = case.source(place)
        reader = open_reader(source, source.splits(1))
        found = await next_records(reader, 2)
        positions = reader.snapshot()
        server.kill()
        try:
            await in_time(asyncio.to_thread(reader.close), "close while the server is away")
        finally:
            server.start()
        restored = open_reader(copied(source), positions)
        found += await in_time(next_records(restored), "the rest after the server has come back")
        restored.close()
        expect_same(found, case.records(), "read before and after the death of the server")
        await _dies_while_reading(case, place)


async def _dies_while_reading(case: SourceCase, place: Any) -> None:
    server = case.server
    assert server is not None
    source = case.source(place)
    reader = open_reader(source, source.splits(1))
    found = await next_records(reader, 1)
    positions = reader.snapshot()
    server.kill()
    rest = asyncio.ensure_future(next_records(reader))
    await asyncio.sleep(0)
    server.start()
    try:
        found += await in_time(rest, "the rest, of a reader that has seen its server die")
    except HeadgateError:
        restored = open_reader(copied(source), positions)
        found += await in_time(next_records(restored), "the rest, of a restored reader")
        restored.close()
    reader.close()
    expect_same(found, case.records(), "the server died while the reader read")


@CHECKS.check(Feature.CUTS, unless=[Feature.ACKNOWLEDGES, Feature.UNREPEATED])
async def a_connection_may_break(case: SourceCase) -> None:
    """When a connection breaks in front of, within or behind an answer, each record is read once.

    A reader may connect again by itself, or fail with an error for users, which restarts the job from its
    last position. It must not take a part of the records for all of them.
    """
    with case.place() as place, case.cutting() as proxy:
        case.put(place, case.records())
        source = case.source(place)
        splits = source.splits(1)
        before = proxy.passed("answers")
        expect_same(await _restarted(source, splits), case.records(), "read without any cut")
        size = proxy.passed("answers") - before
        expect(size > 0, "the source does not connect through the proxy of `cutting`")
        for place_of_cut in sorted({0, 1, *(size * part // CUTS for part in range(1, CUTS))}):
            proxy.cut_after(place_of_cut, "answers")
            found = await _restarted(source, splits)
            proxy.calm()
            situation = f"connections broke behind byte {place_of_cut} of {size} of the answers"
            expect_same(found, case.records(), situation)


async def _restarted(source: Source, splits: Sequence[bytes]) -> list[Any]:
    """Return all records of a job that takes a checkpoint behind each batch, and restarts when it fails."""
    found: list[Any] = []
    for _ in range(ATTEMPTS_MAX):
        reader: SourceReader | None = None
        try:
            reader = open_reader(copied(source), splits)
            while not reader.finished:
                records = await in_time(next_records(reader, 1), "the next record")
                found += records
                splits = reader.snapshot()
            return found
        except HeadgateError:
            pass  # it goes on behind the last batch
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"a broken connection: {type(error).__name__} is not an error for users: {error}"
            ) from error
        finally:
            if reader is not None:
                await in_time(asyncio.to_thread(reader.close), "close behind a broken connection")
    raise AssertionError(f"{ATTEMPTS_MAX} readers have failed after one connection broke")


@CHECKS.check(Feature.MISTAKES)
async def says_what_is_wrong(case: SourceCase) -> None:
    """A wrong address, password or name is an error with the reason, and without the secret."""
    with case.place() as place:
        for name, (source, reason) in case.mistakes(place).items():
            error = await in_time(refused(read_all(source), name), f"the error for {name}")
            expect(reason in str(error), f"{name}: the error does not say `{reason}`: {error}")
            expect_no_secrets(case, f"{name}: the error", str(error))


@CHECKS.check(Feature.CONNECTS)
async def its_connection_can_be_checked(case: SourceCase) -> None:
    """Before a run, wrong settings are found, no secret is shown, and nothing is changed or confirmed."""
    with case.place() as place:
        case.put(place, case.records())
        confirms = Feature.CONFIRMS in case.features
        confirmed = case.confirmed(place) if confirms else 0
        source = case.source(place)
        wrong = case.mistakes(place) if Feature.MISTAKES in case.features else {}
        await check_connections(case, source, wrong)
        if confirms:
            expect(case.confirmed(place) == confirmed, "the check has confirmed a position")
        found = await everything(source, len(case.records()))
        expect_same(found, case.records(), "read behind the check")


@CHECKS.check()
async def tells_no_secrets(case: SourceCase) -> None:
    """Neither `repr` nor the description for `explain` shows a secret."""
    with case.place() as place:
        source = case.source(place)
        expect_no_secrets(case, "repr", repr(source))
        expect_no_secrets(case, "describe", source.describe())
