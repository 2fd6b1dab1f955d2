"""A reader whose records are fetched in a thread beside the subtask, some ahead."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa

from ..operators.elements import Batch, ColumnBatch
from ..operators.source import SourceReader
from .functions.loop_thread import LoopThread

AHEAD_MAX: Final = 4
"""The most pieces that are fetched ahead."""


class Split(msgspec.Struct):
    """The one split of such a source."""

    position: str | int | None
    """The position of the last record that was read; None: there was none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Records, and the position of the last one; without records: a position only."""

    data: pa.RecordBatch | None
    position: str | int | None


class FetchingReader(SourceReader):
    """Hands on what `fetch` puts. Only one subtask has a split; the others have nothing to read."""

    def __init__(self, what: str) -> None:
        """Make a reader.

        Args:
            what: names the thread.
        """
        self._what = what
        self._split: Split | None = None
        self._thread: LoopThread | None = None
        self._room = asyncio.Event()
        self._lock = threading.Lock()
        """Guards the fields below, which both threads change."""
        self._pieces: deque[Piece] = deque()
        self._ended = False
        self._failure: BaseException | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    async def fetch(self, position: str | int | None) -> None:
        """Put what follows a position, in order; return at the end of the source.

        It runs in a thread of its own, and is cancelled when the reader is closed.
        """
        raise NotImplementedError

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for each in splits:
            self._split = msgspec.msgpack.decode(each, type=Split)
            self._thread = LoopThread(f"{self._what} of {self.context.operator_name}")
            self._thread.submit(self.fetch(self._split.position)).add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        error: BaseException | None
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        with self._lock:
            self._failure, self._ended = error, True
            self._wake()

    async def put(self, piece: Piece) -> None:
        """Add a piece, when there is room for it; for `fetch`."""
        while True:
            with self._lock:
                if len(self._pieces) < AHEAD_MAX:
                    self._pieces.append(piece)
                    self._wake()
                    return
                self._room.clear()
            await self._room.wait()

    def _wake(self) -> None:
        """End a `wait`; with the lock."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(partial(_finish, future))

    def poll(self) -> Batch | None:
        while self._split is not None:
            with self._lock:
                if not self._pieces:
                    if self._failure is not None:
                        raise self._failure
                    return None
                piece = self._pieces.popleft()
            assert self._thread is not None
            self._thread.soon(self._room.set)
            self._split.position = piece.position
            if piece.data is not None:
                return ColumnBatch(piece.data)
        return None

    async def wait(self) -> None:
        if self._split is None:
            await super().wait()
            return
        with self._lock:
            if self._pieces or self._ended:
                return
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiter = (loop, future)
        await future

    @property
    def finished(self) -> bool:
        if self._split is None:
            return True
        with self._lock:
            return self._ended and self._failure is None and not self._pieces

    def snapshot(self) -> list[bytes]:
        if self._split is None or self.finished:
            return []
        return [msgspec.msgpack.encode(self._split)]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
