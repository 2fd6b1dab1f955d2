"""Opens listeners at configured ports and hosts, and limits what they grant to strangers.

Every user of the machine can connect to a TCP port, and a client that has not shown the job's token yet may
be hostile. So each listener counts its connections in an `Admission`. When too many strangers are connected
the one that has waited longest is closed, not the newcomer: our own processes show the token right after
they have connected, and so they still get in while a stranger holds idle connections open.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Awaitable, Callable

import msgspec

from ..errors import JobError, OptionError
from .options.network import (
    ANY_ADDRESS,
    CONNECTIONS_MAX,
    CONTROL_BIND_HOST,
    CONTROL_HOST,
    CONTROL_PORT,
    DATA_BIND_HOST,
    DATA_HOST,
    DATA_PORT,
    ENVIRONMENT_PREFIX,
    FRAME_SIZE_MAX,
    HANDSHAKE_TIMEOUT,
    MESSAGE_SIZE_MAX,
    PORT_PATIENCE,
    QUERY_CLIENTS_MAX,
    QUERY_REQUEST_MAX,
    QUERY_UNANSWERED_MAX,
    UNAUTHENTICATED_MAX,
    UNSENT_SIZE_MAX,
)
from .options.registry import Options
from .options.types import Option

LOOPBACK = "127.0.0.1"
RETRY_S = 0.1
"""The pause between two attempts while all ports are taken."""
OpenServer = Callable[[str, int], Awaitable[asyncio.AbstractServer]]
"""Opens a server at a host and port; raises OSError if that is not possible."""
GREETING_BYTES_MAX = 16 * 1024
"""The longest first message, or HTTP request, that is read from a stranger."""
_log = logging.getLogger("headgate.listener")


_socket_numbers = itertools.count()


class UnixSocket:
    """A Unix socket that only this user can reach, at a path that a newer one may take.

    A job may start again, in the same process too, while the coordinator before it still closes. So a
    socket takes its path in one step, when it listens already, and a socket that closes leaves the path
    alone if it belongs to another one by then.
    """

    def __init__(self, path: str) -> None:
        """Nothing is open yet."""
        self.path = path
        self._inode = 0

    async def open(
        self, listen: Callable[[str], Awaitable[asyncio.AbstractServer]]
    ) -> asyncio.AbstractServer:
        """Return the server that `listen` has opened at the path that it is given."""
        first = f"{self.path}.{next(_socket_numbers)}"
        server = await listen(first)
        os.chmod(first, 0o600)
        self._inode = os.stat(first).st_ino
        os.replace(first, self.path)
        return server

    def remove(self) -> None:
        """Remove the socket's path, if it is still its own."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)


class Listener(msgspec.Struct, frozen=True):
    """The configuration of one listener; `options/network.py` explains each setting.

    A host that is not set is chosen by `at`, on the node where the process runs.
    """

    ports: range = CONTROL_PORT.default
    bind_host: str | None = None
    advertised_host: str | None = None
    patience_ms: int = PORT_PATIENCE.default
    port_key: str = CONTROL_PORT.key
    bind_key: str = CONTROL_BIND_HOST.key
    advertised_key: str = CONTROL_HOST.key

    @classmethod
    def control(cls, options: Options) -> Listener:
        """The coordinator's control port."""
        return cls._of(options, CONTROL_PORT, CONTROL_BIND_HOST, CONTROL_HOST)

    @classmethod
    def data(cls, options: Options) -> Listener:
        """The data port of a worker."""
        return cls._of(options, DATA_PORT, DATA_BIND_HOST, DATA_HOST)

    @classmethod
    def _of(
        cls,
        options: Options,
        port: Option[range],
        bind: Option[str | None],
        advertised: Option[str | None],
    ) -> Listener:
        return cls(
            ports=options.get(port),
            bind_host=options.get(bind),
            advertised_host=options.get(advertised),
            patience_ms=options.get(PORT_PATIENCE),
            port_key=port.key,
            bind_key=bind.key,
            advertised_key=advertised.key,
        )

    def hosts(self, node_host: str = LOOPBACK) -> tuple[str, str]:
        """Return the address to bind, and the one that peers get.

        Args:
            node_host: the address of this machine among the peers; loopback if all of them are on it.

        Raises:
            OptionError: an environment variable that holds a host is not set.
        """
        bind = _from_environment(self.bind_key, self.bind_host) or node_host
        told = _from_environment(self.advertised_key, self.advertised_host)
        return bind, told or (node_host if bind in ANY_ADDRESS else bind)

    async def open(
        self, open_server: OpenServer, node_host: str = LOOPBACK
    ) -> tuple[asyncio.AbstractServer, str, int]:
        """Open a server at the first free port.

        Args:
            open_server: opens a server; see `OpenServer`.
            node_host: see `hosts`.

        Returns:
            The server, and the host and port at which peers reach it.

        Raises:
            OptionError: see `hosts`.
            JobError: all ports stayed taken for the time of `headgate.listener.port-patience`, or the host
                or port cannot be bound at all.
        """
        bind, told = self.hosts(node_host)
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience_ms / 1000
        while True:
            for port in self.ports:
                try:
                    server = await open_server(bind, port)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise self._unusable(bind, port, error) from error
                else:
                    return server, told, port or _port_of(server)
            if loop.time() >= until:
                raise self._taken(bind)
            await asyncio.sleep(RETRY_S)

    def _taken(self, host: str) -> JobError:
        first, last = self.ports[0], self.ports[-1]
        if len(self.ports) == 1:
            text, fix = "the port is taken", f"end what listens there, or give {self.port_key} "
            fix += "another port, a range such as 6121-6140, or 0 for any free one"
        else:
            text, fix = "all ports of the range are taken", f"widen the range of {self.port_key}; "
            fix += "processes of one machine need a port each"
        port = str(first) if len(self.ports) == 1 else f"{first}-{last}"
        return JobError(f"{text} option=`{self.port_key}` port=`{port}` host=`{host}`", fix=fix)

    def _unusable(self, host: str, port: int, error: OSError) -> JobError:
        if error.errno == errno.EACCES:
            return JobError(
                f"this user may not listen at the port option=`{self.port_key}` port=`{port}`",
                fix="ports below 1024 usually need special rights: choose a higher one",
            )
        return JobError(
            f"cannot listen at this address option=`{self.bind_key}` host=`{host}` port=`{port}`: "
            f"{error}",
            fix=f"set {self.bind_key} to an address of this machine, or to 0.0.0.0 for all; what peers "
            f"are told is {self.advertised_key}",
        )


