"""The wire format: frames of a 16-byte header and a payload, and how elements become frames.

    length u32 | kind u8 | flags u8 | backlog u16 | channel u32 | sequence u32      (little endian)

`length` counts the payload. `sequence` counts the frames of one channel in one direction, modulo 2**32: a
gap or repeat is an error. `backlog` is the number of batches that wait at the sender; in CREDIT frames it
is the number of credits. CREDIT and BUFFER_SIZE travel the other way. Objects travel as pickles: only peers
that showed the cluster's token get to send frames. Tuples of numbers travel as arrays (`numbers.py`).
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import msgspec
import numpy as np
import pyarrow as pa

from ...errors import DataError, ExchangeError
from ...operators.elements import (
    Batch,
    CancelCheckpointMarker,
    CheckpointBarrier,
    ColumnBatch,
    Control,
    Element,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    LoopProbe,
    ObjectBatch,
    Watermark,
    WatermarkStatus,
)
from .numbers import decode_numbers, encode_numbers
from .settings import FRAME_SIZE_MAX_BYTES

WIRE_VERSION = 4
HEADER = struct.Struct("<IBBHII")
HEADER_BYTES = HEADER.size
_SIZE = struct.Struct("<I")
_SIZE_MAX = 2**32 - 1
BACKLOG_MAX = 0xFFFF
SEQUENCE_MASK = 0xFFFF_FFFF
_SAMPLED_RECORDS = 16
_TEXTS = frozenset({str, bytes})
_NUMBERS = frozenset({int, float, bool, type(None)})
TIMESTAMPS_COLUMN = pa.field("__timestamps", pa.int64(), nullable=False)

ChannelId: TypeAlias = int
"""Names a channel within one attempt; given by the planner, fits in 32 bits."""
Parts: TypeAlias = list[Any]
"""Bytes-like objects to be written one after the other."""


class FrameKind(IntEnum):
    """The kinds of frames."""

    HELLO = 1
    """First frame in both directions: who calls, and the answer. msgpack."""
    OPEN = 2
    """The sender will use this channel; credits may come."""
    SCHEMA = 3
    """Arrow schema of the COLUMNS frames that follow on the channel."""
    COLUMNS = 4
    """An Arrow IPC record batch without its schema; with DICTIONARIES a whole IPC stream."""
    OBJECTS = 5
    """Pickle, protocol 5, of (records, timestamps)."""
    CONTROL = 6
    """msgpack of [tag, control element]."""
    BACKLOG = 7
    """The sender has a backlog and no credit."""
    CREDIT = 8
    """Receiver to sender: that many more buffers are free."""
    BUFFER_SIZE = 9
    """Receiver to sender: how many bytes future buffers may hold, as a u32."""
    READ_HELLO = 10
    """First frame of a client that reads state, and the answer (`reads/wire.py`). msgpack."""
    READ = 11
    """Client to worker: a request. msgpack."""
    READ_ANSWER = 12
    """Worker to client: the answer to a request. msgpack."""
    NUMBERS = 13
    """Records that are tuples of numbers, and their timestamps, as arrays (`numbers.py`)."""


class Flags(IntEnum):
    """Bits of the header's flags."""

    TIMESTAMPS = 1
    """The last column holds the event times."""
    DICTIONARIES = 2
    """The payload is an IPC stream of one batch, with its schema and dictionaries."""


class Header(NamedTuple):
    """A frame's header."""

    length: int
    kind: FrameKind
    flags: int
    backlog: int
    channel: ChannelId
    sequence: int


_KINDS = {int(kind): kind for kind in FrameKind}


def unpack_header(buffer: bytes | bytearray, offset: int = 0) -> Header:
    """Read a header.

    Raises:
        ExchangeError: the frame's kind is unknown.
    """
    length, kind, flags, backlog, channel, sequence = HEADER.unpack_from(buffer, offset)
    known = _KINDS.get(kind)
    if known is None:
        raise ExchangeError(f"unknown kind of frame kind=`{kind}` channel=`{channel}`")
    return Header(length, known, flags, backlog, channel, sequence)


def frame(
    kind: FrameKind,
    payload: Any = b"",
    *,
    channel: int = 0,
    sequence: int = 0,
    backlog: int = 0,
    flags: int = 0,
) -> Parts:
    """A frame as parts to write. `payload` is bytes or an Arrow buffer."""
    length = len(payload)
    backlog = min(backlog, BACKLOG_MAX)
    header = HEADER.pack(length, kind, flags, backlog, channel, sequence & SEQUENCE_MASK)
    return [header, memoryview(payload)] if length else [header]


def encode_buffer_size(size_bytes: int) -> bytes:
    """The payload of a BUFFER_SIZE frame."""
    return _SIZE.pack(min(size_bytes, _SIZE_MAX))


