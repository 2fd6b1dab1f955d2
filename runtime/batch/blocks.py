"""Batches as rows of a Spark DataFrame, and back: one row per block of records.

    edge          the exchange that the block travels on; `RESULT` and below: the output of a sink
    target        the subtask it goes to
    phase         `MARK`: first of all, it identifies the subtask, and has a source's splits; 0: read before
                  everything else (a broadcast input); 1: in event-time order
    first_ms      its earliest event time; the least value if its records have none
    input_index   the input of the receiver
    sender, seq   its origin and its number there: with `edge` they order blocks of equal time
    payload       the records, in the frames that workers exchange

A block is sorted by event time and spans little of it, so that a receiver that reads blocks in the order of
`first_ms` holds few of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from ...errors import InternalError
from ...operators.elements import (
    WATERMARK_MIN,
    Batch,
    ColumnBatch,
    Control,
    ObjectBatch,
    concatenated,
)
from ..exchange.partitioners import Partitioner
from ..exchange.wire import HEADER_BYTES, ElementDecoder, ElementEncoder, unpack_header

SCHEMA: Final = (
    "edge int, target int, phase int, first_ms long, input_index int, sender int, seq long, "
    "payload binary"
)
"""The schema of the DataFrames, in Spark's notation."""
ORDER: Final = ("phase", "first_ms", "input_index", "edge", "sender", "seq")
"""The order in which a receiver wants its blocks."""
ROWS: Final = pa.schema(
    [
        ("edge", pa.int32()),
        ("target", pa.int32()),
        ("phase", pa.int32()),
        ("first_ms", pa.int64()),
        ("input_index", pa.int32()),
        ("sender", pa.int32()),
        ("seq", pa.int64()),
        ("payload", pa.binary()),
    ]
)
MARK: Final = -1
RESULT: Final = -1
"""The `edge` of the output of sink node 0; that of node n is `RESULT - n`."""
SORTED_ROWS: Final = 131_072
"""The most records that a sender sorts for one receiver at a time; fewer if they are large."""
SORTED_BYTES: Final = 16 << 20
BLOCK_ROWS: Final = 8_192
BLOCKS_PER_BATCH: Final = 16
"""The most bytes that Spark and its Python workers exchange at a time.

A block may have `SORTED_BYTES`, and one more with a single record.
"""


class Block(NamedTuple):
    """One row, see the module's docstring."""

    edge: int
    target: int
    phase: int
    first_ms: int
    input_index: int
    sender: int
    seq: int
    payload: bytes


def to_rows(blocks: Iterable[Block]) -> pa.RecordBatch:
    """Return blocks as the rows that Spark takes from a task."""
    columns = zip(*blocks, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ROWS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ROWS)


def in_batches(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Group blocks for Spark: a few at a time, and few bytes, since a column has at most 2 GiB."""
    some: list[Block] = []
    size = 0
    for block in blocks:
        if some and (len(some) == BLOCKS_PER_BATCH or size + len(block.payload) > SORTED_BYTES):
            yield some
            some, size = [], 0
        some.append(block)
        size += len(block.payload)
    if some:
        yield some


def from_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Block]:
    """Yield the blocks that Spark passes to a task."""
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ROWS.names]
        yield from map(Block, *columns)


def encode(batch: Batch, sender: str) -> bytes:
    """Encode a batch as a payload; `sender` is the step it comes from, for errors."""
    return b"".join(bytes(part) for part in ElementEncoder(0, sender).batch(batch, 0))


def decode(payload: bytes) -> Batch:
    """Decode a payload made by `encode`."""
    decoder, offset, found = ElementDecoder(0), 0, None
    while offset < len(payload):
        header = unpack_header(payload, offset)
        offset += HEADER_BYTES
        found = decoder.decode(header, payload[offset : offset + header.length])
        offset += header.length
    if not isinstance(found, ColumnBatch | ObjectBatch):
        raise InternalError(f"a block without records bytes=`{len(payload)}`")
    return found


def joined(batches: list[Batch]) -> Batch:
    """Concatenate batches of one stream, at least one."""
    columns = [batch for batch in batches if isinstance(batch, ColumnBatch)]
    if columns:
        return concatenated(columns)
    objects = [batch for batch in batches if isinstance(batch, ObjectBatch)]
    times = [batch.timestamps for batch in objects if batch.timestamps is not None]
    records = [record for batch in objects for record in batch.records]
    return ObjectBatch(records, np.concatenate(times) if times else None)


def size_of(batch: Batch) -> int:
    """Return about how many bytes a batch has; objects are not measured."""
    return batch.nbytes if isinstance(batch, ColumnBatch) else 0


class BlockWriter:
    """One output of a subtask: splits batches by receiver, sorts by event time, and emits blocks."""

    def __init__(
        self,
        edge: int,
        phase: int,
        input_index: int,
        sender: int,
        sender_name: str,
        targets: list[int],
        partitioner: Partitioner,
        give: Callable[[Block], None],
    ) -> None:
        """Create a writer. `targets`: the subtask at each channel of the partitioner."""
        self._edge, self._phase, self._input_index = edge, phase, input_index
        self._sender, self._sender_name = sender, sender_name
        self._targets = targets
        self._partitioner = partitioner
        self._give = give
        self._waiting: dict[int, list[Batch]] = {}
        self._rows: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._seq = 0

    def emit(self, batch: Batch) -> None:
        """See `task.chain.ChainPartition`."""
        for channel, part in self._partitioner(batch):
            self._waiting.setdefault(channel, []).append(part)
            rows = self._rows[channel] = self._rows.get(channel, 0) + len(part)
            size = self._bytes[channel] = self._bytes.get(channel, 0) + size_of(part)
            if rows >= SORTED_ROWS or size >= SORTED_BYTES:
                self._flush(channel)

    def broadcast(self, element: Control) -> None:
        """Do nothing: receivers derive watermarks from the order of the blocks."""

    def flush(self) -> None:
        """Emit all waiting blocks at the end."""
        for channel in sorted(self._waiting):
            self._flush(channel)

    def _flush(self, channel: int) -> None:
        waiting = self._waiting.pop(channel, [])
        if not waiting:
            return
        self._rows[channel] = self._bytes[channel] = 0
        batch = joined(waiting)
        if batch.timestamps is not None:
            batch = batch.take(np.argsort(batch.timestamps, kind="stable"))
        for offset in range(0, len(batch), BLOCK_ROWS):
            self._give_block(channel, batch.slice(offset, min(BLOCK_ROWS, len(batch) - offset)))

    def _give_block(self, channel: int, part: Batch) -> None:
        payload = encode(part, self._sender_name)
        if len(payload) > SORTED_BYTES and len(part) > 1:  # objects, whose size is known only now
            half = len(part) // 2
            self._give_block(channel, part.slice(0, half))
            self._give_block(channel, part.slice(half, len(part) - half))
            return
        first = WATERMARK_MIN if part.timestamps is None else int(part.timestamps[0])
        self._give(
            Block(
                self._edge,
                self._targets[channel],
                self._phase,
                first,
                self._input_index,
                self._sender,
                self._seq,
                payload,
            )
        )
        self._seq += 1
