"""The messages of the plugin pgoutput: transactions, relations and changes of rows.

Version 1 of the protocol, which all servers since PostgreSQL 10 speak: a transaction comes as a whole,
after it was committed, in the order of the commits. Values are in their text form.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Final, TypeAlias

EPOCH_US: Final = 946_684_800_000_000
"""The year 2000 in microseconds since 1970: the server counts from there."""


class Unchanged(Enum):
    """Stands for a value that was not sent: it is stored apart (TOAST), and did not change."""

    VALUE = "unchanged"


UNCHANGED: Final = Unchanged.VALUE
Value: TypeAlias = bytes | Unchanged | None
Row: TypeAlias = list[Value]


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins.

    Attributes:
        commit_lsn: where its commit is in the log.
        time_us: of the commit, since 1970.
        xid: its number, of 32 bits.
    """

    commit_lsn: int
    time_us: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The transaction ends; `end_lsn` is behind its commit."""

    end_lsn: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The columns of a table: sent before its first change, and after they have changed."""

    oid: int
    schema: str
    name: str
    columns: tuple[str, ...]
    types: tuple[int, ...]


@dataclass(slots=True)
class Change:
    """A change of one row.

    Attributes:
        kind: `I`, `U` or `D`.
        new: the row after it; None for a deletion.
        old: the row before it, as far as the replica identity has it; None if it was not sent.
        whole: `old` has all columns, and not only those of the key.
    """

    relation: int
    kind: str
    new: Row | None
    old: Row | None
    whole: bool


@dataclass(frozen=True, slots=True)
class Truncate:
    """All rows of some tables were deleted."""

    relations: tuple[int, ...]


Message: TypeAlias = Begin | Commit | Relation | Change | Truncate

_BEGIN: Final = Struct(">QqI")
_COMMIT: Final = Struct(">BQQq")
_U32: Final = Struct(">I")
_U16: Final = Struct(">H")
_COLUMN: Final = Struct(">Ii")
_TEXT, _NULL, _UNCHANGED = b"tnu"
_NEW, _OLD, _KEY = b"NOK"


def decode(data: bytes) -> Message | None:
    """Return a message; None if it says nothing about rows, such as where a transaction came from."""
    kind = data[0]
    if kind == 0x49:  # I
        relation = _U32.unpack_from(data, 1)[0]
        return Change(relation, "I", _row(data, 6)[0], None, False)
    if kind == 0x55:  # U
        relation = _U32.unpack_from(data, 1)[0]
        which = data[5]
        if which == _NEW:
            return Change(relation, "U", _row(data, 6)[0], None, False)
        old, at = _row(data, 6)
        return Change(relation, "U", _row(data, at + 1)[0], old, which == _OLD)
    if kind == 0x44:  # D
        relation = _U32.unpack_from(data, 1)[0]
        return Change(relation, "D", None, _row(data, 6)[0], data[5] == _OLD)
    if kind == 0x42:  # B
        lsn, time_us, xid = _BEGIN.unpack_from(data, 1)
        return Begin(lsn, time_us + EPOCH_US, xid)
    if kind == 0x43:  # C
        return Commit(_COMMIT.unpack_from(data, 1)[2])
    if kind == 0x52:  # R
        return _relation(data)
    if kind == 0x54:  # T
        count = _U32.unpack_from(data, 1)[0]
        return Truncate(tuple(_U32.unpack_from(data, 6 + 4 * place)[0] for place in range(count)))
    return None


def _row(data: bytes, at: int) -> tuple[Row, int]:
    """Return the values of a row, and the place behind it."""
    count = (data[at] << 8) | data[at + 1]
    at += 2
    values: Row = []
    add = values.append
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == _TEXT:
            end = at + 4 + int.from_bytes(data[at : at + 4])
            add(data[at + 4 : end])
            at = end
        elif kind == _NULL:
            add(None)
        else:
            add(UNCHANGED)
    return values, at


def _relation(data: bytes) -> Relation:
    oid = _U32.unpack_from(data, 1)[0]
    schema, at = _text(data, 5)
    name, at = _text(data, at)
    count = _U16.unpack_from(data, at + 1)[0]  # the byte before is the replica identity
    at += 3
    columns, types = [], []
    for _ in range(count):
        column, at = _text(data, at + 1)  # the byte before says whether it is a part of the key
        columns.append(column)
        types.append(_COLUMN.unpack_from(data, at)[0])
        at += 8
    return Relation(oid, schema, name, tuple(columns), tuple(types))


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1
