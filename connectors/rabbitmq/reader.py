"""Reads the splits of one subtask: a thread fetches and decodes, the mailbox takes finished pieces.

A broker sends whole chunks of messages, and one more for each credit it is given. The first chunk may begin
before the position; what is before it is left out. Offsets have gaps where the broker keeps notes of its
own, so whether messages are lost is told by the first offset that the stream still has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import SourceError
from ...operators.elements import Positions
from ..fetched_splits import LoopedReader, Piece, no_stop_any_more
from ..outages import Outage
from .client import (
    AWAY_S,
    PAUSE_S,
    Connection,
    cannot_use,
    connected,
    failures,
    is_lost,
    is_missing,
    no_stream,
    reason_of,
)
from .envelope import Content, NotAMessageError, unwrap
from .model import METADATA, REJECTED_SCHEMA, RabbitSettings, StreamSplit, decoded

_MESSAGE_BYTES: Final = 200
"""About what a message takes beside its data."""
_CREDIT: Final = 4
"""The number of chunks that a broker sends ahead."""
_LOOK_S: Final = 10.0
"""The end of a stream is asked for this often, which also tells whether the broker still answers."""
_READING: Final = 0
"""The number of the subscription."""
_log = logging.getLogger("headgate.connectors.rabbitmq")


class RabbitReader(LoopedReader[StreamSplit]):
    """Reads some splits, each on a connection of its own."""

    def __init__(self, settings: RabbitSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the data of messages.
            schema: the columns to return.
        """
        reading = settings.reading
        super().__init__(
            reading.buffer_bytes,
            reading.on_bad_record,
            "what publishes to the stream",
        )
        self._settings = settings
        self._decoder = reading.columns.decoder(values, schema, METADATA)
        self._fetched: dict[str, StreamSplit] = {}
        """The positions of the thread, of the splits that have not ended there."""
        self._ends: dict[str, int] = {}
        """The offsets behind the last messages of streams, as far as they are known."""
        self._taken: dict[str, int] = {}
        """The positions of the mailbox, of all splits."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [decoded(split) for split in splits]
        for split in added:
            if split.stop is not None and self._settings.reading.stop is None:
                raise no_stop_any_more("split", split.name, f", {split.stop}", "the message")
            self._fetched[split.name] = msgspec.structs.replace(split)
            self._taken[split.name] = split.next
            if split.stop is not None:
                self._ends[split.name] = split.stop + 1
        self.begin(added, "rabbitmq")

    def taken(self, piece: Piece[StreamSplit]) -> None:
        self._taken[piece.position.name] = piece.position.next

    def cut(self, piece: Piece[StreamSplit], rows: int) -> StreamSplit:
        return msgspec.structs.replace(piece.position, next=int(piece.marks[rows - 1]) + 1)

    def places(self, piece: Piece[StreamSplit]) -> Positions:
        offsets = np.array(piece.marks, np.int64)
        return Positions(self.context.operator_name, piece.position.name, offsets)

    def first_bad(self, piece: Piece[StreamSplit]) -> tuple[str, str, bytes]:
        (offset, data), reason = piece.bad[0]
        return f"{piece.position.stream} offset {offset}", reason, data

    def rejected(self, piece: Piece[StreamSplit]) -> pa.RecordBatch:
        rows = [
            {
                "stream": piece.position.stream,
                "offset": offset,
                "reason": reason,
                "data": data,
            }
            for (offset, data), reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    def lag_records(self) -> dict[str, int] | None:
        """Return the offsets left by split, as of the last look at the end of each stream."""
        taken = dict(self._taken)
        return {name: max(0, end - taken[name]) for name, end in dict(self._ends).items()}

    # -- the thread ---------------------------------------------------------------------------------

    async def fetch_all(self) -> None:
        """Read splits, also those that come later, until all end, the reader is closed, or one fails."""
        tasks: dict[str, asyncio.Task[None]] = {}
        self._outage = Outage(self.context.clock, AWAY_S)
        try:
            while True:
                change = self.change()
                for name, at in list(self._fetched.items()):
                    if name not in tasks:
                        tasks[name] = asyncio.create_task(self._follow(at))
                going_on = {task for task in tasks.values() if not task.done()}
                if not going_on:
                    change.cancel()
                    return
                await asyncio.wait({*going_on, change}, return_when=asyncio.FIRST_COMPLETED)
                for task in going_on:
                    if task.done():
                        task.result()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow(self, at: StreamSplit) -> None:
        """Read a split, on another connection whenever one is lost."""
        settings, context = self._settings, self.context
        name = f"headgate-{context.job_name}-{context.operator_name}"
        while at.name in self._fetched and not self.is_closed():
            try:
                async with connected(settings.broker, at.stream, name) as connection:
                    await connection.until_lost(self._read(connection, at))
            except failures() as error:
                if is_missing(error):
                    raise no_stream(settings.broker, at.stream) from error
                lost = is_lost(error)
                if not lost or self._outage.is_too_long():
                    raise cannot_use(settings.broker, error) from error
                _log.warning("the RabbitMQ broker is tried again: %s", reason_of(error))
                await asyncio.sleep(PAUSE_S)

    async def _read(self, connection: Connection, at: StreamSplit) -> None:
        """Read a split on a connection until it ends, the reader is closed, or something fails."""
        from rstream import schema
        from rstream.constants import OffsetType

        clock = self.context.clock
        frames: asyncio.Queue[Any] = asyncio.Queue()
        look_s = clock.monotonic()
        where = schema.OffsetSpec.from_params(OffsetType.OFFSET, at.next)
        await self._look(connection, at)
        if at.stop is not None and at.next > at.stop:
            self._end(at)
            return
        await connection.subscribe(_READING, where, frames.put_nowait, _CREDIT)
        while await self.has_room(at.name):
            if clock.monotonic() - look_s > _LOOK_S:
                await self._look(connection, at)
                look_s = clock.monotonic()
            frame = await self._next(frames)
            if frame is None:
                continue
            await self._take(connection, at, frame)
            if at.name not in self._fetched:
                return
            await connection.client.credit(_READING, 1)

    async def _look(self, connection: Connection, at: StreamSplit) -> None:
        """Note the end of the stream.

        Raises:
            SourceError: it is before the position.
        """
        end = await connection.end()
        self._outage.end()
        if end < at.next:
            raise _another_stream(at, end)
        if at.stop is None:
            self._ends[at.name] = end

    async def _next(self, frames: asyncio.Queue[Any]) -> Any:
        """Return the next chunk; None: the reader is closed, or should look at the stream."""
        change = self.change()
        getting = asyncio.ensure_future(frames.get())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await asyncio.wait({getting, change}, return_when=asyncio.FIRST_COMPLETED)
            return getting.result() if getting.done() else None
        finally:
            change.cancel()
            getting.cancel()

    async def _take(self, connection: Connection, at: StreamSplit, frame: Any) -> None:
        """Hand the messages of a chunk to the mailbox."""
        self._outage.end()
        first, messages = int(frame.chunk_first_offset), frame.get_messages()
        behind = first + len(messages)
        if first > at.next:
            await self._check_gap(connection, at, first)
        skipped = max(0, at.next - first)
        stop = behind if at.stop is None else min(behind, at.stop + 1)
        rows = self._settings.reading.batch_rows
        for start in range(skipped, stop - first, rows):
            part = messages[start : min(start + rows, stop - first)]
            at.next = first + start + len(part)
            self.put(self._piece(at, first + start, part, int(frame.timestamp)))
        if at.stop is None:
            self._ends[at.name] = max(self._ends.get(at.name, 0), behind)
        elif behind > at.stop:
            self._end(at)

    def _end(self, at: StreamSplit) -> None:
        at.next = max(at.next, at.stop + 1 if at.stop is not None else 0)
        self.put(Piece(msgspec.structs.replace(at), ended=True))
        del self._fetched[at.name]

    async def _check_gap(self, connection: Connection, at: StreamSplit, first: int) -> None:
        """Handle offsets that were not sent: notes of the broker, or messages that were deleted.

        Raises:
            SourceError: messages were deleted, and the user has not chosen to skip them.
        """
        begins = await connection.first() if at.next else None
        if begins is not None and begins > at.next:
            what = f"messages {at.next} to {begins - 1} were deleted before they were read"
            if self._settings.reading.on_lost == "fail":
                raise SourceError(
                    f"a stream has lost messages stream=`{at.name}`: {what}",
                    fix="keep messages for longer (max-age, max-length-bytes); on_lost='skip' goes on with "
                    "the first one that is left",
                )
            _log.warning("the job goes on without messages stream=`%s`: %s", at.name, what)
            with self._shared.changed:
                self._shared.lost += begins - at.next
        at.next = first

    def _piece(
        self, at: StreamSplit, first: int, messages: list[bytes], time_ms: int
    ) -> Piece[StreamSplit]:
        """Decode messages of one split, the first of which has a given offset."""
        size = _MESSAGE_BYTES + sum(_MESSAGE_BYTES + len(each) for each in messages)
        contents, bad = self._unwrapped(first, messages)
        time = datetime.fromtimestamp(time_ms / 1000, UTC)
        found = self._decoder.decode(
            contents,
            [content.data for _, content in contents],
            lambda each: f"{at.stream} offset {each[0]}",
            {
                "stream": lambda each: at.stream,
                "offset": lambda each: each[0],
                "timestamp": lambda each: time,
                "properties": lambda each: _properties_of(each[1]),
            },
        )
        bad += [((offset, content.data), reason) for (offset, content), reason in found.bad]
        good = [offset for offset, _ in found.good]
        return Piece(msgspec.structs.replace(at), found.batch, good, sorted(bad), size, time_ms)

    def _unwrapped(
        self, first: int, messages: list[bytes]
    ) -> tuple[list[tuple[int, Content]], list[tuple[Any, str]]]:
        """Return the offsets and contents of messages, and those that are no messages."""
        if self._settings.envelope == "none":
            return [(offset, Content(each)) for offset, each in enumerate(messages, first)], []
        contents: list[tuple[int, Content]] = []
        bad: list[tuple[Any, str]] = []
        for offset, message in enumerate(messages, first):
            try:
                contents.append((offset, unwrap(message)))
            except NotAMessageError as error:
                bad.append(((offset, message), f"{error}; envelope='none' takes bytes as they are"))
        return contents, bad


def _properties_of(content: Content) -> list[dict[str, str]] | None:
    if content.properties is None:
        return None
    return [{"name": name, "value": value} for name, value in content.properties]


def _another_stream(at: StreamSplit, end: int) -> SourceError:
    return SourceError(
        f"a stream has no message at the position of the job stream=`{at.stream}` "
        f"position=`{at.next}`: its last one is {end - 1}; was it deleted and made again?",
        fix="give the source another name, so that it begins from the start",
    )
