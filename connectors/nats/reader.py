"""Reads the splits of one subtask: a thread fetches and decodes, the mailbox takes finished pieces.

Each split has a consumer in the server, which is made for the position of the reader and is never asked
where it stands. Its messages are counted: if one was sent and did not arrive, another consumer is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import SourceError
from ...operators.elements import Positions
from ..fetched_splits import LoopedReader, Piece, no_stop_any_more
from ..messages import MessageDecoder
from .client import AWAY_S, PAUSE_S, cannot_use, connected, failures, is_lost, is_missing, reason_of
from .model import METADATA, REJECTED_SCHEMA, NatsSettings, NatsSplit, decoded

_MESSAGE_BYTES: Final = 500
"""About what a message takes beside its data."""
_FIRST_COUNT: Final = 64
"""The number of messages that are asked for while nothing is known about their size."""
_WAIT_S: Final = 0.5
"""A request waits for messages for this time."""
_UNUSED_S: Final = 60.0
"""The server forgets a consumer that was not used for this time; another one is made then."""
_IDLE_MAX: Final = 10
"""After this number of requests without the messages that were sent, a consumer is made again."""
_log = logging.getLogger("headgate.connectors.nats")


class _Interrupted(Exception):
    """Raised if a consumer can no longer be used, and another one should be made."""


class NatsReader(LoopedReader[NatsSplit]):
    """Reads some splits."""

    def __init__(self, settings: NatsSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the data of messages.
            schema: the columns to return.
        """
        super().__init__(
            settings.buffer_bytes, settings.on_bad_record, "what publishes to the stream"
        )
        self._settings = settings
        self._decoder = MessageDecoder(
            settings.columns.format.decoder(values), schema, settings.columns.metadata, METADATA
        )
        self._fetched: dict[str, NatsSplit] = {}
        """The positions of the thread, of the splits that have not ended there."""
        self._pending: dict[str, int] = {}
        """The messages of splits that the server had not sent when it sent the last one."""
        self._count = min(_FIRST_COUNT, settings.batch_rows)
        self._worked_s = 0.0
        """When the server answered last."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [decoded(split) for split in splits]
        for split in added:
            if split.stop is not None and self._settings.stop is None:
                raise no_stop_any_more("split", split.name, f", {split.stop}", "the message")
            self._fetched[split.name] = msgspec.structs.replace(split)
        self.begin(added, "nats")

    def cut(self, piece: Piece[NatsSplit], rows: int) -> NatsSplit:
        return msgspec.structs.replace(piece.position, after=int(piece.marks[rows - 1]))

    def places(self, piece: Piece[NatsSplit]) -> Positions:
        sequences = np.array(piece.marks, np.int64)
        return Positions(self.context.operator_name, piece.position.name, sequences)

    def first_bad(self, piece: Piece[NatsSplit]) -> tuple[str, str, bytes]:
        message, reason = piece.bad[0]
        where = f"{piece.position.stream} sequence {message.metadata.sequence.stream}"
        return f"{where} subject {message.subject}", reason, message.data

    def rejected(self, piece: Piece[NatsSplit]) -> pa.RecordBatch:
        rows = [
            {
                "stream": piece.position.stream,
                "sequence": message.metadata.sequence.stream,
                "subject": message.subject,
                "reason": reason,
                "data": message.data,
            }
            for message, reason in piece.bad
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
        self._worked()
        name = f"headgate-{context.job_name}-{context.operator_name}"
        while self._fetched and not self.is_closed():
            try:
                async with connected(settings.servers, name) as connection:
                    await connection.until_lost(self._read_all(connection.jetstream))
            except _Interrupted as error:
                _log.info("the NATS source asks again: %s", error)
            except failures() as error:
                if self.is_closed():
                    return
                if not is_lost(error):
                    raise _cannot_read(settings, error) from error
                if context.clock.monotonic() - self._worked_s > AWAY_S:
                    raise cannot_use(settings.servers, error) from error
                _log.warning("the NATS servers are tried again: %s", reason_of(error))
                await asyncio.sleep(PAUSE_S)

    def _worked(self) -> None:
        self._worked_s = self.context.clock.monotonic()

    async def _read_all(self, jetstream: Any) -> None:
        tasks = [asyncio.create_task(self._read(jetstream, name)) for name in list(self._fetched)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, jetstream: Any, name: str) -> None:
        """Read a split until it ends, the reader is closed, or something fails."""
        at = self._fetched[name]
        consumer = f"headgate-{secrets.token_hex(8)}"
        messages, pending = await self._consume(jetstream, at, consumer)
        received = 0
        idle = 0
        try:
            if at.stop is not None and not pending:
                await self._check_begin(jetstream, at)
                self._end(at)
                return
            while await self.has_room(name):
                state = (await jetstream.stream_info(at.stream)).state
                self._worked()
                self._skip_lost(at, state)
                try:
                    found = await messages.fetch(self._count, timeout=_WAIT_S)
                except TimeoutError:
                    found = []
                if found:
                    received, idle = received + len(found), 0
                    if found[-1].metadata.sequence.consumer != received:
                        raise _Interrupted(f"messages of `{name}` did not arrive")
                    await self._take(jetstream, at, found)
                else:
                    told = await messages.consumer_info()
                    self._worked()
                    idle += 1
                    if told.delivered.consumer_seq != received and idle > _IDLE_MAX:
                        raise _Interrupted(f"messages of `{name}` did not arrive")
                    if told.delivered.consumer_seq == received and not told.num_pending:
                        # The filter does not match the messages up to here, so the split has passed them.
                        self._catch_up(at, state.last_seq)
                if name not in self._fetched:
                    return
        except Exception as error:
            if is_missing(error) and "consumer" in reason_of(error).lower():
                raise _Interrupted(f"the server has forgotten the consumer of `{name}`") from error
            raise
        finally:
            with contextlib.suppress(Exception):
                await jetstream.delete_consumer(at.stream, consumer)

    async def _consume(self, jetstream: Any, at: NatsSplit, consumer: str) -> tuple[Any, int]:
        """Make a consumer that begins at a position; return it, and how many messages it has."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        config = ConsumerConfig(
            name=consumer,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=at.after + 1,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            inactive_threshold=_UNUSED_S,
            filter_subject=at.subject or None,
        )
        told = await jetstream.add_consumer(at.stream, config=config)
        self._worked()
        self._pending[at.name] = told.num_pending
        bound = await jetstream.pull_subscribe_bind(consumer=consumer, stream=at.stream)
        return bound, told.num_pending

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
        if self._settings.on_lost == "fail":
            raise SourceError(
                f"a stream has lost messages split=`{at.name}`: {what}",
                fix="keep messages for longer (max_age, max_bytes, max_msgs); on_lost='skip' goes on with "
                "the first one that is left",
            )
        _log.warning("the job goes on without messages split=`%s`: %s", at.name, what)
        with self._shared.changed:
            self._shared.lost += first - after - 1

    async def _take(self, jetstream: Any, at: NatsSplit, found: list[Any]) -> None:
        """Hand messages to the mailbox."""
        metas = [message.metadata for message in found]
        sequences = [meta.sequence.stream for meta in metas]
        # Gaps are of other subjects, or of deleted messages; the stream may have been trimmed just now.
        if sequences[-1] - at.after != len(sequences):
            state = (await jetstream.stream_info(at.stream)).state
            after = at.after
            for sequence in sequences:
                if sequence > after + 1 and state.first_seq > after + 1:
                    self._lose(at, after, min(sequence, state.first_seq))
                after = sequence
        stop = at.stop
        kept = [n for n, sequence in enumerate(sequences) if stop is None or sequence <= stop]
        pending = metas[-1].num_pending
        ended = stop is not None and (sequences[-1] >= stop or not pending)
        self._pending[at.name] = 0 if ended else pending
        at.after = sequences[-1] if stop is None else min(stop, sequences[-1])
        self.put(self._piece(at, [found[n] for n in kept], [metas[n] for n in kept], ended))
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
        self, at: NatsSplit, found: list[Any], metas: list[Any], ended: bool
    ) -> Piece[NatsSplit]:
        """Decode messages of one split."""
        sizes = [_MESSAGE_BYTES + len(message.data) for message in found]
        if sizes:
            fitting = self._settings.buffer_bytes // 4 // max(sizes)
            self._count = max(1, min(self._settings.batch_rows, fitting, self._count * 4))
        decoded = self._decoder.decode(
            list(zip(found, metas, strict=True)),
            [message.data for message in found],
            lambda each: f"{at.stream} sequence {each[1].sequence.stream}",
            _METADATA,
        )
        return Piece(
            msgspec.structs.replace(at),
            decoded.batch,
            [meta.sequence.stream for _, meta in decoded.good],
            [(message, reason) for (message, _), reason in decoded.bad],
            sum(sizes) + _MESSAGE_BYTES,
            int(metas[0].timestamp.timestamp() * 1000) if metas else -1,
            ended,
        )


_METADATA: Final[Mapping[str, Callable[[tuple[Any, Any]], Any]]] = {
    "subject": lambda each: each[0].subject,
    "sequence": lambda each: each[1].sequence.stream,
    "timestamp": lambda each: each[1].timestamp,
    "headers": lambda each: _headers_of(each[0]),
}
"""The parts of a message, which comes with its metadata in the stream, beside its data."""


def _headers_of(message: Any) -> list[dict[str, str]] | None:
    if not message.headers:
        return None
    return [{"name": name, "value": value} for name, value in message.headers.items()]


def _cannot_read(settings: NatsSettings, error: BaseException) -> SourceError:
    return SourceError(
        f"a stream cannot be read stream=`{settings.stream}` servers=`{settings.servers}`: "
        f"{reason_of(error)}",
        fix="check that the stream is still there, that it keeps messages by limits and is no work queue, "
        "and the rights of the user",
    )
