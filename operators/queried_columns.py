"""Values of some keys that lie in columns: from the state that has them to the client that reads them.

A column of whole numbers or of floats travels as its memory, and any other one as JSON. Values are made of
the columns where they are used, so that the subtask does as little as it can between two batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import isfinite
from typing import Any, Final, TypeAlias, final, overload

import msgspec
import numpy as np
import pyarrow as pa

from ..state.keyed.base import ABSENT
from ..state.values import Array, Index
from .queries import TooLarge, to_json

Column: TypeAlias = Array | pa.Array
"""A column of results; those of int64 and float64 without null may be numpy."""
_NUMBERS: Final = {"<i8": "i", "<f8": "f"}
_DTYPES: Final = {kind: dtype for dtype, kind in _NUMBERS.items()}
_JSON: Final = "j"
_LIST: Final = msgspec.json.Decoder(list[Any])


@final
class SentColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column on its way to a client."""

    name: str
    kind: str
    """`i`: words of int64, `f`: of float64, both little-endian; `j`: a JSON array."""
    data: bytes


@final
class QueriedColumns(Sequence[Any]):
    """The values of some keys: objects whose members lie in columns."""

    def __init__(
        self, names: Sequence[str], columns: Sequence[Column], found: Index | None, count: int
    ) -> None:
        """Take the values that were found.

        Args:
            names: of the members.
            columns: the members of those keys that have a value.
            found: the places of these keys, ascending; None: each key has a value.
            count: the number of keys.
        """
        self._names = names
        self._columns = columns
        self._found = found
        self._count = count

    @classmethod
    def joined(
        cls, names: Sequence[str], parts: Sequence[tuple[Index, Sequence[Column]]], count: int
    ) -> QueriedColumns:
        """Return the values of `count` keys that were found in parts: the places of keys, and columns."""
        parts = [part for part in parts if len(part[0])]
        if not parts:
            return cls(names, [pa.nulls(0) for _ in names], np.empty(0, np.intp), count)
        places = np.concatenate([places for places, _ in parts])
        order = np.argsort(places)
        columns = [_joined(each, order) for each in zip(*(part for _, part in parts), strict=True)]
        return cls(names, columns, None if len(places) == count else places[order], count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        rows = _rows(self._names, list(map(_listed, self._columns)))
        if self._found is None:
            return iter(rows)
        return iter(_spread(rows, self._found.tolist(), self._count, ABSENT))

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        return list(self)[at]

    def part(self, first: int, stop: int) -> QueriedColumns:
        """Return the values of the keys from `first` to `stop`."""
        if self._found is None:
            columns = [column[first:stop] for column in self._columns]
            return QueriedColumns(self._names, columns, None, stop - first)
        low, high = np.searchsorted(self._found, (first, stop)).tolist()
        columns = [column[low:high] for column in self._columns]
        return QueriedColumns(self._names, columns, self._found[low:high] - first, stop - first)

    def sent(self, bytes_max: int) -> tuple[list[SentColumn], list[int]]:
        """Return the columns for `received`, and the places of keys that have no value.

        Raises:
            TooLarge: they have more than `bytes_max` bytes.
            StateError: a value has no form in JSON.
        """
        sent, left = [], bytes_max
        for name, column in zip(self._names, self._columns, strict=True):
            kind = _NUMBERS.get(column.dtype.str) if isinstance(column, np.ndarray) else None
            data = to_json(_listed(column), left) if kind is None else column.tobytes()
            left -= len(data)
            if left < 0:
                raise TooLarge
            sent.append(SentColumn(name, kind or _JSON, data))
        if self._found is None:
            return sent, []
        return sent, np.delete(np.arange(self._count), self._found).tolist()


def received(columns: Sequence[SentColumn], absent: Sequence[int], count: int) -> list[Any]:
    """Return the values of `count` keys as plain data; None for those that have no value.

    Raises:
        ValueError: the columns are not of one length, or there are other values than keys.
        msgspec.DecodeError: a column is not JSON.
    """
    rows = _rows([each.name for each in columns], list(map(_read, columns)))
    if len(rows) + len(absent) != count:
        raise ValueError(f"other values than keys values=`{len(rows)}` keys=`{count}`")
    if not absent:
        return rows
    missing = set(absent)
    return _spread(rows, [place for place in range(count) if place not in missing], count, None)


def plain_column(column: pa.Array) -> Column:
    """Return a column as numpy, if it is of int64 or float64 and has no null."""
    if column.null_count or column.type not in (pa.int64(), pa.float64()):
        return column
    numbers: Array = column.to_numpy()
    return numbers


def _joined(columns: Sequence[Column], order: Index) -> Column:
    if all(isinstance(column, np.ndarray) for column in columns):
        numbers: Array = np.concatenate(columns)[order]
        return numbers
    return pa.concat_arrays([pa.array(column) for column in columns]).take(pa.array(order))


def _listed(column: Column) -> list[Any]:
    values: list[Any] = column.tolist()
    return values


def _read(column: SentColumn) -> list[Any]:
    dtype = _DTYPES.get(column.kind)
    if dtype is None:
        return _LIST.decode(column.data)
    numbers = np.frombuffer(column.data, dtype)
    values = _listed(numbers)
    if column.kind == "f" and not np.isfinite(numbers).all():  # JSON has null for them
        return [value if isfinite(value) else None for value in values]
    return values


def _rows(names: Sequence[str], lists: Sequence[Sequence[Any]]) -> list[Any]:
    return list(map(dict, map(zip, repeat(names), zip(*lists, strict=True))))


def _spread(rows: Sequence[Any], places: Sequence[int], count: int, default: Any) -> list[Any]:
    """Return a list of `count` with the rows at these places."""
    values = [default] * count
    for place, row in zip(places, rows, strict=True):
        values[place] = row
    return values
