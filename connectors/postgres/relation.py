"""The rows that a source or a lookup reads: those of a table, or those of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ...errors import UsageError
from .client import Address, Connection, connect, reason_of, refusals
from .tables import Column, Table, find_table, no_table
from .values import schema_of

_TYPE: Final = """
SELECT format_type(%s, %s), CASE WHEN b.typtype = 'e' THEN 'enum' ELSE b.typname END
FROM pg_type t JOIN pg_type b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END
WHERE t.oid = %s
"""


@dataclass(frozen=True)
class Relation:
    """The table or the query that is read.

    Attributes:
        address: of the database.
        table: as SQL names it; None: it is a query.
        query: a SELECT; None: it is a table.
    """

    address: Address
    table: str | None
    query: str | None

    def check(self) -> None:
        """Check that there is either a table or a query.

        Raises:
            UsageError: there are both or none.
        """
        self.address.check()
        if bool(self.table) == bool(self.query):
            raise UsageError(
                f"either a table or a query is read table=`{self.table}` query=`{self.query}`",
                fix='table="orders", or query="SELECT ..."',
            )

    def __str__(self) -> str:
        """Return what messages call it."""
        return self.table or " ".join((self.query or "").split())[:80]

    def looking(self) -> Any:
        """Turn errors of the server in the block into errors with the name of what is read."""
        return refusals(
            f"the rows cannot be read table=`{self}` server=`{self.address}`",
            "check the query, if there is one, and the rights of the user on its tables",
        )

    def describe(self, connection: Connection) -> Table:
        """Return the columns and keys that it has now.

        Raises:
            UsageError: there is no such table, or the query cannot be read.
        """
        if self.table is None:
            return _described(connection, self.query or "", self.address)
        found = find_table(connection, self.table, self.address)
        if found is None:
            raise no_table(connection, self.table, self.address)
        return found

    def columns(self, application: str) -> pa.Schema:
        """Look at the database, and return the columns with their types."""
        with connect(self.address, application) as connection, self.looking():
            return schema_of(self.describe(connection), None)

    def rows(self, name: Sequence[str]) -> Any:
        """Return the rows as the part of a statement behind FROM, under the name `headgate_rows`.

        Args:
            name: schema and name of the table, as they were found.
        """
        from psycopg import sql

        if self.query is not None:
            return _rows_of(self.query)
        return sql.SQL("{} AS headgate_rows").format(sql.Identifier(*name))


def _rows_of(query: str) -> Any:
    from psycopg import sql

    text: Any = query.strip().removesuffix(";")
    # The query may end in a comment, so the parenthesis has a line of its own.
    return sql.SQL("({}\n) AS headgate_rows").format(sql.SQL(text))


def _described(connection: Connection, query: str, address: Address) -> Table:
    import psycopg
    from psycopg import sql

    statement = sql.SQL("SELECT * FROM {} LIMIT 0").format(_rows_of(query))
    try:
        cursor = connection.execute(statement)
    except (psycopg.errors.ProgrammingError, psycopg.errors.NotSupportedError) as error:
        raise UsageError(
            f"the query cannot be read query=`{' '.join(query.split())[:200]}` server=`{address}`: "
            f"{reason_of(error)}",
            fix="one SELECT without parameters, in which each column has a name of its own",
        ) from None
    described, result = cursor.description or (), cursor.pgresult
    assert result is not None
    columns = []
    for place, each in enumerate(described):
        kind = (each.type_code, result.fmod(place), each.type_code)
        found = connection.execute(_TYPE, kind).fetchone()
        assert found is not None
        columns.append(
            Column(each.name, found[0], found[1], False, False, False, None, not_null=False)
        )
    names = [each.name for each in columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not names:
        raise UsageError(
            f"the columns of the query need names of their own columns=`{', '.join(twice)}`",
            fix="SELECT ... AS name",
        )
    return Table(0, "", "", tuple(columns), (), "n", False, "q")
