"""A control link for a thread without an event loop: it waits in the socket itself."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Sequence

import msgspec

from .link import MESSAGE_BYTES_MAX
from .messages import Messages, decode, encode

SEND_TIMEOUT_S = 10.0
"""A peer that takes nothing for that long is taken for gone."""
_LENGTH = struct.Struct("<I")


class BlockingLink:
    """One end of a link; `close` may be called from another thread, the rest only from its own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unread = bytearray()

    @classmethod
    def connect(cls, addresses: Sequence[str]) -> BlockingLink:
        """Connect to the first address that answers.

        Raises:
            OSError: none does.
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
            OSError: the peer is gone, or takes nothing.
        """
        data = encode(message)
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout_s: float) -> Messages | None:
        """The next message; None if none comes in time.

        Raises:
            OSError: the peer is gone, or says what is no message.
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
        """The first whole message of what was read."""
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
        """Hang up; whoever waits in `receive` is told."""
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
