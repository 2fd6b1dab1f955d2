"""Server-sent events as a source. A connection that ends is made again, from the last event on.

The format and the rules for `Last-Event-ID` are those of the HTML standard, section "Server-sent events".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import SourceError, UsageError
from ...operators.durations import Duration, parse_duration
from ...operators.schema import SchemaLike, record_class, to_schema
from ...operators.source import Source, SourceReader
from ..arguments import check_count, parse_bytes
from ..fetched_splits import OneSplit
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..messages import check_metadata
from .client import (
    ANSWER_BYTES_MAX,
    Answer,
    HttpClient,
    HttpSettings,
    check_reachable,
    check_service,
    http_settings,
)
from .reader import ConnectionReader, decoded, refused

METADATA: Final = ("id", "event")
EVENT: Final = "32mb"
_OWN: Final = frozenset({"accept", "host", "last-event-id", "cache-control"})
_RETRY_MS_MAX: Final = 300_000
_CONNECT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class EventSettings:
    """The settings of a source.

    Attributes:
        http: of the requests; the timeout is that between two parts of a stream.
        format: of the data of an event.
        metadata: columns of other parts of an event, by part.
        events: the types of events that are read; empty: all.
        replays: the service gives events with ids, and those after the id that it is told.
        start: the id to begin after; empty: the service decides.
        batch_rows: the most rows of a batch.
        event_bytes: the most bytes of an event.
    """

    http: HttpSettings
    format: Format
    metadata: Mapping[str, str]
    events: frozenset[str]
    replays: bool
    start: str
    batch_rows: int
    event_bytes: int


class EventSource(Source[Any]):
    """The events of one address."""

    def __init__(
        self, settings: EventSettings, values: pa.Schema, row_type: type[Any] | None, bounded: bool
    ) -> None:
        self.settings = settings
        self.values = values
        self.row_type = row_type
        self.bounded = bounded
        self.replays = settings.replays
        self.extras = settings.format.extras
        more = [pa.field(column, pa.string(), False) for column in settings.metadata.values()]
        self.schema = pa.schema([*values, *more])

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        return check_service(self.settings.http)

    def splits(self, parallelism: int) -> list[bytes]:
        check_reachable(self.settings.http)
        return [msgspec.msgpack.encode(OneSplit(self.settings.start or None))]

    def reader(self) -> SourceReader:
        assert self.schema is not None
        return EventReader(self.settings, self.values, self.schema.names)

    def with_columns(self, columns: Sequence[str]) -> EventSource:
        # At least one column stays: a batch without columns has no rows to count.
        assert self.schema is not None
        fields = [field for field in self.schema if field.name in columns] or [self.schema.field(0)]
        narrow = copy.copy(self)
        narrow.schema = pa.schema(fields)
        narrow.row_type = self.row_type if len(fields) == len(self.schema) else None
        return narrow

    def describe(self) -> str:
        return f"sse({self.settings.http.shown})"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream."""

    data: bytes
    id: str
    """The last id that was given; empty: none was."""
    own_id: bool
    """True if the event itself has an id."""
    type: str


