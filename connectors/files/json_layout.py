"""Decodes lines of JSON that all have one layout: by columns and without a parser, so faster than it.

Programs write objects of one kind with the same fields in the same order and without white space. The
layout is learned from one line, and each line of a piece is compared with it in every byte outside of its
values. Numbers are read eight digits at a time. Whatever is not plain is left to the parser, which also
decides what is a bad record: another layout, escapes, nulls, nested values, exponents, large numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s: TypeAlias = npt.NDArray[np.int64]
UInt64s: TypeAlias = npt.NDArray[np.uint64]

LINES_MIN: Final = 32
"""Fewer lines are left to the parser. Up to some thousand, the class of `json_objects` is faster."""
_BYTES_MAX: Final = 1 << 30
_PAUSE_MAX: Final = 255
"""After pieces of other forms, this many are left to the parser before another one is looked at."""
_PAD: Final = 24
"""Bytes around the lines, so that words can be read at every digit."""
_DIGITS_MAX: Final = 19
_QUOTE, _NEWLINE, _SPACE = 0x22, 0x0A, 0x20
_SLASH: Final = b"\\"
_OPEN, _CLOSE, _MINUS, _ZERO, _POINT = 0x7B, 0x7D, 0x2D, 0x30, 0x2E
_FIELD: Final = re.compile(rb'"([^"\\\x00-\x1f]*)":(?:"[^"\\\x00-\x1f]*"|(-?[0-9][0-9.]*))')
_is: Final = pa.types


def _every(byte: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([byte]) * 8))


class _OtherForm(Exception):
    """Raised if lines do not have the layout, or something that only the parser reads."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a layout.

    Attributes:
        name: of the field.
        number: True if its value is a number, False if it is a string.
        head: the bytes before the value: a comma or brace, the name, and the quote of a string.
        quote: the number of the first quote of the name, among those of a line.
    """

    name: str
    number: bool
    head: bytes
    quote: int


class LayoutReader:
    """Reads lines of one layout as the columns of a schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._fields: tuple[_Field, ...] = ()
        self._possible = all(_is_supported(field.type) for field in schema)
        self._pause = self._waiting = 0

    def read(self, data: bytes, starts: Int64s, ends: Int64s) -> pa.RecordBatch | None:
        """Return the rows of lines, given by their starts and ends; None: only the parser can tell."""
        if not self._possible or len(starts) < LINES_MIN:
            return None
        if self._waiting:
            self._waiting -= 1
            return None
        first = data[starts[0] : ends[0]]
        try:
            batch = self._read(data, starts, ends, first)
        except (_OtherForm, pa.ArrowException, UnicodeDecodeError):
            self._fields = ()
            self._pause = self._waiting = min(2 * self._pause + 1, _PAUSE_MAX)
            return None
        self._pause = 0
        return batch

    def _read(self, data: bytes, starts: Int64s, ends: Int64s, first: bytes) -> pa.RecordBatch:
        self._fields = self._fields or _layout_of(first)
        lines = _Lines(data, starts, ends, self._fields)
        columns = lines.columns({field.name: field for field in self._schema})
        arrays = []
        for field in self._schema:
            made = columns.get(field.name)
            if made is None:
                _check(field.nullable)
                made = pa.nulls(len(starts), field.type)
            arrays.append(made)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _is_supported(kind: pa.DataType) -> bool:
    tests: tuple[Callable[[pa.DataType], bool], ...] = (
        _is.is_integer,
        _is.is_float32,
        _is.is_float64,
        _is.is_string,
        _is.is_large_string,
        _is.is_timestamp,
    )
    return any(test(kind) for test in tests)


def _check(holds: object) -> None:
    """Leave the lines to the parser unless a condition holds."""
    if not holds:
        raise _OtherForm


def _layout_of(line: bytes) -> tuple[_Field, ...]:
    """Return the fields of a line, which is a flat object of strings and numbers."""
    fields: list[_Field] = []
    at, quote = 0, 0
    while line[at : at + 1] == (b"," if fields else b"{"):
        found = _FIELD.match(line, at + 1)
        _check(found)
        assert found is not None
        number = found[2] is not None
        head = line[at : at + 1] + b'"' + found[1] + (b'":' if number else b'":"')
        fields.append(_Field(found[1].decode(), number, head, quote))
        quote += 2 if number else 4
        at = found.end()
    _check(line[at:] == b"}\n" and len({field.name for field in fields}) == len(fields) > 0)
    return tuple(fields)


