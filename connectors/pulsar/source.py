"""Reads topics of Pulsar. Each partition is a split; its position is the place of the last message.

Readers of the client have no subscription, so positions are those of checkpoints only. A subscription on
request keeps messages that no completed checkpoint has.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack, overload

import msgspec

from ...errors import UsageError
from ...operators.connections import counted
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..arguments import OnLost, check_choice, check_count, check_position
from ..bad_records import BadRecordPolicy
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..messages import MessageColumns, MessageSource, Reading
from .client import ANSWER_S_MAX, Cluster, check_topic, failures
from .model import (
    METADATA,
    REJECTED_SCHEMA,
    Place,
    PulsarSettings,
    Start,
    Stop,
    TopicSplit,
    decoded,
    place_of,
)
from .reader import PulsarReader

BUFFER: Final = "32mb"
RECEIVE_QUEUE: Final = 1000


class PulsarSource(MessageSource[Record_co]):
    """The messages of some topics, each read exactly once."""

    rejected_schema = REJECTED_SCHEMA

    def __init__(self, settings: PulsarSettings) -> None:
        super().__init__("pulsar", settings.reading.columns, METADATA)
        self.settings = settings
        self.bounded = settings.reading.stop is not None
        self.discovers = not self.bounded

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per partition, with the places where reading starts and stops."""
        with self.settings.cluster.checked_client() as client:
            names = _partitions(client, self.settings)
            planned = [_planned(client, self.settings, name) for name in names]
        return [msgspec.msgpack.encode(split) for split in planned if split is not None]

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        """Return one split per partition that exists now; new ones are read from their beginning."""
        with self.settings.cluster.checked_client() as client:
            return [
                known.get(name, msgspec.msgpack.encode(TopicSplit(name)))
                for name in _partitions(client, self.settings)
            ]

    def split_key(self, split: bytes) -> str:
        return decoded(split).name

    def split_share(self, key: str) -> int:
        """Return consecutive numbers for the partitions of a topic, so that subtasks get equally many."""
        topic, _, number = key.rpartition("-partition-")
        return zlib.crc32(topic.encode()) + int(number) if topic else zlib.crc32(key.encode())

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check that the topics are there, and the right to read them."""
        self.settings.reading.columns.format.check_connection()
        with self.settings.cluster.checked_client() as client:
            names = _partitions(client, self.settings)
            for name in names:
                _looked_at(client, self.settings, name, last=False)
        return counted(len(names), "partition")

    def reader(self) -> SourceReader:
        return PulsarReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        return f"pulsar({', '.join(self.settings.topics)})"


def _partitions(client: Any, settings: PulsarSettings) -> list[str]:
    """Return the full names of all partitions, and of the topics that have none."""
    names: list[str] = []
    for topic in settings.topics:
        try:
            names += client.get_topic_partitions(topic)
        except failures() as error:
            raise settings.cluster.cannot_read(topic, error) from error
    return names


def _planned(client: Any, settings: PulsarSettings, topic: str) -> TopicSplit | None:
    """Return a partition with the places where reading starts and stops; None: it has nothing to read."""
    start, stop = settings.reading.start, settings.reading.stop
    at = TopicSplit(topic)
    last = _looked_at(client, settings, topic, last=start == "latest" or stop is not None)
    if start == "latest":
        at.after = last or at.after
    elif isinstance(start, datetime):
        at.since_ms = max(1, round(start.timestamp() * 1000))
    if stop is not None:
        at.stop = last
        if last is None or at.after == last:
            return None
    return at


def _looked_at(client: Any, settings: PulsarSettings, topic: str, *, last: bool) -> Place | None:
    """Check that a partition can be read, and return the place of its last message.

    Args:
        client: of the cluster.
        settings: of the source.
        topic: the full name of the partition.
        last: False: the place is not needed.

    Returns:
        The place; None: the partition has no message, or the place is not needed.
    """
    import pulsar

    try:
        reader = client.create_reader(
            topic, pulsar.MessageId.latest, start_message_id_inclusive=True
        )
        place: Place | None = None
        try:
            # The last entry may be a batch of messages.
            while last and reader.has_message_available():
                found = place_of(reader.read_next(ANSWER_S_MAX * 1000))
                if place is not None and found[:2] != place[:2]:
                    break
                place = found
        finally:
            reader.close()
    except failures() as error:
        raise settings.cluster.cannot_read(topic, error) from error
    return place


class PulsarOptions(TypedDict, total=False):
    """The keyword arguments of `pulsar_source` beside the schema; it documents them."""

    format: FormatName | Format
    delimiter: str
    metadata: Mapping[str, str]
    start: Start
    stop: Stop | None
    subscription: str | None
    on_bad_record: BadRecordPolicy
    on_lost: OnLost
    batch_rows: int
    buffer: str | int
    receive_queue: int
    token: str | None
    ca: str | None
    certificate: str | None
    key: str | None


@overload
def pulsar_source(
    topics: str | Sequence[str],
    *,
    url: str,
    schema: type[Record],
    **options: Unpack[PulsarOptions],
) -> PulsarSource[Record]: ...
@overload
def pulsar_source(
    topics: str | Sequence[str],
    *,
    url: str,
    schema: ColumnsLike | None = ...,
    **options: Unpack[PulsarOptions],
) -> PulsarSource: ...
def pulsar_source(
    topics: str | Sequence[str],
    *,
    url: str,
    schema: SchemaLike | None = None,
    format: FormatName | Format = "json",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    start: Start = "earliest",
    stop: Stop | None = None,
    subscription: str | None = None,
    on_bad_record: BadRecordPolicy = "fail",
    on_lost: OnLost = "fail",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    receive_queue: int = RECEIVE_QUEUE,
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> PulsarSource:
    """Return a source of the messages in topics of Apache Pulsar, each read exactly once.

    It needs `pip install 'headgate[pulsar]'`. Partitions that are added while the job runs are found after
    `headgate.source.discovery-interval` and read from their beginning, unless reading has an end (`stop`).

    Args:
        topics: the name of a topic, or several: `orders`, or with tenant and namespace
            `shop/sales/orders`. Each partition is a split.
        url: the cluster: `pulsar://host:6650` or `pulsar+ssl://host:6651`, several hosts with commas; or
            where that can be read on each machine: `file:/path` or `env:NAME`.
        schema: the columns of the data: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        format: of the data: `json` (an object each), `csv` (one line), `raw`, or what `avro_format` and
            `protobuf_format` return.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `topic` (with the partition), `message_id`,
            `publish_time`, `event_time`, `key` or `properties`, such as {"publish_time": "sent_at"}.
        start: where a run without state begins: `earliest`, `latest`, or a time (a datetime: the first
            message that was published at that time or later).
        stop: `latest`: reading ends with what is there when the job starts, which makes the source bounded.
            None: it never ends.
        subscription: the name of a durable subscription that keeps messages until a completed checkpoint
            has them, whatever the retention of the namespace. Other consumers must not use it. None:
            messages are kept by the retention alone.
        on_bad_record: the treatment of unreadable messages: `fail`, `drop` (counted), or `side_output`
            (`rejected`).
        on_lost: what happens if messages may have been deleted before they were read: `fail`, or `skip` to
            those that are left, with a warning.
        batch_rows: most rows per batch.
        buffer: about the most bytes that wait to be processed, per subtask, beside `receive_queue`.
        receive_queue: about the most messages of a partition that brokers send ahead.
        token: the token of a role, or where it can be read on each machine: `file:/path` or `env:NAME`.
        ca: with TLS: the file of the authorities to trust. None: those of the package certifi.
        certificate: with TLS: the file with the certificate of the client, which names the role if there is
            no token.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the topics exist is found out when the job starts.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    for name in names:
        check_topic(name)
    if not names or len(set(names)) < len(names):
        raise UsageError(
            f"a source needs topics, each of them once topics=`{', '.join(names)}`",
            fix='pulsar_source("orders", ...)',
        )
    cluster = Cluster(url, token, ca, certificate, key)
    cluster.check()
    made = to_format(format, delimiter)
    columns = MessageColumns.of(made, schema, metadata, METADATA, "messages of Pulsar")
    check_position("start", start, ("earliest", "latest"), "or a datetime", place="a topic")
    if stop is not None:
        check_choice("stop", stop, ("latest",))
    check_count("receive_queue", receive_queue, 1)
    reading = Reading[Start, Stop].of(
        columns, start, stop, on_bad_record, on_lost, batch_rows, buffer
    )
    return PulsarSource(PulsarSettings(names, cluster, subscription, receive_queue, reading))
