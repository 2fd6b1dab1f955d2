"""Frames over a stream socket: one connection, cut into frames without needless copies.

Payloads of which much is still to come are received straight into their own memory; small frames are
cut from a scratch buffer that takes many of them in one system call.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from ...errors import ExchangeError, HeadgateError
from ..admission import GREETING_BYTES_MAX
from .settings import ExchangeSettings
from .wire import HEADER_BYTES, Header, Parts, unpack_header

SCRATCH_BYTES = 256 * 1024
DIRECT_BYTES = 16 * 1024
"""A payload with at least this much to come is received into its own memory."""
BODY_FIRST_BYTES = 4 << 20
"""Memory taken at first on the word of a header alone; it doubles as bytes really arrive."""


class FrameConnection(asyncio.BufferedProtocol):
    """One end of a connection. Subclasses say what frames mean and what a loss does."""

    def __init__(self, settings: ExchangeSettings) -> None:
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self.writable = False
        """False while the socket has more than `write_buffer_high_bytes` to send."""
        self.broken = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the socket is closed."""
        self._payload_bytes_max = GREETING_BYTES_MAX
        self._scratch_bytes = HEADER_BYTES + GREETING_BYTES_MAX
        self._scratch = bytearray(self._scratch_bytes)
        self._end = 0  # bytes in the scratch buffer
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

    def establish(self) -> None:
        """The handshake is over: allow frames of all sizes."""
        self._payload_bytes_max = self._settings.frame_size_max_bytes
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
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._header is not None:
                self._filled += nbytes
                self._continue_body(self._header)
            else:
                self._end += nbytes
                self._cut_frames()
        except HeadgateError as error:
            self.break_off(error)
        except Exception as error:
            self.break_off(ExchangeError(f"a frame cannot be read error=`{error!r}`"))

    def _cut_frames(self) -> None:
        start = 0
        while not self.broken and self._end - start >= HEADER_BYTES:
            header = unpack_header(self._scratch, start)
            if header.length > self._payload_bytes_max:
                raise ExchangeError(
                    f"a frame is too large bytes=`{header.length}` limit=`{self._payload_bytes_max}`"
                )
            begin = start + HEADER_BYTES
            missing = header.length - (self._end - begin)
            if missing <= 0:
                start = begin + header.length
                self.frame_received(header, self._scratch[begin:start])
            elif missing >= DIRECT_BYTES or HEADER_BYTES + header.length > len(self._scratch):
                self._begin_body(header, begin)
                start = self._end
            else:
                break
        self._keep_from(start)

    def _keep_from(self, start: int) -> None:
        """Move the begun frame to the front, so that the rest of it fits behind."""
        rest = self._scratch[start : self._end]
        if self._scratch_bytes != len(self._scratch):
            self._scratch = bytearray(self._scratch_bytes)
        self._scratch[: len(rest)] = rest
        self._end = len(rest)

    def _begin_body(self, header: Header, begin: int) -> None:
        self._header = header
        self._body = bytearray(min(header.length, BODY_FIRST_BYTES))
        self._filled = self._end - begin
        self._body[: self._filled] = self._scratch[begin : self._end]

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
