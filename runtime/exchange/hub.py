"""The exchange of one worker: its listeners, its connections to peers, and the channels of each region.

Regions of a job have no channels in between (`protocol/failover.py`), so each has an attempt, gates and
connections of its own: whatever happens to those of one region, no other notices.

Life of an attempt: register the gates and make the output channels on all workers, `connect` on all
workers, run, `reset`. In each region an attempt number is used once and only grows, so a worker left over
from an earlier attempt can neither connect nor be connected to.

Channels to a subtask of the same worker pass elements by reference, under the same credits.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from ...errors import ExchangeError, UsageError, check
from ..listening import LOOPBACK, Admission, Listener, ListenerLimits
from .gate import InputGate, LocalOutputChannel
from .links import (
    SCRATCH_BYTES,
    AcceptingEnd,
    ChannelHello,
    DiallingEnd,
    ReadClient,
    SocketOutputChannel,
    refusal_of,
)
from .partition import OutputChannel
from .settings import ExchangeSettings
from .wire import WIRE_VERSION, ChannelId

UDS_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket on Linux."""


class WorkerAddress(msgspec.Struct, frozen=True):
    """The addresses at which a worker listens. Peers with the same `host_id` may use the Unix socket."""

    worker_id: str
    host: str
    uds_path: str | None
    tcp_port: int
    host_id: str

    def encode(self) -> bytes:
        """The address as msgpack, for control messages."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> WorkerAddress:
        """The reverse of `encode`."""
        return msgspec.msgpack.decode(data, type=cls)


def addresses_for_peers(addresses: Sequence[bytes]) -> list[bytes]:
    """Return encoded addresses without the Unix sockets that no peer can reach.

    With a worker on each of many machines they are most of what there is to send to all of them.
    """
    decoded = [WorkerAddress.decode(data) for data in addresses]
    workers = Counter(address.host_id for address in decoded)
    return [
        address.encode()
        if workers[address.host_id] > 1
        else msgspec.structs.replace(address, uds_path=None, host_id="").encode()
        for address in decoded
    ]


def this_host() -> str:
    """Equal for processes that share a file system and a kernel; pods of one node differ."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


AdmitReader: TypeAlias = Callable[[bytes | bytearray, AcceptingEnd], ReadClient | None]


def _refuse_reader(hello: bytes | bytearray, end: AcceptingEnd) -> None:
    """Refuse a client that wants to read state: no worker is behind this hub."""


