"""The key hash: 64 bits, stable for ever, the same for one value and for a column of them.

Where a key lives (its key group) follows from this hash, and so does where its state is found after
a restore. It must therefore never change: `tests/state/golden_hashes.json` pins it. Version 1:

* integers of any width, and bool as 0 / 1: `mix(v + INT)` over 64-bit two's complement, a bijection.
  An integer outside 64 bits: its little-endian two's complement bytes, as bytes tagged `BIGINT`.
* str (UTF-8) and bytes, by length n: up to 12 bytes the 16-byte cell (n, data, zero padding) as two
  words; up to 128 bytes the 8-byte words, the last one being the last 8 bytes; above, XXH3-64.
* date: days since 1970 tagged `DATE`; datetime: microseconds since 1970 (UTC; naive as if UTC) tagged
  `TIMESTAMP`, the nanoseconds below added by a multiply.
* decimal: trailing zeros stripped; a whole number hashes as that integer, else (digits, scale).
* UUID: its 16 bytes. None: a constant. Tuple: its elements, in order, and their number.

Values that Python calls equal hash equal (`1 == True == Decimal("1.0")`), so the key of a dict and
the key of a column agree. Floats are refused: rounding would decide where a key lives.

The key group comes from the top bits, slot tables use the low ones (`slots/table.py`). A second,
independent hash of the same columns (`identity_columns`) makes the identity of a key 128 bits wide.
"""

from __future__ import annotations

import datetime
import decimal
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ..errors import StateError

Hashes: TypeAlias = npt.NDArray[np.uint64]
Index: TypeAlias = npt.NDArray[np.int64]
N = TypeVar("N", bound=np.integer[Any])

_MASK = (1 << 64) - 1
_C1, _C2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

INT, DATE, TIMESTAMP = 0x9E3779B97F4A7C15, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB
STRING, BYTES, BIGINT = 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F
DECIMAL, TUPLE, NANOS = 0xEB44ACCAB455D165, 0x2D358DCCAA6C78A5, 0x8BB84B93962EACC9
NULL_HASH = 0x4B33A62ED433D4A3

_CELL_BYTES = 12
_WORDS_BYTES = 128
_PIECE_ROWS = 8_192
_VIEWS = (pa.string_view(), pa.binary_view())
_EPOCH = datetime.datetime(1970, 1, 1)
_EPOCH_DAY = _EPOCH.toordinal()
_PER_UNIT = {"s": 1_000_000, "ms": 1_000, "us": 1}


# --- one value ---------------------------------------------------------------------------------


def hash_key(value: Any) -> int:
    """Return the 64-bit hash of one key.

    Raises:
        StateError: the value is of a type that cannot be a key, such as float or list.
    """
    function = _SCALARS.get(type(value))
    if function is None:
        function = _scalar_of(value)
    return function(value)


def key_group_of(hash_: int, max_parallelism: int) -> int:
    """Return the key group of a hash: its top 32 bits, scaled to `max_parallelism`."""
    return ((hash_ >> 32) * max_parallelism) >> 32


def _mix(h: int) -> int:
    h = ((h ^ (h >> 30)) * _C1) & _MASK
    h = ((h ^ (h >> 27)) * _C2) & _MASK
    return h ^ (h >> 31)


def _hash_int(value: int) -> int:
    if -(1 << 63) <= value <= _MASK:
        return _mix((value + INT) & _MASK)
    size = value.bit_length() // 8 + 1
    return _hash_tagged(value.to_bytes(size, "little", signed=True), BIGINT)


def _hash_tagged(data: bytes, tag: int) -> int:
    size = len(data)
    if size <= _CELL_BYTES:
        first: int
        second: int
        first, second = struct.unpack("<QQ", struct.pack("<I12s", size, data))
        h = ((first ^ tag) * _C1) & _MASK
        h = ((h ^ (h >> 32) ^ second) * _C2) & _MASK
        return h ^ (h >> 29)
    if size <= _WORDS_BYTES:
        h = ((size ^ tag) * _C1) & _MASK
        words = struct.unpack_from(f"<{(size - 1) // 8}Q", data)
        for word in (*words, int.from_bytes(data[-8:], "little")):
            h = ((h ^ word) * _C2) & _MASK
            h ^= h >> 32
        return _mix(h)
    return _mix(xxhash.xxh3_64_intdigest(data) ^ tag)


