"""Rows on their way from the thread that reads them to the mailbox of their subtask.

A server may take its time, so a thread asks it, decodes rows and puts *pieces* into a buffer that is
bounded in bytes. The mailbox takes pieces without waiting, and moves its position behind each that it
takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch, Positions
from ...operators.source import SourceReader
from .client import Address, cannot_use, is_lost, reason_of

P = TypeVar("P")
"""The type of positions."""
ROW_BYTES: Final = 200
"""About what a row takes beside its values, until it is a part of a batch."""
_AWAY_PAUSE_S: Final = 0.5
_log = logging.getLogger("headgate.connectors.postgres")


@dataclass(slots=True)
class Piece(Generic[P]):
    """Consecutive rows of a split, decoded.

    Attributes:
        split: its name.
        batch: the rows; None if there are none.
        inside: returns the position behind its first n rows.
        position: behind all of them.
        offsets: of the rows, for dead letters.
        ready_ms: when the first of them was committed, in ms since 1970; -1: it is not known.
        ended: nothing follows in this split.
    """

    split: str
    batch: pa.RecordBatch | None
    inside: Callable[[int], P]
    position: P
    offsets: npt.NDArray[np.int64]
    size_bytes: int = 0
    ready_ms: int = -1
    ended: bool = False


def no_rows(split: str, position: P, *, ended: bool = False) -> Piece[P]:
    """Return a piece that only moves the position."""
    return Piece(split, None, lambda _: position, position, np.empty(0, np.int64), ended=ended)


@dataclass(slots=True)
class Shared(Generic[P]):
    """The state that the thread and the mailbox share; `changed` guards it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    pieces: deque[Piece[P]] = field(default_factory=deque)
    waiting_bytes: int = 0
    confirm: int = 0
    """The place in the log up to which completed checkpoints have read."""
    error: BaseException | None = None
    closed: bool = False


class Closed(Exception):
    """The reader was closed."""


class PieceReader(SourceReader, Generic[P]):
    """A reader that takes the pieces of a thread."""

    def __init__(self) -> None:
        self._shared: Shared[P] = Shared()

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._arrived.set)

    def _start(self, worker: Worker[P], name: str) -> None:
        threading.Thread(target=worker.run, name=f"postgres {name}", daemon=True).start()

    def _took(self, piece: Piece[P]) -> None:
        """Move the position behind a piece."""
        raise NotImplementedError

    def poll(self) -> Batch | None:
        while True:
            self._arrived.clear()
            piece = self._next_piece()
            if piece is None:
                return None
            self._took(piece)
            if piece.ended:
                self.context.splits.ended(piece.split)
            if piece.batch is not None and piece.batch.num_rows:
                self.context.splits.reading(piece.split)
                places = Positions(self.context.operator_name, piece.split, piece.offsets)
                return ColumnBatch(piece.batch, positions=places)

    def _next_piece(self) -> Piece[P] | None:
        """Take the first piece, or only its first rows."""
        shared, wanted = self._shared, self.rows_wanted
        with shared.changed:
            if not shared.pieces:
                if shared.error is not None:
                    raise shared.error
                return None
            piece = shared.pieces[0]
            if wanted and piece.batch is not None and piece.batch.num_rows > wanted:
                first = Piece(
                    piece.split,
                    piece.batch.slice(0, wanted),
                    piece.inside,
                    piece.inside(wanted),
                    piece.offsets[:wanted],
                )
                inside = piece.inside
                piece.batch = piece.batch.slice(wanted)
                piece.offsets = piece.offsets[wanted:]
                piece.inside = lambda count: inside(wanted + count)
                return first
            shared.pieces.popleft()
            shared.waiting_bytes -= piece.size_bytes
            shared.changed.notify_all()
            return piece

    async def wait(self) -> None:
        await self._arrived.wait()

    def close(self) -> None:
        """Stop the thread, which closes its connections: that may take longer than the subtask can wait."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()


class Worker(Generic[P]):
    """The thread of a reader. It goes on when a server that was away comes back.

    Attributes:
        shared: with the mailbox.
    """

    def __init__(
        self, address: Address, buffer_bytes: int, shared: Shared[P], wake: Callable[[], None]
    ) -> None:
        self._address = address
        self._buffer_bytes = buffer_bytes
        self.shared = shared
        self._wake = wake
        self._pieces = 0
        """The number of pieces that were handed over."""

    def read(self) -> None:
        """Read all that follows the last piece that was handed over."""
        raise NotImplementedError

    def run(self) -> None:
        """Read until there is nothing more or the reader is closed; wait for a server that is away."""
        try:
            while True:
                pieces = self._pieces
                try:
                    self.read()
                except Exception as error:
                    self._raise_unless_away(error, went_on=self._pieces > pieces)
                else:
                    return
        except Closed:
            pass
        except BaseException as error:
            with self.shared.changed:
                self.shared.error = error
            self._wake()

    def _raise_unless_away(self, error: Exception, *, went_on: bool) -> None:
        """Wait a moment if the server is away; else raise.

        A query that takes longer than the server allows is asked again only if something was read.
        """
        import psycopg

        cause = error if isinstance(error, psycopg.Error) else error.__cause__
        stuck = isinstance(cause, psycopg.errors.QueryCanceled) and not went_on
        if cause is None or not is_lost(cause) or stuck:
            if isinstance(error, psycopg.Error):
                raise cannot_use(self._address, error) from error
            raise error
        _log.warning("reading goes on as soon as the server is back: %s", reason_of(cause))
        self.pause(_AWAY_PAUSE_S)

    def pause(self, seconds: float) -> None:
        """Wait for this time, or raise when the reader is closed."""
        with self.shared.changed:
            if self.shared.changed.wait_for(lambda: self.shared.closed, seconds):
                raise Closed

    def hand_over(self, piece: Piece[P], serve: Callable[[], None] = lambda: None) -> None:
        """Give a piece to the mailbox, once it has room; call `serve` now and then until it has."""
        shared = self.shared
        while True:
            with shared.changed:
                closed = shared.closed
                if not closed and (
                    shared.waiting_bytes < self._buffer_bytes or not piece.size_bytes
                ):
                    shared.pieces.append(piece)
                    shared.waiting_bytes += piece.size_bytes
                    self._pieces += 1
                    self._handed_over(piece)
                    break
                shared.changed.wait(1)
            serve()
            if closed:
                raise Closed
        self._wake()

    def _handed_over(self, piece: Piece[P]) -> None:
        """Remember the position from which reading goes on."""
        raise NotImplementedError
