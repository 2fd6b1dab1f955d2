"""A link: control messages both ways, in order, until one side goes away.

Two kinds: in memory (in-process cluster, tests, simulation) and over a stream socket (Unix or TCP).
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..options.network import MESSAGE_SIZE_MAX, UNSENT_SIZE_MAX
from .messages import Messages, decode, encode

MESSAGE_BYTES_MAX = MESSAGE_SIZE_MAX.default
"""The largest message where no options are known, as in clients."""
UNSENT_BYTES_MAX = UNSENT_SIZE_MAX.default
"""The most unsent bytes where no options are known."""
CONNECT_S = 10.0
"""An address that does not answer within this time is given up."""
_LENGTH = struct.Struct("<I")
SEND_TIMEOUT_S = 10.0
"""A peer that takes nothing for this long counts as gone."""


class ControlLink(Protocol):
    """One end of a link."""

    def send(self, message: Messages) -> None:
        """Queue a message; never blocks. On a closed link the message is dropped: the peer is gone."""
        ...

    async def receive(self) -> Messages | None:
        """Return the next message; None once the peer is gone. Cancel it only to give the link up."""
        ...

    async def drain(self) -> None:
        """Wait until all sent messages have left this process, or the link is closed."""
        ...

    def close(self) -> None:
        """Close the link; the peer's `receive` returns None after all that was sent before."""
        ...


class MemoryLink:
    """An end of a link within one event loop."""

    def __init__(self) -> None:
        self._inbox: deque[Messages | None] = deque()
        self._arrived = asyncio.Event()
        self._peer: MemoryLink | None = None

    @staticmethod
    def pair() -> tuple[MemoryLink, MemoryLink]:
        """Return two connected ends."""
        one, other = MemoryLink(), MemoryLink()
        one._peer, other._peer = other, one
        return one, other

    def send(self, message: Messages) -> None:
        if self._peer is not None:
            self._peer._put(message)

    def _put(self, message: Messages | None) -> None:
        self._inbox.append(message)
        self._arrived.set()

    async def receive(self) -> Messages | None:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        if self._inbox[0] is None:
            return None
        return self._inbox.popleft()

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer._peer = None
            peer._put(None)
        self._put(None)


class StreamLink:
    """An end of a link over a stream socket: each message is a u32 length and its msgpack bytes."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        unsent_bytes_max: int = UNSENT_BYTES_MAX,
    ) -> None:
        """
        Args:
            reader: the stream from the peer.
            writer: the stream to the peer.
            message_bytes_max: the connection is closed if the peer sends a larger message.
            unsent_bytes_max: it is closed if more than this waits for the peer in front of a message.
        """
        self._reader = reader
        self._writer = writer
        self._message_bytes_max = message_bytes_max
        self._unsent_bytes_max = unsent_bytes_max

    def trust(self, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        """Allow messages up to this size: the peer has shown the token."""
        self._message_bytes_max = message_bytes_max

    def abort(self) -> None:
        """Close at once, and drop what has not been sent yet."""
        self._writer.transport.abort()

    def send(self, message: Messages) -> None:
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > self._unsent_bytes_max:
            self._writer.transport.abort()
            return
        data = encode(message)
        self._writer.writelines([_LENGTH.pack(len(data)), data])

    async def receive(self) -> Messages | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > self._message_bytes_max:
                self.close()
                return None
            return decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            self.close()
            return None

    async def drain(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


def is_local(address: str) -> bool:
    """Return True for an address that means another place on another machine."""
    return address.startswith(("unix:", "tcp:127.", "tcp:localhost:", "tcp:::1:", "tcp:[::1]:"))


async def connect(
    address: str,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    unsent_bytes_max: int = UNSENT_BYTES_MAX,
) -> StreamLink:
    """Open a link to `unix:<path>` or `tcp:<host>:<port>`, with the bounds of `StreamLink`.

    Raises:
        OSError: there is no listener, or no answer in time.
    """
    kind, _, rest = address.partition(":")
    async with asyncio.timeout(CONNECT_S):
        if kind == "unix":
            reader, writer = await asyncio.open_unix_connection(rest)
        else:
            host, _, port = rest.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        return StreamLink(reader, writer, message_bytes_max, unsent_bytes_max)


class BlockingLink:
    """One end of a link for a thread without an event loop: it waits in the socket itself.

    `close` may be called from another thread, the rest only from its own.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unread = bytearray()

    @classmethod
    def connect(cls, addresses: Sequence[str]) -> BlockingLink:
        """Connect to the first address that answers.

        Raises:
            OSError: no address answers.
        """
        problem = OSError("no address to connect to")
        for address in addresses:
            try:
                return cls(_socket_to(address))
            except OSError as error:
                problem = error
        raise problem

    def send(self, message: Messages) -> None:
        """Send a message.

        Raises:
            OSError: the peer is gone, or reads nothing.
        """
        data = encode(message)
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout_s: float) -> Messages | None:
        """Return the next message; None if none comes in time.

        Raises:
            OSError: the peer is gone, or sends something that is no message.
        """
        while (message := self._next()) is None:
            readable, _, _ = select.select([self._sock], [], [], max(0.0, timeout_s))
            if not readable:
                return None
            data = self._sock.recv(65_536)
            if not data:
                raise ConnectionResetError("the peer hung up")
            self._unread += data
        return message

    def _next(self) -> Messages | None:
        """Return the first complete message of the bytes that were read."""
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > MESSAGE_BYTES_MAX:
            raise ConnectionError(f"the peer sent no message length=`{length}`")
        end = _LENGTH.size + length
        if len(self._unread) < end:
            return None
        data = bytes(self._unread[_LENGTH.size : end])
        del self._unread[:end]
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"the peer sent no message: {error}") from error

    def close(self) -> None:
        """Close the link; a thread that waits in `receive` gets None."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _socket_to(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(SEND_TIMEOUT_S)
        try:
            sock.connect(rest)
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), SEND_TIMEOUT_S)
