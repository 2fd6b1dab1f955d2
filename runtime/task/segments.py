"""Writes the small state of all subtasks of a worker into segments, one for each checkpoint if possible.

Each subtask collects the pieces of its snapshot (`Pieces`) and hands them in once. When all subtasks here
have done so, or after a bounded time, they are written as one object, one behind the other. A checkpoint
needs all subtasks, so none completes later because a subtask waits for the others of its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeAlias, final

import msgspec

from ...errors import HeadgateError
from ..options.registry import Options
from ..options.state import (
    FILE_MERGING,
    GATHER_DELAY,
    SEGMENT_PIECE_MAX,
    SEGMENT_SIZE_MAX,
    SPACE_AMPLIFICATION_MAX,
)
from ..protocol import names
from ..protocol.checkpoints.segments import SegmentLedger, layout
from ..storage.base import CLEAN_UP_S
from .concurrency import in_thread
from .local_files import SnapshotTarget

Places: TypeAlias = dict[str, tuple[str, int]]
"""By the name that a piece would have as a file: its segment, and its offset there."""


class SegmentSettings(msgspec.Struct, frozen=True):
    """The options of segments.

    Attributes:
        piece_bytes_max: larger state gets an object of its own.
        bytes_max: what may wait at once to be written; what comes beyond it gets objects of its own.
        delay_ms: the longest time for which a subtask waits for the others of its worker.
        amplification_max: see `SegmentLedger`.
    """

    piece_bytes_max: int = 4 << 20
    bytes_max: int = 32 << 20
    delay_ms: int = 200
    amplification_max: float = 2.0


def segment_settings(options: Options) -> SegmentSettings | None:
    """Return the options of segments; None: no segments are written."""
    if not options.get(FILE_MERGING):
        return None
    return SegmentSettings(
        piece_bytes_max=options.get(SEGMENT_PIECE_MAX),
        bytes_max=options.get(SEGMENT_SIZE_MAX),
        delay_ms=options.get(GATHER_DELAY),
        amplification_max=options.get(SPACE_AMPLIFICATION_MAX),
    )


class SegmentKey(msgspec.Struct, frozen=True):
    """The snapshots whose pieces may share a segment."""

    attempt: int
    generation: int
    checkpoint_id: int


class _Group(msgspec.Struct):
    """The pieces for one segment, and those who wait for it."""

    target: SnapshotTarget
    pieces: list[tuple[str, bytes]] = msgspec.field(default_factory=list)
    subtasks: int = 0
    waiters: int = 0
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[Places] | None = None
    closed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


@final
class SegmentWriter:
    """The segments of one worker; all its subtasks share it."""

    def __init__(
        self,
        worker_id: str,
        subtasks: Callable[[int], int],
        threads: Executor,
    ) -> None:
        """
        Args:
            worker_id: unique among all workers of the job, for ever.
            subtasks: returns the number of subtasks here of an attempt.
            threads: for blocking work.
        """
        self._worker_id = worker_id
        self._subtasks = subtasks
        self._threads = threads
        self._numbers = itertools.count()
        self._groups: dict[SegmentKey, _Group] = {}
        self._reserved = 0
        self.settings: SegmentSettings | None = None
        """The options of the job; None: no segments are written."""
        self.ledger = SegmentLedger()

    def configure(self, settings: SegmentSettings | None) -> None:
        """Use the options of a job whose subtasks are about to be deployed."""
        self.settings = settings
        if settings is not None:
            self.ledger.amplification_max = settings.amplification_max

    def reserve(self, size: int) -> bool:
        """Reserve room for a piece of this size; False: it has to be written by itself."""
        settings = self.settings
        if settings is None or size > settings.piece_bytes_max:
            return False
        if self._reserved + size > settings.bytes_max:
            return False
        self._reserved += size
        return True

    def release(self, size: int) -> None:
        """Give reserved room back."""
        self._reserved -= size

    async def place(
        self,
        key: SegmentKey,
        pieces: Sequence[tuple[str, bytes]],
        target: SnapshotTarget,
        transfers: asyncio.Semaphore,
    ) -> Places:
        """Write the pieces of a subtask, perhaps together with those of others; return their places.

        Each subtask calls it once for each snapshot, also without pieces.

        Raises:
            StorageError: the store refused.
        """
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(target)
        group.subtasks += 1
        group.pieces += pieces
        settings = self.settings
        if group.subtasks >= self._subtasks(key.attempt) or settings is None:
            self._close(key, group, transfers)
        elif group.timer is None:
            loop = asyncio.get_running_loop()
            close = lambda: self._close(key, group, transfers)  # noqa: E731
            group.timer = loop.call_later(settings.delay_ms / 1000, close)
        return await self._wait(key, group) if pieces else {}

    def _close(self, key: SegmentKey, group: _Group, transfers: asyncio.Semaphore) -> None:
        """Write what the group has; later pieces of the checkpoint go into another segment."""
        if self._groups.get(key) is group:
            del self._groups[key]
        if group.timer is not None:
            group.timer.cancel()
        if group.pieces and group.task is None:
            writing = self._write(key, group, transfers)
            group.task = asyncio.get_running_loop().create_task(
                writing, name=f"segment of checkpoint {key.checkpoint_id}"
            )
        group.closed.set()

    async def _wait(self, key: SegmentKey, group: _Group) -> Places:
        """Wait for the segment. The last subtask that stops waiting gives it up."""
        group.waiters += 1
        try:
            await group.closed.wait()
            assert group.task is not None  # it has pieces: ours
            return await asyncio.shield(group.task)
        except asyncio.CancelledError:
            if group.waiters == 1:
                await self._give_up(key, group)
            raise
        finally:
            group.waiters -= 1

    async def _give_up(self, key: SegmentKey, group: _Group) -> None:
        if self._groups.get(key) is group:
            del self._groups[key]
        if group.timer is not None:
            group.timer.cancel()
        if group.task is None:
            return
        group.task.cancel()
        (places,) = await asyncio.gather(group.task, return_exceptions=True)
        if not isinstance(places, BaseException):  # it was written a moment ago
            await _delete(group.target, next(iter(places.values()))[0])

    async def _write(self, key: SegmentKey, group: _Group, transfers: asyncio.Semaphore) -> Places:
        offsets = layout([len(data) for _, data in group.pieces])
        content = await in_thread(self._threads, lambda: b"".join(data for _, data in group.pieces))
        name = names.segment_file(
            key.generation, key.checkpoint_id, self._worker_id, next(self._numbers), len(content)
        )
        try:
            async with transfers:
                await group.target.write(name, content, self._threads)
        except BaseException:
            await _delete(group.target, name)
            raise
        return {
            piece: (name, offset) for (piece, _), offset in zip(group.pieces, offsets, strict=True)
        }


async def _delete(target: SnapshotTarget, name: str) -> None:
    """Try to delete a segment that no checkpoint needs, in bounded time."""
    assert target.store is not None  # pieces are for a store
    with contextlib.suppress(HeadgateError, TimeoutError):
        async with asyncio.timeout(CLEAN_UP_S):
            await target.store.delete_files([name])


@final
class Pieces:
    """The pieces of one snapshot of one subtask, until they are placed."""

    def __init__(self, writer: SegmentWriter, key: SegmentKey) -> None:
        self._writer = writer
        self._key = key
        self._pieces: list[tuple[str, bytes]] = []
        self._reserved = 0

    def reserve(self, size: int) -> bool:
        """Reserve room for a piece; False: it has to be written by itself."""
        if not self._writer.reserve(size):
            return False
        self._reserved += size
        return True

    def add(self, name: str, data: bytes) -> None:
        """Add a piece for which room is reserved, by the name that it would have as a file."""
        self._pieces.append((name, data))

    async def place(self, target: SnapshotTarget, transfers: asyncio.Semaphore) -> Places:
        """Write all pieces; return their places.

        Raises:
            StorageError: the store refused.
        """
        return await self._writer.place(self._key, self._pieces, target, transfers)

    def close(self) -> None:
        """Let go of the pieces, in every outcome."""
        self._pieces = []
        self._writer.release(self._reserved)
        self._reserved = 0
