"""The binary log of a server: its settings, its files, and places in it.

A place is a number: that of the file, and in its lower 32 bits the offset in it. Files have growing
numbers, so later places are greater.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ...errors import SourceError, UsageError
from .client import Address, Connection, query, reason_of

FIRST_OFFSET: Final = 4
"""Events begin behind the mark of the file."""
_WANTED: Final[Mapping[str, tuple[str, ...]]] = {
    "log_bin": ("ON", "1"),
    "binlog_format": ("ROW",),
    "binlog_row_image": ("FULL",),
    "binlog_row_metadata": ("FULL",),
    "binlog_checksum": ("CRC32",),
}
_UNREADABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "binlog_transaction_compression": ("OFF", "0"),
    "binlog_row_value_options": ("",),
    "log_bin_compress": ("OFF", "0"),
}
"""Settings that some servers have, and the values with which their log can be read."""
_IDENTITY: Final = ("server_uuid", "server_uid", "server_id")
"""The first that a server has identifies it."""


def place_of(number: int, offset: int) -> int:
    """Return a place as a number."""
    return (number << 32) | offset


def file_number(name: str) -> int:
    """Return the number at the end of the name of a file of the log."""
    return int(name.rpartition(".")[2])


class Files(msgspec.Struct, frozen=True):
    """The files of a log that the server has.

    Attributes:
        base: their name without the number.
        sizes: by their numbers, which ascend.
    """

    base: str
    sizes: dict[int, int]

    @property
    def end(self) -> int:
        """The place behind the last transaction."""
        last = max(self.sizes)
        return place_of(last, self.sizes[last])

    @property
    def begin(self) -> int:
        """The first place that the server still has."""
        return place_of(min(self.sizes), FIRST_OFFSET)

    def bytes_behind(self, place: int) -> int:
        """Return how many bytes follow a place."""
        number, offset = place >> 32, place & 0xFFFFFFFF
        return sum(
            max(0, size - (offset if each == number else 0))
            for each, size in self.sizes.items()
            if each >= number
        )

    def text(self, place: int) -> str:
        """Return a place as the server writes it."""
        return place_text(self.base, place)


def place_text(base: str, place: int) -> str:
    """Return a place in the log with this name as the server writes it."""
    return f"{base}.{place >> 32:06}:{place & 0xFFFFFFFF}"


def files_of(connection: Connection) -> Files:
    """Return the files of the server's log."""
    rows = query(connection, "SHOW BINARY LOGS")
    base = str(rows[-1][0]).rpartition(".")[0]
    return Files(base, {file_number(row[0]): int(row[1]) for row in rows})


def identify(connection: Connection, address: Address) -> str:
    """Check that the server writes its log so that changes can be read from it, and return its identity.

    Raises:
        UsageError: it does not, or the user has not the rights to read it.
    """
    import pymysql

    names = [*_WANTED, *_UNREADABLE, *_IDENTITY]
    listed = ", ".join(f"'{name}'" for name in names)
    found = dict(query(connection, f"SHOW GLOBAL VARIABLES WHERE variable_name IN ({listed})"))
    wrong = [
        (name, found.get(name, "none"), values[0])
        for name, values in (*_WANTED.items(), *_UNREADABLE.items())
        if found.get(name, "none" if name in _WANTED else values[0]).upper() not in values
    ]
    if wrong:
        what = " ".join(f"{name}=`{value}`" for name, value, _ in wrong)
        raise UsageError(
            f"the server does not write changes of rows as a whole into its log server=`{address}` {what}",
            fix="in the configuration of the server, and a restart: "
            + ", ".join(f"{name} = {wanted or 'nothing'}" for name, _, wanted in wrong)
            + "; SET GLOBAL changes all but log_bin for new connections. binlog_row_metadata needs "
            "MariaDB 10.5 or MySQL 8.0",
        )
    grants = [str(row[0]) for row in query(connection, "SHOW GRANTS")]
    roles = any(" ON " not in each for each in grants)  # they may have the right
    everywhere = [each for each in grants if " ON *.* " in each]
    if not roles and not any(
        right in each for each in everywhere for right in ("REPLICATION SLAVE", "ALL PRIVILEGES")
    ):
        raise UsageError(
            f"the user has no right to read the log of the server server=`{address}`",
            fix="GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO the user",
        )
    try:
        files_of(connection)
    except pymysql.MySQLError as error:
        raise UsageError(
            f"the user has no right to see the files of the log server=`{address}`: {reason_of(error)}",
            fix="GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO the user",
        ) from None
    return next(f"{name}={found[name]}" for name in _IDENTITY if name in found)


def check_place(
    files: Files, base: str, place: int, address: Address, again: str
) -> SourceError | None:
    """Return the error if the server does not have any more what follows a place, and None if it has.

    Args:
        files: those that it has.
        base: the name of the log that was read.
        place: the place up to which it was read.
        address: of the server.
        again: what to do if nothing else helps.

    Raises:
        SourceError: the server has never had this place.
    """
    number, offset = place >> 32, place & 0xFFFFFFFF
    where = f"server=`{address}` position=`{place_text(base, place)}` log=`{files.text(files.end)}`"
    if files.base != base or place > files.end or offset > files.sizes.get(number, offset):
        raise SourceError(
            f"the log of the server ends before the position {where}: the log was deleted (RESET MASTER), "
            "or the server was restored from a backup or replaced by another one, so changes would be "
            "passed over",
            fix=again,
        )
    if number in files.sizes:
        return None
    return SourceError(
        f"the server has deleted the part of its log that is still to be read {where} "
        f"first=`{files.text(files.begin)}`",
        fix=f"raise binlog_expire_logs_seconds (MariaDB: also expire_logs_days); {again}; on_lost=`skip` "
        "goes on with what is left",
    )


def created_later(event: Any, created: int) -> bool:
    """Return True if a file of the log was made at another time than the one that was read before."""
    return bool(created and event.timestamp and event.timestamp != created)
