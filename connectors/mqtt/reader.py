"""Receives messages in a thread, in a session that the broker keeps.

On the next connection of a session the broker gives again what was not acknowledged. Messages that the
subtask has already are then known by their packet identifiers, which no other message has until they are
acknowledged, and by their content, as a broker may have forgotten what it had sent.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from ...errors import SourceError
from ..acknowledged import AcknowledgingReader, QueueSplit
from ..fetched_splits import Piece
from .client import AWAY_S, PAUSE_S, Connection, Refused, cannot_use, is_lost, reason_of
from .model import METADATA, REJECTED_SCHEMA, MqttSettings

_TURN_S: Final = 0.05
"""The thread looks this often whether there is something to acknowledge."""
_GATHER_S: Final = 0.005
"""The same while messages gather that the mailbox could take."""
_MESSAGE_BYTES: Final = 500
"""About what a message takes beside its data."""
_BUFFER_BYTES: Final = 64 << 20
"""The bytes that wait before nothing more is received, as messages of quality 0 have no other bound."""
_ENDS_MAX: Final = 10
"""Connections end this often within `AWAY_S` if two clients have one session."""
_log = logging.getLogger("headgate.connectors.mqtt")


class MqttReader(AcknowledgingReader[Any]):
    """Has one connection. Messages are their own handles."""

    def __init__(self, settings: MqttSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the data of messages.
            schema: the columns to return.
        """
        super().__init__(_BUFFER_BYTES, settings.on_bad_record, "what publishes the messages")
        self._settings = settings
        self._decoder = settings.columns.decoder(values, schema, METADATA)
        self._received: list[Any] = []
        """Messages that have come, and that the mailbox does not know yet."""
        self._waiting: dict[int, Any] = {}
        """The messages that are not acknowledged, by their packet identifiers."""
        self._subscribed: Any = None
        """The answer to the subscription."""

    # -- the mailbox --------------------------------------------------------------------------------

    def first_bad(self, piece: Piece[QueueSplit]) -> tuple[str, str, bytes]:
        message, reason = piece.bad[0]
        return f"topic {message.topic}", reason, message.payload

    def rejected(self, piece: Piece[QueueSplit]) -> pa.RecordBatch:
        rows = [
            {"topic": message.topic, "reason": reason, "data": message.payload}
            for message, reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    def lag_s(self) -> float | None:
        """Return None: messages of MQTT do not say when they were published."""
        return None

    # -- the thread ---------------------------------------------------------------------------------

    def fetch_forever(self) -> None:
        settings, context, clock = self._settings, self.context, self.context.clock
        name = settings.client_id or f"headgate-{context.job_name}-{context.operator_name}"
        connection = Connection(
            settings.broker,
            name,
            SessionExpiryInterval=settings.session_s,
            ReceiveMaximum=settings.unacknowledged_max,
        )
        connection.client.on_message = lambda _client, _data, message: self._receive(message)
        connection.client.on_subscribe = self._note_answer
        worked_s = clock.monotonic()
        ends_s: deque[float] = deque(maxlen=_ENDS_MAX)
        """When the last connections have ended."""
        connected = False
        try:
            while not self.is_closed():
                try:
                    if not connected:
                        self._connect(connection)
                        connected = True
                    self._acknowledge_due(connection)
                    turn_s = _GATHER_S if self._received else _TURN_S
                    if self._has_room():
                        connection.turn(turn_s)
                    else:
                        time.sleep(turn_s)
                    worked_s = clock.monotonic()
                except (OSError, Refused) as error:
                    if connected:
                        ends_s.append(clock.monotonic())
                    connected = False
                    if len(ends_s) == _ENDS_MAX and ends_s[-1] - ends_s[0] < AWAY_S:
                        raise _taken_over(name, error) from error
                    if not is_lost(error) or clock.monotonic() - worked_s > AWAY_S:
                        raise cannot_use(settings.broker, error) from error
                    _log.warning("the MQTT broker is tried again: %s", reason_of(error))
                    time.sleep(PAUSE_S)
                self._hand_on()
            if connected:
                # A checkpoint may have been completed just before the end.
                self._acknowledge_due(connection)
                self._settle(connection)
        finally:
            connection.close()

    def _has_room(self) -> bool:
        # A broker may send more than it was allowed to, as Mosquitto does behind many acknowledgements. Up
        # to the bound the connection is looked after, so that the broker does not take us for dead.
        if len(self._waiting) > self._settings.unacknowledged_max:
            return False
        with self._shared.changed:
            return not self.is_full()

    def _note_answer(
        self, client: Any, data: Any, packet: int, reasons: Any, properties: Any
    ) -> None:
        self._subscribed = reasons

    def _connect(self, connection: Connection) -> None:
        """Connect to the session, and subscribe if it is a new one or topics were added.

        Raises:
            OSError: the broker does not answer.
            Refused: it refuses us, or a subscription.
        """
        from paho.mqtt.subscribeoptions import SubscribeOptions

        clock = self.context.clock
        connection.connect(clock, clean=False)
        if not connection.session_present:
            self._waiting.clear()  # none of them is given again, or can be acknowledged
        # Retained messages come with new subscriptions only.
        options = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
        self._subscribed = None
        connection.client.subscribe([(topic, options) for topic in self._settings.topics])
        deadline_s = clock.monotonic() + AWAY_S
        while self._subscribed is None:
            connection.turn(_TURN_S)
            if clock.monotonic() > deadline_s:
                raise TimeoutError("the broker does not answer the subscription")
        for reason in self._subscribed:
            if reason.is_failure:
                raise Refused(f"the subscription is refused: {reason}")

    def _settle(self, connection: Connection) -> None:
        try:
            connection.settle(self.context.clock)
        except OSError as error:
            _log.debug("acknowledgements may be lost: %s", reason_of(error))

    def _receive(self, message: Any) -> None:
        if message.qos:
            known = self._waiting.get(message.mid)
            if message.dup and known is not None and _is_same(message, known):
                return  # the subtask has it, and will acknowledge it
            self._waiting[message.mid] = message
        self._received.append(message)

    def _acknowledge_due(self, connection: Connection) -> None:
        for message in self.due():
            # A message of a session that is gone, or of quality 0, needs none. One whose acknowledgement is
            # lost comes again.
            packet: int = message.mid
            if message.qos and self._waiting.get(packet) is message:
                connection.client.ack(packet, 1)
                del self._waiting[packet]

    def _hand_on(self) -> None:
        """Hand what has come to the mailbox, unless more should gather."""
        rows = self._settings.batch_rows
        with self._shared.changed:
            if self.should_gather() and len(self._received) < rows:
                return
        received: list[Any]
        received, self._received = self._received, []
        for start in range(0, len(received), rows):
            self.put(self._piece(received[start : start + rows]))

    def _piece(self, messages: list[Any]) -> Piece[QueueSplit]:
        """Decode messages."""
        found = self._decoder.decode(
            messages,
            [each.payload for each in messages],
            lambda message: f"topic {message.topic}",
            _METADATA,
        )
        size = sum(_MESSAGE_BYTES + len(each.payload) for each in messages)
        return Piece(QueueSplit(0), found.batch, found.good, found.bad, size)


def _is_same(message: Any, known: Any) -> bool:
    """Return True if a message with the packet identifier of a known one is that one again.

    A broker that has lost the known one, as its disk had an older state, may use the identifier again.
    """
    return (message.topic, message.payload) == (known.topic, known.payload)


def _properties_of(message: Any) -> list[dict[str, str]] | None:
    found = getattr(message.properties, "UserProperty", None)
    return [{"name": name, "value": value} for name, value in found] if found else None


_METADATA: Final[Mapping[str, Callable[[Any], Any]]] = {
    "topic": lambda message: message.topic,
    "retained": lambda message: bool(message.retain),
    "properties": _properties_of,
}
"""The parts of a message beside its data."""


def _taken_over(client_id: str, error: BaseException) -> SourceError:
    return SourceError(
        f"the broker ends one connection after the other client_id=`{client_id}`: {reason_of(error)}",
        fix="another client may have the same session: give each source a client_id= of its own, and run "
        "the job once",
    )