class _Lines:
    """Lines, whose quotes are at the places that a layout has them.

    Raises:
        _OtherForm: they are not.
    """

    def __init__(
        self, data: bytes, starts: Int64s, ends: Int64s, fields: tuple[_Field, ...]
    ) -> None:
        begin, size = int(starts[0]), int(ends[-1] - starts[0])
        _check(size < _BYTES_MAX and (starts[1:] == ends[:-1]).all())
        # Words are read at any place, so the bytes are copied between two margins.
        self._bytes = np.empty(size + 2 * _PAD, np.uint8)
        self._bytes[:_PAD] = self._bytes[_PAD + size :] = 0
        self._words = np.ndarray((size + 2 * _PAD - 7,), np.uint64, self._bytes, strides=(1,))
        codes = self._bytes[_PAD : _PAD + size]
        codes[:] = np.frombuffer(data, np.uint8, size, begin)
        self._fields = fields
        start, self._close = starts + (_PAD - begin), ends + (_PAD - begin - 2)
        _check((self._bytes[self._close + 1] == _NEWLINE).all())
        _check(np.count_nonzero(codes < _SPACE) == len(starts))
        _check(data.find(_SLASH, begin, begin + size) < 0)
        if not data.isascii():
            str(codes.data, "utf-8")
        quotes = np.flatnonzero(codes == _QUOTE)
        each = fields[-1].quote + (2 if fields[-1].number else 4)
        _check(len(quotes) == each * len(starts))
        self._quotes: Int64s = quotes.reshape(-1, each)
        # Quotes are in order, so now each line has as many as the layout.
        _check((self._quote(0) == start + 1).all() and (self._bytes[self._close] == _CLOSE).all())

    def _quote(self, number: int) -> Int64s:
        """Return the positions of the quotes that have this number in their lines."""
        return self._quotes[:, number] + _PAD

    def columns(self, wanted: Mapping[str, pa.Field]) -> dict[str, pa.Array]:
        """Return the columns of wanted fields, when all of them have proved to be in order."""
        columns = {}
        begins = [self._quote(field.quote) - 1 for field in self._fields]
        ends = [*begins[1:], self._close]
        for field, begin, end in zip(self._fields, begins, ends, strict=True):
            self._check_bytes(begin, field.head)
            start = begin + len(field.head)
            target = wanted.get(field.name)
            if field.number:
                digits = self._digits(start, end, target)
                if target is not None:
                    columns[field.name] = digits
                continue
            _check((self._quote(field.quote + 3) == end - 1).all())
            if target is not None:
                _check(not _is.is_integer(target.type) and not _is.is_floating(target.type))
                columns[field.name] = self._texts(start, end - 1).cast(target.type)
        return columns

    def _check_bytes(self, at: Int64s, text: bytes) -> None:
        """Check that all lines have this text at their positions, in words that may overlap."""
        _check((at + len(text) <= self._close).all())
        for begin in range(0, len(text), 8):
            begin = min(begin, max(0, len(text) - 8))
            part = text[begin : begin + 8]
            mask = np.uint64((1 << 8 * len(part)) - 1)
            expected = np.uint64(int.from_bytes(part, "little"))
            _check(((self._word(at + begin) & mask) == expected).all())

    def _word(self, at: Int64s) -> UInt64s:
        """Return the eight bytes at these positions, the first one as the lowest."""
        found: UInt64s = self._words[at]
        return found

    def _digits(self, start: Int64s, end: Int64s, target: pa.Field | None) -> pa.Array | None:
        """Check that values are plain numbers, and return those of a column."""
        whole = target is not None and _is.is_integer(target.type)
        _check(target is None or whole or _is.is_floating(target.type))
        signs = self._bytes.take(start) == _MINUS
        first = start + signs
        sizes = end - first
        longest = int(sizes.max())
        _check(int(sizes.min()) > 0 and longest <= _DIGITS_MAX)
        values = np.zeros(len(start), np.uint64)
        points = np.zeros(len(start), np.uint8)
        for step in range((longest + 7) // 8):
            keep = ((8 - np.clip(sizes - 8 * step, 0, 8)) << 3).astype(np.uint64)
            word = self._word(end - 8 * (step + 1)) ^ _every(_ZERO)
            # What lies before the value becomes zeros; a shift by 64 takes two steps.
            half = keep >> np.uint64(1)
            word = ((word >> half >> (keep - half)) << half) << (keep - half)
            if not whole:
                other = word ^ _every(_ZERO ^ _POINT)
                found = (other - _every(1)) & ~other & _every(0x80)
                points += np.bitwise_count(found)
                word &= ~((found >> np.uint64(7)) * np.uint64(0xFF))
            _check(not ((word | (word + _every(6))) & _every(0xF0)).any())
            if whole:
                values += _eight_digits(word) * np.uint64(10 ** (8 * step))
        leading = (self._bytes.take(first) == _ZERO) & (sizes > 1)
        if not whole:
            second = self._bytes.take(first + 1)
            _check(int(points.max()) <= 1 and (self._bytes.take(first) != _POINT).all())
            _check((self._bytes.take(end - 1) != _POINT).all())
            leading &= second != _POINT
        _check(not leading.any())
        if target is None:
            return None
        if not whole:
            return self._texts(start, end).cast(target.type)
        _check(int(values.max()) < 1 << 63)
        made = values.view(np.int64)
        return pa.array(np.where(signs, -made, made) if signs.any() else made).cast(target.type)

    def _texts(self, starts: Int64s, ends: Int64s) -> pa.Array:
        """Return the bytes between positions as strings."""
        # Values alternate with the gaps between them, so nothing is copied yet.
        offsets = np.empty(2 * len(starts), np.int32)
        offsets[0::2] = starts
        offsets[1::2] = ends
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._bytes)]
        both = pa.StringArray.from_buffers(len(offsets) - 1, buffers[1], buffers[2])
        return both.take(pa.array(np.arange(0, len(offsets), 2)))


def _eight_digits(word: UInt64s) -> UInt64s:
    """Return the numbers of words of eight digits from 0 to 9, the first one in the lowest byte."""
    pairs = word * np.uint64(10) + (word >> np.uint64(8))
    mask = np.uint64(0x000000FF000000FF)
    high = (pairs & mask) * np.uint64(0x000F424000000064)
    low = ((pairs >> np.uint64(16)) & mask) * np.uint64(0x0000271000000001)
    return (high + low) >> np.uint64(32)
