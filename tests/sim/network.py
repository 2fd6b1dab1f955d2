"""The network of a simulation: byte streams and control links with delays; in order, or broken."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate.runtime.control.messages import Messages, decode, encode

from .process import Process, current, is_dead

if TYPE_CHECKING:
    from .loop import SimLoop


class Network:
    """Between the processes of a simulation."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._servers: dict[int, MemoryServer] = {}
        self._ports = 1
        self.latency_s = 0.0005
        """The mean delay of a message."""
        self.far = 1
        """The factor by which messages take longer for now."""
        self.bytes_per_s = 100e6
        self.pairs: list[tuple[MemoryTransport, MemoryTransport]] = []
        """All connections between workers there ever were, so that some can be broken."""
        self._cut_until_s: dict[frozenset[Process | None], float] = {}

    def delay_s(self, size_bytes: int = 0) -> float:
        """Return the delay of a message."""
        return (
            self._rng.expovariate(1 / (self.latency_s * self.far)) + size_bytes / self.bytes_per_s
        )

    def cut(self, one: Process | None, other: Process | None, seconds: float) -> None:
        """For a while nothing gets from one of two processes to the other; others reach both."""
        self._cut_until_s[frozenset((one, other))] = self._loop.time() + seconds

    def open_at_s(self, one: Process | None, other: Process | None) -> float:
        """From when on something gets through between two processes."""
        return max(self._loop.time(), self._cut_until_s.get(frozenset((one, other)), 0.0))

    def listen(self, factory: Callable[[], Any]) -> MemoryServer:
        """A server of the process that asks."""
        port, self._ports = self._ports, self._ports + 1
        server = self._servers[port] = MemoryServer(self, factory, port, current())
        return server

    def forget(self, port: int) -> None:
        """The server is closed."""
        self._servers.pop(port, None)

    async def connect(self, factory: Callable[[], Any], port: int) -> tuple[Any, Any]:
        """See `SimLoop.create_connection`."""
        await asyncio.sleep(self.delay_s())
        server = self._servers.get(port)
        process = current()
        if server is not None:
            await asyncio.sleep(self.open_at_s(process, server.process) - self._loop.time())
        if server is None or (server.process is not None and server.process.dead) or is_dead():
            raise ConnectionRefusedError(f"nobody listens port={port}")
        near = MemoryTransport(self._loop, self, factory(), process)
        accepting = (
            server.process.context.run(server.factory) if server.process else server.factory()
        )
        far = MemoryTransport(self._loop, self, accepting, server.process)
        near.peer, far.peer = far, near
        self.pairs.append((near, far))
        far.soon(accepting.connection_made, far)
        near.protocol.connection_made(near)
        return near, near.protocol


class MemoryServer:
    """The part of `asyncio.Server` that is used."""

    def __init__(
        self, network: Network, factory: Callable[[], Any], port: int, process: Process | None
    ) -> None:
        self._network = network
        self.factory = factory
        self.port = port
        self.process = process

    @property
    def sockets(self) -> list[MemoryServer]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return "sim", self.port

    def close(self) -> None:
        self._network.forget(self.port)

    async def wait_closed(self) -> None:
        """It is at once."""


class MemoryTransport(asyncio.Transport):
    """One end of a connection; what is written arrives later, in pieces."""

    def __init__(
        self, loop: SimLoop, network: Network, protocol: Any, process: Process | None
    ) -> None:
        super().__init__()
        self._loop = loop
        self._network = network
        self.owner = process
        self.protocol = protocol
        self.peer: MemoryTransport | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._high = 1 << 16
        self._paused = False
        self._closing = False
        self._lost = False
        self._free_at_s = 0.0
        if process is not None:
            process.on_death.append(self.abort)

    def soon(self, call: Callable[..., Any], *args: Any) -> None:
        """Have the process of this end do something."""
        context = self.owner.context if self.owner is not None else None
        self._loop.call_soon(call, *args, context=context)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is not None:
            self._high = high

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def is_closing(self) -> bool:
        return self._closing

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write(self, data: Any) -> None:
        if self._closing or self._lost:
            return
        if self.owner is not None and self.owner.dead:
            return
        chunk = bytes(data)
        self._unsent.append(chunk)
        self._unsent_bytes += len(chunk)
        network = self._network
        other = None if self.peer is None else self.peer.owner
        begin = max(self._free_at_s, network.open_at_s(self.owner, other))
        self._free_at_s = begin + network.delay_s(len(chunk))
        self._loop.call_at(self._free_at_s, self._arrive)
        if self._unsent_bytes > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def _arrive(self) -> None:
        if self._lost or not self._unsent:
            return
        chunk = self._unsent.popleft()
        self._unsent_bytes -= len(chunk)
        peer = self.peer
        if peer is not None:
            peer.soon(peer.receive, chunk)
        if self._paused and self._unsent_bytes <= self._high // 4:
            self._paused = False
            self.soon(self._resume)
        if self._closing and not self._unsent:
            self._lose(None)

    def _resume(self) -> None:
        if not self._lost:
            self.protocol.resume_writing()

    def receive(self, chunk: bytes) -> None:
        """Bytes from the peer, handed on as a socket would: as they fit."""
        at = 0
        while at < len(chunk) and not (self._lost or self._closing):
            room = self.protocol.get_buffer(-1)
            count = min(len(room), len(chunk) - at)
            room[:count] = chunk[at : at + count]
            at += count
            self.protocol.buffer_updated(count)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._lose(None)

    def abort(self) -> None:
        self._closing = True
        self._lose(None)

    def break_down(self) -> None:
        """The network loses the connection: both ends see it."""
        self._lose(ConnectionResetError("the connection broke"))

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._unsent.clear()
        self.soon(self.protocol.connection_lost, error)
        peer = self.peer
        if peer is not None and not peer._lost:
            self._loop.call_later(self._network.delay_s(), peer._lose, error)


class SimLink:
    """One end of a control link between two processes."""

    def __init__(self, loop: SimLoop, process: Process | None) -> None:
        self._loop = loop
        self._process = process
        self._inbox: deque[Messages | None] = deque()
        self._arrived = asyncio.Event()
        self._peer: SimLink | None = None
        self._free_at_s = 0.0
        if process is not None:
            process.on_death.append(self.close)

    @staticmethod
    def pair(loop: SimLoop, one: Process | None, other: Process | None) -> tuple[SimLink, SimLink]:
        """Two connected ends, of these processes."""
        near, far = SimLink(loop, one), SimLink(loop, other)
        near._peer, far._peer = far, near
        return near, far

    def send(self, message: Messages) -> None:
        if self._peer is not None and not (self._process is not None and self._process.dead):
            self._carry(self._peer, encode(message))

    def _carry(self, peer: SimLink, data: bytes | None) -> None:
        """To the peer, in order, after a while; None hangs up."""
        network = self._loop.network
        size = 0 if data is None else len(data)
        begin = max(self._free_at_s, self._loop.time())
        self._free_at_s = begin + network.delay_s(size)
        message = None if data is None else decode(data)
        self._loop.call_at(self._free_at_s, peer._put, message)

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
            self._carry(peer, None)
        self._put(None)
