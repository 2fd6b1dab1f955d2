"""Reads topics of Kafka. Each partition is a split; its position is the offset of the next record.

Partitions are assigned by headgate, never by a consumer group, so that positions are those of checkpoints
only. Offsets are written to a group on request, for tools that show the lag.
"""

from __future__ import annotations

import functools
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self, TypedDict, Unpack, overload

import msgspec
import pyarrow as pa

from ...errors import SourceError, UsageError
from ...operators.connections import counted
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..arguments import ON_LOST, OnLost, check_count, check_policy, check_position, parse_bytes
from ..bad_records import BadRecordPolicy, parse_policy
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..messages import MessageColumns, MessageSource
from .client import (
    ANSWER_S_MAX,
    ErrorListener,
    check_properties,
    describe_topics,
    make_consumer,
    no_answer,
    no_topic,
    patiently,
)
from .model import METADATA, REJECTED_SCHEMA, KafkaSettings, PartitionSplit, Start, Stop, decoded
from .reader import KafkaReader
from .rights import check_group_right, check_topic_rights
from .security import KafkaSecurity, with_security

BUFFER: Final = "32mb"
_log = logging.getLogger("headgate.connectors.kafka")


class KafkaSource(MessageSource[Record_co]):
    """The records of some topics, each read exactly once."""

    rejected_schema = REJECTED_SCHEMA

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__("kafka", settings.columns, METADATA)
        self.settings = settings
        self.bounded = settings.bounded
        self.discovers = (
            True  # bounded ones look for nothing, but remember which partitions have ended
        )

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check that the topics are there, and the rights to read them."""
        from confluent_kafka import KafkaException

        settings, errors = self.settings, ErrorListener()
        settings.columns.format.check_connection()
        consumer = make_consumer(settings, "headgate-check", errors)
        try:
            places = _find_places(consumer, settings, errors)
            _check_rights(settings, places)
            for place in places[:1]:
                _offsets(consumer, "earliest", [place])
        except KafkaException as error:
            raise no_answer(settings.bootstrap, errors, error.args[0].str()) from error
        finally:
            consumer.close()
        topics = sorted({topic for topic, _ in places})
        return f"{counted(len(places), 'partition')} of {', '.join(topics) or 'no topic yet'}"

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per partition, with the offsets where reading starts and stops."""
        errors = ErrorListener()
        consumer = make_consumer(self.settings, "headgate-splits", errors)
        try:
            return [msgspec.msgpack.encode(each) for each in _plan(consumer, self.settings, errors)]
        finally:
            consumer.close()

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        """Return one split per partition that exists now; new ones are read from their beginning."""
        errors = ErrorListener()
        consumer = make_consumer(self.settings, "headgate-discovery", errors)
        try:
            return _discovered(consumer, self.settings, errors, known)
        finally:
            consumer.close()

    def split_key(self, split: bytes) -> str:
        return decoded(split).name

    def split_share(self, key: str) -> int:
        """Return consecutive numbers for the partitions of a topic, so that subtasks get equally many."""
        topic, _, partition = key.rpartition("/")
        return zlib.crc32(topic.encode()) + int(partition)

    def reader(self) -> SourceReader:
        return KafkaReader(self.settings, self.values, self.schema)

    def with_columns(self, columns: Sequence[str]) -> Self:
        narrow = super().with_columns(columns)
        if self.settings.columns.format.columns_apart:
            kept = [field for field in self.values if field.name in narrow.schema.names]
            narrow.values = pa.schema(kept or [self.values.field(0)])
        return narrow

    def describe(self) -> str:
        return f"kafka({self.settings.read})"


def _plan(consumer: Any, settings: KafkaSettings, errors: ErrorListener) -> list[PartitionSplit]:
    """Ask the cluster for partitions and offsets, and return the splits in order."""
    from confluent_kafka import KafkaException

    try:
        places = _find_places(consumer, settings, errors)
        _check_rights(settings, places)
        starts = patiently(lambda: _offsets(consumer, settings.start, places, at_start=True))
        stop = settings.stop
        stops = {} if stop is None else patiently(lambda: _offsets(consumer, stop, places))
    except KafkaException as error:
        raise no_answer(settings.bootstrap, errors, error.args[0].str()) from error
    return [
        PartitionSplit(*place, starts[place], stops.get(place))
        for place in places
        if place not in stops or starts[place] < stops[place]
    ]


