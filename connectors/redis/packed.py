"""Entries in the form that the scripts of the sink read: texts behind their lengths, entries behind counts.

An entry is the number of its texts, and then names and values of its fields in turn, each behind its
length in bytes. All numbers have four bytes, the highest first. The entries of a batch are made at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PACKED: Final = pa.large_binary()
_NUMBER: Final = struct.Struct(">I")
_NONE: Final = pa.scalar(b"", PACKED)


def pack(
    names: Sequence[bytes], columns: Sequence[pa.Array]
) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the entries of rows, and how many fields each of them has.

    Args:
        names: of the fields.
        columns: their values as `PACKED`; a field whose value is null is not in the entry.
    """
    fields = np.zeros(len(columns[0]), np.int64)
    parts: list[Any] = []
    for name, values in zip(names, columns, strict=True):
        named = pa.scalar(_NUMBER.pack(len(name)) + name, PACKED)
        lengths = _packed_numbers(pc.fill_null(pc.binary_length(values), 0).to_numpy())
        if values.null_count:
            there = values.is_valid()
            fields += there.to_numpy(zero_copy_only=False)
            parts.append(_joined(named, lengths, values))
        else:
            fields += 1
            parts += (named, lengths, values)
    counts = _packed_numbers(2 * fields)
    return pc.binary_join_element_wise(counts, *parts, _NONE, null_handling="skip"), fields


def _joined(*parts: Any) -> pa.Array:
    """Return the parts of each row as one text, which is null if one of them is."""
    return pc.binary_join_element_wise(*parts, _NONE)


def _packed_numbers(numbers: npt.NDArray[np.int64]) -> pa.Array:
    buffer = pa.py_buffer(numbers.astype(">u4").tobytes())
    kind = pa.binary(_NUMBER.size)
    return pa.Array.from_buffers(kind, len(numbers), [None, buffer]).cast(PACKED)


def offsets_of(packed: pa.Array) -> npt.NDArray[np.int64]:
    """Return where each entry begins in the bytes of all of them, and the end."""
    offsets = np.frombuffer(packed.buffers()[1], np.int64)
    return offsets[packed.offset : packed.offset + len(packed) + 1]
