"""Readers whose thread fetches and decodes records beside the subtask, some ahead.

The thread puts finished pieces into a bounded queue, and the mailbox takes them. `FetchedSplitsReader` is
for clients that block, `CommandedReader` for those of them that also make other requests, `LoopedReader`
for clients that have coroutines, and `OneSplitReader` for sources that have one split.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import numpy.typing as npt
import pyarrow as pa

from ..errors import StateError
from ..operators.base import OperatorContext
from ..operators.drops import DropKind
from ..operators.elements import Batch, ColumnBatch, Positions
from ..operators.source import SourceReader
from ..operators.splits import WHOLE
from .bad_records import BadRecordHandler, OnBadRecord

AHEAD_MAX: Final = 4
"""The most pieces that a `OneSplitReader` fetches ahead."""
_SMALL_ROWS: Final = 1_024
"""Pieces with fewer records cost more by themselves than their records do."""
_CLOSE_S_MAX: Final = 5.0
"""The longest wait for the thread of a `OneSplitReader`. One that goes on after it does so unheard."""


class Position(Protocol):
    """A split with its position, a `msgspec.Struct`."""

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics; `WHOLE`: it is not reported."""
        ...


P = TypeVar("P", bound=Position)


@dataclass(slots=True)
class Piece(Generic[P]):
    """Consecutive records of one split, decoded.

    Attributes:
        position: behind the last record.
        batch: the good records; None if there are none.
        marks: the place of each of them, in the form of the reader.
        bad: the other records, in the form of the reader, with the reasons.
        size_bytes: of what it keeps in memory.
        ready_ms: the time of the first record, in ms since 1970; -1: it has none.
        ended: nothing of the split follows.
    """

    position: P
    batch: pa.RecordBatch | None = None
    marks: Sequence[Any] | npt.NDArray[Any] = ()
    bad: list[tuple[Any, str]] = field(default_factory=list)
    size_bytes: int = 0
    ready_ms: int = -1
    ended: bool = False


