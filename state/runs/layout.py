"""The layout of rows in a run: columns of fixed width are packed into one record per row.

A lookup touches rows all over a file. Packed, a row costs one or two cache lines, and one page, however
many columns it has. Strings and other columns without a fixed width stay Arrow columns beside the
records. A record consists of the identity of the key, which is its hash and its check lane (if there is
one), so that a row can be recognised without touching another page; of flags (bit 0: the row is deleted,
bit i + 1: fixed column i is null); and of the columns, widest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ..hashing import Hashes
from ..snapshot import DELETED_COLUMN
from ..values import Index

Records: TypeAlias = npt.NDArray[np.void]
"""One packed record per row."""

_WORD_BITS = 64
_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class PackedRows(msgspec.Struct, frozen=True):
    """Some rows in the order of their hashes.

    Attributes:
        hashes: the first lane of each row's identity.
        records: see `RowLayout`.
        variable: the columns of variable width.
    """

    hashes: Hashes
    records: Records
    variable: list[pa.Array]

    def __len__(self) -> int:
        return len(self.hashes)

    def slice(self, start: int, stop: int) -> PackedRows:
        """Return the rows from start to stop without copying them."""
        variable = [column.slice(start, stop - start) for column in self.variable]
        return PackedRows(self.hashes[start:stop], self.records[start:stop], variable)

    def take(self, rows: Index) -> PackedRows:
        """Return the rows at these positions, in that order."""
        indices = pa.array(rows) if self.variable else None
        variable = [column.take(indices) for column in self.variable]
        return PackedRows(self.hashes.take(rows), self.records.take(rows), variable)


class RowLayout:
    """Packs rows of `schema` and unpacks them.

    Attributes:
        schema: the columns of a row: keys and state.
        wide: identities have a second lane, which is kept in the record.
        dtype: the type of a record, whose size is a multiple of 8.

    Raises:
        StateError: there is a dictionary column, which must be decoded before it becomes state.
    """

    def __init__(self, schema: pa.Schema, wide: bool) -> None:
        self.schema, self.wide = schema, wide
        self._fixed: list[str] = []
        self._variable: list[str] = []
        widths: dict[str, int] = {}
        for field in schema:
            width = _fixed_width(field)
            (self._variable if width is None else self._fixed).append(field.name)
            if width is not None:
                widths[field.name] = width
        self._flag_words = len(self._fixed) // _WORD_BITS + 1
        lanes = [("hash", "<u8"), *([("check", "<u8")] if wide else [])]
        flags = [(f"flags{word}", "<u8") for word in range(self._flag_words)]
        widest_first = sorted(widths.items(), key=lambda item: (item[1] % 8, -item[1]))
        columns = [(f"_{name}", _NUMBERS.get(width, f"V{width}")) for name, width in widest_first]
        used = sum(np.dtype(kind).itemsize for _, kind in [*lanes, *flags, *columns])
        padding = [("padding", f"V{-used % 8}")] if used % 8 else []
        self.dtype: np.dtype[np.void] = np.dtype([*lanes, *flags, *columns, *padding])

    @property
    def variable_fields(self) -> list[pa.Field]:
        """The columns kept beside the records."""
        return [self.schema.field(name) for name in self._variable]

    def empty(self, rows: int) -> Records:
        """Return room for records. The padding is zero, so that equal rows have equal bytes."""
        return np.zeros(rows, self.dtype)

    def pack(self, hashes: Hashes, checks: Hashes | None, table: pa.Table) -> PackedRows:
        """Pack rows of the columns of `schema`. A column `deleted` may mark deleted ones."""
        records = self.empty(len(hashes))
        records["hash"] = hashes
        if self.wide and checks is not None:
            records["check"] = checks
        for index, name in enumerate(self._fixed):
            column = one_array(table.column(name))
            _raw_values(column, records[f"_{name}"])
            if column.null_count:
                nulls = column.is_null().to_numpy(zero_copy_only=False)
                self._set_flags(records, index + 1, nulls)
        if DELETED_COLUMN in table.column_names:
            deleted = one_array(table.column(DELETED_COLUMN)).to_numpy(zero_copy_only=False)
            self._set_flags(records, 0, deleted)
        return PackedRows(hashes, records, [one_array(table.column(n)) for n in self._variable])

    def unpack(self, rows: PackedRows) -> pa.Table:
        """Return the columns of `schema`, whose values mean nothing in deleted rows."""
        records, columns = rows.records, dict(zip(self._variable, rows.variable, strict=True))
        words = [records[f"flags{word}"] for word in range(self._flag_words)]
        some = [
            bool((word > 1).any()) if at == 0 else bool(word.any()) for at, word in enumerate(words)
        ]
        for index, name in enumerate(self._fixed):
            word, bit = divmod(index + 1, _WORD_BITS)
            nulls = None
            if some[word]:
                nulls = (words[word] >> np.uint64(bit) & np.uint64(1)).astype(np.bool_)
            columns[name] = _from_raw(self.schema.field(name).type, records[f"_{name}"], nulls)
        return pa.Table.from_arrays([columns[n] for n in self.schema.names], schema=self.schema)

    def checks(self, records: Records) -> Hashes | None:
        """Return the second lane of each record's identity; None if there is none."""
        return records["check"] if self.wide else None

    @staticmethod
    def numbers(records: Records, column: str) -> npt.NDArray[np.int64]:
        """Return a column of 64-bit numbers or times that are not null."""
        return records[f"_{column}"].astype(np.uint64).view(np.int64)

    @staticmethod
    def deleted(records: Records) -> npt.NDArray[np.bool_]:
        """Return a mask of the deleted rows."""
        return (records["flags0"] & np.uint64(1)).astype(np.bool_)

    @staticmethod
    def _set_flags(records: Records, flag: int, where: npt.NDArray[np.bool_]) -> None:
        word, bit = divmod(flag, _WORD_BITS)
        records[f"flags{word}"] |= where.astype(np.uint64) << np.uint64(bit)


