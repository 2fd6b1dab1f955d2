"""Opens a listener at a configured port and host. Control and data ports are both opened here."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..errors import JobError, OptionError
from .options.network import (
    ANY_ADDRESS,
    CONTROL_BIND_HOST,
    CONTROL_HOST,
    CONTROL_PORT,
    DATA_BIND_HOST,
    DATA_HOST,
    DATA_PORT,
    ENVIRONMENT_PREFIX,
    PORT_PATIENCE,
)
from .options.registry import Options
from .options.types import Option

LOOPBACK = "127.0.0.1"
RETRY_S = 0.1
"""The pause between two attempts while all ports are taken."""
OpenServer = Callable[[str, int], Awaitable[asyncio.AbstractServer]]
"""Opens a server at a host and port; raises OSError if that is not possible."""


@dataclass(frozen=True, slots=True)
class Listener:
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
        """The address to bind, and the one that peers are told.

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