def worker_metrics_port(
    port: int | None, control_addresses: list[str], node_host: str
) -> int | None:
    """The first port that a worker tries for its metrics: next to the coordinator not the coordinator's.

    Args:
        port: of the option `metrics.port`.
        control_addresses: where the coordinator listens.
        node_host: the address of the worker's machine.
    """
    if not port:
        return port
    tcp = [address for address in control_addresses if address.startswith("tcp:")]
    together = any(address.removeprefix("tcp:").rpartition(":")[0] == node_host for address in tcp)
    return port + 1 if together else port


def _from_environment(key: str, host: str | None) -> str | None:
    """The host that an option means."""
    if host is None or not host.startswith(ENVIRONMENT_PREFIX):
        return host
    name = host.removeprefix(ENVIRONMENT_PREFIX)
    value = os.environ.get(name, "").strip()
    if not value:
        raise OptionError(
            f"the environment variable with the host is not set key=`{key}` variable=`{name}`",
            fix="set it on every machine before Ray starts there, or write the address itself",
        )
    return value


def _port_of(server: asyncio.AbstractServer) -> int:
    """The port that the operating system has chosen."""
    assert hasattr(server, "sockets")
    return int(server.sockets[0].getsockname()[1])


class ListenerLimits(msgspec.Struct, frozen=True):
    """The limits of one listener; `options/network.py` explains each."""

    handshake_timeout_ms: int = HANDSHAKE_TIMEOUT.default
    unauthenticated_max: int = UNAUTHENTICATED_MAX.default
    connections_max: int = CONNECTIONS_MAX.default
    frame_size_max_bytes: int = FRAME_SIZE_MAX.default
    message_size_max_bytes: int = MESSAGE_SIZE_MAX.default
    unsent_max_bytes: int = UNSENT_SIZE_MAX.default
    read_clients_max: int = QUERY_CLIENTS_MAX.default
    read_request_max_bytes: int = QUERY_REQUEST_MAX.default
    unanswered_keys_max: int = QUERY_UNANSWERED_MAX.default

    @classmethod
    def of(cls, options: Options) -> ListenerLimits:
        """The limits that a job's options set."""
        return cls(
            handshake_timeout_ms=options.get(HANDSHAKE_TIMEOUT),
            unauthenticated_max=options.get(UNAUTHENTICATED_MAX),
            connections_max=options.get(CONNECTIONS_MAX),
            frame_size_max_bytes=options.get(FRAME_SIZE_MAX),
            message_size_max_bytes=options.get(MESSAGE_SIZE_MAX),
            unsent_max_bytes=options.get(UNSENT_SIZE_MAX),
            read_clients_max=options.get(QUERY_CLIENTS_MAX),
            read_request_max_bytes=options.get(QUERY_REQUEST_MAX),
            unanswered_keys_max=options.get(QUERY_UNANSWERED_MAX),
        )

    @property
    def handshake_timeout_s(self) -> float:
        """The same time in seconds."""
        return self.handshake_timeout_ms / 1000


class Admission:
    """The open connections of one listener. Not thread-safe."""

    def __init__(self, limits: ListenerLimits, listener: str) -> None:
        """No connection is open.

        Args:
            limits: the bounds.
            listener: its name in the log.
        """
        self.limits = limits
        self._listener = listener
        self._strangers: dict[object, Callable[[], None]] = {}
        self._authenticated: set[object] = set()
        self.turned_away = 0
        """The number of connections that were closed because there were too many."""

    def enter(self, connection: object, hang_up: Callable[[], None]) -> None:
        """Count a new connection. `hang_up` is called, perhaps at once, when there is no room for it."""
        self._strangers[connection] = hang_up
        open_ = len(self._strangers) + len(self._authenticated)
        limits = self.limits
        if len(self._strangers) > limits.unauthenticated_max or open_ > limits.connections_max:
            self._turn_away(next(iter(self._strangers)))

    def authenticate(self, connection: object) -> None:
        """The peer has shown the token: from now on the connection is not closed for want of room."""
        if self._strangers.pop(connection, None) is not None:
            self._authenticated.add(connection)

    def leave(self, connection: object) -> None:
        """The connection is closed. It may be unknown here."""
        self._strangers.pop(connection, None)
        self._authenticated.discard(connection)

    def _turn_away(self, connection: object) -> None:
        hang_up = self._strangers.pop(connection)
        self.turned_away += 1
        if self.turned_away.bit_count() == 1:  # the first, then each time there are twice as many
            _log.warning(
                "too many connections, so one that has not shown the job's token was closed "
                "listener=`%s` closed_so_far=`%s` unauthenticated_max=`%s` connections_max=`%s`",
                self._listener,
                self.turned_away,
                self.limits.unauthenticated_max,
                self.limits.connections_max,
            )
        hang_up()