def join_rows(pieces: Sequence[PackedRows]) -> PackedRows:
    """Join pieces (at least one) one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    variable = zip(*(piece.variable for piece in pieces), strict=True)
    # Join records as plain bytes: numpy would compare and copy them field by field.
    dtype = pieces[0].records.dtype
    records = np.concatenate([piece.records.view(f"V{dtype.itemsize}") for piece in pieces])
    return PackedRows(
        np.concatenate([piece.hashes for piece in pieces]),
        records.view(dtype),
        [pa.concat_arrays(list(column)) for column in variable],
    )


def one_array(column: Any) -> pa.Array:
    """Return a column of a table, or an array, as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _fixed_width(field: pa.Field) -> int | None:
    """Return the bytes of a value; None if values differ in width."""
    type_ = field.type
    if pa.types.is_dictionary(type_):
        raise StateError(
            f"a dictionary column cannot lie in a run column=`{field.name}` type=`{type_}`",
            fix="decode it first",
        )
    if pa.types.is_boolean(type_):
        return 1
    if pa.types.is_primitive(type_) or pa.types.is_decimal(type_):
        return int(type_.bit_width) // 8
    return int(type_.byte_width) if pa.types.is_fixed_size_binary(type_) else None


def _raw_values(array: pa.Array, out: npt.NDArray[Any]) -> None:
    """The bytes of a fixed-width column, into a field of records."""
    if pa.types.is_boolean(array.type):
        out[:] = array.fill_null(False).to_numpy(zero_copy_only=False)
        return
    buffer = array.buffers()[1]
    if buffer is not None:
        out[:] = np.frombuffer(buffer, out.dtype)[array.offset : array.offset + len(array)]


def _from_raw(
    type_: pa.DataType, raw: npt.NDArray[Any], nulls: npt.NDArray[np.bool_] | None
) -> pa.Array:
    if pa.types.is_boolean(type_):
        return pa.array(raw.astype(np.bool_), mask=nulls)
    validity = None
    if nulls is not None and nulls.any():
        validity = pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    # An own copy: records may lie in memory that is used again.
    data = pa.py_buffer(np.array(raw).view(np.uint8))
    return pa.Array.from_buffers(type_, len(raw), [validity, data])
