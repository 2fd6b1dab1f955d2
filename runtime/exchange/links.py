"""The two ends of a connection between workers, and the channels that run over it.

A worker dials each worker it sends to; batches and control elements travel from the dialling to the
accepting end, credits come back. So two workers that send to each other have two connections.

A connection is cut into frames without needless copies. Payloads of which much is still to come are
received straight into their own memory; small frames are cut from a scratch buffer that takes many of them
in one system call. All connections of a hub share this buffer, since the event loop fills and empties it
for one of them at a time: only the beginning of a frame, less than `DIRECT_BYTES`, is kept for each.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from ...errors import ExchangeError, HeadgateError
from ...operators.elements import Batch, Control, EndOfPartition
from ..listening import GREETING_BYTES_MAX
from .gate import InputGate
from .partition import OutputChannel
from .queues import BATCHES
from .settings import ExchangeSettings
from .wire import (
    BACKLOG_MAX,
    HEADER_BYTES,
    SEQUENCE_MASK,
    WIRE_VERSION,
    ChannelId,
    ElementDecoder,
    ElementEncoder,
    FrameKind,
    FrameTooLargeError,
    Header,
    Parts,
    decode_buffer_size,
    encode_buffer_size,
    frame,
    unpack_header,
)

SCRATCH_BYTES = 256 * 1024
DIRECT_BYTES = 16 * 1024
"""A payload with at least this much to come is received into its own memory."""
BODY_FIRST_BYTES = 4 << 20
"""Memory taken at first on the word of a header alone; it doubles as bytes really arrive."""


class FrameConnection(asyncio.BufferedProtocol):
    """One end of a connection. Subclasses say what frames mean and what a loss does."""

    def __init__(self, settings: ExchangeSettings, scratch: bytearray) -> None:
        """
        Args:
            settings: limits.
            scratch: `SCRATCH_BYTES` that connections of one event loop share.
        """
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self.writable = False
        """False while the socket has more than `write_buffer_high_bytes` to send."""
        self.broken = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the socket is closed."""
        self._payload_bytes_max = GREETING_BYTES_MAX
        self._scratch = scratch
        self._scratch_bytes = HEADER_BYTES + GREETING_BYTES_MAX
        """The part of the scratch buffer that may be used."""
        self._begun = b""
        """The beginning of a frame whose rest has not arrived."""
        self._header: Header | None = None  # of the payload that is received into `_body`
        self._body = bytearray()
        self._filled = 0

    # -- for subclasses -----------------------------------------------------------------------------

    def connected(self) -> None:
        """The socket is there; frames may be written."""

    def frame_received(self, header: Header, payload: bytes | bytearray) -> None:
        """A whole frame arrived. Raising breaks the connection off."""
        raise NotImplementedError

    def resumed(self) -> None:
        """The connection is `writable` again."""

    def lost(self, error: ExchangeError) -> None:
        """The connection broke without `shut_down`. Called once."""

    def establish(self, payload_bytes_max: int = 0) -> None:
        """The handshake is over: allow frames up to this size; 0: that of the settings."""
        self._payload_bytes_max = payload_bytes_max or self._settings.frame_size_max_bytes
        self._scratch_bytes = SCRATCH_BYTES

    # -- use ----------------------------------------------------------------------------------------

    @property
    def has_socket(self) -> bool:
        """True once connected, also after the loss: `closed` is, or will be, done."""
        return self._transport is not None

    def write(self, parts: Parts) -> None:
        """Send frames. They queue in the socket's buffer, so data asks `writable` first."""
        if self._transport is not None and not self.broken:
            self._transport.writelines(parts)

    def pause_reading(self) -> None:
        """Receive nothing more for now; what has arrived already still comes."""
        if self._transport is not None and not self.broken:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        if self._transport is not None and not self.broken:
            self._transport.resume_reading()

    def break_off(self, error: HeadgateError) -> None:
        """Close at once because of `error`."""
        if not self.broken:
            self._abort()
            self.lost(error if isinstance(error, ExchangeError) else ExchangeError(str(error)))

    def shut_down(self) -> None:
        """Close at once, on purpose: `lost` is not called."""
        if not self.broken:
            self._abort()

    def hang_up(self) -> None:
        """Close on purpose, after what was written has been sent."""
        self.broken = True
        self.writable = False
        if self._transport is not None:
            self._transport.close()

    def _abort(self) -> None:
        self.broken = True
        self.writable = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.broken:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._settings.write_buffer_high_bytes)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.writable = True
        self.connected()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        if not self.broken:
            self.broken = True
            self.writable = False
            reason = "closed by the peer" if exc is None else repr(exc)
            self.lost(ExchangeError(f"the connection broke reason=`{reason}`"))

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        if not self.broken:
            self.writable = True
            self.resumed()

    def get_buffer(self, sizehint: int) -> Any:
        if self._header is not None:
            return memoryview(self._body)[self._filled :]
        begun = len(self._begun)
        self._scratch[:begun] = self._begun
        return memoryview(self._scratch)[begun : self._scratch_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._header is not None:
                self._filled += nbytes
                self._continue_body(self._header)
            else:
                self._cut_frames(len(self._begun) + nbytes)
        except HeadgateError as error:
            self.break_off(error)
        except Exception as error:
            self.break_off(ExchangeError(f"a frame cannot be read error=`{error!r}`"))

    def _cut_frames(self, end: int) -> None:
        """Take the frames out of the first `end` bytes of the scratch buffer."""
        start = 0
        while not self.broken and end - start >= HEADER_BYTES:
            header = unpack_header(self._scratch, start)
            if header.length > self._payload_bytes_max:
                raise ExchangeError(
                    f"a frame is too large bytes=`{header.length}` limit=`{self._payload_bytes_max}`"
                )
            begin = start + HEADER_BYTES
            missing = header.length - (end - begin)
            if missing <= 0:
                start = begin + header.length
                self.frame_received(header, self._scratch[begin:start])
            elif missing >= DIRECT_BYTES or end - start >= DIRECT_BYTES or self._is_long(header):
                self._begin_body(header, begin, end)
                start = end
            else:
                break
        self._begun = bytes(self._scratch[start:end])

    def _is_long(self, header: Header) -> bool:
        """Return True for a frame that does not fit into the scratch buffer."""
        return HEADER_BYTES + header.length > self._scratch_bytes

    def _begin_body(self, header: Header, begin: int, end: int) -> None:
        self._header = header
        self._body = bytearray(min(header.length, BODY_FIRST_BYTES))
        self._filled = end - begin
        self._body[: self._filled] = self._scratch[begin:end]

    def _continue_body(self, header: Header) -> None:
        if self._filled < len(self._body):
            return
        if self._filled < header.length:
            grown = bytearray(min(header.length, 2 * len(self._body)))
            grown[: self._filled] = self._body
            self._body = grown
            return
        body = self._body
        self._header, self._body, self._filled = None, bytearray(), 0
        self.frame_received(header, body)


class ChannelHello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of the dialling end."""

    version: int
    token: str
    worker_id: str
    expected_peer: str
    attempt: int
    region: int = 0


class HelloAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The accepting end's reply; `refusal` is empty if the caller is welcome."""

    refusal: str


_HELLO = msgspec.msgpack.Decoder(ChannelHello)
_ANSWER = msgspec.msgpack.Decoder(HelloAnswer)


class SocketOutputChannel(OutputChannel):
    """Sends to a gate of another worker. Elements are encoded only once there is credit for them."""

    encodes = True

    def __init__(self, channel_id: ChannelId, settings: ExchangeSettings, sender: str = "") -> None:
        super().__init__(channel_id, settings)
        self._connection: FrameConnection | None = None
        self._encoder = ElementEncoder(channel_id, sender, settings.frame_size_max_bytes)
        self._parts: Parts = []

    def bind(self, connection: FrameConnection) -> None:
        """Use `connection`; its other end answers with the first credits."""
        self._connection = connection
        connection.write(self._encoder.open())

    def _can_transmit(self) -> bool:
        return self._connection is not None and self._connection.writable

    def _transmit(self, batch: Batch, backlog: int) -> None:
        try:
            self._parts += self._encoder.batch(batch, backlog)
        except FrameTooLargeError:
            # Each half takes a credit of its own. This one has its credit already.
            half = len(batch) // 2
            self.queue.appendleft(batch.slice(half, len(batch) - half))
            self.queued_buffers += 1
            self._transmit(batch.slice(0, half), self.queued_buffers)

    def _transmit_control(self, control: Control) -> None:
        self._parts += self._encoder.control(control)

    def _announce_backlog(self, backlog: int) -> None:
        assert self._connection is not None
        self._connection.write(self._encoder.backlog(backlog))

    def _flush(self) -> None:
        if self._parts:
            assert self._connection is not None
            parts, self._parts = self._parts, []
            self._connection.write(parts)


class DiallingEnd(FrameConnection):
    """Our end of a connection we send on; made before the socket, to collect its channels."""

    def __init__(
        self,
        settings: ExchangeSettings,
        scratch: bytearray,
        hello: ChannelHello,
        on_loss: Callable[[str, ExchangeError], None],
    ) -> None:
        super().__init__(settings, scratch)
        self.peer_id = hello.expected_peer
        self._hello = hello
        self._on_loss = on_loss
        self._channels: dict[ChannelId, SocketOutputChannel] = {}
        self._credit_sequences: dict[ChannelId, int] = {}
        self._turn = 0
        self.dialled = False
        self.established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the peer welcomed us; fails if it did not."""
        # Its waiter may be gone when it fails.
        self.established.add_done_callback(lambda done: done.cancelled() or done.exception())

    def add(self, channel: SocketOutputChannel) -> None:
        """Run `channel` over this connection, now or once it is established."""
        if channel.channel_id in self._channels:
            raise ExchangeError(f"the channel exists already channel=`{channel.channel_id}`")
        self._channels[channel.channel_id] = channel
        self._credit_sequences[channel.channel_id] = 0
        if self.broken:
            channel.fail(ExchangeError(f"the connection is broken peer=`{self.peer_id}`"))
        elif self.established.done():
            channel.bind(self)

    def connected(self) -> None:
        self.write(frame(FrameKind.HELLO, msgspec.msgpack.encode(self._hello)))

    def frame_received(self, header: Header, payload: bytes | bytearray) -> None:
        if not self.established.done():
            self._read_answer(header, payload)
            return
        channel = self._channels.get(header.channel)
        if header.kind not in (FrameKind.CREDIT, FrameKind.BUFFER_SIZE) or channel is None:
            raise ExchangeError(
                f"unexpected frame kind=`{header.kind.name}` channel=`{header.channel}`"
            )
        expected = self._credit_sequences[header.channel]
        if header.sequence != expected:
            raise ExchangeError(
                f"credit out of sequence channel=`{header.channel}` "
                f"expected=`{expected}` received=`{header.sequence}`"
            )
        self._credit_sequences[header.channel] = (expected + 1) & SEQUENCE_MASK
        if header.kind is FrameKind.CREDIT:
            channel.add_credits(header.backlog)
        else:
            channel.set_buffer_size(decode_buffer_size(payload))

    def _read_answer(self, header: Header, payload: bytes | bytearray) -> None:
        if header.kind is not FrameKind.HELLO:
            raise ExchangeError(f"the peer does not speak our protocol kind=`{header.kind.name}`")
        refusal = _ANSWER.decode(payload).refusal
        if refusal:
            raise ExchangeError(f"the peer refused the connection: {refusal}")
        self.establish()
        self.established.set_result(None)
        for channel in list(self._channels.values()):
            channel.bind(self)

    def resumed(self) -> None:
        channels = list(self._channels.values())
        # Each time another channel goes first, since the first may fill the socket again.
        self._turn = (self._turn + 1) % max(1, len(channels))
        for channel in channels[self._turn :] + channels[: self._turn]:
            channel.pump()

    def abandon(self) -> None:
        """The attempt is over: subtasks that still hold one of the channels must not wait for it."""
        for channel in self._channels.values():
            channel.fail(ExchangeError("the attempt is over"))
        if not self.established.done():
            self.established.set_exception(ExchangeError("the attempt is over"))

    def lost(self, error: ExchangeError) -> None:
        error = ExchangeError(f"{error.message} peer=`{self.peer_id}`")
        if not self.established.done():
            self.established.set_exception(error)
        live = [channel for channel in self._channels.values() if not channel.finished]
        for channel in live:
            channel.fail(error)
        if live:
            self._on_loss(self.peer_id, error)


class _SocketInput:
    """The receiving end of one channel, and the way back for its credits and sizes."""

    def __init__(self, connection: FrameConnection, channel_id: ChannelId) -> None:
        self.gate: InputGate | None = None
        self.finished = False
        self._position = 0
        self._connection = connection
        self._channel_id = channel_id
        self._decoder = ElementDecoder(channel_id)
        self._credit_sequence = 0

    def bind(self, gate: InputGate) -> None:
        self._position = gate.attach(self._channel_id, self)
        self.gate = gate
        gate.open(self._position)

    def add_credits(self, count: int) -> None:
        while count > 0:
            portion = min(count, BACKLOG_MAX)
            count -= portion
            self._write(FrameKind.CREDIT, backlog=portion)

    def set_buffer_size(self, size_bytes: int) -> None:
        self._write(FrameKind.BUFFER_SIZE, encode_buffer_size(size_bytes))

    def _write(self, kind: FrameKind, payload: bytes = b"", backlog: int = 0) -> None:
        sequence = self._credit_sequence
        self._credit_sequence += 1
        self._connection.write(
            frame(kind, payload, channel=self._channel_id, sequence=sequence, backlog=backlog)
        )

    def frame_received(self, header: Header, payload: bytes | bytearray) -> None:
        element = self._decoder.decode(header, payload)
        if header.kind is FrameKind.OPEN:
            return
        gate = self.gate
        if gate is None:
            raise ExchangeError(f"frame before the first credit channel=`{self._channel_id}`")
        if header.kind is FrameKind.BACKLOG:
            gate.receive_backlog(self._position, header.backlog)
        elif isinstance(element, BATCHES):
            gate.receive(self._position, element, header.backlog)
        elif element is not None:
            self.finished = isinstance(element, EndOfPartition)
            gate.receive_control(self._position, element)


class ReadClient(Protocol):
    """A client that reads state over a connection, at the worker."""

    def received(self, header: Header, payload: bytes | bytearray) -> None:
        """Take a frame. Raising breaks the connection off."""
        ...

    def closed(self) -> None:
        """Note that the connection is gone."""
        ...


class GateDirectory(Protocol):
    """The part of a hub that an accepting end uses."""

    def admit(self, hello: ChannelHello, end: AcceptingEnd) -> str:
        """Why the caller is refused; empty if it is welcome."""
        ...

    def admit_reader(self, hello: bytes | bytearray, end: AcceptingEnd) -> ReadClient | None:
        """Answer a client that wants to read state; None: it is refused."""
        ...

    def gate_of(self, channel_id: ChannelId, region: int) -> InputGate | None:
        """The gate of a region that holds a channel, if it is registered."""
        ...

    def connection_lost(self, peer_id: str, error: ExchangeError, region: int) -> None:
        """A connection with live channels broke."""
        ...

    def forget(self, end: AcceptingEnd) -> None:
        """The connection is gone."""
        ...


class AcceptingEnd(FrameConnection):
    """Our end of a connection we receive on."""

    def __init__(
        self,
        settings: ExchangeSettings,
        scratch: bytearray,
        hub: GateDirectory,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(settings, scratch)
        self._handshake_timeout_s = handshake_timeout_s
        self.peer_id = ""
        self.region: int | None = None
        """Whose channels it carries; None until the caller has been welcomed."""
        self._hub = hub
        self.reader: ReadClient | None = None
        """The client at the other end, if it is no worker."""
        self._inputs: dict[ChannelId, _SocketInput] = {}
        self._deadline: asyncio.TimerHandle | None = None

    def connected(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._handshake_timeout_s, self.shut_down)

    def frame_received(self, header: Header, payload: bytes | bytearray) -> None:
        if not self.peer_id:
            self._receive_from_no_peer(header, payload)
            return
        input_ = self._inputs.get(header.channel)
        if input_ is None:
            if header.kind is not FrameKind.OPEN:
                raise ExchangeError(f"the channel is not open channel=`{header.channel}`")
            input_ = self._inputs[header.channel] = _SocketInput(self, header.channel)
            input_.frame_received(header, payload)
            assert self.region is not None  # as was said in the hello
            gate = self._hub.gate_of(header.channel, self.region)
            if gate is not None:
                input_.bind(gate)
        else:
            input_.frame_received(header, payload)

    def _receive_from_no_peer(self, header: Header, payload: bytes | bytearray) -> None:
        """Take a frame of a stranger, or of a client that reads state."""
        if self.reader is not None:
            self.reader.received(header, payload)
        elif header.kind is not FrameKind.READ_HELLO:
            self._read_hello(header, payload)
        else:
            self.reader = self._hub.admit_reader(payload, self)
            if self.reader is None:
                self.hang_up()
            elif self._deadline is not None:
                self._deadline.cancel()

    def _read_hello(self, header: Header, payload: bytes | bytearray) -> None:
        if header.kind is not FrameKind.HELLO:
            raise ExchangeError(f"frame before the handshake kind=`{header.kind.name}`")
        hello = _HELLO.decode(payload)
        refusal = self._hub.admit(hello, self)
        self.write(frame(FrameKind.HELLO, msgspec.msgpack.encode(HelloAnswer(refusal))))
        if refusal:
            self.hang_up()
            return
        self.peer_id, self.region = hello.worker_id, hello.region
        self.establish()
        if self._deadline is not None:
            self._deadline.cancel()

    def gate_registered(self, gate: InputGate) -> None:
        """Bind the channels of `gate` that were opened before it was there."""
        for channel_id in gate.channel_ids:
            input_ = self._inputs.get(channel_id)
            if input_ is not None:
                try:
                    input_.bind(gate)
                except HeadgateError as error:
                    self.break_off(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
        if self.reader is not None:
            self.reader.closed()
        self._hub.forget(self)

    def lost(self, error: ExchangeError) -> None:
        live = [input_ for input_ in self._inputs.values() if not input_.finished]
        error = ExchangeError(f"{error.message} peer=`{self.peer_id}`")
        for input_ in live:
            if input_.gate is not None:
                input_.gate.fail(error)
        if live and self.region is not None:
            self._hub.connection_lost(self.peer_id, error, self.region)


def refusal_of(hello: ChannelHello, worker_id: str, token: str, attempt: int | None) -> str:
    """Why a caller is refused; empty if it is welcome."""
    # Compared as bytes and in constant time; nothing else is said to strangers.
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "wrong token"
    if hello.version != WIRE_VERSION:
        return f"other version of the protocol version=`{hello.version}` ours=`{WIRE_VERSION}`"
    if hello.expected_peer != worker_id:
        return f"this is another worker worker=`{worker_id}`"
    if hello.attempt != attempt:
        return f"another attempt runs here attempt=`{attempt}` yours=`{hello.attempt}`"
    return ""
