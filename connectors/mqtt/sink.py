"""A topic of MQTT as a sink, at least once: no checkpoint completes before the broker has all messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ...errors import DataError, JobError, StorageError, UsageError
from ...operators.clock import SystemClock
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import Guarantee, GuaranteeLike, Sink, SinkRun, SinkWriter, parse_guarantee
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.calling import CallBounds, CallingWriter
from ..messages import check_message_columns
from ..publishing import RowEncoder
from .client import (
    ANSWER_S_MAX,
    AWAY_S,
    PAUSE_S,
    Broker,
    Connection,
    Refused,
    cannot_use,
    is_lost,
    look,
    reason_of,
)

_ROWS: Final = 500
_WITHIN_MS: Final = 200
_TURN_S: Final = 0.02
_IN_FLIGHT: Final = 1_000


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `mqtt_sink`, which documents them."""

    topic: str
    broker: Broker
    format: Format
    topic_column: str | None
    retain: bool


class MqttSink(Sink):
    """One topic, or those in a column."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("mqtt", *settings.format.extras)
        self.place = f"{settings.topic or 'topics'} of {settings.broker}"

    def bind(self, schema: pa.Schema | None) -> None:
        column = self.settings.topic_column
        texts = {} if column is None else {"topic_column": column}
        check_message_columns(
            schema, texts, texts.values(), self.settings.format, "messages of MQTT"
        )

    def writer(self) -> SinkWriter:
        return MqttWriter(self.settings)

    def check_output(self, run: SinkRun) -> None:
        look(self.settings.broker, SystemClock())

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        look(self.settings.broker, SystemClock())
        return "the broker answers"

    def describe(self) -> str:
        return f"mqtt({self.settings.topic or self.settings.topic_column})"


class MqttWriter(CallingWriter):
    """Publishes the records of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        # One call at a time keeps the order.
        super().__init__(CallBounds(_ROWS, _WITHIN_MS, 1))
        self._settings = settings
        apart = () if settings.topic_column is None else (settings.topic_column,)
        self._encoder = RowEncoder(settings.format, settings.topic, apart)
        self._connection: Connection | None = None
        self._refusal = ""
        """Why the broker has refused a message, the first one of a call."""
        self._left: dict[int, tuple[str, bytes]] = {}
        """The messages that the broker has not taken, by their packet identifiers."""

    async def begin(self) -> None:
        await asyncio.to_thread(self._connect)

    async def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> None:
        """Connect with a new session, in which nothing waits.

        Raises:
            SourceError: the broker does not answer, or refuses us.
        """
        broker = self._settings.broker
        connection = Connection(broker, "", keep_alive_s=0)
        connection.client.max_inflight_messages_set(_IN_FLIGHT)
        connection.client.on_publish = self._published
        try:
            connection.connect(self.context.clock, clean=True)
        except (OSError, Refused) as error:
            raise cannot_use(broker, error) from error
        self._connection = connection

    def _published(self, client: Any, data: Any, packet: int, reason: Any, properties: Any) -> None:
        self._left.pop(packet, None)
        if reason.is_failure:
            self._refusal = self._refusal or str(reason)

    async def call(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        await asyncio.to_thread(self._publish, self._messages_of(batch.data))

    def _messages_of(self, data: pa.RecordBatch) -> list[tuple[str, bytes]]:
        """Return topic and data of each record."""
        settings, column = self._settings, self._settings.topic_column
        topics = [settings.topic] * data.num_rows
        if column is not None:
            topics = data.column(column).to_pylist()
        for topic in topics:
            if not topic or set(topic) & {"+", "#", "\0"}:
                raise DataError(
                    f"a record has no topic that MQTT takes topic_column=`{column}`",
                    fix="correct such records before the sink, or filter them out",
                )
        return list(zip(topics, self._encoder.encode(data), strict=True))

    def _publish(self, messages: list[tuple[str, bytes]]) -> None:
        """Publish messages until the broker has taken all of them.

        Raises:
            StorageError: the broker does not answer.
            JobError: it does not take messages like these.
        """
        clock, broker = self.context.clock, self._settings.broker
        deadline_s = clock.monotonic() + AWAY_S
        self._refusal = ""
        while messages:
            try:
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                self._publish_all(self._connection, messages)
                return
            except Exception as error:
                lost = error if isinstance(error, OSError) else error.__cause__
                if lost is None or not is_lost(lost):
                    raise
                if self._connection is not None:
                    self._check_refusal()
                    messages, self._connection = list(self._left.values()), None
                if not messages:
                    return  # the broker had taken all of them before
                if clock.monotonic() > deadline_s:
                    raise StorageError(
                        f"messages are not acknowledged broker=`{broker}`: {reason_of(lost)}",
                        fix="check that the broker can be reached",
                    ) from error
                self.context.logger.warning("the MQTT broker is tried again: %s", reason_of(lost))
                time.sleep(PAUSE_S)

    def _publish_all(self, connection: Connection, messages: list[tuple[str, bytes]]) -> None:
        self._left = {}
        for topic, value in messages:
            sent = connection.client.publish(topic, value, qos=1, retain=self._settings.retain)
            self._left[sent.mid] = (topic, value)
        clock, left = self.context.clock, len(self._left)
        deadline_s = clock.monotonic() + ANSWER_S_MAX
        while self._left:
            if self._closed:
                raise JobError("the sink was closed while messages were published")
            connection.turn(_TURN_S)
            if len(self._left) < left:
                left, deadline_s = len(self._left), clock.monotonic() + ANSWER_S_MAX
            elif clock.monotonic() > deadline_s:
                raise TimeoutError("the broker does not answer")
        self._check_refusal()

    def _check_refusal(self) -> None:
        """Raise JobError if the broker has refused a message, which is not left any more."""
        if self._refusal:
            raise JobError(
                f"messages cannot be published broker=`{self._settings.broker}`: {self._refusal}",
                fix="check the rights of the user, and the limits of the broker",
            )


def mqtt_sink(
    topic: str = "",
    *,
    url: str,
    format: FormatName | Format = "json",
    topic_column: str | None = None,
    retain: bool = False,
    guarantee: GuaranteeLike = "at_least_once",
    user: str | None = None,
    password: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> MqttSink:
    """Return a sink that publishes to a topic of MQTT, at least once.

    It needs `pip install 'headgate[mqtt]'` and a broker that speaks MQTT 5. The quality of service of all
    messages is 1.

    Args:
        topic: the topic of all messages; or a column has it.
        url: the broker, as for `mqtt_source`.
        format: of the data: `json` (an object of the columns), `raw` (the one column), or what
            `avro_format` and `protobuf_format` return.
        topic_column: a column with the topic, which is not a part of the data.
        retain: the broker keeps the last message of a topic for later subscribers.
        guarantee: `at_least_once`, or `none`.
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the broker answers is found out when the job starts.
    """
    if bool(topic) == (topic_column is not None):
        raise UsageError(
            "the topic must be given once", fix='mqtt_sink("alerts"), or topic_column="topic"'
        )
    if set(topic) & {"+", "#", "\0"}:
        raise UsageError(
            f"no message can have this topic topic=`{topic}`", fix="leave wildcards out"
        )
    made_format = to_output_format(format)
    broker = Broker(url, user, password, ca, certificate, key)
    broker.check()
    settings = SinkSettings(topic, broker, made_format, topic_column, retain)
    return MqttSink(settings, parse_guarantee(guarantee))
