"""Lines of text from standard input and from a socket, and to a socket: for demonstrations.

None of them can be read again. A failure of the job loses what was read since the last checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from ..errors import JobError, SourceError, UsageError
from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.sink import Guarantee, Sink, SinkWriter
from ..operators.source import Source, SourceReader
from .arguments import check_count
from .fetched_splits import OneSplit, OneSplitReader
from .files.source import LINES
from .formats.format import planning
from .formats.text import JsonFormat

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
LINE_BYTES_MAX: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 16
_SEND_S_MAX: Final = 30.0
_CONNECT_S_MAX: Final = 10.0


class LineSource(Source[Any]):
    """Lines that come once; a subclass says from where."""

    schema = LINES
    replays = False

    def splits(self, parallelism: int) -> list[bytes]:
        return [msgspec.msgpack.encode(OneSplit(None))]

    def with_columns(self, columns: Sequence[str]) -> LineSource:
        return self  # it has only one


class StdinSource(LineSource):
    """The lines of standard input."""

    def reader(self) -> SourceReader:
        return StdinReader("lines")

    def describe(self) -> str:
        return "stdin()"


class SocketSource(LineSource):
    """The lines that a program on this machine sends when a connection is made."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def reader(self) -> SourceReader:
        return SocketReader(self.host, self.port)

    def describe(self) -> str:
        return f"socket({self.host}:{self.port})"


class LineReader(OneSplitReader):
    """Cuts chunks of bytes into lines."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the source to its end."""
        raise NotImplementedError

    async def fetch(self, position: str | int | None) -> None:
        rest = b""
        async for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                raise SourceError(
                    f"a line is longer than {LINE_BYTES_MAX:,} bytes",
                    fix="lines end with a line break",
                )
            await self._put(lines)
        if rest:
            await self._put([rest])

    async def _put(self, lines: list[bytes]) -> None:
        if lines:
            texts = [line.removesuffix(b"\r").decode(errors="replace") for line in lines]
            column = pa.array(texts, pa.string())
            await self.hand_on(pa.RecordBatch.from_arrays([column], schema=LINES), None)


class StdinReader(LineReader):
    """Reads standard input of this process, without changing its mode, which a terminal shares."""

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            file = sys.stdin.fileno()
            empty = os.path.samestat(os.fstat(file), os.stat(os.devnull))
        except (AttributeError, OSError, ValueError):
            empty = True
        if empty:
            raise SourceError(
                "this process has no standard input",
                fix="run the job in the process that has it: --cluster in-process",
            )
        while True:
            await _readable(file)
            chunk = os.read(file, _CHUNK_BYTES)
            if not chunk:
                return
            yield chunk


async def _readable(file: int) -> None:
    """Return when a read does not block."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(file, ready.set)
    except PermissionError:
        return  # a file on disk can always be read
    try:
        await ready.wait()
    finally:
        loop.remove_reader(file)


class SocketReader(LineReader):
    """Connects, and reads to the end of the connection."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__("lines")
        self._host, self._port = host, port

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise _unreachable(self._host, self._port, error) from None
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                yield chunk
        except OSError as error:
            raise SourceError(
                f"the connection has ended address=`{self._host}:{self._port}`: {error}"
            ) from error
        finally:
            writer.close()


class SocketSink(Sink):
    """Sends lines to a program on this machine."""

    guarantees = frozenset({Guarantee.NONE})
    guarantee = Guarantee.NONE

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.place = f"{host}:{port}"

    def bind(self, schema: pa.Schema | None) -> None:
        if schema is not None and not _is_line(schema):
            with planning():
                JsonFormat().check_output(schema)

    def writer(self) -> SinkWriter:
        return SocketWriter(self.host, self.port)

    def describe(self) -> str:
        return f"socket({self.host}:{self.port})"


class SocketWriter(SinkWriter):
    """Writes the lines of one subtask to a connection of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._socket: socket.socket | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._encode = JsonFormat().encoder(pa.schema([]), "")

    def prepare(self) -> None:
        self._socket = _connected(self._host, self._port)
        self._socket.settimeout(_SEND_S_MAX)

    def write(self, batch: Batch) -> None:
        assert self._socket is not None
        lines = self._lines(batch)
        try:
            self._socket.sendall(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            raise JobError(
                f"lines cannot be sent address=`{self._host}:{self._port}`: {error}",
                fix="check that the program which takes them still runs, and reads",
            ) from error

    def _lines(self, batch: Batch) -> list[bytes]:
        if not isinstance(batch, ColumnBatch):
            return [_one_line(str(record)) for record in batch.records]
        if _is_line(batch.data.schema):
            return [_one_line(text or "") for text in batch.data.column(0).to_pylist()]
        return [value or b"" for value in self._encode(batch.data)]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _is_line(schema: pa.Schema) -> bool:
    return len(schema) == 1 and schema.field(0).type in (pa.string(), pa.large_string())


def _one_line(text: str) -> bytes:
    return " ".join(text.splitlines()).encode(errors="replace")


def _connected(host: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), _CONNECT_S_MAX)
    except OSError as error:
        raise _unreachable(host, port, error) from None


def _unreachable(host: str, port: int, error: OSError) -> JobError:
    return JobError(
        f"nothing listens at address=`{host}:{port}`: {error}",
        fix=f"start the other program first, such as: nc -lk {host} {port}",
    )


def _check_address(host: str, port: int) -> None:
    if host not in LOOPBACK:
        raise UsageError(
            f"sockets are for demonstrations on one machine host=`{host}`",
            fix=f"one of {', '.join(LOOPBACK)}; between machines use kafka_source or http_source",
        )
    check_count("port", port, 1)
    if port > 65535:
        raise UsageError(f"not a port port=`{port}`", fix="1 to 65535")


def stdin_source() -> StdinSource:
    """Return a source of the lines of standard input, in the column `line`.

    It is for demonstrations in one process (`--cluster in-process`). Lines cannot be read again: a failure
    of the job loses those since the last checkpoint. It ends with standard input.
    """
    return StdinSource()


def socket_source(port: int, *, host: str = "127.0.0.1") -> SocketSource:
    """Return a source of the lines that a program on this machine sends, in the column `line`.

    It is for demonstrations, such as with `nc -lk 127.0.0.1 9999`. Lines cannot be read again: a failure of
    the job loses those since the last checkpoint. It ends with the connection.

    Args:
        port: at which the program listens.
        host: `127.0.0.1`, `::1` or `localhost`.

    Raises:
        UsageError: this is no address of this machine. Whether anything listens is found when the job runs.
    """
    _check_address(host, port)
    return SocketSource(host, port)


def socket_sink(port: int, *, host: str = "127.0.0.1") -> SocketSink:
    """Return a sink that sends a line for each record to a program on this machine.

    A record of one text column is its text, any other one of columns a JSON object, and a Python object is
    `str(record)`. It is for demonstrations: nothing says which lines have arrived, so the guarantee is
    `none`.

    Args:
        port: at which the program listens.
        host: `127.0.0.1`, `::1` or `localhost`.

    Raises:
        UsageError: this is no address of this machine. Whether anything listens is found when the job runs.
    """
    _check_address(host, port)
    return SocketSink(host, port)