def _check_rights(settings: KafkaSettings, places: Sequence[tuple[str, int]]) -> None:
    """Raise UsageError unless the user may read these partitions, and write offsets to the group."""
    topics = sorted({topic for topic, _ in places})
    check_topic_rights(settings.bootstrap, settings.properties, topics, ("READ",))
    if settings.group is not None:
        check_group_right(settings.bootstrap, settings.properties, settings.group)


def _discovered(
    consumer: Any, settings: KafkaSettings, errors: ErrorListener, known: Mapping[str, bytes]
) -> list[bytes]:
    """Ask the cluster for partitions, and for the first offsets of those that are not known."""
    from confluent_kafka import KafkaException

    splits: list[bytes] = []
    new: dict[tuple[str, int], int] = {}
    try:
        for topic, number in _find_places(consumer, settings, errors):
            split = known.get(f"{topic}/{number}")
            if split is not None:
                splits.append(split)
                continue
            try:
                new |= _offsets(consumer, "earliest", [(topic, number)], at_start=True)
            except (KafkaException, SourceError) as error:
                # It may have no leader yet. The others do not wait for it, and it is looked at again.
                _log.warning("partition %s/%d cannot be read yet: %s", topic, number, error)
    except KafkaException as error:
        raise no_answer(settings.bootstrap, errors, error.args[0].str()) from error
    return [
        *splits,
        *(msgspec.msgpack.encode(PartitionSplit(*place, at)) for place, at in new.items()),
    ]


def _find_places(
    consumer: Any, settings: KafkaSettings, errors: ErrorListener
) -> list[tuple[str, int]]:
    """Return topic and number of all partitions to read, in order."""
    if settings.pattern is None:
        found = {
            topic: describe_topics(consumer, topic, settings.bootstrap, errors)[topic]
            for topic in settings.topics
        }
        for topic, described in found.items():
            if described.error is not None:
                known = describe_topics(consumer, None, settings.bootstrap, errors)
                if topic not in known:
                    raise no_topic(topic, sorted(known), "READ")
                # The topic was created just now, and its partitions have no leaders yet.
                found[topic] = patiently(
                    functools.partial(_of_new_topic, consumer, topic, settings.bootstrap, errors)
                )
    else:
        matches = re.compile(settings.pattern).fullmatch
        found = {
            topic: described
            for topic, described in sorted(
                describe_topics(consumer, None, settings.bootstrap, errors).items()
            )
            # A topic that is just being created or deleted has an error for a moment.
            if matches(topic) and not topic.startswith("__") and described.error is None
        }
    return [(topic, number) for topic, each in found.items() for number in sorted(each.partitions)]


def _of_new_topic(consumer: Any, topic: str, bootstrap: str, errors: ErrorListener) -> Any:
    """Return what the cluster says about a topic.

    Raises:
        KafkaException: the topic has no partitions that can be read, at least not yet.
    """
    from confluent_kafka import KafkaException

    described = describe_topics(consumer, topic, bootstrap, errors)[topic]
    if described.error is not None:
        raise KafkaException(described.error)
    return described


