"""Reads streams of Redis and Valkey. Each stream is a split; its position is the id of the last entry.

Entries stay in a stream until it is trimmed, so the source can be read again from any position. Consumer
groups are not used for reading. Positions are written to a group on request, for tools that show the lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypedDict, Unpack, overload

import msgspec

from ...errors import SourceError, UsageError
from ...operators.connections import counted
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ...operators.suggestions import suggest
from ..arguments import OnLost, check_policy, check_position
from ..bad_records import BadRecordPolicy
from ..formats.format import Format
from ..formats.text import FormatName
from ..messages import MessageColumns, MessageSource, Reading
from .client import Address, cannot_use, connect, is_lost, reason_of, too_old
from .fields import to_entry_format
from .model import (
    FIRST,
    METADATA,
    NO_STREAM,
    REJECTED_SCHEMA,
    SEQUENCE_MAX,
    UNKNOWN,
    OnMissing,
    RedisSettings,
    Start,
    Stop,
    StreamInfo,
    StreamSplit,
    info_of,
    order_of,
    parse_id,
    seen_at,
)
from .reader import RedisReader

BUFFER: Final = "32mb"
FIELD: Final = "value"
FORMATS: Final = ("fields", "json", "csv", "raw")
ON_MISSING: Final[tuple[OnMissing, ...]] = ("fail", "wait")


class RedisSource(MessageSource[Record_co]):
    """The entries of some streams, each read exactly once."""

    rejected_schema = REJECTED_SCHEMA

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__("redis", settings.reading.columns, METADATA)
        self.settings = settings
        self.bounded = settings.reading.stop is not None

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per stream, with the ids where reading starts and stops."""
        settings = self.settings
        found = _look_at_all(settings, "headgate-splits")
        planned = [_plan(settings, name, info) for name, info in found.items()]
        return [msgspec.msgpack.encode(split) for split in planned if split is not None]

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.reading.columns.format.check_connection()
        found = _look_at_all(self.settings, "headgate-check")
        missing = sum(info is NO_STREAM for info in found.values())
        return (
            f"{counted(len(found), 'stream')}{f', {missing} do not exist yet' if missing else ''}"
        )

    def reader(self) -> SourceReader:
        return RedisReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        return f"redis({', '.join(self.settings.streams)})"


def _look_at_all(settings: RedisSettings, name: str) -> dict[str, StreamInfo]:
    """Return the description of each stream.

    Args:
        settings: of the source.
        name: the name that the server shows for the connection.
    """
    import redis

    client = connect(settings.address, name)
    try:
        return {stream: _look(client, settings, stream) for stream in settings.streams}
    except redis.RedisError as error:
        if is_lost(error):
            raise cannot_use(settings.address, error) from error
        raise SourceError(
            f"the streams cannot be looked at server=`{settings.address}`: {reason_of(error)}",
            fix="check that they are streams, and the rights of the user (ACL): XINFO, XRANGE, XREAD",
        ) from error
    finally:
        client.close()


def _look(client: Any, settings: RedisSettings, stream: str) -> StreamInfo:
    """Return the description of a stream.

    Raises:
        SourceError: it does not exist, and the source does not wait for it.
    """
    import redis

    try:
        told = client.xinfo_stream(stream)
    except redis.ResponseError as error:
        if "no such key" not in str(error):
            raise
        if settings.on_missing == "wait":
            return NO_STREAM
        raise SourceError(
            f"there is no such stream stream=`{stream}` server=`{settings.address}`",
            fix="check the name and the number of the database; on_missing='wait' waits for it",
        ) from None
    info = info_of(told)
    if info is None:
        raise too_old(settings.address)
    return info


def _plan(settings: RedisSettings, stream: str, info: StreamInfo) -> StreamSplit | None:
    """Return the split of a stream; None: nothing is to be read."""
    after = _resolve("start", settings.reading.start, stream, info)
    if settings.reading.stop is None:
        return StreamSplit(stream, after, seen_at(info, after))
    stop = _resolve("stop", settings.reading.stop, stream, info)
    if order_of(stop) <= order_of(after):
        return None
    stop_seen = info.added if stop == info.last else UNKNOWN
    return StreamSplit(stream, after, seen_at(info, after), stop, stop_seen)


def _resolve(name: str, at: Start | Stop, stream: str, info: StreamInfo) -> str:
    """Return the id behind which a position lies, as the stream is now."""
    if at == "earliest":
        return FIRST if info.first is not None else info.last
    if isinstance(at, Mapping):
        given = at.get(stream)
        if given is None:
            return _resolve(name, "earliest" if name == "start" else "latest", stream, info)
        time_ms, sequence = order_of(given)
        if (time_ms, sequence) > order_of(info.last):
            raise UsageError(
                f"the stream has no such entry {name}=`{stream}: {given}`",
                fix=f"the last id is {info.last}",
            )
        return f"{time_ms}-{sequence}"
    if isinstance(at, datetime | int):
        time_ms = at if isinstance(at, int) else round(at.timestamp() * 1000)
        before = f"{time_ms - 1}-{SEQUENCE_MAX}" if time_ms > 0 else FIRST
        # Entries that come later belong to a run that starts now, whatever their time.
        return min(before, info.last, key=order_of)
    return info.last