def _hash_datetime(value: datetime.datetime) -> int:
    if value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    since = value - _EPOCH
    micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    # pandas' Timestamp is a datetime with nanoseconds on top
    nanos: int = getattr(value, "nanosecond", 0)
    return _mix((micros + TIMESTAMP + nanos * NANOS) & _MASK)


def _hash_decimal(value: decimal.Decimal) -> int:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise StateError(f"this decimal cannot be a key value=`{value}`")
    number = int("".join(map(str, digits))) * (-1 if sign else 1)
    if number == 0:
        return _hash_int(0)
    while exponent < 0 and number % 10 == 0:
        number //= 10
        exponent += 1
    if exponent >= 0:
        return _hash_int(number * 10**exponent)
    return _mix((_hash_int(number) ^ DECIMAL) + -exponent * _C1 & _MASK)


def _hash_tuple(value: tuple[Any, ...]) -> int:
    h = (TUPLE + len(value)) & _MASK
    for element in value:
        h = _mix((h * _C1 + hash_key(element)) & _MASK)
    return h


_SCALARS: dict[type, Callable[[Any], int]] = {
    int: _hash_int,
    bool: _hash_int,
    str: lambda value: _hash_tagged(value.encode(), STRING),
    bytes: lambda value: _hash_tagged(value, BYTES),
    type(None): lambda value: NULL_HASH,
    tuple: _hash_tuple,
    datetime.datetime: _hash_datetime,
    datetime.date: lambda value: _mix((value.toordinal() - _EPOCH_DAY + DATE) & _MASK),
    decimal.Decimal: _hash_decimal,
    uuid.UUID: lambda value: _hash_tagged(value.bytes, BYTES),
}


def _scalar_of(value: Any) -> Callable[[Any], int]:
    """Return the function for a subclass of a key type (a str Enum, a NamedTuple) or for a numpy scalar."""
    if isinstance(value, np.integer | np.bool_):
        return lambda number: _hash_int(int(number))
    for kind in type(value).__mro__:
        if kind in _SCALARS:
            return _SCALARS[kind]
    raise not_a_key(type(value).__name__)


def not_a_key(kind: str) -> StateError:
    """Return the error for a value of a type that cannot be a key."""
    fix = "key by int, str, bytes, bool, date, datetime, Decimal, UUID, None, or a tuple of these"
    if kind.startswith(("float", "double", "halffloat")):
        fix = "cast it first, for example to a decimal or to a whole number of units"
    return StateError(f"a value of this type cannot be a key type=`{kind}`", fix=fix)


def check_key_type(type_: pa.DataType) -> None:
    """Raise StateError if a column of this type cannot be a key."""
    empty = pa.nulls(0, type_)
    _hash_column(empty, 0)


# --- columns -----------------------------------------------------------------------------------


def hash_columns(arrays: Sequence[pa.Array]) -> Hashes:
    """Return the hash of each row: that of the value for one column, that of the tuple of values for
    several.

    Raises:
        StateError: a column is of a type that cannot be a key.
    """
    return _hash_rows(arrays, 0)


def distinct(numbers: npt.NDArray[N]) -> npt.NDArray[N]:
    """Return the numbers in order, each once. `np.unique` takes several times as long."""
    if numbers.size and numbers.min() == numbers.max():
        return numbers[:1]
    numbers = np.sort(numbers)
    again = numbers[1:] == numbers[:-1]
    return numbers[np.append(True, ~again)] if again.any() else numbers


def identity_columns(arrays: Sequence[pa.Array], seed: int) -> Hashes:
    """Return a second hash of each row, independent of `hash_columns`.

    Runs store it under the version that `operators/spilling_space.py` names, which must change
    together with it.
    """
    return _hash_rows(arrays, (2 * seed + INT) & _MASK | 1)


def hash_keys(values: Sequence[Any]) -> Hashes:
    """Return `hash_key` of each value; vectorised where all values are int, or all are str."""
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return _mix_array(np.array(values, np.int64).view(np.uint64) + np.uint64(INT))
        except OverflowError:
            pass
    elif kinds == {str}:
        return hash_columns([pa.array(values, pa.string())])
    return np.fromiter(map(hash_key, values), np.uint64, len(values))


def hash_numbers(values: npt.NDArray[Any]) -> Hashes | None:
    """Return `hash_key` of each value of an array of int64 or bool; None: they are floats."""
    if values.dtype not in (np.int64, np.bool_):
        return None
    return _mix_array(values.astype(np.int64).view(np.uint64) + np.uint64(INT))


