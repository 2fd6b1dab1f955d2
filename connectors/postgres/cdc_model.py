"""The settings and the position that the source of changes shares with its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import StateError
from ..changes.source import ChangeSettings
from ..changes.table import Parts
from .client import Address

METADATA: Final[Mapping[str, pa.DataType]] = {
    "lsn": pa.int64(),
    "commit_time": pa.timestamp("us", "UTC"),
    "xid": pa.int64(),
    "unchanged": pa.list_(pa.string()),
}
"""The parts of a change beside the row, and the types of their columns."""


@dataclass(frozen=True, kw_only=True)
class CdcSettings(ChangeSettings):
    """The arguments of `postgres_cdc_source`, which documents them."""

    address: Address
    slot: str
    publication: str
    create: bool


class Segment(msgspec.Struct):
    """A part of the table, by its key, that one attempt has read in one transaction.

    Attributes:
        upto: the key of its last row, as texts; None: it has all rows that follow.
        snapshot: the transactions that it contains, as `pg_current_snapshot()` tells them.
        until: a place in the log: what commits behind it is not in the segment.
    """

    upto: list[str] | None
    snapshot: str
    until: int


class Position(msgspec.Struct):
    """A split: the slot, and how far its changes were read.

    Attributes:
        system: identifies the server's data.
        table: schema and name.
        key: the columns of the primary key; empty: there is none.
        key_types: theirs, as Postgres casts them.
        columns: the columns that the table is known to have.
        horizon: a transaction number: those below it had begun when the slot was made.
        reading_table: the table is being read, or still to be read.
        last: the key of the last row of the table that was returned; None: none was.
        segments: the parts of the table that were read; the last one may be unfinished.
        confirmed: a place in the log: all transactions that commit before it were read.
        transaction: where the transaction that is being read commits; 0: none.
        done: how many rows of it were returned.
        stop: a place in the log at which reading ends.
        oid: the number of the table; 0 in positions of the first versions.
        published: identifies the table's place in the publication; empty in positions of the first
            versions.
    """

    slot: str
    system: str
    table: tuple[str, str]
    key: list[str]
    key_types: list[str]
    columns: list[str]
    horizon: int
    reading_table: bool
    last: list[str] | None
    segments: list[Segment]
    confirmed: int
    transaction: int = 0
    done: int = 0
    stop: int | None = None
    oid: int = 0
    published: str = ""

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return self.slot


def decoded(split: bytes) -> Position:
    """Return a split as a position.

    Raises:
        StateError: it is the split of another source.
    """
    try:
        return msgspec.msgpack.decode(split, type=Position)
    except msgspec.DecodeError as error:
        raise StateError(
            "the restored positions are not those of changes of a PostgreSQL table: it was another source "
            "before",
            fix="give it another name, so that it begins from the start; or start the job fresh",
        ) from error


# -- keys -----------------------------------------------------------------------------------------------

_ORDERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "int2": int,
    "int4": int,
    "int8": int,
    "numeric": Decimal,
    "text": str.encode,
    "varchar": str.encode,
    "uuid": str,
    "date": str,
    "bool": str,
}
"""For each type of a key: makes values that Python orders as the server does, texts by their bytes."""
TEXTS: Final = ("text", "varchar")
"""Types that are ordered by their bytes only if the server is told so."""
ORDERED: Final = tuple(_ORDERS)


class Segments(Parts[int]):
    """Tells which transactions are contained in the part of the table with a key."""

    def __init__(self, position: Position) -> None:
        super().__init__(
            [_ORDERS[base] for base in position.key_types],
            [(part.upto, _Snapshot(part.snapshot).contains) for part in position.segments],
        )
        self.until = max((part.until for part in position.segments), default=0)


class _Snapshot:
    """The transactions that a reader sees."""

    def __init__(self, text: str) -> None:
        low, high, running = text.split(":")
        self._low, self._high = int(low), int(high)
        self._running = frozenset(map(int, filter(None, running.split(","))))

    def contains(self, xid: int) -> bool:
        """Return True for a transaction that had committed, if it has committed by now.

        Args:
            xid: its lower 32 bits, as the stream of changes has it.
        """
        distance = ((xid - self._high + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
        whole = self._high + distance
        return whole < self._low or (whole < self._high and whole not in self._running)