class RedisOptions(TypedDict, total=False):
    """The keyword arguments of `redis_source` beside the schema; it documents them."""

    format: Literal["fields"] | FormatName | Format
    field: str
    delimiter: str
    metadata: Mapping[str, str]
    start: Start
    stop: Stop | None
    group: str | None
    on_bad_record: BadRecordPolicy
    on_lost: OnLost
    on_missing: OnMissing
    batch_rows: int
    buffer: str | int
    password: str | None
    ca: str | None
    certificate: str | None
    key: str | None
    cluster: bool


@overload
def redis_source(
    streams: str | Sequence[str],
    *,
    url: str,
    schema: type[Record],
    **options: Unpack[RedisOptions],
) -> RedisSource[Record]: ...
@overload
def redis_source(
    streams: str | Sequence[str],
    *,
    url: str,
    schema: ColumnsLike | None = ...,
    **options: Unpack[RedisOptions],
) -> RedisSource: ...
def redis_source(
    streams: str | Sequence[str],
    *,
    url: str,
    schema: SchemaLike | None = None,
    format: Literal["fields"] | FormatName | Format = "fields",
    field: str = FIELD,
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    start: Start = "earliest",
    stop: Stop | None = None,
    group: str | None = None,
    on_bad_record: BadRecordPolicy = "fail",
    on_lost: OnLost = "fail",
    on_missing: OnMissing = "fail",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    password: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    cluster: bool = False,
) -> RedisSource:
    """Return a source of the entries in streams of Redis or Valkey.

    It needs `pip install 'headgate[redis]'`.

    Args:
        streams: the name of a stream, or several. Each is read by one subtask.
        url: the server, `redis://user@host:6379/0`, `rediss://...` with TLS, `unix:///path`; or where it
            can be read on each machine: `file:/path` or `env:NAME`.
        schema: the columns: a Struct class, a `pyarrow.Schema` or {name: type}. With `format="raw"` it is
            one column, by default `value` of type binary.
        format: `fields` (each column is a field of the entry, with a text as its value; a field that is
            not there is null); or that of the payload in one field: `json`, `csv`, `raw`, or what
            `avro_format` and `protobuf_format` return.
        field: with such a payload: the name of the field.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `stream`, `id` (such as 1767225600000-0) or
            `timestamp` (the time in the id), such as {"timestamp": "sent_at"}.
        start: where a run without state begins: `earliest`, `latest`, a time (a datetime, or ms since 1970:
            the first entry of that time or later), or ids {stream: id}, behind which it begins.
        stop: where reading ends, which makes the source bounded: `latest` (all that is there when the job
            starts), a time, or the ids of the last entries {stream: id}. None: it never ends.
        group: the consumer group to which the positions of completed checkpoints are written, for tools
            that show the lag. Nobody else should use it. Positions in checkpoints do not depend on it.
        on_bad_record: the treatment of unreadable entries: `fail`, `drop` (counted), or `side_output`
            (`rejected`).
        on_lost: what happens if entries have been trimmed before they were read: `fail`, or `skip` to the
            first one that is left, with a warning.
        on_missing: what happens at the start if a stream does not exist: `fail`, or `wait` for its first
            entry.
        batch_rows: most rows per batch.
        buffer: about the most bytes that wait to be processed, per subtask.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.
        cluster: the server is a node of a Redis cluster.

    Raises:
        UsageError: an argument is wrong. Whether the streams exist is found out when the job starts.
    """
    names = (streams,) if isinstance(streams, str) else tuple(streams)
    if not names or not all(names) or len(set(names)) < len(names):
        raise UsageError(
            f"must be names of streams, each once streams=`{names}`", fix='streams="orders"'
        )
    address = Address(url, password, ca, certificate, key, cluster)
    address.check()
    made = to_entry_format(format, delimiter, FORMATS)
    columns = MessageColumns.of(made, schema, metadata, METADATA, "entries")
    _check_position("start", start, ("earliest", "latest"), names)
    if stop is not None:
        _check_position("stop", stop, ("latest",), names)
    check_policy("on_missing", on_missing, ON_MISSING)
    reading = Reading[Start, Stop].of(
        columns, start, stop, on_bad_record, on_lost, batch_rows, buffer
    )
    settings = RedisSettings(names, address, field, group, on_missing, reading)
    return RedisSource(settings)


def _check_position(name: str, given: object, words: Sequence[str], streams: Sequence[str]) -> None:
    if isinstance(given, Mapping):
        for stream, known in given.items():
            if stream not in streams:
                raise UsageError(
                    f"an id is given for a stream that is not read {name}=`{stream}`",
                    fix=suggest(str(stream), list(streams), "streams"),
                )
            if not isinstance(known, str) or parse_id(known) is None:
                raise UsageError(
                    f"not the id of an entry {name}=`{stream}: {known}`",
                    fix=f'{name}={{"{stream}": "1767225600000-0"}}',
                )
    else:
        others = "a datetime, ms since 1970, or ids"
        check_position(name, given, words, others, place="streams", least=0)
