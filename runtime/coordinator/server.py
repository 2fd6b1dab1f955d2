"""The port of the coordinator: workers connect to it, show the token and introduce themselves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial

from ..control.link import ControlLink, StreamLink
from ..control.messages import Hello
from ..listening import GREETING_BYTES_MAX, LOOPBACK, Admission, Listener, ListenerLimits

_log = logging.getLogger("headgate.coordinator")


class ControlServer:
    """Listens on a Unix socket and on a TCP port."""

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
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unix_path)
            self._servers.append(
                await asyncio.start_unix_server(
                    self._connected, unix_path, limit=GREETING_BYTES_MAX
                )
            )
            os.chmod(unix_path, 0o600)
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
        for address in self._addresses:
            if address.startswith("unix:"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address.removeprefix("unix:"))
