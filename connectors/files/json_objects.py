"""Decodes a few lines of JSON objects with the same fields: by a class made for them, faster than Arrow.

The layout, the names and kinds of the fields, is learned from one line, and the lines are decoded by a
class that has exactly these fields. Arrow's parser, and columns of numpy (`json_layout`), take some tenths
of a millisecond for a few lines as well. The parser still reads whatever could mean something else to it,
and decides what is a bad record: lines that lack a field or have another one, escapes, nulls, nested
values, values of other kinds, and fields that a line has twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

LINES_MIN: Final = 2
LINES_MAX: Final = 2_048
"""For more lines columns are faster. A single one is left to the parser."""
_PAUSE_MAX: Final = 255
"""After pieces of other forms, this many are left to the parser before another one is looked at."""
_QUOTE, _SLASH = b'"', b"\\"
_NEGATIVE_ZERO: Final = re.compile(rb":\s*-0")
_is: Final = pa.types


class _OtherForm(Exception):
    """Raised if lines do not have the layout, or have something that only the parser reads."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of lines.

    Attributes:
        decode: makes an object of a line that has exactly the fields of the layout, or raises.
        getters: the functions that return the value of a field of such an object, by wanted columns.
        quotes: the number of quotes in a line.
    """

    decode: Callable[[bytes], Any]
    getters: Mapping[str, Callable[[Any], Any]]
    quotes: int


class ObjectReader:
    """Reads lines of one layout as the columns of a schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._layout: _Layout | None = None
        self._possible = all(_is_supported(field.type) for field in schema)
        self._pause = self._waiting = 0

    def may_read(self, count: int) -> bool:
        """Return True if this number of lines is read fastest here, provided that they have one layout."""
        return self._possible and LINES_MIN <= count <= LINES_MAX

    def read(self, text: memoryview, lines: Sequence[bytes]) -> pa.RecordBatch | None:
        """Return the rows of lines; None: only the parser can tell.

        Args:
            text: the lines, and nothing else but white space between them.
            lines: the same, of a number that `may_read` allows.
        """
        if self._waiting:
            self._waiting -= 1
            return None
        try:
            batch = self._read(bytes(text), lines)
        except (_OtherForm, ValueError, OverflowError, msgspec.DecodeError, pa.ArrowException):
            self._layout = None
            self._pause = self._waiting = min(2 * self._pause + 1, _PAUSE_MAX)
            return None
        self._pause = 0
        return batch

    def _read(self, text: bytes, lines: Sequence[bytes]) -> pa.RecordBatch:
        if self._layout is None:
            self._layout = _layout_of(lines[0], self._schema)
        layout = self._layout
        # Each line has all fields, so with this many quotes in all of them none has a field twice.
        _check(_SLASH not in text and text.count(_QUOTE) == layout.quotes * len(lines))
        objects = list(map(layout.decode, lines))
        arrays = []
        for field in self._schema:
            getter = layout.getters.get(field.name)
            if getter is None:
                _check(field.nullable)
                arrays.append(pa.nulls(len(lines), field.type))
            else:
                arrays.append(_array_of(list(map(getter, objects)), field.type, text))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _is_supported(kind: pa.DataType) -> bool:
    return kind in (pa.float64(), pa.string(), pa.large_string()) or bool(
        _is.is_integer(kind) or _is.is_timestamp(kind)
    )


def _check(holds: object) -> None:
    """Leave the lines to the parser unless a condition holds."""
    if not holds:
        raise _OtherForm


def _layout_of(line: bytes, schema: pa.Schema) -> _Layout:
    """Return the layout of a line, which is a flat object of strings and numbers."""
    found = msgspec.json.decode(line)
    _check(isinstance(found, dict) and found)
    kinds = {field.name: field.type for field in schema}
    names, fields, getters = {}, [], {}
    for place, (name, value) in enumerate(found.items()):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _check(number or isinstance(value, str))
        wanted = kinds.get(name)
        whole = wanted is not None and _is.is_integer(wanted)
        _check(wanted is None or (whole or wanted == pa.float64()) == number)
        own = f"f{place}"
        names[own] = name
        fields.append((own, (int if whole else float) if number else str))
        if wanted is not None:
            getters[name] = attrgetter(own)
    # Objects of this class hold no others, so the collector of garbage need not know them.
    made = msgspec.defstruct("Line", fields, rename=names, forbid_unknown_fields=True, gc=False)
    quotes = 2 * len(fields) + 2 * sum(kind is str for _, kind in fields)
    return _Layout(msgspec.json.Decoder(made).decode, getters, quotes)


def _array_of(values: list[Any], kind: pa.DataType, text: bytes) -> pa.Array:
    """Return the values of a column, which came in this text."""
    if kind == pa.float64():
        made = pa.array(values, kind)
        # The parser tells -0 from 0.
        _check(np.asarray(made).all() or not _NEGATIVE_ZERO.search(text))
        return made
    made = pa.array(values, pa.int64() if _is.is_integer(kind) else pa.string())
    return made if made.type == kind else made.cast(kind)
