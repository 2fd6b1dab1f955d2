"""The elements of a channel: batches of records, and the control elements between them.

A batch is only a container: everything a user can observe (order per key, watermarks, barriers)
behaves as if its records were processed one by one, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, ClassVar, TypeAlias, final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from ..errors import StateError

Timestamps: TypeAlias = npt.NDArray[np.int64]
"""Event time of each record, milliseconds since the epoch, UTC."""

Numbers: TypeAlias = tuple[npt.NDArray[Any], ...]
"""The numbers of records that are tuples: for each place an array of int64, float64 or bool."""

_Rows: TypeAlias = slice | npt.NDArray[Any]
"""Some rows of a batch: a slice, their places, or a mask."""

WATERMARK_MAX = 2**63 - 1
"""The watermark of a stream that has ended."""
WATERMARK_MIN = -(2**63)
"""The watermark of a stream that has not yet seen an event time."""


@final
class Positions:
    """The positions of a batch's records in their source: all of them in one split.

    Known in the subtask of the source only, and only as long as steps keep it: see
    docs/errors-and-dead-letters.md.

    Attributes:
        source: the name of the source's step.
        split: the name that the reader reports, such as the path of a file.
    """

    __slots__ = ("_offsets", "_rows", "source", "split")

    def __init__(
        self,
        source: str,
        split: str,
        offsets: range | npt.NDArray[np.int64],
        rows: npt.NDArray[Any] | pa.BooleanArray | None = None,
    ) -> None:
        """Create the positions of some of the records at these offsets; `rows`: see `of`.

        The offsets are only computed when they are read, which is seldom.
        """
        self.source = source
        self.split = split
        self._offsets = offsets
        self._rows = rows

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The offset of each record in the split; the unit is the source's."""
        found, rows = self._offsets, self._rows
        if isinstance(found, range):
            found = np.arange(found.start, found.stop, found.step, dtype=np.int64)
        if rows is not None:
            if isinstance(rows, pa.Array):
                rows = rows.to_numpy(zero_copy_only=False)
            found = found[rows]
        self._offsets, self._rows = found, None
        return found

    def of(self, rows: slice | npt.NDArray[Any] | pa.BooleanArray) -> Positions:
        """Return those of some of the records: a slice, their places, or a mask without nulls."""
        offsets = self._offsets if self._rows is None else self.offsets
        if isinstance(rows, slice):
            return Positions(self.source, self.split, offsets[rows])
        return Positions(self.source, self.split, offsets, rows)


@final
class ColumnBatch:
    """Records as Arrow columns; `timestamps` is None until the stream has event time.

    `positions` is None where the origin of the records is no longer known.
    """

    __slots__ = ("data", "positions", "timestamps")

    def __init__(
        self,
        data: pa.RecordBatch,
        timestamps: Timestamps | None = None,
        positions: Positions | None = None,
    ) -> None:
        self.data = data
        self.timestamps = timestamps
        self.positions = positions

    def __len__(self) -> int:
        return int(self.data.num_rows)

    @property
    def nbytes(self) -> int:
        """The bytes of the rows in view (a slice counts only its own rows)."""
        times = 0 if self.timestamps is None else self.timestamps.nbytes
        return int(self.data.nbytes) + times

    def slice(self, offset: int, length: int) -> ColumnBatch:
        """Return rows [offset, offset + length) without copying."""
        rows = slice(offset, offset + length)
        times = None if self.timestamps is None else self.timestamps[rows]
        positions = None if self.positions is None else self.positions.of(rows)
        return ColumnBatch(self.data.slice(offset, length), times, positions)

    def take(self, indices: npt.NDArray[np.integer[Any]]) -> ColumnBatch:
        """Return the rows at `indices`, copied in that order."""
        times = None if self.timestamps is None else self.timestamps[indices]
        positions = None if self.positions is None else self.positions.of(indices)
        return ColumnBatch(self.data.take(pa.array(indices)), times, positions)

    def without_positions(self) -> ColumnBatch:
        """Return the same records without positions, to be sent to another subtask."""
        return self if self.positions is None else ColumnBatch(self.data, self.timestamps)


