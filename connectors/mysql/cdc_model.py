"""The settings and the position that the source of changes shares with its reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from ...errors import StateError
from ..changes.source import ChangeSettings
from ..changes.table import Parts
from .client import Address
from .tables import key_kind

METADATA: Final[Mapping[str, pa.DataType]] = {
    "place": pa.int64(),
    "commit_time": pa.timestamp("us", "UTC"),
    "gtid": pa.string(),
}
"""The parts of a change beside the row, and the types of their columns."""


@dataclass(frozen=True, kw_only=True)
class CdcSettings(ChangeSettings):
    """The arguments of `mysql_cdc_source`, which documents them."""

    address: Address
    server_id: int | None


class Segment(msgspec.Struct):
    """A part of the table, by its key, that one attempt has read in one transaction.

    Attributes:
        upto: the key of its last row, as texts; None: it has all rows that follow.
        place: what commits before this place in the log is contained in it, and nothing else.
    """

    upto: list[str] | None
    place: int


class Position(msgspec.Struct):
    """A split: the table, and how far its changes were read.

    Attributes:
        system: identifies the server.
        log: the name of the files of its log, without their numbers.
        table: schema and name.
        key: the columns of the primary key.
        key_kinds: their kinds.
        columns: the columns that the table is known to have.
        reading_table: the table is being read, or still to be read.
        last: the key of the last row of the table that was returned; None: none was.
        segments: the parts of the table that were read; the last one may be unfinished.
        confirmed: a place in the log: all transactions before it were read, and one begins there.
        done: how many rows of that one were returned.
        stop: a place in the log at which reading ends.
        created: the time at which the file with the place was made, in s since 1970; 0: it is not known.
    """

    system: str
    log: str
    table: tuple[str, str]
    key: list[str]
    key_kinds: list[str]
    columns: list[str]
    reading_table: bool
    last: list[str] | None
    segments: list[Segment]
    confirmed: int
    done: int = 0
    stop: int | None = None
    created: int = 0

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return self.full_name

    @property
    def full_name(self) -> str:
        """The name of the table."""
        return ".".join(self.table)


def decoded(split: bytes) -> Position:
    """Return a split as a position.

    Raises:
        StateError: it is the split of another source.
    """
    try:
        return msgspec.msgpack.decode(split, type=Position)
    except msgspec.DecodeError as error:
        raise StateError(
            "the restored positions are not those of changes of a MySQL table: it was another source "
            "before",
            fix="give it another name, so that it begins from the start; or start the job fresh",
        ) from error


class Segments(Parts[int]):
    """Tells which places in the log are contained in the part of the table with a key."""

    def __init__(self, position: Position) -> None:
        super().__init__(
            [key_kind(name).order for name in position.key_kinds],
            [(part.upto, part.place.__gt__) for part in position.segments],
        )
        self.until = max((part.place for part in position.segments), default=0)
