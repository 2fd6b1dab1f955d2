"""The replication slot and the stream of changes behind it."""

from __future__ import annotations

import select
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

from ...errors import SourceError, UsageError
from ...operators.clock import Clock
from .client import Address, Connection, connect, reason_of
from .pgoutput import EPOCH_US

_STATUS: Final = Struct(">cQQQqB")
_DATA: Final = Struct(">cQQq")
_KEEPALIVE: Final = Struct(">cQqB")


def lsn_of(text: str) -> int:
    """Return a place in the log as a number; the server writes it as two hexadecimal ones."""
    high, low = text.split("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def slot_state(connection: Connection, slot: str) -> dict[str, Any] | None:
    """Return what the server tells of a slot; None: there is none."""
    row = connection.execute(
        "SELECT plugin, slot_type, database, confirmed_flush_lsn::text, wal_status, active_pid, "
        "database = current_database() FROM pg_replication_slots WHERE slot_name = %s",
        [slot],
    ).fetchone()
    if row is None:
        return None
    names = ("plugin", "type", "database", "confirmed", "status", "active", "here")
    return dict(zip(names, row, strict=True))


def check_slot(state: dict[str, Any], slot: str, address: Address) -> None:
    """Check that a slot can be read.

    Raises:
        UsageError: it is of another kind, or of another database.
        SourceError: the server has removed what it had kept.
    """
    if state["type"] != "logical" or state["plugin"] != "pgoutput" or not state["here"]:
        raise UsageError(
            f"the slot is not one of pgoutput for this database slot=`{slot}` server=`{address}` "
            f"kind=`{state['type']}` plugin=`{state['plugin']}` database=`{state['database']}`",
            fix="name another slot, which the source then creates",
        )
    if state["status"] == "lost":
        raise SourceError(
            f"the server has invalidated the slot slot=`{slot}` server=`{address}`: the log that it needs "
            "was removed, so changes were lost",
            fix=f"raise max_slot_wal_keep_size; SELECT pg_drop_replication_slot('{slot}'), and run the "
            "job once with --fresh, with snapshot=`initial`",
        )


def identify(address: Address, application: str) -> str:
    """Return what identifies the data of a server.

    Raises:
        SourceError: it does not answer, or the user may not replicate.
    """
    connection = connect(address, application, replication="database")
    try:
        return _identify(connection)[0]
    finally:
        connection.close()


def _identify(connection: Connection) -> tuple[str, int]:
    """Return what identifies the data, and up to where the server has written its log."""
    row = connection.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None
    return str(row[0]), lsn_of(row[2])


class Stream:
    """A connection that gets changes.

    Attributes:
        system: identifies the data of the server.
        written: the end of the server's log when the stream was made.
        end: the end of the server's log, as far as it has told.
    """

    def __init__(self, address: Address, application: str, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._connection: Any = connect(address, application, replication="database")
        self._raw = self._connection.pgconn
        self.system, self.written = _identify(self._connection)
        self.end = 0
        self._received = 0

    def start(self, slot: str, publication: str, lsn: int) -> bool:
        """Start to stream transactions that commit at `lsn` or later; return False if the slot is in use.

        Raises:
            SourceError: the slot cannot be read.
        """
        from psycopg import pq, sql

        statement = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {})"
        ).format(
            sql.Identifier(slot),
            _raw(lsn_text(lsn)),
            sql.Literal(f'"{publication}"'),
        )
        result = self._raw.exec_(statement.as_bytes(self._connection))
        if result.status == pq.ExecStatus.COPY_BOTH:
            return True
        if result.error_field(pq.DiagnosticField.SQLSTATE) == b"55006":
            return False
        reason = result.error_message.decode(errors="replace").strip()
        raise SourceError(
            f"changes cannot be read slot=`{slot}` server=`{self._address}`: {reason}",
            fix="if the slot does not exist, or has lost its log, changes were lost: drop it, and run the "
            "job once with --fresh, with snapshot=`initial`; else check the attribute REPLICATION of the "
            "user, and wal_level=logical",
        )

    def receive(self, most: int, wait_s: float) -> list[bytes]:
        """Return messages of the plugin that have come; wait for the first one for at most this time.

        Raises:
            psycopg.OperationalError: the connection broke.
            SourceError: the server has ended the stream.
        """
        found: list[bytes] = []
        waited = False
        take = self._raw.get_copy_data
        while len(found) < most:
            size, data = take(1)
            if size > 0:
                message = bytes(data)
                if message[0] == 0x77:  # w
                    _, start, end, _ = _DATA.unpack_from(message)
                    self.end = max(self.end, end)
                    self._received = max(self._received, start)
                    found.append(message[25:])
                else:
                    found.append(message)
            elif size == 0:
                if found or waited:
                    break
                waited = True
                readable = select.poll()  # `select` takes low numbers of sockets only
                readable.register(self._raw.socket, select.POLLIN)
                if readable.poll(wait_s * 1000):
                    self._raw.consume_input()
            else:
                self._raise_end()
        return found

    def keepalive(self, message: bytes) -> int | None:
        """Return up to where the server has sent all changes, if the message says that."""
        if message[0] != 0x6B:  # k
            return None
        _, end, _, _ = _KEEPALIVE.unpack_from(message)
        self.end = max(self.end, end)
        self._received = max(self._received, end)
        return int(end)

    def report(self, confirmed: int, *, ask: bool = False) -> None:
        """Tell the server what is durable here; 0: nothing new.

        Args:
            confirmed: the server may forget what commits before it.
            ask: it shall tell at once up to where it has sent.
        """
        now_us = self._clock.now_ms() * 1000 - EPOCH_US
        received = max(self._received, confirmed)
        self._raw.put_copy_data(
            _STATUS.pack(b"r", received, confirmed, confirmed, now_us, int(ask))
        )
        self._raw.flush()

    def _raise_end(self) -> None:
        from psycopg import OperationalError, pq

        result = self._raw.get_result()
        reason = "" if result is None else result.error_message.decode(errors="replace").strip()
        code = None if result is None else result.error_field(pq.DiagnosticField.SQLSTATE)
        # 57...: the server shuts down; 08...: the connection broke.
        if not code or code[:2] in (b"57", b"08") or self._raw.status != pq.ConnStatus.OK:
            raise OperationalError(reason or "the server has ended the stream")
        raise SourceError(
            f"the stream of changes has ended server=`{self._address}`: {reason}",
            fix="see the log of the server",
        )

    def close(self) -> None:
        self._connection.close()


