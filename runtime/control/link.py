"""A link: control messages both ways, in order, until one side goes away.

Two kinds: in memory (in-process cluster, tests, simulation) and over a stream socket (Unix or TCP).
`ControlServer` is the port of a coordinator: workers connect to it, show the token and introduce
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import select
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from ..listening import (
    GREETING_BYTES_MAX,
    LOOPBACK,
    Admission,
    Listener,
    ListenerLimits,
    UnixSocket,
)
from ..options.network import MESSAGE_SIZE_MAX, UNSENT_SIZE_MAX
from .messages import Hello, Messages, decode, encode

MESSAGE_BYTES_MAX = MESSAGE_SIZE_MAX.default
"""The largest message where no options are known, as in clients."""
UNSENT_BYTES_MAX = UNSENT_SIZE_MAX.default
"""The most unsent bytes where no options are known."""
CONNECT_S = 10.0
"""An address that does not answer within this time is given up."""
_LENGTH = struct.Struct("<I")
SEND_TIMEOUT_S = 10.0
"""A peer that takes nothing for this long counts as gone."""
_log = logging.getLogger("headgate.coordinator")


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


class ControlServer:
    """The control port of a coordinator: it listens on a Unix socket and on a TCP port."""

    def __init__(
        self,
        token: str,
        on_hello: Callable[[Hello, ControlLink], Awaitable[None]],
        limits: ListenerLimits | None = None,
        listener: Listener | None = None,
    ) -> None:
        """
        Args:
            token: the secret that a peer must show.
            on_hello: serves a peer that has shown it, until the link ends.
            limits: the limits for peers that have not shown it yet.
            listener: the TCP port and its hosts; None: any free port.
        """
        self._listener = listener or Listener()
        self._token = token
        self._admission = Admission(limits or ListenerLimits(), "control port")
        self._on_hello = on_hello
        self._servers: list[asyncio.AbstractServer] = []
        self._unix: UnixSocket | None = None
        self._addresses: list[str] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._links: set[ControlLink] = set()

    @property
    def addresses(self) -> list[str]:
        """The addresses of this listener, in the order in which peers try them."""
        return self._addresses

    @property
    def token(self) -> str:
        """The secret that a Hello must have."""
        return self._token

    async def listen(self, unix_path: str | None, node_host: str = LOOPBACK) -> None:
        """Open the listeners. Only this user can reach the Unix socket.

        Args:
            unix_path: the path of the Unix socket; None: TCP only.
            node_host: the address of this machine for the peers.

        Raises:
            JobError: the TCP port is taken, or cannot be bound.
        """
        server, host, port = await self._listener.open(
            partial(asyncio.start_server, self._connected, limit=GREETING_BYTES_MAX), node_host
        )
        self._servers.append(server)
        self._addresses.append(f"tcp:{host}:{port}")
        if unix_path is not None:
            own = UnixSocket(unix_path)
            start = partial(asyncio.start_unix_server, limit=GREETING_BYTES_MAX)
            self._servers.append(await own.open(partial(start, self._connected)))
            self._unix = own
            self._addresses.insert(0, f"unix:{unix_path}")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unsent_max = self._admission.limits.unsent_max_bytes
        link = StreamLink(reader, writer, GREETING_BYTES_MAX, unsent_max)
        self._admission.enter(link, link.abort)
        self.accept(link)

    def accept(self, link: ControlLink) -> None:
        """Serve a link until it ends."""
        task = asyncio.get_running_loop().create_task(self._serve(link), name="control connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, link: ControlLink) -> None:
        self._links.add(link)
        try:
            hello = await self._greeting(link)
            if hello is None:
                return
            self._admission.authenticate(link)
            if isinstance(link, StreamLink):
                link.trust(self._admission.limits.message_size_max_bytes)
            await self._on_hello(hello, link)
        finally:
            link.close()
            self._links.discard(link)
            self._admission.leave(link)

    async def _greeting(self, link: ControlLink) -> Hello | None:
        """Return the first message, if it comes in time and has the token."""
        try:
            async with asyncio.timeout(self._admission.limits.handshake_timeout_s):
                hello = await link.receive()
        except TimeoutError:
            return None
        if not isinstance(hello, Hello):
            return None
        # As bytes, and in a time that does not depend on where they differ.
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            _log.warning("refused a connection with a wrong token")
            return None
        return hello

    async def close(self) -> None:
        """Stop listening and close all links."""
        for server in self._servers:
            server.close()
        for link in list(self._links):
            link.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._unix is not None:
            self._unix.remove()