@dataclass(slots=True)
class Shared(Generic[P]):
    """The state that the thread and the mailbox share; `changed` guards it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    pieces: deque[Piece[P]] = field(default_factory=deque)
    waiting_bytes: int = 0
    """The bytes of all pieces."""
    paused: frozenset[str] = frozenset()
    lost: int = 0
    """Records that were deleted before they were read, and are not yet counted."""
    error: BaseException | None = None
    closed: bool = False


class FetchedSplitsReader(SourceReader, Generic[P]):
    """Takes pieces from a thread. A subclass fetches them.

    Args:
        buffer_bytes: while pieces of this size wait, no more are fetched.
        policy: for bad records.
        culprit: the thing to correct if there are some, for the error.
    """

    can_pause_splits = True

    def __init__(self, buffer_bytes: int, policy: OnBadRecord, culprit: str) -> None:
        self._buffer_bytes = buffer_bytes
        self._policy, self._culprit = policy, culprit
        self._positions: dict[str, P] = {}
        """The positions of the mailbox, of all splits."""
        self._going_on: dict[str, None] = {}
        """The splits that have not ended."""
        self._shared: Shared[P] = Shared()
        self._thread: threading.Thread | None = None

    # -- what a subclass has ------------------------------------------------------------------------

    def fetch_forever(self) -> None:
        """Fetch pieces, and `put` them, until the reader is closed; called in a thread."""
        raise NotImplementedError

    def cut(self, piece: Piece[P], rows: int) -> P:
        """Return the position behind the first rows of a piece without bad records."""
        raise NotImplementedError

    def first_bad(self, piece: Piece[P]) -> tuple[str, str, bytes]:
        """Return where the first bad record of a piece is, the reason, and its bytes."""
        raise NotImplementedError

    def rejected(self, piece: Piece[P]) -> pa.RecordBatch:
        """Return the bad records of a piece as rows of the side output."""
        raise NotImplementedError

    def places(self, piece: Piece[P]) -> Positions | None:
        """Return the positions of the good records, if they have numbers."""
        return None

    def release(self) -> None:
        """Release what `fetch_forever` has used, also after failures; called in the thread."""

    def taken(self, piece: Piece[P]) -> None:
        """Note that the mailbox has taken a piece, or the first rows of one."""

    # -- the mailbox --------------------------------------------------------------------------------

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._bad = BadRecordHandler(self._policy, context, reject, self._culprit)
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def begin(self, positions: Sequence[P], kind: str) -> None:
        """Begin to read splits; `kind` names the thread.

        It may be called again, by a reader whose `fetch_forever` goes on until it is closed.
        """
        for position in positions:
            self._positions[position.name] = position
            self._going_on[position.name] = None
            if position.name != WHOLE:
                self.context.splits.opened(position.name)
        if positions:
            name = f"{kind} {self.context.operator_name}"
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            else:
                self.wake_thread()

    def poll(self) -> Batch | None:
        while True:
            self._arrived.clear()
            piece = self._next_piece()
            if piece is None:
                return None
            self.taken(piece)
            if piece.bad:
                first, rejected = partial(self.first_bad, piece), partial(self.rejected, piece)
                self._bad.handle(len(piece.bad), first, rejected)
            name = piece.position.name
            self._positions[name] = piece.position
            if piece.ended:
                del self._going_on[name]
                if name != WHOLE:
                    self.context.splits.ended(name)
            if piece.batch is not None and piece.batch.num_rows:
                if name != WHOLE:
                    self.context.splits.reading(name)
                return ColumnBatch(piece.batch, positions=self.places(piece))

    def _next_piece(self) -> Piece[P] | None:
        """Take the first piece of a split that is not paused, or only its first rows."""
        shared, wanted = self._shared, self.rows_wanted
        with shared.changed:
            self.context.drops.add(DropKind.DELETED, shared.lost)
            shared.lost = 0
            for place, piece in enumerate(shared.pieces):
                if piece.position.name in shared.paused:
                    continue
                if (
                    wanted
                    and not piece.bad
                    and piece.batch is not None
                    and len(piece.marks) > wanted
                ):
                    shared.pieces[place] = replace(
                        piece, batch=piece.batch.slice(wanted), marks=piece.marks[wanted:]
                    )
                    first = piece.batch.slice(0, wanted)
                    return Piece(self.cut(piece, wanted), first, piece.marks[:wanted])
                del shared.pieces[place]
                shared.waiting_bytes -= piece.size_bytes
                shared.changed.notify_all()
                self.wake_thread()
                return piece
            if shared.error is not None:
                raise shared.error
        return None

    async def wait(self) -> None:
        await self._arrived.wait()

    @property
    def finished(self) -> bool:
        return not self._going_on

    def pause_splits(self, splits: frozenset[str]) -> None:
        with self._shared.changed:
            self._shared.paused = splits
            self._shared.changed.notify_all()
        self.wake_thread()
        self._arrived.set()

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(self._positions[name]) for name in self._going_on]

    def lag_s(self) -> float | None:
        with self._shared.changed:
            times = [piece.ready_ms for piece in self._shared.pieces if piece.ready_ms >= 0]
        return max(0.0, (self.context.clock.now_ms() - min(times)) / 1000) if times else 0.0

    def close(self) -> None:
        """Stop the thread, which closes the connection: that may take longer than the subtask can wait."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()
        self.wake_thread()

    def wake_thread(self) -> None:
        """Tell the thread that something has changed, if it does not wait for `changed`."""

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.fetch_forever()
        except BaseException as error:
            with self._shared.changed:
                self._shared.error = error
            self._wake()
        finally:
            self.release()

    def is_closed(self) -> bool:
        """Return True if the thread should end."""
        with self._shared.changed:
            return self._shared.closed

    def readable(self, names: Sequence[str]) -> list[str]:
        """Return the splits to read now, none while too much waits; `changed` is held.

        Pieces of paused splits must not hold up the others.
        """
        shared = self._shared
        waiting = self.is_full() and any(
            piece.position.name not in shared.paused for piece in shared.pieces
        )
        return [] if waiting else [name for name in names if name not in shared.paused]

    def is_full(self) -> bool:
        """Return True if enough waits to be taken; `changed` is held."""
        return self._shared.waiting_bytes >= self._buffer_bytes

    def should_gather(self) -> bool:
        """Return True while small pieces wait for the mailbox; `changed` is held.

        Records that come then had better gather. That costs no time, as they would wait in any case, and
        larger pieces make less work.
        """
        shared = self._shared
        waiting = [
            len(each.marks) for each in shared.pieces if each.position.name not in shared.paused
        ]
        return bool(waiting) and sum(waiting) < _SMALL_ROWS * len(waiting)

    def put(self, *pieces: Piece[P], lost: int = 0) -> None:
        """Hand pieces to the mailbox.

        Args:
            pieces: the pieces.
            lost: records that were deleted before they were read.
        """
        with self._shared.changed:
            self._shared.lost += lost
            self._shared.pieces += pieces
            self._shared.waiting_bytes += sum(piece.size_bytes for piece in pieces)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed, and there is no one left to wake
            self._loop.call_soon_threadsafe(self._arrived.set)