class _Region:
    """The channels and connections of one region on this worker while an attempt runs."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.gates: dict[ChannelId, InputGate] = {}
        self.local: dict[ChannelId, LocalOutputChannel] = {}
        self.dialling: dict[str, DiallingEnd] = {}


class ExchangeHub:
    """One per worker. All calls belong in one event loop; several hubs may share it."""

    def __init__(
        self,
        worker_id: str,
        token: str,
        *,
        settings: ExchangeSettings | None = None,
        limits: ListenerLimits | None = None,
        listener: Listener | None = None,
        on_failure: Callable[[str, ExchangeError, int], None] | None = None,
    ) -> None:
        """Make a hub; `start` opens its listeners.

        Args:
            worker_id: unique among the workers that may meet.
            token: the cluster's shared secret; peers must show it.
            settings: sizes of buffers, and timeouts; None: the defaults, with the frame size of `limits`.
            limits: of what peers get before they have shown the token.
            listener: the TCP port and its hosts; None: any free port.
            on_failure: called with a peer's id, the error and the region when a connection with live
                channels broke, after their gates and partitions have failed. At most once per connection.
        """
        self.worker_id = worker_id
        self.on_failure = on_failure
        self._token = token
        limits = limits or ListenerLimits()
        self._settings = settings or ExchangeSettings(
            frame_size_max_bytes=limits.frame_size_max_bytes
        )
        self._scratch = bytearray(SCRATCH_BYTES)
        self._admission = Admission(limits, "data port")
        self._listener = listener or Listener()
        self._servers: list[asyncio.AbstractServer] = []
        self._uds_path: str | None = None
        self._address: WorkerAddress | None = None
        self._regions: dict[int, _Region] = {}
        self._last_attempts: dict[int, int] = {}
        """The newest attempt of each region."""
        self._accepting: dict[AcceptingEnd, None] = {}
        """The connections in the order in which they came, so that they are always closed in this order."""
        self.admit_reader: AdmitReader = _refuse_reader
        """Answers a client that wants to read state, as `AcceptingEnd` expects it."""
        self.refused = 0
        """Callers of another attempt, or strangers, that were sent away."""

    # -- life ---------------------------------------------------------------------------------------

    async def start(
        self,
        uds_dir: str | None,
        node_host: str = LOOPBACK,
        *,
        host_id: str | None = None,
    ) -> WorkerAddress:
        """Open the listeners and return where they are.

        Args:
            uds_dir: directory of the Unix socket; None: TCP only.
            node_host: the address of this machine among the peers.
            host_id: see `this_host`.

        Raises:
            JobError: the TCP port is taken, or cannot be bound.
        """
        check(self._address is None, "the hub was started already")
        loop = asyncio.get_running_loop()
        path = self._path_below(uds_dir)
        open_server = partial(loop.create_server, self._accept)
        server, host, port = await self._listener.open(open_server, node_host)
        self._servers.append(server)
        if path is not None:
            self._servers.append(await loop.create_unix_server(self._accept, path))
            self._uds_path = path
            os.chmod(path, 0o600)
        self._address = WorkerAddress(
            worker_id=self.worker_id,
            host=host,
            uds_path=self._uds_path,
            tcp_port=port,
            host_id=host_id or this_host(),
        )
        return self._address

    def _path_below(self, directory: str | None) -> str | None:
        """The path of the Unix socket, if there is to be one."""
        if directory is None:
            return None
        # Worker ids may be long, and paths of Unix sockets must be short.
        name = hashlib.blake2s(self.worker_id.encode(), digest_size=8).hexdigest()
        path = os.path.join(directory, f"{name}.sock")
        if len(os.fsencode(path)) > UDS_PATH_BYTES_MAX:
            raise UsageError(
                f"the path of the Unix socket is too long path=`{path}`",
                fix=f"use a directory that leaves it within {UDS_PATH_BYTES_MAX} bytes",
            )
        return path

    def attempt(self, region: int = 0) -> int | None:
        """The attempt of a region that this hub works for; None between attempts."""
        current = self._regions.get(region)
        return None if current is None else current.attempt

    async def reset(self, regions: Collection[int] | None = None) -> None:
        """Drop all gates, channels and connections of some regions, or of all; ready for the next attempt.

        Nothing is flushed and `on_failure` is not called. Peers that still run the attempt see their
        connections break. Clients that read state stay connected.
        """
        over = set(self._regions) if regions is None else set(regions) & set(self._regions)
        dropped = [self._regions.pop(region) for region in over]
        ends: list[DiallingEnd | AcceptingEnd] = [
            end
            for end in self._accepting
            if end.reader is None and (regions is None or end.region in over)
        ]
        ends += [dialling for region in dropped for dialling in region.dialling.values()]
        for end in ends:
            end.shut_down()
        for region in dropped:
            for gate in set(region.gates.values()):
                gate.close()
            for local in region.local.values():
                local.fail(ExchangeError("the attempt is over"))
            for dialling in region.dialling.values():
                dialling.abandon()
        await asyncio.gather(*(end.closed for end in ends if end.has_socket))

    async def close(self) -> None:
        """Reset, and stop listening. The hub cannot be started again."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        await self.reset()
        for end in list(self._accepting):
            end.shut_down()
        for server in servers:
            await server.wait_closed()
        if self._uds_path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._uds_path)

    # -- channels -----------------------------------------------------------------------------------

    def register_gate(self, gate: InputGate, attempt: int, region: int = 0) -> None:
        """Receive for `gate`, whose senders may be here or elsewhere, connected already or not."""
        own = self._use(attempt, region)
        for channel_id in gate.channel_ids:
            if channel_id in own.gates:
                raise ExchangeError(f"the channel has a gate already channel=`{channel_id}`")
        for channel_id in gate.channel_ids:
            own.gates[channel_id] = gate
            local = own.local.get(channel_id)
            if local is not None:
                local.bind(gate)
        for end in list(self._accepting):
            if end.region == region:
                end.gate_registered(gate)

    def output_channel(
        self,
        channel_id: ChannelId,
        peer: WorkerAddress,
        attempt: int,
        sender: str = "",
        region: int = 0,
    ) -> OutputChannel:
        """The sending end of a channel to `peer`: by reference if that is this worker, else a socket.

        It may be used at once; elements wait until the peer is connected and has the gate. `sender` is
        the name of the step that sends, for errors.
        """
        own = self._use(attempt, region)
        if peer.worker_id != self.worker_id:
            channel = SocketOutputChannel(channel_id, self._settings, sender)
            self._end_for(peer.worker_id, own, region).add(channel)
            return channel
        if channel_id in own.local:
            raise ExchangeError(f"the channel exists already channel=`{channel_id}`")
        local = own.local[channel_id] = LocalOutputChannel(channel_id, self._settings)
        gate = own.gates.get(channel_id)
        if gate is not None:
            local.bind(gate)
        return local

    def _use(self, attempt: int, region: int) -> _Region:
        """Begin `attempt` of a region, or go on with it."""
        current = self._regions.get(region)
        if current is None:
            last = self._last_attempts.get(region, -1)
            if attempt <= last:
                raise ExchangeError(f"the attempt is over attempt=`{attempt}` last=`{last}`")
            self._last_attempts[region] = attempt
            current = self._regions[region] = _Region(attempt)
        elif attempt != current.attempt:
            raise ExchangeError(
                f"another attempt runs here attempt=`{attempt}` running=`{current.attempt}`",
                fix="reset the hub between attempts",
            )
        return current

    # -- connections --------------------------------------------------------------------------------

    async def connect(self, peers: Iterable[WorkerAddress], attempt: int, region: int = 0) -> None:
        """Connect to all `peers` we send to; others, and this worker itself, are left out.

        Cancelling leaves connections half made: `reset` follows.

        Raises:
            ExchangeError: a peer cannot be reached, or refused us (token, attempt).
        """
        own = self._use(attempt, region)
        wanted = [(peer, end) for peer in peers if (end := own.dialling.get(peer.worker_id))]
        tasks = [
            asyncio.create_task(self._dial(peer, end), name=f"connect {peer.worker_id}")
            for peer, end in wanted
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _dial(self, peer: WorkerAddress, end: DiallingEnd) -> None:
        if end.dialled:
            await asyncio.shield(end.established)
            return
        end.dialled = True
        try:
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                await self._open_socket(peer, end)
                # Shielded: a cancelled wait must not look like an answer.
                await asyncio.shield(end.established)
        except (OSError, TimeoutError) as error:
            failure = ExchangeError(
                f"cannot connect to a worker peer=`{peer.worker_id}` host=`{peer.host}` "
                f"port=`{peer.tcp_port}` error=`{error!r}`"
            )
            end.break_off(failure)
            raise failure from error

    async def _open_socket(self, peer: WorkerAddress, end: DiallingEnd) -> None:
        loop = asyncio.get_running_loop()
        own = self._address
        if own is not None and own.host_id == peer.host_id and peer.uds_path is not None:
            # A file system that is not shared after all shows itself here; TCP works anyway.
            with suppress(FileNotFoundError, PermissionError):
                await loop.create_unix_connection(lambda: end, peer.uds_path)
                return
        await loop.create_connection(lambda: end, peer.host, peer.tcp_port)

    def _end_for(self, peer_id: str, own: _Region, region: int) -> DiallingEnd:
        end = own.dialling.get(peer_id)
        if end is None:
            hello = ChannelHello(
                WIRE_VERSION, self._token, self.worker_id, peer_id, own.attempt, region
            )
            lost = partial(self.connection_lost, region=region)
            end = own.dialling[peer_id] = DiallingEnd(self._settings, self._scratch, hello, lost)
        return end

    def _accept(self) -> AcceptingEnd:
        handshake_s = self._admission.limits.handshake_timeout_s
        end = AcceptingEnd(self._settings, self._scratch, self, handshake_s)
        self._accepting[end] = None
        self._admission.enter(end, end.shut_down)
        return end

    # -- for the accepting ends ---------------------------------------------------------------------

    def admit(self, hello: ChannelHello, end: AcceptingEnd) -> str:
        """Why a caller is refused; empty if it is welcome. One connection per peer and region."""
        attempt = self.attempt(hello.region)
        refusal = refusal_of(hello, self.worker_id, self._token, attempt)
        if not refusal and any(
            (other.peer_id, other.region) == (hello.worker_id, hello.region)
            for other in self._accepting
            if other is not end
        ):
            refusal = f"the worker is connected already worker=`{hello.worker_id}`"
        self.refused += bool(refusal)
        if not refusal:
            self._admission.authenticate(end)
        return refusal

    @property
    def limits(self) -> ListenerLimits:
        """The limits of its listeners."""
        return self._admission.limits

    def authenticated(self, end: AcceptingEnd) -> None:
        """Note that a caller is no stranger: it may read state."""
        self._admission.authenticate(end)

    def gate_of(self, channel_id: ChannelId, region: int) -> InputGate | None:
        """The gate of a region that holds a channel, if it is registered."""
        own = self._regions.get(region)
        return None if own is None else own.gates.get(channel_id)

    def connection_lost(self, peer_id: str, error: ExchangeError, region: int) -> None:
        """A connection with live channels broke; gates and partitions have failed already."""
        if self.on_failure is not None:
            self.on_failure(peer_id, error, region)

    def forget(self, end: AcceptingEnd) -> None:
        """The connection is gone."""
        self._accepting.pop(end, None)
        self._admission.leave(end)
