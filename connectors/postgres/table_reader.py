"""Reads the rows of a table or a query in the order of a key, so that a position is the key of a row.

A thread copies the rows of its splits, one split after the other. The rows behind a position are those with
greater keys: whatever happens to other rows, a row that keeps its key is neither doubled nor passed over.

A source that polls reads in the same way, in the order of its growing column and then of the key, again and
again. It stops at a *bound*: the highest key that it saw some time ago (`lag`), because transactions that
commit late may still add rows below the highest one that it sees now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError, StateError
from ...operators.elements import Batch
from ..fetched_splits import Piece
from ..rows_reader import ROW_BYTES, key_at
from .client import Connection, connect
from .pieces import PostgresRowsReader
from .relation import Relation
from .values import copied_lines, from_texts, parse_rows, schema_of

_BLOCK_BYTES: Final = 4 << 20
_WITH_A_GREATEST: Final = ("timestamp", "date", "numeric", "real", "double precision")
"""Types that have a value above all others, and how they begin."""
_GREATEST: Final = ("infinity", "nan")


@dataclass(frozen=True)
class TableSettings:
    """The arguments of `postgres_source`, which documents them."""

    relation: Relation
    key: tuple[str, ...]
    splits: int | None
    incremental_by: str | None
    lag_s: float
    every_s: float
    batch_rows: int
    buffer_bytes: int


class TableSplit(msgspec.Struct):
    """A range of keys, and how far it was read.

    Attributes:
        name: of the split.
        table: schema and name; empty: it is a query.
        key: the columns by which rows are ordered; those of a source that polls begin with the growing
            one.
        key_types: theirs, as the server writes them.
        last: the key behind which reading goes on; None: from the first row.
        upto: the last key of the split; None: the greatest there is.
        polls: reading never ends.
        rows: how many rows were returned.
    """

    name: str
    table: list[str]
    key: list[str]
    key_types: list[str]
    last: list[str] | None = None
    upto: list[str] | None = None
    polls: bool = False
    rows: int = 0


def decoded(split: bytes, settings: TableSettings) -> TableSplit:
    """Return the bytes of a split as one.

    Raises:
        StateError: it is the split of another source.
    """
    again = "give the source another name, so that it begins from the start; or start the job fresh"
    try:
        found = msgspec.msgpack.decode(split, type=TableSplit)
    except msgspec.DecodeError as error:
        raise StateError(
            "the restored positions are not those of a PostgreSQL table: it was another source before",
            fix=again,
        ) from error
    by = settings.incremental_by
    if found.polls != (by is not None) or (by is not None and found.key[0] != by):
        raise StateError(
            f"the restored positions are of rows in another order table=`{settings.relation}` "
            f"order=`{', '.join(found.key)}` incremental_by=`{by}`",
            fix=again,
        )
    return found


class TableReader(PostgresRowsReader[TableSplit]):
    """Reads some splits of a table."""

    def __init__(self, settings: TableSettings, rows: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            rows: the columns to return.
        """
        super().__init__(settings.relation.address, settings.buffer_bytes)
        self._settings = settings
        self._rows = rows
        self._left: deque[TableSplit] = deque()
        """The splits that are not finished in the thread, behind the rows that were handed over."""
        self._behind = True
        """There may be rows that were not handed over: the server takes its time, or they are too new."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        found = [decoded(split, self._settings) for split in splits]
        self._left.extend(found)
        self.begin(found, "postgres")

    def poll(self) -> Batch | None:
        batch = super().poll()
        self.held_back = not self.finished and self._behind
        return batch

    def cut(self, piece: Piece[TableSplit], rows: int) -> TableSplit:
        at, keys = piece.position, piece.marks
        last = key_at(keys, rows - 1)
        return msgspec.structs.replace(at, last=last, rows=at.rows - len(keys) + rows)

    def offsets(self, piece: Piece[TableSplit]) -> npt.NDArray[np.int64]:
        behind = piece.position.rows
        return np.arange(behind - len(piece.marks), behind, dtype=np.int64)

    def lag_s(self) -> float | None:
        return None

    # -- the thread ---------------------------------------------------------------------------------

    def read(self) -> None:
        settings = self._settings
        with (
            connect(settings.relation.address, self._application) as connection,
            settings.relation.looking(),
        ):
            connection.execute("SET default_transaction_read_only = on")
            self._check(connection)
            while self._left:
                if self._left[0].polls:
                    self._poll(connection)
                self._read_range(connection, self._left[0].upto)
                split = self._left[0]
                self.hand_over(Piece(split, ended=True))

    def _check(self, connection: Connection) -> None:
        """Check that the table is the one of the positions, and has the columns.

        Raises:
            StateError: it is another one.
        """
        found = self._settings.relation.describe(connection)
        schema_of(found, self._rows)
        table = self._left[0].table
        if table != ([found.schema, found.name] if found.kind != "q" else []):
            raise StateError(
                f"the restored positions are those of another table table=`{found.full_name}` "
                f"was=`{'.'.join(table) or 'a query'}`",
                fix="give the source another name, so that it begins from the start; or start the job "
                "fresh",
            )
        if not found.keys:
            for split in self._left:
                if split.last is not None and split.rows and not split.polls:
                    self._check_resumed(connection, split)

    def _check_resumed(self, connection: Connection, split: TableSplit) -> None:
        """Check that no row of a view or a query is left out when reading goes on behind a key.

        Raises:
            DataError: a row without a key, or another row with this key, would be.
        """
        from psycopg import sql

        assert split.last is not None  # the caller has checked it
        nulls = sql.SQL(" OR ").join(
            sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in split.key
        )
        for condition, allowed, problem in (
            (nulls, 0, "a row has no value in a column of its key"),
            (_compared(split, "=", split.last), 1, "two rows have the same key"),
        ):
            statement = sql.SQL("SELECT FROM {} WHERE {} LIMIT {}").format(
                self._settings.relation.rows(split.table), condition, sql.Literal(allowed + 1)
            )
            if len(connection.execute(statement).fetchall()) > allowed:
                raise DataError(
                    f"{problem}, so reading cannot go on behind a row key=`{', '.join(split.key)}` "
                    f"last=`{', '.join(split.last)}` table=`{self._settings.relation}`",
                    fix="key= needs columns that have values in all rows and identify a row",
                )

    def move(self, piece: Piece[TableSplit]) -> None:
        self._left[0] = piece.position
        if piece.ended:
            self._left.popleft()

    def _poll(self, connection: Connection) -> None:
        """Read new rows again and again, until the reader is closed."""
        settings, clock = self._settings, self.context.clock
        seen: deque[tuple[float, list[str]]] = deque()
        """The highest keys, and when they were seen."""
        read = None
        while True:
            highest = self._highest(connection)
            if highest is not None and (not seen or seen[-1][1] != highest):
                seen.append((clock.monotonic(), highest))
            bound = None
            while seen and clock.monotonic() - seen[0][0] >= settings.lag_s:
                bound = seen[0][1]
                if len(seen) == 1:
                    break
                seen.popleft()
            if bound is not None and bound != read:
                self._read_range(connection, bound)
                read = bound
            self._behind = highest is not None and highest != read
            self.pause(settings.every_s)

    def _highest(self, connection: Connection) -> list[str] | None:
        """Return the highest key, up to its first null; None: there are no rows.

        Raises:
            DataError: no row could follow it.
        """
        from psycopg import sql

        split = self._left[0]
        columns = [sql.Identifier(name) for name in split.key]
        statement = sql.SQL(
            "SELECT {} FROM (SELECT {} FROM {} WHERE {} IS NOT NULL ORDER BY {} LIMIT 1) AS highest"
        ).format(
            sql.SQL(", ").join(sql.SQL("highest.{}::text").format(each) for each in columns),
            sql.SQL(", ").join(columns),
            self._settings.relation.rows(split.table),
            columns[0],
            sql.SQL(", ").join(sql.SQL("{} DESC").format(each) for each in columns),
        )
        found = connection.execute(statement).fetchone()
        if found is None:
            return None
        if split.key_types[0].startswith(_WITH_A_GREATEST) and found[0].lower() in _GREATEST:
            column, relation = split.key[0], self._settings.relation
            raise DataError(
                "a row has the greatest value that there is in the column that grows, so no new row could "
                f"follow it incremental_by=`{column}` value=`{found[0]}` table=`{relation}`",
                fix=f"leave such rows out by a query: ... WHERE {column} < '{found[0]}'",
            )
        return list(takewhile(lambda text: text is not None, found))

    def _read_range(self, connection: Connection, upto: list[str] | None) -> None:
        """Read the rest of a split up to a key, or up to all keys that begin with this."""
        statement = copy_statement(self._settings, self._left[0], self._rows.names, upto)
        for lines in copied_lines(connection, statement, self._settings.batch_rows, _BLOCK_BYTES):
            self._hand_over_rows(lines)

    def _hand_over_rows(self, lines: list[bytes]) -> None:
        split = self._left[0]
        width = len(split.key)
        texts = parse_rows(lines, [str(place) for place in range(width + len(self._rows))])
        keys = texts.select(range(width))
        self._check_keys(keys.columns, split)
        columns = [
            from_texts(each.name, column, each.type)
            for each, column in zip(self._rows, texts.columns[width:], strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._rows)
        last = key_at(keys, -1)
        position = msgspec.structs.replace(split, last=last, rows=split.rows + len(keys))
        self.hand_over(Piece(position, batch, keys, size_bytes=batch.nbytes + ROW_BYTES))

    def _check_keys(self, keys: Sequence[pa.Array], split: TableSplit) -> None:
        """Check that each row has a key of its own, by which its place is known.

        Raises:
            DataError: one has none, or that of the row before.
        """
        order, relation = ", ".join(split.key), self._settings.relation
        missing = next((n for n, each in zip(split.key, keys, strict=True) if each.null_count), "")
        if missing:
            raise DataError(
                f"a row has no value in a column of its key column=`{missing}` table=`{relation}`",
                fix=f"leave such rows out by a query: ... WHERE {missing} IS NOT NULL",
            )
        same = reduce(pc.and_, [pc.equal(each[1:], each[:-1]) for each in keys])
        first = [each[0].as_py() for each in keys]
        if first == split.last or pc.any(same, min_count=0).as_py():
            at = 0 if first == split.last else pc.index(same, True).as_py()
            found = ", ".join(str(each[at].as_py()) for each in keys)
            raise DataError(
                f"two rows have the same key, so reading could not go on between them key=`{order}` "
                f"values=`{found}` table=`{relation}`",
                fix="key= needs columns that identify a row",
            )


def _compared(split: TableSplit, operator: str, values: Sequence[str]) -> Any:
    """Return the condition that the first columns of the key compare with these values in this way."""
    from psycopg import sql

    names = [sql.Identifier(name) for name in split.key[: len(values)]]
    kinds: list[Any] = list(split.key_types)
    given = [
        sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(kind))
        for value, kind in zip(values, kinds, strict=False)
    ]
    return sql.SQL("({}) {} ({})").format(
        sql.SQL(", ").join(names), sql.SQL(cast(Any, operator)), sql.SQL(", ").join(given)
    )


def copy_statement(
    settings: TableSettings, split: TableSplit, columns: Sequence[str], upto: list[str] | None
) -> Any:
    """Return the statement that reads the rest of a split: the key, and then these columns."""
    from psycopg import sql

    names = [sql.Identifier(name) for name in split.key]
    conditions = [
        *([] if split.last is None else [_compared(split, ">", split.last)]),
        *([] if upto is None else [_compared(split, "<=", upto)]),
    ]
    return sql.SQL("COPY (SELECT {} FROM {}{}{} ORDER BY {}) TO STDOUT (FORMAT csv)").format(
        sql.SQL(", ").join([*names, *map(sql.Identifier, columns)]),
        settings.relation.rows(split.table),
        sql.SQL(" WHERE " if conditions else ""),
        sql.SQL(" AND ").join(conditions),
        sql.SQL(", ").join(names),
    )