def key_groups_of(hashes: Hashes, max_parallelism: int) -> npt.NDArray[np.int32]:
    """Return `key_group_of` of each hash."""
    scaled = hashes >> np.uint64(32)
    scaled *= np.uint64(max_parallelism)
    scaled >>= np.uint64(32)
    return scaled.astype(np.int32)


def _hash_rows(arrays: Sequence[pa.Array], lane: int) -> Hashes:
    """Hash rows. Lane 0 is the frozen hash; any other (odd) number makes an independent one."""
    if len(arrays) == 1:
        return _hash_column(arrays[0], lane)
    rows = len(arrays[0]) if arrays else 0
    h = np.full(rows, (TUPLE + len(arrays)) & _MASK, np.uint64)
    for array in arrays:
        h *= np.uint64(_C1)
        h += _hash_column(array, lane)
        h = _mix_array(h)
    return h


def _hash_column(array: pa.Array, lane: int) -> Hashes:
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return _hash_column(array.storage, lane)
    if pa.types.is_dictionary(type_):
        values = _hash_column(array.dictionary, lane)
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        h = values.take(indices) if len(values) else np.zeros(len(array), np.uint64)
    elif pa.types.is_null(type_):
        h = np.zeros(len(array), np.uint64)
    elif pa.types.is_decimal(type_):
        h = _hash_by_value(array, lane)
    elif _is_text(type_):
        h = _hash_text(array, STRING if _is_string(type_) else BYTES, lane)
    else:
        h = _hash_numbers(array, lane)
    if array.null_count:
        h[array.is_null().to_numpy(zero_copy_only=False)] = NULL_HASH ^ lane
    return h


def _hash_numbers(array: pa.Array, lane: int) -> Hashes:
    type_, tag, nanos = array.type, INT, None
    if pa.types.is_boolean(type_):
        words = array.cast(pa.uint8()).cast(pa.uint64())
    elif pa.types.is_integer(type_):
        words = array if type_.bit_width == 64 else array.cast(pa.int64())
    elif pa.types.is_date(type_):
        tag = DATE
        words = array.cast(pa.date32()).view(pa.int32()).cast(pa.int64())
    elif pa.types.is_timestamp(type_):
        tag = TIMESTAMP
        words = array.view(pa.int64())
    else:
        raise not_a_key(str(type_))
    h = _words(words)
    if pa.types.is_timestamp(type_):
        if type_.unit == "ns":
            signed = h.view(np.int64)
            micros = signed // 1_000
            nanos = (signed - micros * 1_000).view(np.uint64)
            h = micros.view(np.uint64)
        else:
            h = h * np.uint64(_PER_UNIT[type_.unit])
    h = h + np.uint64((tag + lane) & _MASK)
    if nanos is not None:
        h += nanos * np.uint64(NANOS)
    return _mix_array(h) if not lane else _mix_array(h * np.uint64(lane))


def _words(array: pa.Array) -> Hashes:
    """Return the 64-bit values of an array without copying. At nulls they are arbitrary."""
    values = np.frombuffer(array.buffers()[1] or b"", np.uint64)
    return values[array.offset : array.offset + len(array)]


def _mix_array(h: Hashes) -> Hashes:
    """Apply splitmix64's finaliser; overwrites the argument."""
    for shift, factor in ((30, _C1), (27, _C2)):
        h ^= h >> np.uint64(shift)
        h *= np.uint64(factor)
    h ^= h >> np.uint64(31)
    return h


