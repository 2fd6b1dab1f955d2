"""Reads the changes of one table: a thread gets and decodes them, the mailbox takes finished pieces.

A position is a place in the log at which a transaction begins, and the number of rows that were returned
of it. The server sends that transaction again as a whole, and the rows that were returned are passed over.

The table itself is read first, if the user wants that, in the order of its key, in a transaction whose
place in the log is known: what commits before it is in the rows. If reading is interrupted, the rest is
read in another transaction later. The log is read from the place of the first one, and changes that the
part of the table with their key contains are left out.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import JobError, SourceError
from ..changes.rows import check_end, snapshot_batch
from ..fetched_splits import Piece
from ..rows_reader import ROW_BYTES, RowsReader, key_at
from .cdc_model import CdcSettings, Position, Segment, decoded
from .cdc_stream import Streaming, open_stream
from .client import (
    Connection,
    cannot_use,
    code_of,
    connected,
    is_lost,
    query,
    quoted,
    reason_of,
    refusals,
)
from .log import Files, check_place, files_of, identify, place_of, place_text
from .tables import Column, find_table, from_rows, key_kind

AGAIN: Final = "run the job once with --fresh, with snapshot=`initial`"
_WATCH_S: Final = 5.0
"""The server is asked this often how far its log is."""
_FIRST_ROWS: Final = 256
_PIECE_BYTES: Final = 4 << 20
_REFUSED_LOG: Final = 1236
"""The server says that the log cannot be read from the place."""
_log = logging.getLogger("headgate.connectors.mysql")


class CdcReader(RowsReader[Position]):
    """Reads the changes of a table: the table first, and then the log."""

    def __init__(self, settings: CdcSettings, rows: pa.Schema, schema: pa.Schema) -> None:
        super().__init__(settings.buffer_bytes)
        self._settings = settings
        self._rows = rows
        self._schema = schema
        self._files: Files | None = None
        self._watched_s = 0.0
        self._last_bytes = 0
        """The size of the rows of the table that were handed over last."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        found = [decoded(split) for split in splits]  # there is one at most
        for position in found:
            position.stop = check_end(
                f"the table {position.full_name}",
                position.stop,
                bounded=self._settings.bounded,
                other="name",
            )
            self._position = position
        self.begin(found, "mysql")

    def cut(self, piece: Piece[Position], rows: int) -> Position:
        if piece.position.reading_table:
            return msgspec.structs.replace(piece.position, last=key_at(piece.marks, rows - 1))
        confirmed, done = map(int, piece.marks[rows - 1])
        return msgspec.structs.replace(piece.position, confirmed=confirmed, done=done)

    def offsets(self, piece: Piece[Position]) -> npt.NDArray[np.int64]:
        if piece.position.reading_table:
            return np.full(len(piece.marks), -1, np.int64)
        return np.ascontiguousarray(np.asarray(piece.marks)[:, 0])

    def lag_bytes(self) -> int | None:
        files = self._files
        if files is None:
            return None
        names = list(self._going_on)
        return sum(files.bytes_behind(self._positions[name].confirmed) for name in names)

    # -- the thread ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the table, unless that was done, and then the log until the reader is closed."""
        if self._position.reading_table:
            with self._about():
                self._read_table()
        with self._about():
            self._read_log()

    def move(self, piece: Piece[Position]) -> None:
        self._position = piece.position

    def why_away(self, error: Exception, *, went_on: bool) -> str:
        import pymysql

        direct = isinstance(error, pymysql.MySQLError | OSError)
        cause = error if direct else error.__cause__
        if cause is None or not is_lost(cause):
            if direct:
                raise cannot_use(self._settings.address, error) from error
            raise error
        return reason_of(cause)

    def _about(self) -> Any:
        settings = self._settings
        return refusals(
            f"changes cannot be read table=`{settings.table}` server=`{settings.address}`",
            "check that it can be reached, and the rights: SELECT on the table, and REPLICATION SLAVE and "
            "REPLICATION CLIENT on *.*",
        )

    # -- the table ----------------------------------------------------------------------------------

    def _read_table(self) -> None:
        """Read the rest of the table, in the order of its key, in one transaction."""
        position = msgspec.structs.replace(self._position)
        if position.last is None:
            position.segments = []
        else:
            *whole, partial = position.segments
            position.segments = [*whole, msgspec.structs.replace(partial, upto=position.last)]
        settings = self._settings
        # Sorting a table may take its time, so there is no limit for an answer.
        with connected(settings.address, read_timeout=None) as connection:
            self._check_system(connection)
            table = find_table(connection, ".".join(map(quoted, position.table)), settings.address)
            position.segments.append(Segment(None, self._begin_snapshot(connection)))
            columns = [column for name in self._wanted() if (column := table.column(name))]
            for rows in self._table_rows(connection, position, columns):
                self._hand_over_rows(rows, position, columns)
        done = msgspec.structs.replace(self._position, segments=position.segments)
        done.reading_table, done.last, done.created = False, None, 0
        done.confirmed = position.segments[0].place
        if done.stop is not None:  # else rows of parts that were read later are of a later moment
            done.stop = max(done.stop, position.segments[-1].place)
        self.hand_over(Piece(done))

    def _begin_snapshot(self, connection: Connection) -> int:
        """Begin a transaction that sees one state of the table, and return the place of that in the log."""
        begin = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY"
        query(connection, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        query(connection, begin)
        told = dict(query(connection, "SHOW STATUS LIKE 'binlog_snapshot_%'"))
        names = {name.lower(): value for name, value in told.items()}
        if names.get("binlog_snapshot_file"):
            number = int(names["binlog_snapshot_file"].rpartition(".")[2])
            return place_of(number, int(names["binlog_snapshot_position"]))
        # MySQL does not tell it. While nobody can write the table, its log and its rows agree.
        query(connection, "ROLLBACK")
        with connected(self._settings.address) as other:
            query(other, f"LOCK TABLES {quoted(*self._position.table)} READ")
            place = files_of(other).end
            query(connection, begin)
        return place

    def _table_rows(
        self, connection: Connection, position: Position, columns: Sequence[Column]
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Return the rows behind `last` in blocks; the key comes first, as texts."""
        from pymysql.cursors import SSCursor

        key = [
            (quoted(name), key_kind(kind))
            for name, kind in zip(position.key, position.key_kinds, strict=True)
        ]
        selected = [kind.selected.format(name) for name, kind in key]
        ordered = [kind.ordered.format(name) for name, kind in key]
        statement = (
            f"SELECT {', '.join([*selected, *(each.selected for each in columns)])} "
            f"FROM {quoted(*position.table)}"
        ).replace("%", "%%")
        if position.last is not None:
            given = ", ".join(kind.given for _, kind in key)
            names = ", ".join(ordered).replace("%", "%%")
            statement += f" WHERE ({names}) > ({given})"
        statement += f" ORDER BY {', '.join(ordered)}".replace("%", "%%")
        cursor = connection.cursor(SSCursor)
        cursor.execute(statement, position.last or [])
        count = _FIRST_ROWS
        while rows := list(cursor.fetchmany(min(count, self._settings.batch_rows))):
            yield rows
            size = max(1, self._last_bytes)
            count = max(1, min(2 * count, _PIECE_BYTES * len(rows) // size))

    def _wanted(self) -> list[str]:
        """Return the columns of the table that are read."""
        return [name for name in self._rows.names if name in self._schema.names]

    def _hand_over_rows(
        self, rows: list[tuple[Any, ...]], position: Position, columns: Sequence[Column]
    ) -> None:
        found = list(zip(*rows, strict=True))
        width = len(position.key)
        keys = pa.RecordBatch.from_arrays(
            [pa.array(each, pa.string()) for each in found[:width]],
            [str(place) for place in range(width)],
        )
        values = {
            column.name: from_rows(column, texts, self._rows.field(column.name).type)
            for column, texts in zip(columns, found[width:], strict=True)
        }
        batch = snapshot_batch(self._schema, self._settings, self._rows, values, len(rows))
        self._last_bytes = batch.nbytes
        behind = msgspec.structs.replace(position, last=key_at(keys, -1))
        self.hand_over(Piece(behind, batch, keys, size_bytes=batch.nbytes + ROW_BYTES))

    # -- the log ------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        import pymysql

        settings = self._settings
        with connected(settings.address) as control:
            self._check_system(control)
            self._check_place(control)
            streaming = Streaming(
                self,
                settings,
                (self._rows, self._schema),
                self._position,
                lambda: self._columns_now(control),
            )
            stream = open_stream(settings, self._position, self._server_id())
            try:
                streaming.go_on(stream, lambda: self._watch(control))
            except pymysql.MySQLError as error:
                if code_of(error) == _REFUSED_LOG:
                    raise SourceError(
                        f"the server does not send its log server=`{settings.address}` "
                        f"position=`{place_text(self._position.log, self._position.confirmed)}`: "
                        f"{reason_of(error)}",
                        fix="if another process reads with the same server_id, give each its own; else "
                        f"{AGAIN}",
                    ) from error
                raise
            finally:
                stream.close()

    def _server_id(self) -> int:
        """Return the number by which the server knows this reader: a second one would end the first."""
        if self._settings.server_id is not None:
            return self._settings.server_id
        name = f"{self._application}/{self._position.full_name}"
        return (1 << 31) | (zlib.crc32(name.encode()) >> 1)

    def _check_system(self, connection: Connection) -> None:
        """Check that the server is the one that was read, and still writes what is needed into its log.

        Raises:
            SourceError: it is another one.
            UsageError: it does not.
        """
        system = identify(connection, self._settings.address)
        if system != self._position.system:
            raise SourceError(
                f"the server is not the one whose changes were read server=`{self._settings.address}` "
                f"was=`{self._position.system}` is=`{system}`",
                fix=f"give it the old address; or {AGAIN}",
            )

    def _check_place(self, connection: Connection) -> None:
        """Check that the server still has what follows the position.

        Raises:
            SourceError: it has not.
        """
        self._files = files = files_of(connection)
        position = self._position
        error = check_place(files, position.log, position.confirmed, self._settings.address, AGAIN)
        if error is None:
            return
        if self._settings.on_lost == "fail":
            raise error
        _log.warning("changes were lost: %s", error.message)
        self.put(lost=1)
        self._position = msgspec.structs.replace(position, confirmed=files.begin, done=0, created=0)

    def _watch(self, connection: Connection) -> None:
        """Ask the server now and then how far its log is."""
        now_s = self.context.clock.monotonic()
        if now_s - self._watched_s >= _WATCH_S:
            self._watched_s = now_s
            self._files = files_of(connection)

    def _columns_now(self, connection: Connection) -> list[str]:
        """Return the columns that the table has now."""
        try:
            table = find_table(
                connection, ".".join(map(quoted, self._position.table)), self._settings.address
            )
        except JobError:
            return []
        return [each.name for each in table.columns]
