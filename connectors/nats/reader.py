"""Reads the splits of one subtask: a thread fetches and decodes, the mailbox takes finished pieces.

Each split has a consumer in the server, which is made for the position of the reader and is never asked
where it stands. Its messages are counted: if one was sent and did not arrive, another consumer is made.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections.abc import Callable, Mapping, Sequence
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
    reason_of,
)
from .consumer import Consumer, InterruptedConsumerError
from .frames import Message, headers_of, place_of, sequence_of
from .model import METADATA, REJECTED_SCHEMA, NatsSettings, NatsSplit, decoded

_MESSAGE_BYTES: Final = 500
"""About what a message takes beside its data."""
_FIRST_COUNT: Final = 64
"""The number of messages that are asked for while nothing is known about their size."""
_log = logging.getLogger("headgate.connectors.nats")


class NatsReader(LoopedReader[NatsSplit]):
    """Reads some splits."""

    def __init__(self, settings: NatsSettings, values: pa.Schema, schema: pa.Schema) -> None:
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
        self._fetched: dict[str, NatsSplit] = {}
        """The positions of the thread, of the splits that have not ended there."""
        self._pending: dict[str, int] = {}
        """The messages of splits that the server had not sent when it sent the last one."""
        self._count = min(_FIRST_COUNT, reading.batch_rows)

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [decoded(split) for split in splits]
        for split in added:
            if split.stop is not None and self._settings.reading.stop is None:
                raise no_stop_any_more("split", split.name, f", {split.stop}", "the message")
            self._fetched[split.name] = msgspec.structs.replace(split)
        self.begin(added, "nats")

    def cut(self, piece: Piece[NatsSplit], rows: int) -> NatsSplit:
        return msgspec.structs.replace(piece.position, after=int(piece.marks[rows - 1]))

    def places(self, piece: Piece[NatsSplit]) -> Positions:
        sequences = np.array(piece.marks, np.int64)
        return Positions(self.context.operator_name, piece.position.name, sequences)

    def first_bad(self, piece: Piece[NatsSplit]) -> tuple[str, str, bytes]:
        (sequence, message), reason = piece.bad[0]
        where = f"{piece.position.stream} sequence {sequence}"
        return f"{where} subject {message.subject.decode()}", reason, message.data

    def rejected(self, piece: Piece[NatsSplit]) -> pa.RecordBatch:
        rows = [
            {
                "stream": piece.position.stream,
                "sequence": sequence,
                "subject": message.subject.decode(),
                "reason": reason,
                "data": message.data,
            }
            for (sequence, message), reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    def lag_records(self) -> dict[str, int] | None:
        """Return the messages left by split, as of the last answer of the server."""
        lag = dict(self._pending)
        with self._shared.changed:
            for piece in self._shared.pieces:
                name = piece.position.name
                lag[name] = lag.get(name, 0) + len(piece.marks) + len(piece.bad)
        return lag

    # -- the thread ---------------------------------------------------------------------------------

    async def fetch_all(self) -> None:
        """Read all splits, on another connection whenever one is lost."""
        settings, context = self._settings, self.context
        self._outage = Outage(context.clock, AWAY_S)
        name = f"headgate-{context.job_name}-{context.operator_name}"
        while self._fetched and not self.is_closed():
            try:
                async with connected(settings.servers, name) as connection:
                    await connection.until_lost(self._read_all(connection))
            except InterruptedConsumerError as error:
                _log.info("the NATS source asks again: %s", error)
            except failures() as error:
                if self.is_closed():
                    return
                if not is_lost(error):
                    raise _cannot_read(settings, error) from error
                if self._outage.is_too_long():
                    raise cannot_use(settings.servers, error) from error
                _log.warning("the NATS servers are tried again: %s", reason_of(error))
                await asyncio.sleep(PAUSE_S)

    async def _read_all(self, connection: Connection) -> None:
        tasks = [asyncio.create_task(self._read(connection, name)) for name in list(self._fetched)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, connection: Connection, name: str) -> None:
        """Read a split until it ends, the reader is closed, or something fails."""
        at, jetstream = self._fetched[name], connection.jetstream
        consumer = Consumer(connection, at)
        await consumer.make()
        self._outage.end()
        self._pending[name] = consumer.pending
        try:
            if at.stop is not None and not consumer.pending:
                await self._check_begin(jetstream, at)
                self._end(at)
                return
            while await self.has_room(name):
                state = (await jetstream.stream_info(at.stream)).state
                self._outage.end()
                self._skip_lost(at, state)
                found = await consumer.fetch(self._count)
                if found:
                    await self._take(jetstream, at, found, consumer.pending)
                else:
                    passed = await consumer.has_passed_all()
                    self._outage.end()
                    if passed:
                        # The filter does not match the messages up to here, so the split has passed them.
                        self._catch_up(at, state.last_seq)
                if name not in self._fetched:
                    return
        finally:
            await consumer.delete()

    async def _check_begin(self, jetstream: Any, at: NatsSplit) -> None:
        self._skip_lost(at, (await jetstream.stream_info(at.stream)).state)

    def _skip_lost(self, at: NatsSplit, state: Any) -> None:
        """Handle messages that were deleted before they were read.

        Raises:
            SourceError: some were, and the user has not chosen to skip them; or the stream is another one.
        """
        if state.last_seq < at.after:
            raise SourceError(
                f"a stream has no message at the position of the job stream=`{at.stream}` "
                f"position=`{at.after}`: its last one is {state.last_seq}; was it deleted and made again?",
                fix="give the source another name, so that it begins from the start",
            )
        first = state.first_seq if state.messages else state.last_seq + 1
        if first <= at.after + 1:
            return
        if at.after:  # else the source begins with what there is
            self._lose(at, at.after, first)
        at.after = first - 1

    def _lose(self, at: NatsSplit, after: int, first: int) -> None:
        """Note that the messages behind `after` and before `first` are gone."""
        which = " that may have been of the subject" if at.subject else ""
        what = f"messages {after + 1} to {first - 1}{which} were deleted before they were read"
        if self._settings.reading.on_lost == "fail":
            raise SourceError(
                f"a stream has lost messages split=`{at.name}`: {what}",
                fix="keep messages for longer (max_age, max_bytes, max_msgs); on_lost='skip' goes on with "
                "the first one that is left",
            )
        _log.warning("the job goes on without messages split=`%s`: %s", at.name, what)
        with self._shared.changed:
            self._shared.lost += first - after - 1

    async def _take(
        self, jetstream: Any, at: NatsSplit, found: list[Message], pending: int
    ) -> None:
        """Hand messages to the mailbox."""
        sequences = list(map(sequence_of, found))
        # Gaps are of other subjects, or of deleted messages; the stream may have been trimmed just now.
        if sequences[-1] - at.after != len(sequences):
            state = (await jetstream.stream_info(at.stream)).state
            after = at.after
            for sequence in sequences:
                if sequence > after + 1 and state.first_seq > after + 1:
                    self._lose(at, after, min(sequence, state.first_seq))
                after = sequence
        stop = at.stop
        kept = len(found) if stop is None else bisect.bisect_right(sequences, stop)
        ended = stop is not None and (sequences[-1] >= stop or not pending)
        self._pending[at.name] = 0 if ended else pending
        at.after = sequences[-1] if stop is None else min(stop, sequences[-1])
        self.put(self._piece(at, found[:kept], sequences[:kept], ended))
        if ended:
            del self._fetched[at.name]

    def _end(self, at: NatsSplit) -> None:
        self._pending[at.name] = 0
        self.put(Piece(msgspec.structs.replace(at), ended=True))
        del self._fetched[at.name]

    def _catch_up(self, at: NatsSplit, last: int) -> None:
        """Move the position behind messages that the filter does not match."""
        self._pending[at.name] = 0
        if at.stop is not None and last >= at.stop:
            self._end(at)
        elif last > at.after:
            at.after = last
            self.put(Piece(msgspec.structs.replace(at)))

    def _piece(
        self, at: NatsSplit, found: list[Message], sequences: list[int], ended: bool
    ) -> Piece[NatsSplit]:
        """Decode messages of one split."""
        sizes = [_MESSAGE_BYTES + len(message.data) for message in found]
        if sizes:
            fitting = self._settings.reading.buffer_bytes // 4 // max(sizes)
            self._count = max(1, min(self._settings.reading.batch_rows, fitting, self._count * 4))
        decoded = self._decoder.decode(
            list(zip(sequences, found, strict=True)),
            [message.data for message in found],
            lambda each: f"{at.stream} sequence {each[0]}",
            _METADATA,
        )
        return Piece(
            msgspec.structs.replace(at),
            decoded.batch,
            [sequence for sequence, _ in decoded.good],
            decoded.bad,
            sum(sizes) + _MESSAGE_BYTES,
            place_of(found[0]).time_ns // 1_000_000 if found else -1,
            ended,
        )


_METADATA: Final[Mapping[str, Callable[[tuple[int, Message]], Any]]] = {
    "subject": lambda each: each[1].subject.decode(),
    "sequence": lambda each: each[0],
    "timestamp": lambda each: place_of(each[1]).time_ns // 1000,
    "headers": lambda each: headers_of(each[1]),
}
"""The parts of a message, which comes with its number in the stream, beside its data."""


def _cannot_read(settings: NatsSettings, error: BaseException) -> SourceError:
    return SourceError(
        f"a stream cannot be read stream=`{settings.stream}` servers=`{settings.servers}`: "
        f"{reason_of(error)}",
        fix="check that the stream is still there, that it keeps messages by limits and is no work queue, "
        "and the rights of the user",
    )