def mixed(words: Hashes) -> Hashes:
    """Map 64-bit numbers one to one to numbers whose bits look random.

    This is a step of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    return _mix_array(words + np.uint64(INT))


def _hash_by_value(array: pa.Array, lane: int) -> Hashes:
    """Hash each distinct value with `hash_key`, for types with no vectorised form."""
    encoded = array.dictionary_encode()
    distinct = np.fromiter(map(hash_key, encoded.dictionary.to_pylist()), np.uint64)
    if lane:
        # Equal 64-bit hashes of unequal decimals would stay equal, so the digits are hashed once more.
        digits = [str(value) for value in encoded.dictionary.to_pylist()]
        distinct = _hash_column(pa.array(digits, pa.string()), lane)
    indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return distinct.take(indices) if len(distinct) else np.zeros(len(array), np.uint64)


# --- strings and bytes -------------------------------------------------------------------------


def _is_string(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or type_ == pa.string_view()
    )


def _is_text(type_: pa.DataType) -> bool:
    return _is_string(type_) or bool(
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_fixed_size_binary(type_)
        or type_ == pa.binary_view()
    )


def _hash_text(array: pa.Array, tag: int, lane: int) -> Hashes:
    """Hash all rows as short ones, over the cells of a string view, and then the longer ones again."""
    view = array.cast(pa.string_view() if tag == STRING else pa.binary_view())
    cells = np.frombuffer(view.buffers()[1] or b"", np.uint64).reshape(-1, 2)
    cells = cells[view.offset : view.offset + len(view)]
    h: Hashes = cells[:, 0] ^ np.uint64(tag ^ lane)
    h *= np.uint64(_C1)
    h ^= h >> np.uint64(32)
    h ^= cells[:, 1]
    h *= np.uint64(_C2)
    h ^= h >> np.uint64(29)
    if lane:
        h = _mix_array(h)
    sizes = cells[:, 0].astype(np.uint32)
    if len(h) and int(sizes.max()) > _CELL_BYTES:
        long = sizes > _CELL_BYTES
        if array.null_count:
            long &= array.is_valid().to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(long)
        h[rows] = _hash_long(array, rows, tag, lane)
    return h


def _hash_long(array: pa.Array, rows: npt.NDArray[np.intp], tag: int, lane: int) -> Hashes:
    """Return the hashes of `rows`, all longer than a cell; a piece at a time, to stay within the cache."""
    starts, stops, padded = _bytes_of(array, tag)
    pieces = (rows[low : low + _PIECE_ROWS] for low in range(0, len(rows), _PIECE_ROWS))
    return np.concatenate(
        [_hash_words(padded, starts[p], stops[p] - starts[p], tag, lane) for p in pieces]
        or [np.zeros(0, np.uint64)]
    )


def _bytes_of(array: pa.Array, tag: int) -> tuple[Index, Index, Hashes]:
    """Return the start and end of each value in a copy of the bytes, which is returned as words.

    The copy is padded, so that two whole words can be read at any byte.
    """
    if pa.types.is_fixed_size_binary(array.type) or array.type in _VIEWS:
        array = array.cast(pa.large_string() if tag == STRING else pa.large_binary())
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, data = array.buffers()
    every: Any = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    offsets: Index = every[array.offset : array.offset + len(array) + 1].astype(np.int64)
    base, end = int(offsets[0]), int(offsets[-1])
    offsets -= base
    padded = np.empty((end - base) // 8 + 2, np.uint64)
    padded[-2:] = 0
    padded.view(np.uint8)[: end - base] = np.frombuffer(data, np.uint8, end - base, base)
    return offsets[:-1], offsets[1:], padded


def _hash_words(padded: Hashes, starts: Index, sizes: Index, tag: int, lane: int) -> Hashes:
    h: Hashes = (sizes.view(np.uint64) ^ np.uint64(tag ^ lane)) * np.uint64(_C1)
    words = np.minimum((sizes - 1) // 8, _WORDS_BYTES // 8)
    common = int(words.min())
    for index in range(int(words.max())):
        if index < common:
            h = _absorb(h, _word_at(padded, starts + 8 * index), lane)
        else:
            left = np.flatnonzero(words > index)
            h[left] = _absorb(h[left], _word_at(padded, starts[left] + 8 * index), lane)
    h = _mix_array(_absorb(h, _word_at(padded, starts + sizes - 8), lane))
    for at in np.flatnonzero(sizes > _WORDS_BYTES).tolist():
        begin = int(starts[at])
        value = padded.view(np.uint8)[begin : begin + int(sizes[at])]
        h[at] = _mix(xxhash.xxh3_64_intdigest(value.tobytes(), lane) ^ tag)
    return h


def _absorb(h: Hashes, words: Hashes, lane: int) -> Hashes:
    h = h ^ words
    h *= np.uint64(lane if lane else _C2)
    h ^= h >> np.uint64(32)
    return h


def _word_at(padded: Hashes, at: Index) -> Hashes:
    """Return the 8 bytes at byte offsets `at` as little-endian words, each made of two aligned words."""
    index = at >> 3
    shift = (at & 7).view(np.uint64) << np.uint64(3)
    low = padded.take(index) >> shift
    # a shift by 64 is undefined, so shift in two steps
    high = (padded.take(index + 1) << np.uint64(1)) << (np.uint64(63) - shift)
    low |= high
    return low
