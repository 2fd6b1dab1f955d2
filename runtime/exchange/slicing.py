"""Buffers of a good size: large batches are cut without copying, small ones are put together once."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ...operators.elements import Batch, ColumnBatch, Numbers, ObjectBatch
from .settings import ExchangeSettings

RECORD_BYTES_MIN = 64
"""The least memory that a Python object takes, however short it is on the wire."""
BARE_OBJECT_BYTES = object.__basicsize__ + 2 * struct.calcsize("P")
"""An object of this size has no contents but its `__dict__`, and perhaps weak references."""
RUN_RECORDS_MAX = 128
"""The number of records that are measured together; a longer run would not be cheaper."""
RUN_BYTES_TARGET = 1 << 20
"""Runs are so short that measuring them takes about this much memory, for a moment."""


class BatchSizer:
    """Bytes of a batch. Asking Arrow costs microseconds per column, so fixed widths are remembered."""

    __slots__ = ("_objects", "_row_bytes", "_schema")

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._row_bytes: float | None = None
        self._objects = ObjectSizer()

    def nbytes(self, batch: Batch) -> int:
        """Bytes of a batch on its way, exact enough to choose buffer sizes by."""
        if isinstance(batch, ObjectBatch):
            return sum(size for _, size in self._runs(batch))
        schema = batch.data.schema
        if self._schema is None or not schema.equals(self._schema):
            self._schema = schema
            self._row_bytes = _fixed_row_bytes(schema)
        if self._row_bytes is None:
            return batch.nbytes
        times = 0 if batch.timestamps is None else 8
        return int(len(batch) * (self._row_bytes + times))

    def cut_objects(
        self, batch: ObjectBatch, target: int, bytes_max: int
    ) -> Iterator[tuple[ObjectBatch, int]]:
        """Yield `batch` in slices of about `target` records and `bytes_max` bytes at most, and their sizes.

        A record that is larger than that travels alone.
        """
        runs = list(self._runs(batch, bytes_max // 4))
        whole = sum(size for _, size in runs)
        if whole <= bytes_max:
            yield from cut_evenly(batch, target, whole)
            return
        # Runs are not cut: without room for one more a small rest would be left.
        mean = len(batch) // slices_of(len(batch), target)
        rows_max = mean + 1 + min(RUN_RECORDS_MAX, target // 16)
        begin = end = size = 0
        for rows, run_size in runs:
            if end > begin and (size + run_size > bytes_max or end + rows - begin > rows_max):
                yield batch.slice(begin, end - begin), size
                begin, size = end, 0
            end += rows
            size += run_size
        yield (batch if begin == 0 else batch.slice(begin, end - begin)), size

    def _runs(
        self, batch: ObjectBatch, single_above: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield `(records, bytes)` of consecutive runs; records of numbers need not be measured."""
        if batch.numbers is None:
            yield from self._objects.runs(batch.records, single_above)
            return
        rows = len(batch)
        row_bytes = max(RECORD_BYTES_MIN, sum(each.itemsize for each in batch.numbers))
        run = rows
        if single_above is not None:
            run = max(1, min(RUN_RECORDS_MAX, single_above // row_bytes))
        for begin in range(0, rows, run):
            count = min(run, rows - begin)
            yield count, count * row_bytes


class ObjectSizer:
    """Measures Python objects by what they take as bytes: all of them, since sizes may be uneven.

    One record in a thousand may be a thousand times as large as the others, and no sample finds it. msgspec
    measures built-in types, dataclasses and Structs in 6 to 150 ns per record, and objects of plain classes
    by their attributes. What it does not know is pickled, which takes several times as long.
    """

    __slots__ = ("_encode", "_pickles", "_run")

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder(enc_hook=_contents).encode
        self._pickles = False
        self._run = 1

    def runs(
        self, records: list[Any], single_above: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield `(records, bytes)` of consecutive runs that together are all of `records`.

        A run above `single_above` bytes is yielded record by record.
        """
        begin, count = 0, len(records)
        while begin < count:
            run = records[begin : begin + self._run]
            rows = len(run)
            size = self._measure(run)
            if single_above is not None and size > single_above and rows > 1:
                yield from ((1, self._measure([record])) for record in run)
            else:
                yield rows, size
            begin += rows
            self._run = max(1, min(RUN_RECORDS_MAX, RUN_BYTES_TARGET * rows // size))

    def _measure(self, run: list[Any]) -> int:
        return max(len(run) * RECORD_BYTES_MIN, self._encoded_bytes(run))

    def _encoded_bytes(self, run: list[Any]) -> int:
        if not self._pickles:
            try:
                return len(self._encode(run))
            except (
                Exception
            ):  # a number that is too large for it, or objects that refer to each other
                self._pickles = True
        counted = _Counted()
        try:
            pickle.Pickler(counted, 5).dump(run)
        except Exception:  # the encoder has other ways, and says what is wrong if it has none
            return 0
        return counted.size


def _contents(value: Any) -> Any:
    """The value that is measured in place of an object whose type msgspec does not know."""
    kind = type(value)
    if kind.__dictoffset__ and kind.__basicsize__ <= BARE_OBJECT_BYTES and not kind.__itemsize__:
        return value.__dict__  # it has nothing else
    return pickle.dumps(value, 5)


class _Counted:
    """A file that keeps nothing but the number of bytes written to it."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.size += count
        return count


def _fixed_row_bytes(schema: pa.Schema) -> float | None:
    types = schema.types
    if not all(pa.types.is_primitive(each) for each in types):
        return None
    return float(sum(each.bit_width for each in types)) / 8


_FILLED = 0.95
"""Slices are cut, and buffers are full, this far below the limit: rows are of uneven sizes."""


def rows_within(size_bytes: float, row_bytes: float) -> int:
    """The number of rows that fill a buffer of this size; at least one."""
    return max(1, int(_FILLED * size_bytes / row_bytes))


def slices_of(rows: int, target: int) -> int:
    """Return into how many slices of at least `target` records this number of them is cut, at least one.

    Coalescing stops at the first piece that fills the buffer, so less than twice the target is not cut.
    """
    return max(1, rows // target)


def cut_evenly(
    batch: ObjectBatch, target: int, size_bytes: float
) -> Iterator[tuple[ObjectBatch, int]]:
    """Yield `batch`, which fits a buffer by its bytes, in slices of one size, with their mean sizes."""
    rows = len(batch)
    slices = slices_of(rows, target)
    if slices == 1:
        yield batch, int(size_bytes)
        return
    for number in range(slices):
        begin, end = number * rows // slices, (number + 1) * rows // slices
        yield batch.slice(begin, end - begin), int(size_bytes / slices)


def cut(
    batch: Batch, settings: ExchangeSettings, sizer: BatchSizer, size_max_bytes: int
) -> Iterator[tuple[Batch, int]]:
    """Yield `batch` in slices that fit a buffer of `size_max_bytes`, each with its size in bytes."""
    if isinstance(batch, ObjectBatch):
        yield from sizer.cut_objects(batch, settings.object_rows_per_buffer, size_max_bytes)
        return
    rows = len(batch)
    size, limit = sizer.nbytes(batch), settings.rows_per_buffer_max
    overhead = 0 if size <= size_max_bytes else _overhead(batch)
    bytes_max = size_max_bytes + overhead
    if rows <= limit and size <= bytes_max:
        yield batch, size
        return
    limit = min(limit, rows_within(size_max_bytes, max(1, size - overhead) / rows))
    for offset in range(0, rows, limit):
        yield from _halve(batch.slice(offset, min(limit, rows - offset)), bytes_max, sizer)


def _overhead(batch: ColumnBatch) -> int:
    """Bytes that no cut makes smaller: the dictionaries of dictionary-encoded columns."""
    return batch.slice(0, 0).nbytes


def _halve(
    batch: ColumnBatch, bytes_max: int, sizer: BatchSizer
) -> Iterator[tuple[ColumnBatch, int]]:
    rows, size = len(batch), sizer.nbytes(batch)
    if rows == 1 or size <= bytes_max:
        yield batch, size
    else:
        yield from _halve(batch.slice(0, rows // 2), bytes_max, sizer)
        yield from _halve(batch.slice(rows // 2, rows - rows // 2), bytes_max, sizer)


class Coalescer:
    """The partly filled buffer of one channel."""

    __slots__ = ("bytes_most", "pieces", "rows", "size_bytes")

    def __init__(self) -> None:
        self.pieces: list[Batch] = []
        self.rows = 0
        self.size_bytes = 0.0
        """Its size, by the mean size of the records that were emitted together."""
        self.bytes_most = 0
        """A bound of its size: the size of all records that were emitted together."""

    def accepts(self, batch: Batch) -> bool:
        """True if `batch` can share a buffer with what is here: same kind and same columns."""
        if not self.pieces:
            return True
        first = self.pieces[0]
        if (first.timestamps is None) != (batch.timestamps is None):
            return False
        if isinstance(first, ColumnBatch) and isinstance(batch, ColumnBatch):
            schema = first.data.schema
            # Dictionaries of several batches together may be too many for a narrow index.
            return bool(schema.equals(batch.data.schema, check_metadata=True)) and not any(
                _narrow_index(each) for each in schema.types
            )
        return type(first) is type(batch)

    def add(self, batch: Batch, size_bytes: float, bytes_most: int) -> None:
        """Keep `batch` behind the others."""
        self.pieces.append(batch)
        self.rows += len(batch)
        self.size_bytes += size_bytes
        self.bytes_most += bytes_most

    def take(self) -> Batch:
        """All pieces as one batch, copied once if there are several. Leaves the coalescer empty."""
        pieces = self.pieces
        self.pieces, self.rows, self.size_bytes, self.bytes_most = [], 0, 0.0, 0
        return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


def _narrow_index(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        return bool(type_.index_type.bit_width < 32) or _narrow_index(type_.value_type)
    return any(_narrow_index(type_.field(i).type) for i in range(type_.num_fields))


def _form(numbers: Numbers) -> tuple[Any, ...]:
    return tuple(each.dtype for each in numbers)


def _concatenate(pieces: list[Batch]) -> Batch:
    times = [piece.timestamps for piece in pieces if piece.timestamps is not None]
    timestamps = np.concatenate(times) if times else None
    columns = [piece.data for piece in pieces if isinstance(piece, ColumnBatch)]
    if columns:
        return ColumnBatch(pa.concat_batches(columns), timestamps)
    numbers = [
        piece.numbers for piece in pieces if isinstance(piece, ObjectBatch) and piece.numbers
    ]
    if len(numbers) == len(pieces) and len({_form(each) for each in numbers}) == 1:
        joined = tuple(np.concatenate(arrays) for arrays in zip(*numbers, strict=True))
        return ObjectBatch.of_numbers(joined, timestamps)
    records: list[Any] = []
    for piece in pieces:
        if isinstance(piece, ObjectBatch):
            records += piece.records
    return ObjectBatch(records, timestamps)
