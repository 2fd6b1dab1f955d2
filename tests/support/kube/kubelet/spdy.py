"""The part of SPDY/3.1 that `kubectl port-forward` needs: streams over a connection that was HTTP/1.1.

The real kubectl sends its streams through a WebSocket to the API server, which passes them on as SPDY. Each
forwarded connection is two streams: one for the bytes of both directions, and one for an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

PROTOCOL: Final = "portforward.k8s.io"
UPGRADE: Final = "SPDY/3.1"
Connect: TypeAlias = Callable[[int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
_VERSION: Final = 0x8003
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING = 1, 2, 3, 6
_FIN: Final = 1
_CHUNK_BYTES: Final = 1 << 15
_WORDS: Final = """\
options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age
allow authorization cache-control connection content-base content-encoding content-language content-length
content-location content-md5 content-range content-type date etag expect expires from host if-match
if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma
proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade
user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie
keep-alive origin"""
_TEXT: Final = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request"
    "401 Unauthorized403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented"
    "503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 "
    "Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age="
    "gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY: Final = (
    b"".join(
        len(word).to_bytes(4, "big") + word.replace("_", " ").encode() for word in _WORDS.split()
    )
    + _TEXT.encode()
)
"""The dictionary of zlib for headers, as the protocol defines it."""


class Session:
    """The streams of one connection, until it ends."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect
    ) -> None:
        """
        Args:
            reader: of the connection, behind its upgrade.
            writer: of the same.
            connect: opens a connection to a port of the pod.
        """
        self._reader = reader
        self._writer = writer
        self._connect = connect
        self._headers = zlib.decompressobj(zdict=DICTIONARY)
        self._replies = zlib.compressobj(zdict=DICTIONARY)
        self._errors: dict[str, int] = {}
        self._received: dict[int, asyncio.Queue[bytes]] = {}
        self._forwards: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve streams until the other side leaves."""
        try:
            while True:
                head = await self._reader.readexactly(8)
                first, flags = int.from_bytes(head[:4], "big"), head[4]
                payload = await self._reader.readexactly(int.from_bytes(head[5:], "big"))
                if first >> 31:
                    self._control(first & 0xFFFF, payload)
                elif (received := self._received.get(first)) is not None:
                    received.put_nowait(payload)
                    if flags & _FIN and payload:
                        received.put_nowait(b"")
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for task in list(self._forwards):
                task.cancel()
            await asyncio.gather(*self._forwards, return_exceptions=True)

    def _control(self, kind: int, payload: bytes) -> None:
        if kind == _PING:
            self._send_control(_PING, payload)
        elif kind == _RST_STREAM:
            if (received := self._received.get(int.from_bytes(payload[:4], "big"))) is not None:
                received.put_nowait(b"")
        elif kind == _SYN_STREAM:
            stream = int.from_bytes(payload[:4], "big")
            headers = _parse(self._headers.decompress(payload[10:]))
            self._open(stream, headers)

    def _open(self, stream: int, headers: dict[str, str]) -> None:
        none = (0).to_bytes(4, "big")
        compressed = self._replies.compress(none) + self._replies.flush(zlib.Z_SYNC_FLUSH)
        self._send_control(_SYN_REPLY, stream.to_bytes(4, "big") + compressed)
        number = headers["requestid"]
        if headers["streamtype"] == "error":
            self._errors[number] = stream
            return
        self._received[stream] = asyncio.Queue()
        task = asyncio.create_task(
            self._forward(stream, self._errors.pop(number), int(headers["port"]))
        )
        self._forwards.add(task)
        task.add_done_callback(self._forwards.discard)

    async def _forward(self, stream: int, error_stream: int, port: int) -> None:
        try:
            reader, writer = await self._connect(port)
        except OSError as error:
            self._send(error_stream, f"connect to port {port}: {error}".encode(), fin=True)
            self._send(stream, b"", fin=True)
            return
        received = self._received[stream]

        async def take() -> None:
            with contextlib.suppress(OSError):
                while data := await received.get():
                    writer.write(data)
                    await writer.drain()
                writer.write_eof()

        taking = asyncio.create_task(take())
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(_CHUNK_BYTES):
                    self._send(stream, data)
                    await self._writer.drain()
            self._send(stream, b"", fin=True)
            self._send(error_stream, b"", fin=True)
        finally:
            taking.cancel()
            writer.close()
            del self._received[stream]

    def _send(self, stream: int, data: bytes, *, fin: bool = False) -> None:
        flags = bytes((_FIN if fin else 0,))
        self._writer.write(stream.to_bytes(4, "big") + flags + len(data).to_bytes(3, "big") + data)

    def _send_control(self, kind: int, payload: bytes) -> None:
        first = (_VERSION << 16 | kind).to_bytes(4, "big")
        self._writer.write(first + b"\0" + len(payload).to_bytes(3, "big") + payload)


def _parse(block: bytes) -> dict[str, str]:
    """Return the headers of a decompressed block: a count, then names and values with their lengths."""
    texts, at = [], 4
    for _ in range(2 * int.from_bytes(block[:4], "big")):
        length = int.from_bytes(block[at : at + 4], "big")
        texts.append(block[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return dict(zip(texts[::2], texts[1::2], strict=True))