def decode_buffer_size(payload: bytes | bytearray) -> int:
    """The reverse of `encode_buffer_size`.

    Raises:
        ExchangeError: it is no size.
    """
    if len(payload) != _SIZE.size or not any(payload):
        raise ExchangeError(f"not a size of buffers payload=`{bytes(payload[:8])!r}`")
    return int(_SIZE.unpack(payload)[0])


# ---- control elements -----------------------------------------------------------------------------

_CONTROLS: tuple[type[Any], ...] = (
    Watermark,
    WatermarkStatus,
    CheckpointBarrier,
    CancelCheckpointMarker,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    LoopProbe,
)  # the position is the tag on the wire: append only
_TAGS = {kind: tag for tag, kind in enumerate(_CONTROLS)}
_CONTROL_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _CONTROLS]
_TAGGED = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def encode_control(control: Control) -> bytes:
    """A control element as bytes."""
    return msgspec.msgpack.encode((_TAGS[type(control)], control))


def decode_control(payload: bytes | bytearray) -> Control:
    """The reverse of `encode_control`."""
    tag, body = _TAGGED.decode(payload)
    if not 0 <= tag < len(_CONTROL_DECODERS):
        raise ExchangeError(f"unknown control element tag=`{tag}`")
    control: Control = _CONTROL_DECODERS[tag].decode(body)
    return control


class FrameTooLargeError(Exception):
    """Several records together are too large for one frame."""


# ---- one channel ----------------------------------------------------------------------------------


class ElementEncoder:
    """The frames of one channel, sender's side: numbers them and remembers the schema it sent.

    Args:
        channel: its number.
        sender: name of the step that sends, for errors.
        payload_bytes_max: larger frames would be refused by the receiver, so they are not sent.
    """

    def __init__(
        self,
        channel: ChannelId,
        sender: str = "",
        payload_bytes_max: int = FRAME_SIZE_MAX_BYTES,
    ) -> None:
        self._channel = channel
        self._sender = sender
        self._payload_bytes_max = payload_bytes_max
        self._sequence = 0
        self._schema: pa.Schema | None = None
        self._has_dictionaries = False
        self._dumps: Any = pickle.dumps

    def _frame(
        self, kind: FrameKind, payload: Any = b"", backlog: int = 0, flags: int = 0
    ) -> Parts:
        sequence = self._sequence
        self._sequence += 1
        return frame(
            kind, payload, channel=self._channel, sequence=sequence, backlog=backlog, flags=flags
        )

    def open(self) -> Parts:
        """Announce the channel."""
        return self._frame(FrameKind.OPEN)

    def backlog(self, count: int) -> Parts:
        """Announce a backlog."""
        return self._frame(FrameKind.BACKLOG, backlog=count)

    def control(self, control: Control) -> Parts:
        """A control element."""
        return self._frame(FrameKind.CONTROL, encode_control(control))

    def batch(self, batch: Batch, backlog: int) -> Parts:
        """A batch; its schema goes first if the receiver does not have it.

        Raises:
            DataError: a record cannot be pickled, or is too large.
            FrameTooLargeError: the batch is too large; nothing was counted as sent, so it may be cut.
        """
        if isinstance(batch, ObjectBatch):
            kind, content = self._objects(batch)
            self._check_size(content, len(batch))
            return self._frame(kind, content, backlog)
        data, flags, parts = batch.data, 0, []
        if batch.timestamps is not None:
            data = data.append_column(TIMESTAMPS_COLUMN, pa.array(batch.timestamps))
            flags = Flags.TIMESTAMPS
        is_new = self._schema is None or not data.schema.equals(self._schema, check_metadata=True)
        if is_new:
            self._has_dictionaries = any(map(_has_dictionary, data.schema.types))
        payload = to_stream(data) if self._has_dictionaries else data.serialize()
        self._check_size(payload, len(batch))
        if is_new:
            self._schema = data.schema
            if not self._has_dictionaries:
                parts = self._frame(FrameKind.SCHEMA, data.schema.serialize(), backlog)
        if self._has_dictionaries:
            flags |= Flags.DICTIONARIES
        return parts + self._frame(FrameKind.COLUMNS, payload, backlog, flags)

    def _check_size(self, payload: Any, records: int) -> None:
        size, limit = len(payload), self._payload_bytes_max
        if size <= limit:
            return
        if records > 1:
            raise FrameTooLargeError
        raise DataError(
            f"a record is too large to be sent to another worker operator=`{self._sender}` "
            f"bytes=`{size}` limit=`{limit}`",
            fix="keep large contents in files and send their addresses, or make the records "
            "smaller before this step sends them, or raise headgate.listener.frame-size-max",
        )

    def _objects(self, batch: ObjectBatch) -> tuple[FrameKind, bytes]:
        if batch.numbers is not None:
            return FrameKind.NUMBERS, encode_numbers(batch.numbers, batch.timestamps)
        return FrameKind.OBJECTS, self._pickle(batch)

    def _pickle(self, batch: ObjectBatch) -> bytes:
        content = (batch.records, batch.timestamps)
        if self._dumps is pickle.dumps and share_nothing(batch.records):
            # An object that refers to itself, for instance, cannot be pickled like this.
            with contextlib.suppress(Exception):
                pickled = _pickled_without_memo(content)
                if len(pickled) <= self._payload_bytes_max:
                    return pickled
        try:
            try:
                return bytes(self._dumps(content, protocol=5))
            except Exception:
                if self._dumps is cloudpickle.dumps:
                    raise
                # Classes of the user's script exist by value only; slower, so not tried first.
                self._dumps = cloudpickle.dumps
                return bytes(self._dumps(content, protocol=5))
        except Exception as error:
            raise DataError(
                f"a record cannot be sent to another worker operator=`{self._sender}` "
                f"error=`{error!r}`",
                fix="records must be picklable: no open files, locks or sockets in them",
            ) from error