def _raw(text: Any) -> Any:
    from psycopg import sql

    return sql.SQL(text)


def has_publication(connection: Connection, publication: str) -> bool:
    """Return True if there is a publication of this name."""
    found = connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [publication])
    return found.fetchone() is not None


def check_wal_level(connection: Connection, address: Address) -> None:
    """Check that the server writes its log so that changes can be read from it.

    Raises:
        UsageError: it does not.
    """
    row = connection.execute("SHOW wal_level").fetchone()
    if row is None or row[0] != "logical":
        raise UsageError(
            f"the server does not write changes of rows into its log server=`{address}` "
            f"wal_level=`{row[0] if row else ''}`",
            fix="wal_level = logical in postgresql.conf, and a restart of the server",
        )


def make_publication(
    connection: Connection, publication: str, table: tuple[str, str], *, create: bool
) -> None:
    """Check that a publication has the table; create it if it does not exist and that is allowed.

    Raises:
        UsageError: it has not, or must not be created.
    """
    import psycopg
    from psycopg import sql

    full = ".".join(table)
    if not has_publication(connection, publication):
        statement = sql.SQL(
            "CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)"
        ).format(sql.Identifier(publication), sql.Identifier(*table))
        if not create:
            raise UsageError(
                f"there is no such publication publication=`{publication}`",
                fix=f"{statement.as_string(connection)}; or create=True",
            )
        try:
            connection.execute(statement)
        except psycopg.errors.DuplicateObject:
            pass  # somebody else was faster
        except psycopg.Error as error:
            raise UsageError(
                f"the publication cannot be created publication=`{publication}`: {reason_of(error)}",
                fix=f"as the owner of the table: {statement.as_string(connection)}",
            ) from None
    found = connection.execute(
        "SELECT 1 FROM pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s",
        [publication, *table],
    ).fetchone()
    if found is None:
        raise UsageError(
            f"the publication does not have the table publication=`{publication}` table=`{full}`",
            fix=f"ALTER PUBLICATION {publication} ADD TABLE {full}",
        )


_IDENTITY: Final = """
SELECT to_regclass(format('%%I.%%I', %(schema)s::text, %(name)s::text))::oid,
       (SELECT format('%%s.%%s', n.nspname, c.relname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s),
       EXISTS (SELECT FROM pg_publication_tables
               WHERE pubname = %(publication)s AND schemaname = %(schema)s AND tablename = %(name)s),
       (SELECT format('%%s/%%s', p.oid, r.oid)
        FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = %(oid)s
        WHERE p.pubname = %(publication)s)
"""


@dataclass(frozen=True)
class Identity:
    """The present identity of a table that was known by a name and a number.

    Attributes:
        oid: the number of the table that has the name; None: there is none.
        name: the name of the table that has the number; None: it was dropped.
        published: identifies its place in the publication, and differs if it was taken out and added
            again; None: it is not in the publication.
    """

    oid: int | None
    name: str | None
    published: str | None


def identity_of(
    connection: Connection, publication: str, table: tuple[str, str], oid: int
) -> Identity:
    """Return what became of a table and of its place in a publication."""
    schema, name = table
    found = connection.execute(
        _IDENTITY, {"schema": schema, "name": name, "oid": oid, "publication": publication}
    ).fetchone()
    assert found is not None
    return Identity(found[0], found[1], found[3] if found[2] else None)


def make_slot(connection: Connection, slot: str, address: Address, *, create: bool) -> None:
    """Check that a slot can be read; create it if it does not exist and that is allowed.

    Raises:
        UsageError: it is of another kind, or must not be created.
    """
    import psycopg

    state = slot_state(connection, slot)
    if state is None:
        statement = f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        if not create:
            raise UsageError(
                f"there is no such slot slot=`{slot}` server=`{address}`",
                fix=f"{statement}; or create=True",
            )
        try:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        except psycopg.Error as error:
            raise UsageError(
                f"the slot cannot be created slot=`{slot}` server=`{address}`: {reason_of(error)}",
                fix="wal_level = logical and max_replication_slots in postgresql.conf; ALTER ROLE ... "
                "REPLICATION for the user; a slot has a name of a-z, 0-9 and _",
            ) from None
        state = slot_state(connection, slot)
    assert state is not None
    check_slot(state, slot, address)
