"""A TCP proxy that cuts connections, for tests of what a client makes of a network that fails.

A connection that breaks leaves the client in doubt: the server may have done what it was asked for, or a
part of it, or nothing. `CuttingProxy` stands in front of a server on loopback and breaks connections at a
chosen byte, so that each of these can be tried again and again with the same result.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Literal, final

Direction = Literal["requests", "answers"]
"""A direction: to the server, or from the server to its clients."""

_CHUNK: Final = 65536
_BACKLOG: Final = 128
_CONNECT_S_MAX: Final = 30
_RESET: Final = struct.pack("ii", 1, 0)
"""The option SO_LINGER with which `close` resets a connection instead of ending it in good order."""


class _Connection:
    """The two sockets of a connection, and how many directions are still open."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.open = 2

    def reset(self) -> None:
        _reset(self.client, self.server)


@final
class CuttingProxy:
    """A proxy on a port of 127.0.0.1 in front of a server. Its methods may be called by any thread.

        with CuttingProxy(server.port) as proxy:
            client = connect("127.0.0.1", proxy.port)
            proxy.cut_after(0, "answers")  # what the server does next, the client does not hear of

    Attributes:
        port: the port for clients.
    """

    def __init__(self, server_port: int, server_host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. The server need not run yet; clients are refused as long as it does not.

        Args:
            server_port: the port of the server.
            server_host: its address.
            port: to listen at; 0: the operating system chooses one. A server that tells clients its
                address needs to know it before it starts.
        """
        self._server = (server_host, server_port)
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._passed: dict[Direction, int] = {"requests": 0, "answers": 0}
        self._cut_at: dict[Direction, int] = {}
        """The number of bytes in a direction after which all connections are cut."""
        self._cuts = 0
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._begin(self._accept, "accepts")

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- what tests do ------------------------------------------------------------------------------

    def cut_after(self, count: int, direction: Direction) -> None:
        """Cut all connections, once, when `count` more bytes have passed in a direction.

        The bytes up to there arrive, and the next one does not. With 0 and `answers`, the server does
        what it is asked for, and the client does not hear of it; with 0 and `requests`, the server does
        not hear of it.
        """
        with self._lock:
            self._cut_at[direction] = self._passed[direction] + count

    def cut(self) -> None:
        """Cut all connections now. New ones are accepted."""
        with self._lock:
            self._cuts += 1
            self._cut_all()

    def calm(self) -> None:
        """Forget a cut that has not come."""
        with self._lock:
            self._cut_at.clear()

    def passed(self, direction: Direction) -> int:
        """Return how many bytes have passed in a direction, over all connections."""
        with self._lock:
            return self._passed[direction]

    @property
    def cuts(self) -> int:
        """The number of times that connections were cut."""
        with self._lock:
            return self._cuts

    def close(self) -> None:
        """Cut all connections, and listen no more."""
        with self._lock:
            self._closed = True
            self._cut_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()

    # -- its threads --------------------------------------------------------------------------------

    def _begin(self, target: Callable[..., None], what: str, *arguments: object) -> None:
        name = f"headgate-proxy-{self.port}-{what}"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._begin(self._serve, "connects", client)

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._server, timeout=_CONNECT_S_MAX)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        connection = _Connection(client, server)
        with self._lock:
            if self._closed:
                connection.reset()
                return
            self._connections.add(connection)
        self._begin(self._pump, "answers", connection, server, client, "answers")
        self._pump(connection, client, server, "requests")

    def _pump(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
    ) -> None:
        broken = False
        try:
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(_CHUNK):
                for part in self._allowed(data, direction):
                    sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)  # the other direction may go on
        except OSError:
            broken = True
        with self._lock:
            connection.open -= 1
            if broken or not connection.open:
                self._connections.discard(connection)
                connection.reset()

    def _allowed(self, data: bytes, direction: Direction) -> Iterator[bytes]:
        """Yield what may pass. If that is not all, the connections are cut when it has been sent."""
        with self._lock:
            at = self._cut_at.get(direction)
            left = None if at is None else at - self._passed[direction]
            cuts = left is not None and left < len(data)
            part = data[:left] if cuts else data
            self._passed[direction] += len(part)
            if cuts:
                del self._cut_at[direction]
        if part:
            yield part
        if cuts:
            self.cut()

    def _cut_all(self) -> None:
        found, self._connections = self._connections, set()
        for connection in found:
            connection.reset()


def _reset(*ends: socket.socket) -> None:
    """Close connections so that the other sides get an error at once. Closing again does nothing."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        end.close()
