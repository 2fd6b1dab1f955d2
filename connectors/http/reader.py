"""A reader whose records are fetched in a thread beside the subtask, some ahead."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import BadRecordError, SourceError
from ...operators.async_calls.in_flight import RETRIES_COUNTER
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.source import SourceReader
from ..formats.format import Decode
from ..functions.loop_thread import LoopThread
from .client import HttpClient, HttpSettings

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

    def __init__(self, http: HttpSettings, what: str) -> None:
        """Make a reader.

        Args:
            http: of the requests.
            what: names the thread.
        """
        self._http = http
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

    async def fetch(self, client: HttpClient, position: str | int | None) -> None:
        """Put what follows a position, in order; return at the end of the source.

        It runs in the thread of the requests, and is cancelled when the reader is closed.
        """
        raise NotImplementedError

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._retried = context.metrics.counter(RETRIES_COUNTER)

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for each in splits:
            self._split = msgspec.msgpack.decode(each, type=Split)
            self._thread = LoopThread(f"{self._what} of {self.context.operator_name}")
            self._thread.submit(self._run(self._split.position)).add_done_callback(self._done)

    async def _run(self, position: str | int | None) -> None:
        context = self.context
        seed = f"{context.run_id} {context.operator_name}"
        client = HttpClient(self._http, context.clock, 1, self._retried.inc, seed)
        await client.open()
        try:
            await self.fetch(client, position)
        finally:
            await client.close()

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


def decoded(payloads: list[bytes], decode: Decode, shown: str) -> pa.RecordBatch:
    """Decode payloads, at least one.

    Args:
        payloads: of the records.
        decode: the decoder.
        shown: the address, for errors.

    Raises:
        BadRecordError: one cannot be decoded.
    """
    found = decode(payloads)
    if found.bad:
        index, reason = found.bad[0]
        raise BadRecordError(
            f"a record cannot be read url=`{shown}` record=`{index + 1} of {len(payloads)}`: {reason}",
            fix="correct the schema, or what the service gives",
        )
    batch = found.batch()
    if batch is None or batch.num_rows != len(payloads):
        raise SourceError(f"records were lost while they were decoded url=`{shown}`")
    return batch


def refused(client: HttpClient, text: str) -> SourceError:
    """Return the error for an answer that another request would not change."""
    return SourceError(
        f"the service refuses the request url=`{client.settings.shown}`: {text}",
        fix="check the address and the credentials",
    )


def value_of(found: Any, column: str, shown: str) -> str | int:
    """Return the position of a record, which has this value in the column of positions."""
    if found is None:
        raise SourceError(f"a record has no position url=`{shown}` column=`{column}`")
    value: str | int = found
    return value