class CommandedReader(FetchedSplitsReader[P]):
    """Its thread makes requests for the mailbox between two fetches, as they may block.

    The positions of completed checkpoints are written to a consumer group, if there is one.
    """

    def __init__(
        self, buffer_bytes: int, policy: OnBadRecord, culprit: str, group: str | None
    ) -> None:
        super().__init__(buffer_bytes, policy, culprit)
        self._group = group
        self._cuts: dict[int, list[P]] = {}
        """The positions of checkpoints that are not complete, by their numbers."""
        self._commands: list[Callable[[], None]] = []
        """The requests for the thread to make; `_shared.changed` guards them."""

    # -- what a subclass has ------------------------------------------------------------------------

    def fetch(self) -> None:
        """Fetch pieces, and `put` them, or wait for some for a short time; called in the thread."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Return True if pieces should be fetched; `changed` is held."""
        raise NotImplementedError

    def write_group(self, positions: Sequence[P]) -> None:
        """Write positions to the group. They are information: failures are logged."""
        raise NotImplementedError

    # -- the mailbox --------------------------------------------------------------------------------

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        if self._group is not None:
            self._cuts[checkpoint_id] = list(self._positions.values())

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        cut = self._cuts.get(checkpoint_id, [])
        self._cuts = {id_: kept for id_, kept in self._cuts.items() if id_ > checkpoint_id}
        if cut:
            self.command(partial(self.write_group, cut))

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._cuts.pop(checkpoint_id, None)

    def command(self, command: Callable[[], None], *, once: bool = False) -> None:
        """Let the thread do something; `once`: unless it is about to do it anyway."""
        with self._shared.changed:
            if self._shared.error is None and not (once and command in self._commands):
                self._commands.append(command)
                self._shared.changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------

    def fetch_forever(self) -> None:
        while (commands := self._commands_or_room()) is not None:
            for command in commands:
                command()
            if not commands:
                self.fetch()

    def _commands_or_room(self) -> list[Callable[[], None]] | None:
        """Wait for commands, and return them; return none if pieces fit, None if closed."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(
                lambda: bool(shared.closed or self._commands or self.has_room())
            )
            commands, self._commands = self._commands, []
            return None if shared.closed and not commands else commands


class LoopedReader(FetchedSplitsReader[P]):
    """Its thread runs an event loop, in which a subclass fetches pieces."""

    def __init__(self, buffer_bytes: int, policy: OnBadRecord, culprit: str) -> None:
        super().__init__(buffer_bytes, policy, culprit)
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    async def fetch_all(self) -> None:
        """Fetch pieces, and `put` them, until the reader is closed or all splits have ended."""
        raise NotImplementedError

    def fetch_forever(self) -> None:
        asyncio.run(self._fetch_in_loop())

    async def _fetch_in_loop(self) -> None:
        self._thread_loop = asyncio.get_running_loop()
        await self.fetch_all()

    def wake_thread(self) -> None:
        self.call_in_thread(self._note_change)

    def _note_change(self) -> None:
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def change(self) -> asyncio.Future[None]:
        """Return a future of the next change of what the thread and the mailbox share."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        return waiter

    def call_in_thread(self, function: Callable[[], object]) -> None:
        """Call a function that does not block in the thread, if it runs."""
        if self._thread_loop is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                self._thread_loop.call_soon_threadsafe(function)

    async def has_room(self, name: str) -> bool:
        """Wait until the split may be read; return False if the reader is closed."""
        while True:
            change = self.change()
            with self._shared.changed:
                there = self._shared.closed or bool(self.readable([name]))
                closed = self._shared.closed
            if there:
                change.cancel()
                return not closed
            await change