class EventParser:
    """Turns the bytes of a stream into events, in whatever parts they come."""

    def __init__(self, last_id: str, bytes_max: int) -> None:
        """Make a parser for one connection.

        Args:
            last_id: the id of the last event before.
            bytes_max: the most bytes of an event.
        """
        self.retry_ms: int | None = None
        """The pause before a new connection that the service has asked for."""
        self._bytes_max = bytes_max
        self._line = bytearray()
        self._after_return = False
        self._first = True
        self._data: list[bytes] = []
        self._size = 0
        self._type = ""
        self._id = last_id
        self._own_id = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that these bytes complete.

        Raises:
            ValueError: an event is too large.
        """
        after_return, self._after_return = self._after_return, chunk.endswith(b"\r")
        if after_return:
            chunk = chunk.removeprefix(b"\n")  # the second half of a line break in two parts
        self._line += chunk
        if self._size + len(self._line) > self._bytes_max and not _breaks(chunk):
            raise ValueError("an event is too large")
        if not _breaks(chunk):
            return
        *lines, rest = bytes(self._line).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            if self._first:
                self._first = False
                line = line.removeprefix(b"\xef\xbb\xbf")
            event = self._take(line)
            if event is not None:
                yield event

    def _take(self, line: bytes) -> Event | None:
        """Take a line, and return the event that it ends."""
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
            if self._size > self._bytes_max:
                raise ValueError("an event is too large")
        elif name == b"event":
            self._type = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            self._id, self._own_id = value.decode(errors="replace"), True
        elif name == b"retry" and value.isdigit():
            self.retry_ms = min(_RETRY_MS_MAX, int(value[:9]))
        return None

    def _end(self) -> Event | None:
        data, own_id, kind = self._data, self._own_id, self._type
        self._data, self._own_id, self._type, self._size = [], False, "", 0
        if not data:
            return None
        return Event(b"\n".join(data), self._id, own_id, kind or "message")


def _breaks(chunk: bytes) -> bool:
    return b"\n" in chunk or b"\r" in chunk


class EventReader(ConnectionReader):
    """Reads a stream of events, and connects again when it ends."""

    def __init__(self, settings: EventSettings, values: pa.Schema, columns: list[str]) -> None:
        super().__init__(settings.http, "events", "gives no events")
        self._settings = settings
        self._decode = settings.format.decoder(values)
        self._columns = columns
        self._last = ""

    async def read(self, client: HttpClient, position: str | int | None) -> None:
        self._last = "" if position is None else str(position)
        await super().read(client, position)

    async def connect(self, client: HttpClient) -> str | None:
        import aiohttp

        settings = self._settings
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._last and settings.replays:
            headers["Last-Event-ID"] = self._last
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_S, sock_read=settings.http.timeout_s
        )
        url = settings.http.url
        async with client.response("GET", url, headers=headers, timeout=timeout) as response:
            if response.status == 204:
                return None
            if response.status != 200:
                body = await response.content.read(ANSWER_BYTES_MAX)
                given = {name.lower(): value for name, value in response.headers.items()}
                return self.not_now(client, Answer(response.status, given, body))
            if response.content_type != "text/event-stream":
                raise refused(client, f"it gives `{response.content_type}`, and no events")
            self.answered()
            parser = EventParser(self._last, settings.event_bytes)
            async for chunk in response.content.iter_any():
                await self._put(list(self._fed(parser, chunk)))
                if parser.retry_ms is not None:
                    self.asked_s = parser.retry_ms / 1000
        return "the stream has ended"

    def _fed(self, parser: EventParser, chunk: bytes) -> Iterator[Event]:
        try:
            yield from parser.feed(chunk)
        except ValueError as error:
            raise SourceError(
                f"{error} url=`{self._settings.http.shown}` "
                f"event_bytes=`{self._settings.event_bytes}`",
                fix="give sse_source a larger buffer=",
            ) from None

    async def _put(self, events: list[Event]) -> None:
        settings = self._settings
        if not events:
            return
        self.given()
        if settings.replays and (
            missing := next((e for e in events if not (e.own_id and e.id)), None)
        ):
            raise SourceError(
                f"an event has no id, so it could not be read again url=`{settings.http.shown}` "
                f"event=`{missing.type}`",
                fix="replay=False reads events without ids; a failure then loses events",
            )
        self._last = events[-1].id
        wanted = [e for e in events if not settings.events or e.type in settings.events]
        for start in range(0, len(wanted), settings.batch_rows):
            some = wanted[start : start + settings.batch_rows]
            data = decoded([event.data for event in some], self._decode, settings.http.shown)
            parts = {"id": [event.id for event in some], "event": [event.type for event in some]}
            for part, column in settings.metadata.items():
                field = pa.field(column, pa.string(), False)
                data = data.append_column(field, pa.array(parts[part], pa.string()))
            await self.hand_on(data.select(self._columns), self._position(some[-1].id))
        await self.hand_on(None, self._position(self._last))

    def _position(self, id: str) -> str | None:
        return id if self._settings.replays else None


def sse_source(
    url: str,
    schema: SchemaLike | None = None,
    *,
    format: FormatName | Format = "json",
    metadata: Mapping[str, str] | None = None,
    events: Sequence[str] = (),
    replay: bool = True,
    start: str = "",
    bounded: bool = False,
    headers: Mapping[str, str] | None = None,
    silence: Duration = "1m",
    retries: int = 10,
    longest_pause: Duration = "30s",
    batch_rows: int = 1024,
    buffer: str | int = EVENT,
    ca: str | None = None,
) -> EventSource:
    """Return a source of server-sent events. Without an end, unless the service answers 204.

    After a failure, and when a connection ends, the service is told the id of the last event in the header
    `Last-Event-ID`. A service that then gives all events behind it makes the source exact: each event is
    read once.

    Args:
        url: `http://` or `https://`, without credentials.
        schema: the columns of the data of events; with `format="raw"` by default one column `value`.
        format: of the data of events: `json`, `raw`, `csv`, or what `avro_format` and the like return.
        metadata: further columns of texts: `id` and `event` (the type), such as {"event": "kind"}.
        events: the types of events that are read; by default all. Events without a type are `message`.
        replay: True: each event must have an id, and the service gives those behind the last one. False:
            ids are ignored, and events that come while the job or the connection is down are lost.
        start: the id after which the first run begins; by default the service decides.
        bounded: True: the service is known to end, so that the job can be a batch.
        headers: further headers. `env:NAME` and `file:/path` are read on the workers.
        silence: a connection without a byte for this long is given up, and made again. Services send
            comments to keep it.
        retries: how often in a row a connection that is not answered is made again. Then the attempt fails.
        longest_pause: the longest pause before that, unless the service asks for a longer one.
        batch_rows: the most rows of a batch.
        buffer: the most bytes of an event.
        ca: the file of the authorities to trust; None: those of the system.

    Raises:
        UsageError: an argument is wrong. Whether the service can be reached is found when the job starts.
    """
    made = to_format(format)
    if schema is None:
        schema = made.columns()
    values = to_schema(schema)
    made.check_columns(values)
    wanted = check_metadata(metadata, METADATA, values, "events")
    if isinstance(events, str):
        events = (events,)
    if start and not replay:
        raise UsageError("without replay there are no ids to start after", fix="replay=True")
    if not start.isprintable():
        raise UsageError("an id is a printable text start=", fix="leave line breaks out")
    check_count("batch_rows", batch_rows, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    check_count("silence", parse_duration(silence, "silence"), 1)
    settings = EventSettings(
        http_settings(url, headers, ca, silence, retries, longest_pause, _OWN),
        made,
        wanted,
        frozenset(events),
        replay,
        start,
        batch_rows,
        buffer_bytes,
    )
    return EventSource(settings, values, None if metadata else record_class(schema), bounded)