def share_nothing(records: Sequence[Any]) -> bool:
    """Return True if a sample of records are numbers and texts, or tuples of those, and no text is in two.

    Then a pickle needs no memo of the objects in it, which takes half of the time. If the sample misleads,
    an object that several records share is written once for each: the pickle is larger, and what is read
    are equal objects instead of one.
    """
    seen: set[int] = set()
    for record in records[:: max(1, len(records) // _SAMPLED_RECORDS)]:
        for value in record if type(record) is tuple else (record,):
            if type(value) in _TEXTS:
                if id(value) in seen:
                    return False
                seen.add(id(value))
            elif type(value) not in _NUMBERS:
                return False
    return True


def _pickled_without_memo(content: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.fast = True
    pickler.dump(content)
    return file.getvalue()


class ElementDecoder:
    """The frames of one channel, receiver's side."""

    def __init__(self, channel: ChannelId) -> None:
        self._channel = channel
        self._expected = 0
        self._schema: pa.Schema | None = None

    def decode(self, header: Header, payload: bytes | bytearray) -> Element | None:
        """The element in a frame; None for frames that carry none.

        Raises:
            ExchangeError: a frame was lost or repeated, or cannot come here.
        """
        if header.sequence != self._expected:
            raise ExchangeError(
                f"frame out of sequence channel=`{self._channel}` "
                f"expected=`{self._expected}` received=`{header.sequence}`"
            )
        self._expected = (self._expected + 1) & SEQUENCE_MASK
        match header.kind:
            case FrameKind.COLUMNS:
                return self._columns(header.flags, payload)
            case FrameKind.OBJECTS:
                records, timestamps = pickle.loads(payload)
                return ObjectBatch(records, timestamps)
            case FrameKind.NUMBERS:
                return decode_numbers(payload)
            case FrameKind.CONTROL:
                return decode_control(payload)
            case FrameKind.SCHEMA:
                self._schema = pa.ipc.read_schema(pa.py_buffer(payload))
                return None
            case FrameKind.OPEN | FrameKind.BACKLOG:
                return None
            case _:
                raise ExchangeError(f"frame of the wrong kind kind=`{header.kind.name}`")

    def _columns(self, flags: int, payload: bytes | bytearray) -> ColumnBatch:
        buffer = pa.py_buffer(payload)
        if flags & Flags.DICTIONARIES:
            data = pa.ipc.open_stream(buffer).read_next_batch()
        elif self._schema is None:
            raise ExchangeError(f"columns without a schema channel=`{self._channel}`")
        else:
            data = pa.ipc.read_record_batch(buffer, self._schema)
        if not flags & Flags.TIMESTAMPS:
            return ColumnBatch(data)
        last = data.num_columns - 1
        timestamps = data.column(last).to_numpy(zero_copy_only=True)
        return ColumnBatch(data.remove_column(last), timestamps.astype(np.int64, copy=False))


def _has_dictionary(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return True
    return any(_has_dictionary(type_.field(i).type) for i in range(type_.num_fields))


def to_stream(data: pa.RecordBatch) -> pa.Buffer:
    """An IPC stream of one batch: the only form in which dictionaries travel with their batch. Values that
    it does not use are left out."""
    columns = [_compact(column) for column in data.columns]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=data.schema))
    return sink.getvalue()


def _compact(column: pa.Array) -> pa.Array:
    """Leave out dictionary values that the column does not use, if there are clearly many."""
    type_ = column.type
    if not pa.types.is_dictionary(type_) or type_.ordered or len(column.dictionary) <= len(column):
        return column
    try:
        fresh = column.dictionary_decode().dictionary_encode()
    except pa.ArrowNotImplementedError:  # of nested values
        return column
    return pa.DictionaryArray.from_arrays(fresh.indices.cast(type_.index_type), fresh.dictionary)