@final
class ObjectBatch:
    """Records as Python objects, when the user's stream is of objects.

    Records that are tuples of numbers may be held as arrays of these numbers instead (`of_numbers`), and
    become objects when they are read. Until then they take a small part of the memory, so those that wait
    in a queue do not push others out of the processor's cache; and arrays are split, cut, joined and sent
    for a small part of what objects cost.

    Attributes:
        numbers: one array for each place of the tuples; None: there are objects only.
    """

    NUMBERS_MIN: ClassVar[int] = 1_024
    """Fewer records are not made arrays: what an array costs hardly depends on its length."""

    __slots__ = ("_records", "numbers", "positions", "timestamps")

    def __init__(
        self,
        records: list[Any],
        timestamps: Timestamps | None = None,
        positions: Positions | None = None,
    ) -> None:
        self._records: list[Any] | None = records
        self.numbers: Numbers | None = None
        self.timestamps = timestamps
        self.positions = positions

    @classmethod
    def of_numbers(
        cls,
        numbers: Numbers,
        timestamps: Timestamps | None = None,
        positions: Positions | None = None,
        records: list[Any] | None = None,
    ) -> ObjectBatch:
        """Return a batch of tuples of numbers.

        Args:
            numbers: at least one array of int64, float64 or bool, all of one length. Nobody changes them.
            timestamps: of the records.
            positions: of the records.
            records: the tuples, if they are there already.
        """
        batch = cls([], timestamps, positions)
        batch._records, batch.numbers = records, numbers
        return batch

    @property
    def records(self) -> list[Any]:
        """The records."""
        found = self._records
        if found is None:
            assert self.numbers is not None  # else there are records
            columns = [each.tolist() for each in self.numbers]
            found = self._records = list(zip(*columns, strict=True))
        return found

    def numbers_at(self, place: int | None) -> npt.NDArray[Any] | None:
        """Return the numbers at a place of the tuples; None if there are no arrays, or no such place."""
        if (
            self.numbers is None
            or place is None
            or not -len(self.numbers) <= place < len(self.numbers)
        ):
            return None
        return self.numbers[place]

    def __len__(self) -> int:
        return len(self.records) if self.numbers is None else len(self.numbers[0])

    def slice(self, offset: int, length: int) -> ObjectBatch:
        """Return records [offset, offset + length), as the same objects or equal tuples."""
        rows = slice(offset, offset + length)
        if self.numbers is not None:
            return self._numbers_at(self.numbers, rows)
        return self._at(self.records[rows], rows)

    def take(self, indices: npt.NDArray[np.integer[Any]]) -> ObjectBatch:
        """Return the records at `indices`, in that order."""
        if self.numbers is not None:
            return self._numbers_at(self.numbers, indices)
        records = self.records
        return self._at([records[i] for i in indices.tolist()], indices)

    def where(self, mask: npt.NDArray[np.bool_]) -> ObjectBatch:
        """Return the records for which `mask` is true, in order; takes half as long as `take`."""
        if self.numbers is not None:
            return self._numbers_at(self.numbers, mask)
        return self._at(list(compress(self.records, mask.tobytes())), mask)

    def without_positions(self) -> ObjectBatch:
        """Return the same records, to be sent to another subtask."""
        if self.positions is None:
            return self
        if self.numbers is None:
            return ObjectBatch(self.records, self.timestamps)
        return ObjectBatch.of_numbers(self.numbers, self.timestamps, records=self._records)

    def _at(self, records: list[Any], rows: _Rows) -> ObjectBatch:
        """Return `records`, which are those at `rows`, as a batch."""
        times = None if self.timestamps is None else self.timestamps[rows]
        positions = None if self.positions is None else self.positions.of(rows)
        return ObjectBatch(records, times, positions)

    def _numbers_at(self, numbers: Numbers, rows: _Rows) -> ObjectBatch:
        """Return the records at `rows` as arrays only."""
        part = self._at([], rows)
        part._records, part.numbers = None, tuple(each[rows] for each in numbers)
        return part


Batch: TypeAlias = ColumnBatch | ObjectBatch


