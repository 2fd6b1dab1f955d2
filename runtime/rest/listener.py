"""The sockets of the REST API: aiohttp speaks HTTP on them; connections are bounded as at other ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import cast

from ..listening import LOOPBACK, Admission, Listener, ListenerLimits
from ..options.network import PORT_PATIENCE, REST_ADDRESS, REST_BIND_ADDRESS, REST_PORT
from ..options.registry import Options


class Connection(asyncio.Protocol):
    """One connection: counts it, and closes it if no valid token comes in time; the rest is aiohttp's."""

    def __init__(self, http: asyncio.Protocol, listener: RestListener) -> None:
        self._http = http
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._listener.connections[self._transport] = self
        limits = self._listener.admission.limits
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(limits.handshake_timeout_s, self.abort)
        self._http.connection_made(transport)
        self._listener.admission.enter(self, self.abort)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._listener.connections.pop(self._transport, None)
        self._listener.admission.leave(self)
        self._http.connection_lost(exc)

    def authenticate(self) -> None:
        """A request on this connection has shown the token."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._listener.admission.authenticate(self)

    def abort(self) -> None:
        """Close at once, whatever has not been sent yet."""
        if self._transport is not None:
            self._transport.abort()


ANY_PORT = range(1)
"""The operating system chooses."""


def needs_port(options: Options, node_host: str) -> bool:
    """True if clients are to reach the API over TCP: the user says so, or peers are on other machines."""
    return options.get(REST_PORT) is not None or node_host != LOOPBACK


class RestListener:
    """Listens on a Unix socket, on a TCP port, or on both."""

    def __init__(self, limits: ListenerLimits) -> None:
        """Nothing is open yet."""
        self.admission = Admission(limits, "REST API")
        self.connections: dict[asyncio.BaseTransport, Connection] = {}
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_path = ""

    async def listen_unix(self, make_http: Callable[[], asyncio.Protocol], path: str) -> None:
        """Open a Unix socket that this user only can reach."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: Connection(make_http(), self), path)
        os.chmod(path, 0o600)
        self._servers.append(server)
        self._unix_path = path

    async def listen(
        self, make_http: Callable[[], asyncio.Protocol], options: Options, node_host: str
    ) -> tuple[str, int]:
        """Open a port of the option `rest.port`; returns host and port for clients.

        Args:
            make_http: speaks HTTP on one connection.
            options: of the job.
            node_host: the address of this machine among the peers.

        Raises:
            HeadgateError: all its ports stay taken, or there is no such address.
        """
        first, _, _ = (options.get(REST_ADDRESS) or "").partition(",")
        listener = Listener(
            ports=options.get(REST_PORT) or ANY_PORT,
            bind_host=options.get(REST_BIND_ADDRESS),
            advertised_host=first.strip() or None,
            patience_ms=options.get(PORT_PATIENCE),
            port_key=REST_PORT.key,
            bind_key=REST_BIND_ADDRESS.key,
            advertised_key=REST_ADDRESS.key,
        )

        async def open_server(host: str, port: int) -> asyncio.AbstractServer:
            loop = asyncio.get_running_loop()
            return await loop.create_server(lambda: Connection(make_http(), self), host, port)

        server, told, port = await listener.open(open_server, node_host)
        self._servers.append(server)
        return told, port

    def stop_listening(self) -> None:
        """Take no further connections; those that are open go on."""
        for server in self._servers:
            server.close()
        if self._unix_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._unix_path)
