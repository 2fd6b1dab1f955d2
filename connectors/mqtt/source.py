"""Reads topics of MQTT, and acknowledges messages when a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypedDict, Unpack, overload

import msgspec

from ...errors import UsageError
from ...operators.clock import SystemClock
from ...operators.durations import Duration, parse_duration
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..acknowledged import QueueSplit
from ..arguments import check_count
from ..bad_records import BadRecordPolicy, parse_policy
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..messages import MessageColumns, MessageSource
from .client import Broker, look
from .model import METADATA, REJECTED_SCHEMA, MqttSettings
from .reader import MqttReader

UNACKNOWLEDGED: Final = 10_000
_UNACKNOWLEDGED_MAX: Final = 65_535
SESSION: Final = "7d"
_SESSION_S_MAX: Final = 0xFFFF_FFFE


class MqttSource(MessageSource[Record_co]):
    """The messages of some topics, each read at least once."""

    rejected_schema = REJECTED_SCHEMA
    needs_checkpoints = True

    def __init__(self, settings: MqttSettings) -> None:
        super().__init__("mqtt", settings.columns, METADATA)
        self.settings = settings

    def splits(self, parallelism: int) -> list[bytes]:
        look(self.settings.broker, SystemClock())
        return [msgspec.msgpack.encode(QueueSplit(0))]

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.columns.format.check_connection()
        look(self.settings.broker, SystemClock())
        return "the broker answers"

    def reader(self) -> SourceReader:
        return MqttReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        return f"mqtt({', '.join(self.settings.topics)})"


class MqttOptions(TypedDict, total=False):
    """The keyword arguments of `mqtt_source` beside the schema; it documents them."""

    format: FormatName | Format
    delimiter: str
    metadata: Mapping[str, str]
    client_id: str
    session: Duration
    max_unacknowledged: int
    on_bad_record: BadRecordPolicy
    batch_rows: int
    user: str | None
    password: str | None
    ca: str | None
    certificate: str | None
    key: str | None


@overload
def mqtt_source(
    topics: str | Sequence[str], *, url: str, schema: type[Record], **options: Unpack[MqttOptions]
) -> MqttSource[Record]: ...
@overload
def mqtt_source(
    topics: str | Sequence[str],
    *,
    url: str,
    schema: ColumnsLike | None = ...,
    **options: Unpack[MqttOptions],
) -> MqttSource: ...
def mqtt_source(
    topics: str | Sequence[str],
    *,
    url: str,
    schema: SchemaLike | None = None,
    format: FormatName | Format = "json",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    client_id: str = "",
    session: Duration = SESSION,
    max_unacknowledged: int = UNACKNOWLEDGED,
    on_bad_record: BadRecordPolicy = "fail",
    batch_rows: int = 8192,
    user: str | None = None,
    password: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> MqttSource:
    """Return a source of the messages of MQTT topics, each read at least once.

    It needs `pip install 'headgate[mqtt]'`, a broker that speaks MQTT 5, and a job with checkpoints: a
    message is acknowledged when a checkpoint has it.

    Args:
        topics: topics, or filters with `+` and `#`, to subscribe to.
        url: `mqtt://host:1883` or `mqtts://host:8883`; or where that can be read on each machine:
            `file:/path` or `env:NAME`.
        schema: the columns of the data: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        format: of the data: `json` (an object each), `csv` (one line), `raw`, or what `avro_format` and
            `protobuf_format` return.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `topic`, `retained` or `properties` (the user
            properties), such as {"topic": "device"}.
        client_id: the name of the session, which no other client may have. By default it is made of the
            names of the job and of the source.
        session: for how long the broker keeps the session, and the messages that come, while the job is
            down.
        max_unacknowledged: the most messages that the broker gives before some are acknowledged, which is
            at the end of a checkpoint; up to 65,535.
        on_bad_record: the treatment of unreadable messages: `fail`, `drop` (counted), or `side_output`
            (`rejected`).
        batch_rows: most rows per batch.
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the broker answers is found out when the job starts.
    """
    broker = Broker(url, user, password, ca, certificate, key)
    broker.check()
    columns = MessageColumns.of(
        to_format(format, delimiter), schema, metadata, METADATA, "messages of MQTT"
    )
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    if not names:
        raise UsageError("a source needs a topic", fix='mqtt_source("devices/#", ...)')
    for name in names:
        check_filter(name)
    check_count("batch_rows", batch_rows, 1)
    check_count("max_unacknowledged", max_unacknowledged, 1)
    if max_unacknowledged > _UNACKNOWLEDGED_MAX:
        raise UsageError(
            f"MQTT allows fewer unacknowledged messages max_unacknowledged=`{max_unacknowledged}`",
            fix=f"at most {_UNACKNOWLEDGED_MAX}",
        )
    session_s = parse_duration(session, "session") // 1000
    check_count("session", session_s, 1)
    settings = MqttSettings(
        names,
        broker,
        client_id,
        min(session_s, _SESSION_S_MAX),
        max_unacknowledged,
        columns,
        parse_policy(on_bad_record),
        batch_rows,
    )
    return MqttSource(settings)


def check_filter(name: str) -> None:
    """Check a topic or a filter.

    Raises:
        UsageError: it is neither.
    """
    levels = name.split("/")
    wrong = (
        not name or "\0" in name or any(len(each) > 1 and set(each) & {"+", "#"} for each in levels)
    )
    if wrong or "#" in levels[:-1]:
        raise UsageError(
            f"not a topic topics=`{name}`",
            fix="`devices/1/heat`, or a filter: `devices/+/heat`, `devices/#`",
        )
