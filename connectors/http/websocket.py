"""The messages of a WebSocket as a source. A connection that ends is made again.

The protocol is that of RFC 6455. It has no ids, so a service cannot be asked for messages again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from ..secrets import is_reference, read_secret
from .client import (
    WEBSOCKET,
    Answer,
    HttpClient,
    HttpSettings,
    check_reachable,
    check_service,
    http_settings,
)
from .reader import ConnectionReader, decoded

MESSAGE: Final = "4mb"
_OWN: Final = frozenset(
    {
        "connection",
        "host",
        "sec-websocket-extensions",
        "sec-websocket-key",
        "sec-websocket-version",
        "upgrade",
    }
)
_CONNECT_S: Final = 30.0
_NORMAL: Final = 1000
"""The status of a connection that has done what it was made for."""
_TOO_LARGE: Final = 1009


@dataclass(frozen=True, slots=True)
class WebSocketSettings:
    """The settings of a source.

    Attributes:
        http: of the connection; the timeout is the longest silence.
        format: of a message.
        subscribe: the texts that are sent first; each may be `file:/path` or `env:NAME`.
        bounded: the service ends the connection with status 1000 behind the last message.
        batch_rows: the most rows of a batch.
        message_bytes: the most bytes of a message, and about those of messages that wait to be decoded.
    """

    http: HttpSettings
    format: Format
    subscribe: tuple[str, ...] = field(repr=False)
    bounded: bool
    batch_rows: int
    message_bytes: int


class WebSocketSource(Source[Any]):
    """The messages of one address, which come once."""

    replays = False

    def __init__(
        self, settings: WebSocketSettings, schema: pa.Schema, row_type: type[Any] | None
    ) -> None:
        self.settings = settings
        self.schema = schema
        self.row_type = row_type
        self.bounded = settings.bounded
        self.extras = settings.format.extras

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        for text in self.settings.subscribe:
            read_secret("subscribe", text)
        return check_service(self.settings.http)

    def splits(self, parallelism: int) -> list[bytes]:
        check_reachable(self.settings.http)
        return [msgspec.msgpack.encode(OneSplit(None))]

    def reader(self) -> SourceReader:
        assert self.schema is not None
        return WebSocketReader(self.settings, self.schema)

    def with_columns(self, columns: Sequence[str]) -> WebSocketSource:
        return self  # a message is decoded as a whole

    def describe(self) -> str:
        return f"websocket({self.settings.http.shown})"


class WebSocketReader(ConnectionReader):
    """Reads messages, and connects again when the connection ends."""

    def __init__(self, settings: WebSocketSettings, schema: pa.Schema) -> None:
        super().__init__(settings.http, "messages", "makes no connection")
        self._settings = settings
        self._decode = settings.format.decoder(schema)
        self._texts: list[str] = []

    async def read(self, client: HttpClient, position: str | int | None) -> None:
        for given in self._settings.subscribe:
            text = read_secret("subscribe", given)
            self._texts.append(text)
            if is_reference(given):
                client.hide(text)
        await super().read(client, position)

    async def connect(self, client: HttpClient) -> str | None:
        async with client.websocket(_CONNECT_S, self._settings.message_bytes) as connected:
            if isinstance(connected, Answer):
                return self.not_now(client, connected)
            self.answered()
            for text in self._texts:
                await connected.send_str(text)
            return await self._receive(client, connected)

    async def _receive(self, client: HttpClient, connected: Any) -> str | None:
        """Hand on the messages of a connection; return as `connect`."""
        waiting = _Waiting(self._settings.batch_rows, self._settings.message_bytes)
        filling = asyncio.ensure_future(waiting.fill(connected))
        try:
            while await self._heard(connected, waiting.came):
                payloads = waiting.take()
                if payloads:
                    self.given()
                    data = decoded(payloads, self._decode, self._settings.http.shown)
                    await self.hand_on(data, None)
                if filling.done() and not waiting.came.is_set():
                    return self._ended(client, filling.result())
            return f"the service was silent for {self._settings.http.timeout_s:g} s"
        finally:
            filling.cancel()
            await asyncio.wait([filling])

    async def _heard(self, connected: Any, came: asyncio.Event) -> bool:
        """Return False if the service does not answer: half of the silence allowed, it is asked."""
        half_s = self._settings.http.timeout_s / 2
        for ask in (True, False):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(half_s):
                    await came.wait()
                return True
            if ask:
                await connected.ping()
        return False

    def _ended(self, client: HttpClient, message: Any) -> str | None:
        """Return why a connection has ended with this message; None: it is the end of all messages."""
        from aiohttp import WSMsgType

        settings = self._settings
        if message.type is WSMsgType.CLOSE:
            if settings.bounded and message.data == _NORMAL:
                return None
            reason = client.redacted(message.extra or "")
            return f"the service has ended it status=`{message.data}` {reason}".rstrip()
        if getattr(message.data, "code", None) == _TOO_LARGE:
            raise SourceError(
                f"a message is too large url=`{settings.http.shown}` buffer=`{settings.message_bytes}`",
                fix="give websocket_source a larger buffer=",
            )
        return f"the connection is lost {client.redacted(str(message.data or ''))}".rstrip()


class _Waiting:
    """Messages that have come and are not decoded yet, so that those that come together are one batch.

    Attributes:
        came: is set when the service has said anything, or the connection has ended.
    """

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self.came = asyncio.Event()
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._payloads: list[bytes] = []
        self._bytes = 0
        self._room = asyncio.Event()

    async def fill(self, connected: Any) -> Any:
        """Receive messages, and answer pings; return the message that ends the connection."""
        from aiohttp import WSMsgType

        try:
            while True:
                message = await connected.receive()  # without a pause, if there is one already
                kind = message.type
                if kind is WSMsgType.TEXT or kind is WSMsgType.BINARY:
                    payload = message.data.encode() if kind is WSMsgType.TEXT else message.data
                    self._payloads.append(payload)
                    self._bytes += len(payload)
                elif kind is WSMsgType.PING:
                    await connected.pong(message.data)
                elif kind is not WSMsgType.PONG:
                    return message
                self.came.set()
                if len(self._payloads) >= self._rows_max or self._bytes >= self._bytes_max:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self.came.set()

    def take(self) -> list[bytes]:
        """Return all messages that have come, in order."""
        payloads, self._payloads, self._bytes = self._payloads, [], 0
        self.came.clear()
        self._room.set()
        return payloads


def websocket_source(
    url: str,
    schema: SchemaLike | None = None,
    *,
    format: FormatName | Format = "json",
    subscribe: str | Sequence[str] = (),
    bounded: bool = False,
    headers: Mapping[str, str] | None = None,
    silence: Duration = "1m",
    retries: int = 10,
    longest_pause: Duration = "30s",
    batch_rows: int = 1024,
    buffer: str | int = MESSAGE,
    ca: str | None = None,
) -> WebSocketSource:
    """Return a source of the messages that a service sends over a WebSocket. Without an end by default.

    A message is a record. Messages cannot be read again: those that come while the job or the connection is
    down are lost, and a failure of the job loses those since the last checkpoint. While the job is slower
    than the service, the connection is not read, and the service waits or ends it.

    Args:
        url: `ws://` or `wss://`, without credentials.
        schema: the columns of a message; with `format="raw"` by default one column `value`.
        format: of a message, text or bytes: `json`, `raw`, `csv`, or what `avro_format` and others return.
        subscribe: the text, or several, that the service wants to be sent first on each connection. A text
            `env:NAME` or `file:/path` is read on the worker.
        bounded: True: the service is known to end the connection with status 1000 behind its last message,
            so that the job can be a batch.
        headers: further headers. `env:NAME` and `file:/path` are read on the workers.
        silence: a service that is silent for half of it is sent a ping; without an answer in the other half
            the connection is given up, and made again.
        retries: how often in a row a connection that is not answered is made again. Then the attempt fails.
        longest_pause: the longest pause before that, unless the service asks for a longer one.
        batch_rows: the most rows of a batch.
        buffer: the most bytes of a message, and about the most of messages that wait to be decoded.
        ca: the file of the authorities to trust; None: those of the system.

    Raises:
        UsageError: an argument is wrong. Whether the service can be reached is found when the job starts.
    """
    made = to_format(format)
    if schema is None:
        schema = made.columns()
    values = to_schema(schema)
    made.check_columns(values)
    texts = (subscribe,) if isinstance(subscribe, str) else tuple(subscribe)
    if not all(isinstance(text, str) and text for text in texts):
        raise UsageError(
            "what is sent to subscribe is a text, or several subscribe=",
            fix='subscribe=\'{"type": "subscribe"}\'',
        )
    check_count("batch_rows", batch_rows, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    check_count("silence", parse_duration(silence, "silence"), 2)
    http = http_settings(url, headers, ca, silence, retries, longest_pause, _OWN, WEBSOCKET)
    settings = WebSocketSettings(http, made, texts, bounded, batch_rows, buffer_bytes)
    return WebSocketSource(settings, values, record_class(schema))