def no_stop_any_more(what: str, name: str, end: str, at: str) -> StateError:
    """Return the error for a split that is restored with an end, while its source has none.

    Args:
        what: a split is in this source.
        name: of the split.
        end: shows the end, with a comma before it; empty: it says nothing to users.
        at: where another source would begin.
    """
    return StateError(
        f"{what} {name} is restored with an end{end}, and the source has no stop= any more: {what}s that "
        "have ended already would not be read on",
        fix=f"keep stop=; or give the source another name, with start= at {at} to go on from",
    )


class OneSplit(msgspec.Struct):
    """The one split of a source."""

    position: str | int | None
    """The position of the last record that was read; None: there was none."""

    @property
    def name(self) -> str:
        """The split stands for the whole source."""
        return WHOLE


class OneSplitReader(LoopedReader[OneSplit]):
    """Reads a source with one split: one subtask has it, and the others have nothing to read."""

    def __init__(self, what: str) -> None:
        """Make a reader.

        Args:
            what: names the thread.
        """
        super().__init__(0, OnBadRecord.FAIL, "the source")
        self._what = what
        self._reached: str | int | None = None
        """The position of the last piece."""
        self._fetching: asyncio.Task[Any] | None = None

    async def fetch(self, position: str | int | None) -> None:
        """Hand on what follows a position, in order; return at the end of the source.

        It is cancelled when the reader is closed.
        """
        raise NotImplementedError

    async def hand_on(self, batch: pa.RecordBatch | None, position: str | int | None) -> None:
        """Put records when there is room for them; for `fetch`.

        Args:
            batch: the records; None: only the position has changed.
            position: that of the last record.
        """
        if await self.has_room(WHOLE):
            self._reached = position
            self.put(Piece(OneSplit(position), batch))

    def is_full(self) -> bool:
        return len(self._shared.pieces) >= AHEAD_MAX

    def add_splits(self, splits: Sequence[bytes]) -> None:
        found = [msgspec.msgpack.decode(each, type=OneSplit) for each in splits]
        for split in found:
            self._reached = split.position
        self.begin(found, f"{self._what} of")

    async def fetch_all(self) -> None:
        self._fetching = asyncio.current_task()
        if self.is_closed():
            return
        try:
            await self.fetch(self._reached)
        except asyncio.CancelledError:
            if not self.is_closed():
                raise
            return
        self.put(Piece(OneSplit(self._reached), ended=True))

    def lag_s(self) -> float | None:
        return None

    def close(self) -> None:
        """End the thread, so that it takes nothing that another reader could read."""
        super().close()
        if self._fetching is not None:
            self.call_in_thread(self._fetching.cancel)
        if self._thread is not None:
            self._thread.join(_CLOSE_S_MAX)
