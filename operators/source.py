"""The contract of sources: splits, readers, positions.

A source is a description that is part of the job. It is divided into *splits*; each subtask reads
some of them, with one reader. A reader's position is part of every checkpoint, and reading on from
a restored position yields exactly the records that followed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol

import msgspec
import pyarrow as pa
import xxhash

from ..errors import SourceError, StateError, UsageError
from .base import OperatorContext
from .elements import Batch

if TYPE_CHECKING:
    from typing_extensions import (
        TypeVar,  # the defaults of type variables are newer than Python 3.11
    )

    Record = TypeVar("Record", default=Any)
    Record_co = TypeVar("Record_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Record = TypeVar("Record")
    Record_co = TypeVar("Record_co", covariant=True)

S = TypeVar("S", bound=msgspec.Struct)

REJECTED = "rejected"
"""The side output of records that could not be read."""
BATCH_ROWS: Final = 32_768
"""The most rows of a batch by default, of sources that need not wait for rows."""


class SplitsLeftOutError(SourceError):
    """`Source.discover` found splits, and left out others that it could not make."""

    def __init__(self, message: str, found: list[bytes], *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.found = found


def decode_split(split: bytes, kind: type[S], source: str) -> S:
    """Return a split as the struct that its source has encoded.

    Args:
        split: of a source, or of a snapshot of its reader.
        kind: the class of the struct.
        source: the kind of source, for the error.

    Raises:
        StateError: it is the split of another source.
    """
    try:
        return msgspec.msgpack.decode(split, type=kind)
    except msgspec.DecodeError as error:
        raise StateError(
            f"the restored positions are not those of a {source}: it was another source before",
            fix="give it another name, so that it begins from the start; or start the job fresh",
        ) from error


class SourceReader:
    """Reads the splits of one subtask. All methods run in the subtask's mailbox.

    A reader should report its splits to `context.splits`, so that each has its own event time:
    `opened` for all of them in `add_splits`, `reading` before `poll` returns a batch of one,
    `ended` with its last batch. A reader that reports any must report all; one that reports none
    counts as a single split.

    Attributes:
        can_pause_splits: it has `pause_splits`. Other readers wait as a whole where sources are
            aligned.
        rows_wanted: set before `poll` to keep little in flight: more rows than this are of no use
            now; None: there is no limit. A reader that cannot make its batches smaller, with exact
            positions, may ignore it.
        held_back: True if the last `poll` returned None although there may be records, so that the
            source does not count as idle.
    """

    can_pause_splits: bool = False
    rows_wanted: int | None = None
    held_back: bool = False

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        """Open the reader; called first.

        `reject(batch)` sends unreadable records to the side output `rejected`.
        """
        self.context = context
        self.reject = reject

    def add_splits(self, splits: Sequence[bytes]) -> None:
        """Add splits: as made by `Source.splits`, or as returned by `snapshot` (with position).

        Called once after `open`, possibly with none, and again with each group of splits that the
        source has discovered.
        """
        raise NotImplementedError

    def poll(self) -> Batch | None:
        """Return the next batch if there is one right now, else None.

        Must not block for more than some ms.

        The position moves past the batch at once: the caller is responsible for it from then on.
        """
        raise NotImplementedError

    async def wait(self) -> None:
        """Return when `poll` may have something again. Cancelling it leaves the reader unchanged."""
        await asyncio.sleep(0.01)

    @property
    def finished(self) -> bool:
        """True when no more records will come (then `poll` returns None).

        A reader of a source that discovers splits may be given more of them later.
        """
        raise NotImplementedError

    def pause_splits(self, splits: frozenset[str]) -> None:
        """Return no batch of these splits, by reported name, until called again. Others go on."""
        raise NotImplementedError

    def snapshot(self) -> list[bytes]:
        """Return one byte string per unfinished split: the split with the position of the next record."""
        raise NotImplementedError

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        """Note that the next `snapshot` is that of this checkpoint.

        For readers that report positions elsewhere once the checkpoint is complete.
        """

    def lag_records(self) -> Mapping[str, int] | None:
        """Return, by split, the number of available records not yet returned by `poll`; None: unknown.

        Called for metrics, as are the two below: by another thread, at any time between `open` and
        `close`. So it must neither block nor change anything. An error is logged once.
        """
        return None

    def lag_bytes(self) -> int | None:
        """Return the number of available bytes not yet read; None: unknown, or records are not bytes."""
        return None

    def lag_s(self) -> float | None:
        """Return for how many seconds the next record has been available; 0: there is none; None:
        unknown."""
        return None

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Note that a checkpoint with the positions of this reader is durable, for example to
        acknowledge them.

        Called at most once for each checkpoint, and in order. A failure may lose a notice, so a
        later one stands for all before it. The restored checkpoint is not reported. Raising fails
        the attempt.
        """

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Note that a checkpoint was aborted; this reader may not have been asked for its part of it."""

    def close(self) -> None:
        """Release resources, also after failures. Must not raise."""


class SourceStorage(Protocol):
    """A source's own place in the storage of its job.

    Names are relative, with `/` between their parts.
    """

    @property
    def address(self) -> str:
        """The place as a user writes it: a directory or an s3:// address."""
        ...

    async def read(self, name: str) -> bytes | None:
        """Return a record, None if there is none."""
        ...

    async def create_if_absent(self, name: str, data: bytes) -> bytes:
        """Create a record, durably, unless it exists; return the bytes of the one that exists."""
        ...

    async def upload(self, name: str, path: Path) -> None:
        """Write a file, durably, with the bytes of the local one at `path`."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """Return all records and files whose names begin with `prefix`, in no order."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete records and files; absent ones are no error."""
        ...


