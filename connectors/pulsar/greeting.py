"""The greeting of a broker, which says why it lets nobody in.

The client connects again whatever a broker answers, and tells in the end that none has answered. So brokers
are asked before, with the first command of their protocol, whose messages are those of Protobuf.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Final

_PORT: Final = 6650
_TLS_PORT: Final = 6651
_CONNECT: Final = 2
_ERROR: Final = 14
"""The field of an answer that has the reason of a refusal, in its own field 3."""
_PROTOCOL: Final = 15
_ANSWER_BYTES_MAX: Final = 1 << 20


class RefusedError(Exception):
    """A broker does not let the client in."""


def greet(
    hosts: Sequence[tuple[str, int | None]],
    tls: ssl.SSLContext | None,
    login: tuple[str, bytes],
    seconds_max: float,
) -> None:
    """Connect to one broker, and close the connection.

    Args:
        hosts: those to try, with their ports.
        tls: of the connection; None: it has none.
        login: the method of authentication, and its data.
        seconds_max: for each answer.

    Raises:
        OSError: no connection can be made.
        RefusedError: a broker does not let the client in.
    """
    failure: OSError = ConnectionError("no host is given")
    for host, port in hosts:
        address = host, port or (_PORT if tls is None else _TLS_PORT)
        try:
            with contextlib.ExitStack() as opened:
                connection = opened.enter_context(socket.create_connection(address, seconds_max))
                if tls is not None:
                    connection = opened.enter_context(
                        tls.wrap_socket(connection, server_hostname=host)
                    )
                _log_in(connection, *login)
                return
        except OSError as error:
            failure = error
    raise failure


def _log_in(connection: socket.socket, method: str, data: bytes) -> None:
    connect = _bytes(1, b"headgate") + _number(4, _PROTOCOL) + _bytes(5, method.encode())
    command = _number(1, _CONNECT) + _bytes(2, connect + (_bytes(3, data) if data else b""))
    connection.sendall(struct.pack(">II", len(command) + 4, len(command)) + command)
    with connection.makefile("rb") as received:
        _, size = struct.unpack(">II", received.read(8).ljust(8, b"\0"))
        answer = received.read(min(size, _ANSWER_BYTES_MAX))
    if not answer:
        raise ConnectionError("the connection is closed without an answer")
    refusal = _fields(answer).get(_ERROR)
    if refusal is not None:
        raise RefusedError(_fields(refusal).get(3, b"").decode(errors="replace"))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _fields(message: bytes) -> dict[int, bytes]:
    """Return the fields of a message that are bytes; numbers are skipped."""
    found: dict[int, bytes] = {}
    at = 0

    def read() -> int:
        nonlocal at
        number, shift = 0, 0
        while at < len(message):
            byte = message[at]
            number |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
        return number

    while at < len(message):
        tag = read()
        size = read()
        if tag & 7 == 2:
            found[tag >> 3] = message[at : at + size]
            at += size
    return found
