"""Reads the splits of one subtask: a thread fetches and decodes, the mailbox takes finished pieces.

Each split has a reader of the client, which connects again by itself. It begins with the whole entry at
the position, and places tell what was read before. Brokers skip messages that have been deleted without a
word. They delete whole *ledgers*, from the oldest one on, so no message behind the position was deleted as
long as its ledger is there: that is checked when a message comes from another ledger.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import SourceError
from ..fetched_splits import CommandedReader, Piece, no_stop_any_more
from ..outages import Outage
from .client import ANSWER_S_MAX, AWAY_S, PAUSE_S, failures, is_lost, reason_of
from .model import (
    METADATA,
    NOWHERE,
    REJECTED_SCHEMA,
    Place,
    PulsarSettings,
    TopicSplit,
    decoded,
    place_of,
    text_of,
)

_MESSAGE_BYTES: Final = 500
"""About what a message takes beside its data."""
_PIECE_BYTES: Final = 4 << 20
"""A piece gets no further message when it has this size."""
_WAIT_MS: Final = 5
"""When there is nothing to read, one split after the other is waited for, each for this time."""
_LOOK_S: Final = 1.0
"""While no message comes, the reader asks this often whether the brokers are there."""
_log = logging.getLogger("headgate.connectors.pulsar")


@dataclass(slots=True)
class _Followed:
    """A split that has not ended in the thread.

    Attributes:
        at: the position of the thread.
        outage: of its broker.
        reader: of the client; None: it is not connected.
        consumer: of the subscription; None: there is none, or it is not connected.
    """

    at: TopicSplit
    outage: Outage
    reader: Any = None
    consumer: Any = None


class PulsarReader(CommandedReader[TopicSplit]):
    """Reads some splits."""

    def __init__(self, settings: PulsarSettings, values: pa.Schema, schema: pa.Schema) -> None:
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
            "what publishes to the topic",
            settings.subscription,
        )
        self._settings = settings
        self._decoder = reading.columns.decoder(values, schema, METADATA)
        self._followed: dict[str, _Followed] = {}
        self._turn = 0
        self._looked_s = 0.0

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [decoded(split) for split in splits]
        for at in added:
            if at.stop is not None and self._settings.reading.stop is None:
                raise no_stop_any_more("split", at.name, f", {text_of(at.stop)}", "the time")
        with self._shared.changed:
            for at in added:
                outage = Outage(self.context.clock, AWAY_S)
                self._followed[at.name] = _Followed(msgspec.structs.replace(at), outage)
            self._shared.changed.notify_all()
        self.begin(added, "pulsar")

    def cut(self, piece: Piece[TopicSplit], rows: int) -> TopicSplit:
        return msgspec.structs.replace(piece.position, after=piece.marks[rows - 1])

    def first_bad(self, piece: Piece[TopicSplit]) -> tuple[str, str, bytes]:
        (place, message), reason = piece.bad[0]
        return f"{piece.position.topic} {text_of(place)}", reason, message.data()

    def rejected(self, piece: Piece[TopicSplit]) -> pa.RecordBatch:
        rows = [
            {
                "topic": piece.position.topic,
                "message_id": text_of(place),
                "reason": reason,
                "data": message.data(),
            }
            for (place, message), reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    # -- the thread ---------------------------------------------------------------------------------

    def fetch_forever(self) -> None:
        with self._settings.cluster.client() as self._client:
            super().fetch_forever()

    def has_room(self) -> bool:
        return not self.should_gather() and bool(self.readable(list(self._followed)))

    def fetch(self) -> None:
        """Take what has come of all splits; if nothing has, wait for one of them for a short time."""
        splits = list(self._followed.values())
        self._turn = (self._turn + 1) % len(splits)
        came = False
        for split in splits[self._turn :] + splits[: self._turn]:
            came |= self._may_read(split) and self._take(split, 0)
        if not came:
            split = splits[self._turn]
            if not (self._may_read(split) and self._take(split, _WAIT_MS)):
                self._look()

    def _may_read(self, split: _Followed) -> bool:
        with self._shared.changed:
            return not self._shared.closed and bool(self.readable([split.at.name]))

    def _take(self, split: _Followed, wait_ms: int) -> bool:
        """Hand what has come of a split to the mailbox; return False if nothing has come.

        Args:
            split: its position moves.
            wait_ms: how long to wait for a message.
        """
        try:
            if split.reader is None:
                self._connect(split)
            found = self._received(split.reader, wait_ms)
            if not found:
                return False
            self._check_kept(split.at, found[-1][0][0])
        except failures() as error:
            self._disconnect(split, error)
            return False
        split.outage.end()
        self._put(split, found)
        return True

    def _connect(self, split: _Followed) -> None:
        """Make a reader of the client that begins with the entry at the position."""
        import pulsar

        if self._settings.subscription is not None:
            self._subscribe(split)
        (ledger, entry, _), since_ms = split.at.after, split.at.since_ms
        begins = split.at.after == NOWHERE
        split.reader = self._client.create_reader(
            split.at.topic,
            pulsar.MessageId.earliest if begins else pulsar.MessageId(-1, ledger, entry, -1),
            receiver_queue_size=self._settings.receive_queue,
            reader_name=f"headgate-{self.context.job_name}-{self.context.operator_name}",
            start_message_id_inclusive=True,
        )
        if begins and since_ms:
            split.reader.seek(since_ms)

    def _disconnect(self, split: _Followed, error: BaseException) -> None:
        """Close the reader of the client, so that another one begins at the position.

        Raises:
            SourceError: the topic cannot be read, or the brokers have been away for too long.
        """
        if not is_lost(error) or split.outage.is_too_long():
            raise self._settings.cluster.cannot_read(split.at.topic, error) from error
        _log.warning("the Pulsar cluster is tried again: %s", reason_of(error))
        reader, split.reader, split.consumer = split.reader, None, None
        if reader is not None:
            with contextlib.suppress(*failures()):  # it may have ended by itself
                reader.close()
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.closed, PAUSE_S)

    def _received(self, reader: Any, wait_ms: int) -> list[tuple[Place, Any]]:
        """Return the messages that have come, with their places."""
        import pulsar

        found: list[tuple[Place, Any]] = []
        size_bytes, rows = 0, self._settings.reading.batch_rows
        try:
            while len(found) < rows and size_bytes < _PIECE_BYTES:
                message = reader.read_next(0 if found else wait_ms)
                size_bytes += _MESSAGE_BYTES + len(message.data())
                found.append((place_of(message), message))
        except pulsar.Timeout:
            pass  # no more has come
        return found

    def _put(self, split: _Followed, found: list[tuple[Place, Any]]) -> None:
        """Hand the messages that were not read before to the mailbox."""
        at, after = split.at, split.at.after
        new = []
        for each in found:
            if each[0] > after:  # after a lost connection some may come again
                after = each[0]
                new.append(each)
        if at.after == NOWHERE and at.since_ms:
            late = (n for n, each in enumerate(new) if each[1].publish_timestamp() >= at.since_ms)
            new = new[next(late, len(new)) :]
        if at.stop is not None:
            new = [each for each in new if each[0] <= at.stop]
        if new:
            at.after = new[-1][0]
            self.put(self._piece(at, new))
        if at.stop is not None and after >= at.stop:
            self._end(split)

    def _end(self, split: _Followed, lost: int = 0) -> None:
        self.put(Piece(msgspec.structs.replace(split.at), ended=True), lost=lost)
        del self._followed[split.at.name]
        with contextlib.suppress(*failures()):
            split.reader.close()

    def _piece(self, at: TopicSplit, messages: list[tuple[Place, Any]]) -> Piece[TopicSplit]:
        """Decode messages of one split, which end at the position."""
        data = [message.data() for _, message in messages]
        found = self._decoder.decode(
            messages,
            data,
            lambda each: f"{at.topic} {text_of(each[0])}",
            {
                "topic": lambda each: at.topic,
                "message_id": lambda each: text_of(each[0]),
                "publish_time": lambda each: _time(each[1].publish_timestamp()),
                "event_time": lambda each: _time(each[1].event_timestamp()),
                "key": lambda each: each[1].partition_key() or None,
                "properties": lambda each: _properties_of(each[1]),
            },
        )
        return Piece(
            msgspec.structs.replace(at),
            found.batch,
            [place for place, _ in found.good],
            found.bad,
            sum(_MESSAGE_BYTES + len(each) for each in data),
            messages[0][1].publish_timestamp(),
        )

    # -- messages that were deleted -----------------------------------------------------------------

    def _check_kept(self, at: TopicSplit, ledger: int) -> None:
        """Check that no message behind a position was deleted before it was read.

        Args:
            at: the position.
            ledger: that of the last message that has come.

        Raises:
            SourceError: some may have been deleted, and the user has not chosen to skip them.
        """
        import pulsar

        if at.after == NOWHERE or ledger == at.after[0]:
            return
        if ledger < at.after[0]:
            raise SourceError(
                f"the messages of a topic are older than the position topic=`{at.topic}` "
                f"position=`{text_of(at.after)}`: was the topic deleted and made again?",
                fix="give the source another name, so that it begins from the start",
            )
        first = pulsar.MessageId.earliest
        reader = self._client.create_reader(at.topic, first, receiver_queue_size=1)
        try:
            oldest = place_of(reader.read_next(ANSWER_S_MAX * 1000))
        finally:
            reader.close()
        if oldest[0] > at.after[0]:
            self._lose(at, f"the oldest one is {text_of(oldest)} now")
            self.put(lost=1)

    def _lose(self, at: TopicSplit, what: str) -> None:
        text = f"messages behind {text_of(at.after)} may have been deleted before they were read: {what}"
        if self._settings.reading.on_lost == "fail":
            raise SourceError(
                f"a topic was not read in time topic=`{at.topic}`: {text}",
                fix="let the namespace keep messages for longer (retention), or give the source a "
                "subscription=; on_lost='skip' goes on with what is left",
            )
        _log.warning("the job goes on without messages topic=`%s`: %s", at.topic, text)

    def _look(self) -> None:
        """Look whether the brokers are there, and whether anything is left to read up to an end.

        Raises:
            SourceError: a broker has been away for too long.
        """
        now_s = self.context.clock.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for split in [each for each in self._followed.values() if each.reader is not None]:
            if split.reader.is_connected():
                split.outage.end()
                self._look_for_end(split)
            elif split.outage.is_too_long():
                error = ConnectionError("the connection is lost")
                raise self._settings.cluster.cannot_use(error)

    def _look_for_end(self, split: _Followed) -> None:
        """End a split of which nothing is left to read, although its end was not reached."""
        if split.at.stop is None:
            return
        try:
            left = split.reader.has_message_available()
        except failures() as error:
            self._disconnect(split, error)
            return
        if not left:
            self._lose(split.at, "nothing is left of them")
            self._end(split, lost=1)

    # -- the subscription ---------------------------------------------------------------------------

    def _subscribe(self, split: _Followed) -> None:
        """Connect to the subscription, of which no messages are asked for."""
        import pulsar

        if split.consumer is None:
            split.consumer = self._client.subscribe(
                split.at.topic,
                self._settings.subscription,
                consumer_type=pulsar.ConsumerType.Failover,
                receiver_queue_size=0,
                initial_position=pulsar.InitialPosition.Earliest,
            )

    def write_group(self, positions: Sequence[TopicSplit]) -> None:
        """Let the brokers delete what was read, except the entry at the position.

        So the ledger of the position stays, which tells that nothing was deleted.
        """
        import pulsar

        for at in positions:
            split, (ledger, entry, _) = self._followed.get(at.name), at.after
            if split is None or entry < 1:
                continue
            try:
                self._subscribe(split)
                split.consumer.acknowledge_cumulative(pulsar.MessageId(-1, ledger, entry - 1, -1))
            except failures() as error:
                split.consumer = None
                _log.warning("a subscription was not moved topic=`%s`: %s", at.topic, error)


def _time(time_ms: int) -> datetime | None:
    """Return a time of a message; None: it has none."""
    return datetime.fromtimestamp(time_ms / 1000, UTC) if time_ms else None


def _properties_of(message: Any) -> list[dict[str, str]] | None:
    found = message.properties()
    return [{"name": name, "value": value} for name, value in found.items()] if found else None
