"""Blocks: batches as rows of a Spark DataFrame, one row per block of records, and back in order.

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

`BlockOrder` turns blocks in that order into batches in event-time order. It holds the records of read
blocks that are beyond the first event time of the next block. So no record is ever late: event time is
declared to be just before the next block. All records exist, so that watermarks are not heuristic, and of
an event-time step only the last one counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import InternalError
from ...operators.base import Output
from ...operators.elements import (
    WATERMARK_MAX,
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
RELEASED_ROWS: Final = 65_536
"""The number of records that are passed on at a time."""

Rows: TypeAlias = npt.NDArray[np.int64]
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


class Release(NamedTuple):
    """The next action of a receiver: records of an input, or event time has reached `watermark`."""

    batch: Batch | None
    input_index: int = 0
    watermark: int = WATERMARK_MIN


@dataclass(slots=True)
class _Run:
    """Records of one block, in event-time order, with their origin, which orders equal ones."""

    input_index: int
    batch: Batch
    rank: tuple[int, int, int]


@dataclass(slots=True)
class BlockOrder:
    """Takes blocks in their order, and returns batches and watermarks.

    Attributes:
        decode: makes the records of a block.
        exact: event time is declared between any two event times, and the records of different inputs
            come in one order: so timers fire where they belong among the records. Else that is done once
            for many records, which is the same for steps that wait for the watermark, and faster.
    """

    decode: Callable[[bytes], Batch]
    exact: bool
    _waiting: list[_Run] = field(default_factory=list)
    _rows: int = 0
    _enough: int = RELEASED_ROWS
    _phase: int = 0

    def take(self, block: Block) -> Iterator[Release]:
        """Take the next block, whose records are not yet released."""
        if block.phase != self._phase:
            yield from self._release(None)
            self._phase = block.phase
        if self._rows >= self._enough:
            yield from self._release(block.first_ms)
            # A large overlap is not sorted again for every block.
            self._enough = max(RELEASED_ROWS, 2 * self._rows)
        batch = self.decode(block.payload)
        self._waiting.append(_Run(block.input_index, batch, (block.edge, block.sender, block.seq)))
        self._rows += len(batch)

    def end(self) -> Iterator[Release]:
        """Release the rest: there are no more blocks."""
        yield from self._release(None)

    def _release(self, before: int | None) -> Iterator[Release]:
        """Release the records before an event time (ms), or all."""
        due: list[_Run] = []
        kept: list[_Run] = []
        for run in self._waiting:
            cut = len(run.batch)
            if before is not None:
                # Records without event time are from blocks that are in order already.
                times = run.batch.timestamps
                cut = cut if times is None else int(np.searchsorted(times, before, side="left"))
            if cut:
                due.append(_Run(run.input_index, run.batch.slice(0, cut), run.rank))
            if cut < len(run.batch):
                rest = run.batch.slice(cut, len(run.batch) - cut)
                kept.append(_Run(run.input_index, rest, run.rank))
        self._waiting = kept
        self._rows = sum(len(run.batch) for run in kept)
        if due:
            yield from (
                _exactly(due, watermarks=bool(self._phase)) if self.exact else _by_input(due)
            )
        if before is not None and before > WATERMARK_MIN and self._phase:
            yield Release(None, watermark=before - 1)


def _exactly(due: list[_Run], *, watermarks: bool) -> Iterator[Release]:
    """Yield the records of all inputs by event time; among equal ones those of the first input come
    first."""
    inputs = sorted({run.input_index for run in due})
    batches = [_sorted(due, index) for index in inputs]
    times = np.concatenate([_times(batch) for batch in batches])
    owners = np.repeat(np.arange(len(inputs)), [len(batch) for batch in batches])
    order = np.argsort(times, kind="stable")
    times, owners = times[order], owners[order]
    changes = np.flatnonzero((np.diff(times) != 0) | (np.diff(owners) != 0)) + 1
    given = [0] * len(inputs)
    last = WATERMARK_MIN
    for start, end in itertools.pairwise([0, *changes.tolist(), len(times)]):
        now, owner = int(times[start]), int(owners[start])
        if watermarks and now > last:
            yield Release(None, watermark=now - 1)
            last = now
        yield Release(batches[owner].slice(given[owner], end - start), inputs[owner])
        given[owner] += end - start


def _by_input(due: list[_Run]) -> Iterator[Release]:
    for index in sorted({run.input_index for run in due}):
        yield Release(_sorted(due, index), index)


def _sorted(due: list[_Run], index: int) -> Batch:
    """Return the records of one input by event time; equal ones in order of arrival."""
    runs = sorted((run for run in due if run.input_index == index), key=lambda run: run.rank)
    batch = joined([run.batch for run in runs])
    if len(runs) == 1 or batch.timestamps is None:
        return batch
    return batch.take(np.argsort(batch.timestamps, kind="stable"))


def _times(batch: Batch) -> Rows:
    if batch.timestamps is None:
        return np.full(len(batch), WATERMARK_MIN, np.int64)
    return batch.timestamps


@dataclass(slots=True)
class FinalWatermarkOutput(Output):
    """The output of an event-time step, of whose watermarks only the last one counts.

    Where event time matters, records have been sorted by it, and the watermarks are derived from
    that order.
    """

    output: Output

    def emit(self, batch: Batch) -> None:
        self.output.emit(batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.output.emit_side(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        if timestamp == WATERMARK_MAX:
            self.output.emit_watermark(timestamp)

    def emit_idle(self, idle: bool) -> None:
        """Ignore idleness: a source that is read to its end is never idle."""