def _offsets(
    consumer: Any, at: Start | Stop, places: list[tuple[str, int]], *, at_start: bool = False
) -> dict[tuple[str, int], int]:
    """Return the offset that `at` means for each partition."""
    from confluent_kafka import TopicPartition

    def edge(place: tuple[str, int], which: int) -> int:
        found = consumer.get_watermark_offsets(TopicPartition(*place), timeout=ANSWER_S_MAX)
        if found is None:
            raise SourceError(f"the offsets of a partition are not known partition=`{place}`")
        return int(found[which])

    if isinstance(at, Mapping):
        _check_places(at, places)
        return {place: _given(at, place, edge, at_start=at_start) for place in places}
    if isinstance(at, datetime | int):
        time_ms = at if isinstance(at, int) else round(at.timestamp() * 1000)
        wanted = [TopicPartition(*place, time_ms) for place in places]
        found = consumer.offsets_for_times(wanted, timeout=ANSWER_S_MAX)
        _raise_errors(found)
        offsets = {(each.topic, each.partition): each.offset for each in found}
        return {
            place: offset if offset >= 0 else edge(place, 1) for place, offset in offsets.items()
        }
    if at == "committed":
        wanted = [TopicPartition(*place) for place in places]
        found = consumer.committed(wanted, timeout=ANSWER_S_MAX)
        _raise_errors(found)
        offsets = {(each.topic, each.partition): each.offset for each in found}
        return {
            place: offset if offset >= 0 else edge(place, 0) for place, offset in offsets.items()
        }
    return {place: edge(place, 0 if at == "earliest" else 1) for place in places}


def _raise_errors(places: Sequence[Any]) -> None:
    """Raise the error of a partition, which an answer may have in place of its offset."""
    from confluent_kafka import KafkaException

    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)


def _check_places(
    offsets: Mapping[str, Mapping[int, int]], places: Sequence[tuple[str, int]]
) -> None:
    for topic, given in offsets.items():
        for partition in given:
            if (topic, partition) not in places:
                known = ", ".join(f"{name}/{number}" for name, number in places)
                raise UsageError(
                    f"offsets are given for a partition that is not read partition=`{topic}/{partition}`",
                    fix=f"the partitions are {known[:500]}",
                )


def _given(
    offsets: Mapping[str, Mapping[int, int]],
    place: tuple[str, int],
    edge: Any,
    *,
    at_start: bool,
) -> int:
    """Return the given offset of a partition; one that is not named is read as a whole."""
    topic, partition = place
    given = offsets.get(topic, {}).get(partition)
    if given is None:
        return int(edge(place, 0 if at_start else 1))
    low, high = edge(place, 0), edge(place, 1)
    if at_start and not low <= given <= high:
        raise UsageError(
            f"the partition has no such offset start=`{topic}/{partition}: {given}`",
            fix=f"it has {low} to {high}",
        )
    return given


class KafkaOptions(TypedDict, total=False):
    """The keyword arguments of `kafka_source` beside the schema; it documents them."""

    pattern: str | None
    format: FormatName | Format
    delimiter: str
    metadata: Mapping[str, str]
    start: Start
    stop: Stop | None
    group: str | None
    on_bad_record: BadRecordPolicy
    on_lost: OnLost
    read_uncommitted: bool
    batch_rows: int
    buffer: str | int
    security: KafkaSecurity | None
    properties: Mapping[str, str]


