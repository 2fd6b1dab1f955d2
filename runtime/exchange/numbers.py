"""Records that are tuples of numbers, as arrays: how they are found among Python objects, and their bytes.

Many jobs with Python functions send small tuples from one function to another, such as `(user, 1)`. Arrays,
one for each place of the tuples, hold the same in a small part of the memory, and the records can be made
of them again, equal and of the same types. So arrays travel, and wait in queues, and objects are made where
the records are read (`ObjectBatch.of_numbers`).

`arrays_of` has to look at the type of each value, and must not take long, as all records pass it. Python's
`marshal` writes the values of a list with their types, in one call. If all records have the same form, what
it writes has one, too: it is a table, and numpy reads its columns. A single value of another type or size
changes a tag or the length. These bytes are read at once, in this process; none of them travel.
"""

from __future__ import annotations

import marshal
import struct
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ...errors import ExchangeError
from ...operators.elements import Numbers, ObjectBatch, Timestamps

PLACES_MAX: Final = 64
"""Longer tuples stay objects."""
WAIT_MAX: Final = 64
"""If records have often been no tuples of numbers, this number of batches passes before the next try."""
_VERSION: Final = 2
"""The version of marshal's format in which each value is written in full, and floats in eight bytes."""
_LIST_BYTES: Final = 5
_SAMPLED_RECORDS: Final = 16
_TUPLE, _INT, _LONG, _FLOAT, _TRUE, _FALSE = b"(ilgTF"
_DIGIT_BITS: Final = 15
_DIGITS_MAX: Final = 5
"""An integer of 64 bits has this number of digits of `_DIGIT_BITS` at most."""
_TOP_DIGIT_END: Final = 1 << (63 - _DIGIT_BITS * (_DIGITS_MAX - 1))
_INT32_END: Final = 1 << 31
_HEAD: Final = struct.Struct("<IB3x")
_ALIGNED: Final = 8
_KINDS: Final = {"q": np.dtype("<i8"), "d": np.dtype("<f8"), "?": np.dtype("?")}
_CODES: Final = {dtype: code for code, dtype in _KINDS.items()}
_Table: TypeAlias = npt.NDArray[np.void]
"""A row for each record: the tag of each value, and what follows it."""


# ---- found among objects --------------------------------------------------------------------------


@final
class NumberFinder:
    """Makes arrays of numbers of a sender's batches where that can be done, and rests where it cannot."""

    def __init__(self) -> None:
        self._waits = 0
        self._wait_next = 1

    def __call__(self, batch: ObjectBatch) -> ObjectBatch:
        """Return `batch`, with arrays if its records are tuples of numbers."""
        if batch.numbers is not None or len(batch) < ObjectBatch.NUMBERS_MIN:
            return batch
        if self._waits:
            self._waits -= 1
            return batch
        numbers = arrays_of(batch.records)
        if numbers is None:
            self._waits = self._wait_next
            self._wait_next = min(2 * self._wait_next, WAIT_MAX)
            return batch
        self._wait_next = 1
        return ObjectBatch.of_numbers(numbers, batch.timestamps, batch.positions, batch.records)