def concatenated(batches: Sequence[ColumnBatch]) -> ColumnBatch:
    """Concatenate batches of the same columns, at least one; columns may differ in nullability.

    Raises:
        StateError: one batch cannot hold that much text.
    """
    if len(batches) == 1:
        return batches[0]
    schema = pa.unify_schemas([batch.data.schema for batch in batches])
    parts = [pa.RecordBatch.from_arrays(batch.data.columns, schema=schema) for batch in batches]
    try:
        data = pa.concat_batches(parts)
    except pa.ArrowInvalid as error:
        raise StateError(
            f"records cannot be concatenated into one batch reason=`{error}`",
            fix="cast columns with much text to large_string, or make batches smaller with rows=",
        ) from error
    times = [batch.timestamps for batch in batches if batch.timestamps is not None]
    positions = together([batch.positions for batch in batches])
    return ColumnBatch(data, np.concatenate(times) if times else None, positions)


def together(parts: Sequence[Positions | None]) -> Positions | None:
    """Return the positions of several batches as one; None unless all are known, and of one split."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({(part.source, part.split) for part in known}) != 1:
        return None
    offsets = np.concatenate([part.offsets for part in known])
    return Positions(known[0].source, known[0].split, offsets)


@final
class Watermark(msgspec.Struct, frozen=True):
    """No more records with event time <= `timestamp` (ms) are expected on this channel."""

    timestamp: int


@final
class WatermarkStatus(msgspec.Struct, frozen=True):
    """The channel went idle (it leaves the minimum) or became active again."""

    idle: bool


@final
class CheckpointOptions(msgspec.Struct, frozen=True):
    """The settings of a checkpoint.

    Attributes:
        stop: sources emit nothing after the barrier.
        base: the completed checkpoint on whose files this one may build; 0: none, it is written in
            full.
        savepoint: address of the directory that a savepoint is written to; empty: a checkpoint.
        native: for a savepoint: the backend's own files, instead of canonical tables.
        unaligned: the barrier overtakes records in queues; those become part of the checkpoint.
        aligned_timeout_ms: the barrier stays aligned until the checkpoint is this old, counted from
            its trigger, and overtakes from then on; None: `unaligned` alone decides.
    """

    stop: bool = False
    base: int = 0
    savepoint: str = ""
    native: bool = False
    unaligned: bool = False
    aligned_timeout_ms: int | None = None

    @property
    def may_overtake(self) -> bool:
        """True if the barrier overtakes records, or will after the aligned timeout."""
        return self.unaligned or self.aligned_timeout_ms is not None


@final
class CheckpointBarrier(msgspec.Struct, frozen=True):
    """Separates the records of checkpoint `checkpoint_id` from those of the next."""

    checkpoint_id: int
    trigger_ms: int
    options: CheckpointOptions = msgspec.field(default=CheckpointOptions())

    def overtaking(self) -> CheckpointBarrier:
        """Return the same barrier, set to overtake the records in front of it."""
        return replace(self, options=replace(self.options, unaligned=True))


@final
class CancelCheckpointMarker(msgspec.Struct, frozen=True):
    """Checkpoint `checkpoint_id` was aborted: subtasks that align on it must stop waiting."""

    checkpoint_id: int


@final
class EndOfData(msgspec.Struct, frozen=True):
    """No records follow; barriers still may (the last checkpoint commits the sinks' last output)."""


@final
class EndOfPartition(msgspec.Struct, frozen=True):
    """Nothing follows: the channel is closed normally."""


@final
class LatencyMarker(msgspec.Struct, frozen=True):
    """Sent by a source at `marked_ms`; measures queueing on its way, bypassing user code."""

    marked_ms: int
    source_id: str
    subtask_index: int


@final
class LoopProbe(msgspec.Struct, frozen=True):
    """Marks that all records that a head of the loop sent before number `number` are in front of it.

    It travels round the loop: a subtask forwards it when it has arrived on all channels that still
    have data.
    """

    loop: str
    number: int


Control: TypeAlias = (
    Watermark
    | WatermarkStatus
    | CheckpointBarrier
    | CancelCheckpointMarker
    | EndOfData
    | EndOfPartition
    | LatencyMarker
    | LoopProbe
)
Element: TypeAlias = Batch | Control