@overload
def kafka_source(
    topics: str | Sequence[str] = (),
    *,
    bootstrap: str,
    schema: type[Record],
    **options: Unpack[KafkaOptions],
) -> KafkaSource[Record]: ...
@overload
def kafka_source(
    topics: str | Sequence[str] = (),
    *,
    bootstrap: str,
    schema: ColumnsLike | None = ...,
    **options: Unpack[KafkaOptions],
) -> KafkaSource: ...
def kafka_source(
    topics: str | Sequence[str] = (),
    *,
    bootstrap: str,
    schema: SchemaLike | None = None,
    pattern: str | None = None,
    format: FormatName | Format = "json",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    start: Start = "earliest",
    stop: Stop | None = None,
    group: str | None = None,
    on_bad_record: BadRecordPolicy = "fail",
    on_lost: OnLost = "fail",
    read_uncommitted: bool = False,
    batch_rows: int = 32_768,
    buffer: str | int = BUFFER,
    security: KafkaSecurity | None = None,
    properties: Mapping[str, str] | None = None,
) -> KafkaSource:
    """Return a source of the records in topics of Kafka. It needs `pip install 'headgate[kafka]'`.

    Partitions that are added while the job runs, and new topics that match the pattern, are found after
    `headgate.source.discovery-interval` and read from their beginning, unless reading has an end (`stop`).

    Args:
        topics: the name of a topic, or several. Either they or `pattern` must be given.
        pattern: a regular expression for whole names of topics, such as "orders-.*". Topics whose names
            begin with `__` belong to Kafka, and are left out.
        bootstrap: brokers to ask first: `host:port`, several with commas between them.
        schema: the columns of the values: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        format: of the values: `json` (an object each; other fields are skipped), `csv` (one line, values in
            the order of the schema), `raw`, or what `avro_format` and
            `protobuf_format` return.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `topic`, `partition`, `offset`, `timestamp`, `key`
            (binary) or `headers`, such as {"timestamp": "sent_at"}.
        start: where a run without state begins: `earliest`, `latest`, `committed` (the offsets of `group`,
            or else the earliest), a time (a datetime, or ms since 1970: the first record of that time or
            later), or offsets {topic: {partition: offset}}.
        stop: where reading ends, which makes the source bounded: `latest` (all that is there when the job
            starts), a time, or offsets. None: it never ends.
        group: the consumer group to which the offsets of completed checkpoints are written, for tools that
            show the lag. Positions in checkpoints do not depend on it.
        on_bad_record: the treatment of unreadable records, tombstones included: `fail`, `drop` (counted),
            or `side_output` (`rejected`).
        on_lost: what happens if records have been deleted, by retention for example, before they were
            read: `fail`, or `skip` to the first one that is left, with a warning.
        read_uncommitted: also return records of transactions that are open or aborted.
        batch_rows: most rows per batch. Batches of long records have fewer: about 4 MiB of their values.
        buffer: the most bytes that the client fetches ahead, and that wait to be processed, per subtask.
        security: the credentials and the encryption.
        properties: further properties of librdkafka. A value `file:/path` or `env:NAME` is read where the
            client runs, so that passwords do not become a part of the job.

    Raises:
        UsageError: an argument is wrong. Whether the topics exist is found out when the job starts.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    _check_topics(names, pattern)
    if not bootstrap:
        raise UsageError("no broker is named", fix='bootstrap="host:9092"')
    columns = MessageColumns.of(
        to_format(format, delimiter), schema, metadata, METADATA, "records of Kafka"
    )
    _check_reading(start, stop, group, on_lost)
    check_count("batch_rows", batch_rows, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    settings = KafkaSettings(
        names,
        pattern,
        bootstrap,
        columns,
        start,
        stop,
        group,
        parse_policy(on_bad_record),
        on_lost,
        read_uncommitted,
        batch_rows,
        buffer_bytes,
        with_security(check_properties(properties or {}), security),
    )
    return KafkaSource(settings)


def _check_reading(start: Start, stop: Stop | None, group: str | None, on_lost: str) -> None:
    _check_position("start", start, ("earliest", "latest", "committed"))
    if stop is not None:
        _check_position("stop", stop, ("latest",))
    if start == "committed" and group is None:
        raise UsageError("committed offsets are those of a group", fix='group="..."')
    check_policy("on_lost", on_lost, ON_LOST)


def _check_topics(names: Sequence[str], pattern: str | None) -> None:
    if pattern is not None:
        if names:
            raise UsageError(
                f"topics are given by name and by a pattern topics=`{names}` pattern=`{pattern}`",
                fix="keep one of them",
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"not a regular expression pattern=`{pattern}`: {error}", fix='pattern="orders-.*"'
            ) from None
    elif not names or not all(names) or len(set(names)) < len(names):
        raise UsageError(
            f"must be names of topics, each once topics=`{names}`", fix='topics="orders"'
        )


def _check_position(name: str, given: object, words: Sequence[str]) -> None:
    if isinstance(given, Mapping):
        for topic, offsets in given.items():
            if not isinstance(offsets, Mapping):
                raise UsageError(
                    f"offsets must be given by topic and partition {name}=`{topic}: {offsets}`",
                    fix=f'{name}={{"orders": {{0: 1000, 1: 2000}}}}',
                )
            for partition, offset in offsets.items():
                check_count("partition", partition, 0)
                check_count("offset", offset, 0)
    else:
        others = "a datetime, ms since 1970, or offsets"
        check_position(name, given, words, others, place="topics", least=0)