def arrays_of(records: list[Any]) -> Numbers | None:
    """Return records as arrays; None if they are not all tuples of numbers, of one form, or may not be.

    In a form, each place has floats, bools or integers. The integers are all of 32 bits, or all longer with
    nearly the same number of digits, up to 64 bits. Values of subclasses, such as `IntEnum`, are none of
    these.
    """
    first = records[0]
    kinds = [type(value) for value in first] if type(first) is tuple else []
    if not 0 < len(kinds) <= PLACES_MAX:
        return None
    for record in records[:: max(1, len(records) // _SAMPLED_RECORDS)]:
        if type(record) is not tuple or list(map(type, record)) != kinds:
            return None
    row = _row_type(first)
    if row is None:
        return None
    try:
        written = marshal.dumps(records, _VERSION)
    except ValueError:  # a value of a type that it does not know
        return None
    if len(written) != _LIST_BYTES + len(records) * row.itemsize:
        return None
    table = np.frombuffer(written, row, offset=_LIST_BYTES)
    if not (_all(table["tag"], _TUPLE) and _all(table["size"], len(first))):
        return None
    numbers: list[npt.NDArray[Any]] = []
    for place, kind in enumerate(kinds):
        column = _column(table, place, kind)
        if column is None:
            return None
        numbers.append(column)
    return tuple(numbers)


def _row_type(record: tuple[Any, ...]) -> np.dtype[np.void] | None:
    """Return the type of the rows of a table whose first record is this one; None if there is none."""
    fields: list[Any] = [("tag", "u1"), ("size", "<i4")]
    for place, value in enumerate(record):
        fields.append((f"tag{place}", "u1"))
        kind = type(value)
        if kind is float:
            fields.append((f"value{place}", "<f8"))
        elif kind is int and -_INT32_END <= value < _INT32_END:
            fields.append((f"value{place}", "<i4"))
        elif kind is int:
            digits = -(-value.bit_length() // _DIGIT_BITS)
            if digits > _DIGITS_MAX:
                return None
            fields += [(f"digits{place}", "<i4"), (f"value{place}", "<u2", (digits,))]
        elif kind is not bool:
            return None
    return np.dtype(fields)


def _column(table: _Table, place: int, kind: type) -> npt.NDArray[Any] | None:
    """Return the values of a place; None if they are not all of the kind."""
    tags = table[f"tag{place}"]
    if kind is bool:
        true = tags == _TRUE
        return true if (true | (tags == _FALSE)).all() else None
    values = table[f"value{place}"]
    if kind is float:
        return values.astype(np.float64) if _all(tags, _FLOAT) else None
    if values.ndim == 1:
        return values.astype(np.int64) if _all(tags, _INT) else None
    counts = table[f"digits{place}"]
    digits = values.shape[1]
    if not (_all(tags, _LONG) and _all(np.abs(counts), digits)):
        return None
    if digits == _DIGITS_MAX and values[:, -1].max() >= _TOP_DIGIT_END:
        return None
    numbers = values[:, 0].astype(np.int64)
    for digit in range(1, digits):
        numbers |= values[:, digit].astype(np.int64) << (digit * _DIGIT_BITS)
    return np.where(counts < 0, -numbers, numbers)


def _all(values: npt.NDArray[Any], value: int) -> bool:
    return bool((values == value).all())


# ---- as bytes -------------------------------------------------------------------------------------


def encode_numbers(numbers: Numbers, timestamps: Timestamps | None) -> bytes:
    """Return the payload of a frame: `rows u32 | places u8 | 3 bytes | a code for each array, and 0`, and
    the arrays. The last one has the event times, if there are more arrays than places. The codes and each
    array are padded to a multiple of eight bytes, so that the arrays can be read where they are.
    """
    arrays = numbers if timestamps is None else (*numbers, timestamps)
    codes = "".join([_CODES[each.dtype] for each in arrays]).encode() + b"\0"
    parts: list[Any] = [_HEAD.pack(len(numbers[0]), len(numbers)), codes, _padding(len(codes))]
    for each in arrays:
        parts += [np.ascontiguousarray(each).data.cast("B"), _padding(each.nbytes)]
    return b"".join(parts)


def decode_numbers(payload: bytes | bytearray) -> ObjectBatch:
    """Return the batch in a payload; its arrays refer to it.

    Raises:
        ExchangeError: it is no such payload.
    """
    try:
        rows, places = _HEAD.unpack_from(payload)
        codes = payload[_HEAD.size : payload.index(b"\0", _HEAD.size)].decode()
        at = _HEAD.size + len(codes) + 1 + len(_padding(len(codes) + 1))
        arrays: list[npt.NDArray[Any]] = []
        for code in codes:
            arrays.append(np.frombuffer(payload, _KINDS[code], rows, at))
            at += arrays[-1].nbytes + len(_padding(arrays[-1].nbytes))
    except (struct.error, ValueError, KeyError) as error:
        raise ExchangeError(f"a frame of numbers cannot be read error=`{error!r}`") from error
    if not 0 < places <= len(arrays) <= places + 1 or at != len(payload):
        raise ExchangeError(
            f"a frame of numbers is damaged places=`{places}` arrays=`{len(arrays)}`"
        )
    timestamps = arrays[places] if len(arrays) > places else None
    return ObjectBatch.of_numbers(tuple(arrays[:places]), timestamps)


def _padding(size: int) -> bytes:
    return b"\0" * (-size % _ALIGNED)