@dataclass(frozen=True, slots=True)
class SourceRun:
    """A run of a job, for a source that makes data of its own.

    Attributes:
        job: the job's name.
        run: identifies the run; a run that is restarted, or whose coordinator is replaced, keeps
            it.
        source: the source's name in the job.
        where: the user's line.
        options: the job's options.
        storage: None in a job without storage.
        announce: shows a sentence to the user.
        confirm: raises FencedError if a newer coordinator owns the job, and StorageError if that
            cannot be determined: anything read before a successful call is not of a newer run.
            None: there is only one coordinator.
    """

    job: str
    run: str
    source: str
    where: str
    options: Mapping[str, str]
    storage: SourceStorage | None
    announce: Callable[[str], None]
    confirm: Callable[[], Awaitable[None]] | None = None


class Source(Generic[Record_co]):
    """Description of a source; picklable.

    Its type argument is the type of its records in functions.

    Attributes:
        schema: Arrow schema of the records, None for a source of Python objects.
        row_type: the class a record becomes in per-record functions, None for a generated one.
        bounded: True if the source ends.
        rejected_schema: Arrow schema of the side output `rejected`, None for Python objects.
        needs_storage: True if it keeps data in the job's storage, so that the job must have one.
        has_history: True if it reads a history before it goes live; see `SourceSplits.history`.
        at_rest: True if all its records exist before it is read, and it emits them as fast as they
            are taken, in an order per subtask that is always the same. Watermarks then have fixed
            places between the records, so that results do not depend on the pace of the job.
        discovers: True if splits may appear while the job runs: it has `discover` and `split_key`. A
            subtask without splits then waits for some, unless the source is `bounded`.
        discover_every_ms: how often it looks for splits; None: as often as the job's option says.
        splits_end: True if splits end while others appear. A checkpoint without the keys of all splits
            that there were is then refused, because those that had ended would be read again.
        splits_have_parents: True if splits may have to wait for others; see `split_parents`.
        stop_after_idle_ms: the source ends when none of its subtasks has had a record to read for this
            long; None: it does not.
        replays: False if records that were read since the last checkpoint cannot be read again, so that a
            failure loses them.
        needs_checkpoints: True if it acknowledges at completed checkpoints what it has read, so that a job
            without checkpoints would never acknowledge anything.
        extras: extras of headgate's installation that it needs (`operators/extras.py`).
    """

    schema: pa.Schema | None = None
    row_type: type[Any] | None = None
    bounded: bool = False
    rejected_schema: pa.Schema | None = None
    needs_storage: bool = False
    has_history: bool = False
    at_rest: bool = False
    discovers: bool = False
    discover_every_ms: int | None = None
    splits_end: bool = False
    splits_have_parents: bool = False
    stop_after_idle_ms: int | None = None
    replays: bool = True
    needs_checkpoints: bool = False
    extras: tuple[str, ...] = ()

    def configure(self, options: Mapping[str, str]) -> Source:
        """Return the source configured by the job's options; called before `splits`.

        Readers do not need this: `context.options` are the same.
        """
        return self

    async def prepare(self, run: SourceRun) -> Source:
        """Return the source ready for `splits`, for a source that first has to make its data.

        Called by the coordinator, after `configure`, whenever splits are to be made. It may take
        long. It is cancelled when the job is, and called again, in another process, when the
        coordinator dies: so it must find and reuse what an earlier call of the same run has
        finished. Must not block.
        """
        return self

    async def discard(self, run: SourceRun) -> None:
        """Delete what `prepare` made, in this run or an earlier one: the job's state was deleted."""

    def splits(self, parallelism: int) -> list[bytes]:
        """Divide the source into splits; called once per job, at a fresh start, never after a restore.

        Split i goes to subtask i mod parallelism. The splits must not depend on `parallelism`
        unless the records then do not either. May do blocking I/O.
        """
        raise NotImplementedError

    def latest(self, splits: Sequence[bytes], column: str) -> int | None:
        """Return the greatest event time of all records of `splits`, in ms since 1970; None: no records.

        It may have to read the whole column: blocking I/O. Nulls are ignored.

        Args:
            splits: as this source has just made them.
            column: a timestamp, a date, or int64 milliseconds.

        Raises:
            UsageError: a source of this kind cannot tell.
        """
        raise UsageError(
            f"{self.describe()} cannot tell the last event time of its records",
            fix="give the live source itself, with a position of its own, instead of a function",
        )

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        """Return all splits that exist now; called at intervals, in a thread, if the source `discovers`.

        Each subtask takes those that are new, and reads them from where they begin here: that should be
        their beginning, because a split may be discovered again after a failure. A split that is left
        out by mistake, as a listing may be incomplete, is found by a later call.

        The call must end by itself within a bounded time. Raising is not a failure of the job: it is
        logged, and the next call follows after the interval. `SplitsLeftOutError` has the splits that
        are read nevertheless.

        Args:
            known: the splits that the last call returned, by key; empty in a new coordinator. Those that
                still exist can be returned as they are.
        """
        raise NotImplementedError

    def split_key(self, split: bytes) -> str:
        """Return the name that identifies a split for ever, whatever its position.

        Args:
            split: as made by `splits` or `discover`, or as returned by the `snapshot` of a reader.
        """
        raise NotImplementedError

    def split_parents(self, split: bytes) -> Sequence[str]:
        """Return the keys of the splits that must have ended before this discovered one is read.

        A parent has ended when a checkpoint is complete at which its reader had no position of it any more;
        in a job without checkpoints as soon as its reader has none. With aligned barriers all records of
        the parents have then been processed, and no failure takes a parent back. A parent that `discover`
        does not return is not waited for, because it does not exist any more.

        `splits` has to leave out the splits that must wait: they are discovered later.

        Args:
            split: as made by `discover`.
        """
        return ()

    def split_share(self, key: str) -> int:
        """Return a number from which it follows which subtask reads a discovered split.

        It must depend on the key alone. Splits with consecutive numbers go to different subtasks.
        """
        return xxhash.xxh3_64_intdigest(key.encode())

    def reader(self) -> SourceReader:
        """Return a new reader for one subtask."""
        raise NotImplementedError

    def with_columns(self, columns: Sequence[str]) -> Source:
        """Return the source reading only these columns (a subset, in schema order)."""
        return self

    def describe(self) -> str:
        """Return a short text for `explain`, such as `files(flights/*.parquet)`."""
        return type(self).__name__
