"""Turns the log of a server into pieces: the rows of changes in columns, with their positions.

The log has events: transactions begin and end, and in between a table is described, and then its rows
follow. A transaction is in the log as a whole, when it is committed. A server that is waited for tells with
heartbeats how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, SourceError
from ..changes.rows import ChangedRows, change_batch, effects
from ..changes.table import check_columns
from ..fetched_splits import Piece
from ..rows_reader import ROW_BYTES, Closed, RowsReader
from .cdc_model import METADATA, CdcSettings, Position, Segments
from .client import connect, settings_of
from .log import FIRST_OFFSET, created_later, file_number, place_of, place_text
from .statements import Effect, effect_of, first_words
from .tables import from_log, key_kind, whole_bytes

_HEARTBEAT_S: Final = 0.1
"""A server that has nothing to tell says so this often; the thread then looks whether it should end."""
_MOVE_S: Final = 1.0
"""While only other tables are written, the position moves this often."""
_PIECE_BYTES: Final = 4 << 20
_ROWS_OF_OTHERS: Final = (39, 40, *range(166, 172))
"""Kinds of events that have rows in a form which is not read: parts of JSON, and compressed ones."""
_ALONE, _PREPARED = 1, 64
"""Marks of a transaction in MariaDB: it is one statement; it is the first of two phases (XA)."""
Row: TypeAlias = dict[str, Any]


class Transaction(msgspec.Struct):
    """A transaction whose events come.

    Attributes:
        place: where it begins.
        time_s: of its commit, since 1970.
        gtid: its name; None: it has none.
        is_open: it lasts until it is committed; else it is one statement.
        prepared: it is of two phases (XA), so its rows are in the log before it is decided.
        rows: how many changes of the table it has had.
    """

    place: int
    time_s: int
    gtid: str | None = None
    is_open: bool = True
    prepared: bool = False
    rows: int = 0


def open_stream(settings: CdcSettings, position: Position, server_id: int) -> Any:
    """Return a reader of the log from a position on, of pymysqlreplication; it connects when it is read."""
    import pymysql
    from pymysqlreplication import BinLogStreamReader, event, row_event

    opened: list[bool] = []

    def connect_once(**options: Any) -> Any:
        if "cursorclass" not in options:
            # The library would go on behind an event, and its description of the table would be missing.
            if opened:
                raise pymysql.OperationalError(2013, "the connection broke")
            opened.append(True)
        return connect(settings.address, **options)

    schema, table = position.table
    return BinLogStreamReader(
        settings_of(settings.address),
        server_id,
        resume_stream=True,
        blocking=True,
        log_file=place_text(position.log, position.confirmed).partition(":")[0],
        log_pos=position.confirmed & 0xFFFFFFFF,
        only_tables=[table],
        only_schemas=[schema],
        slave_heartbeat=_HEARTBEAT_S,
        filter_non_implemented_events=False,
        only_events=[
            *(row_event.WriteRowsEvent, row_event.UpdateRowsEvent, row_event.DeleteRowsEvent),
            *(row_event.PartialUpdateRowsEvent, event.NotImplementedEvent, event.QueryEvent),
            *(event.XidEvent, event.XAPrepareEvent, event.GtidEvent, event.MariadbGtidEvent),
            *(event.RotateEvent, event.FormatDescriptionEvent, event.HeartbeatLogEvent),
            *(event.BeginLoadQueryEvent, event.ExecuteLoadQueryEvent),
        ],
        pymysql_wrapper=connect_once,
        enable_logging=False,
    )


class Streaming:
    """Turns the events of one stream into pieces."""

    def __init__(
        self,
        worker: RowsReader[Position],
        settings: CdcSettings,
        schemas: tuple[pa.Schema, pa.Schema],
        position: Position,
        columns_now: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare to read.

        Args:
            worker: the reader in whose thread it happens.
            settings: of the source.
            schemas: all columns of the table that the user wants, and the columns to return.
            position: where to go on.
            columns_now: returns the columns that the table has now.
        """
        self._worker = worker
        self._clock = worker.context.clock
        self._settings = settings
        self._rows_schema, self._schema = schemas
        self._position = position
        self._columns_now = columns_now
        self._passed = (position.confirmed, position.done)
        """The rows of the transaction at this place that were returned before."""
        self._segments = Segments(position) if position.segments else None
        self._confirmed = position.confirmed
        self._file = position.confirmed >> 32
        self._created = position.created
        self._transaction: Transaction | None = None
        """The one whose events come; None between two."""
        self._columns: Sequence[Any] | None = None
        """The columns of our table, as the log describes them; None until its first change."""
        self._by_name: dict[str, Any] = {}
        self._known = set(position.columns)
        self._moved_s = self._clock.monotonic()
        self._rows: ChangedRows[Row, Transaction] = ChangedRows()

    def go_on(self, stream: Any, watch: Callable[[], None]) -> None:
        """Read until the end, or until the reader is closed.

        Args:
            stream: as `open_stream` returns it.
            watch: is called now and then.

        Raises:
            pymysql.MySQLError: the connection broke, or the server has refused.
            SourceError: changes cannot be read.
        """
        import pymysql

        while not self._has_ended():
            if self._worker.is_closed():
                raise Closed
            try:
                event = stream.fetchone()
            except (HeadgateError, pymysql.MySQLError, OSError):
                raise
            except Exception as error:
                raise self._failed(
                    f"the log cannot be decoded: {error}",
                    "read the table without columns of unusual types; or report it",
                ) from error
            if event is None:
                raise pymysql.OperationalError(2013, "the server has ended the stream")
            watch()
            self._take(event)

    def _has_ended(self) -> bool:
        """Return True at the end of what is to be read, which is then handed over."""
        stop = self._position.stop
        if stop is None or self._transaction is not None or self._confirmed < stop:
            return False
        self._flush()
        self._position = self._at(self._confirmed, 0)
        self._worker.hand_over(Piece(self._position, ended=True))
        return True

    # -- events -------------------------------------------------------------------------------------

    def _take(self, event: Any) -> None:
        """Take one event."""
        from pymysqlreplication import event as events
        from pymysqlreplication.row_event import RowsEvent

        if isinstance(event, RowsEvent):
            self._take_rows(event)
        elif isinstance(event, events.MariadbGtidEvent):
            begun = self._begin(event, event.gtid, is_open=not event.flags & _ALONE)
            begun.prepared = bool(event.flags & _PREPARED)
        elif isinstance(event, events.GtidEvent):
            self._begin(event, event.gtid, is_open=False)
        elif isinstance(event, events.QueryEvent):
            self._take_statement(event)
        elif isinstance(event, events.XidEvent | events.XAPrepareEvent):
            self._end(event)
        elif isinstance(event, events.RotateEvent):
            self._take_file(file_number(event.next_binlog), event.position)
        elif isinstance(event, events.FormatDescriptionEvent):
            self._take_description(event)
        elif isinstance(event, events.HeartbeatLogEvent):
            within = self._passed[1] > 0 and self._passed[0] == self._confirmed
            if self._transaction is None and not within:
                self._confirmed = max(self._confirmed, self._place(event))
            self._flush()
            self._move()
        elif isinstance(event, events.BeginLoadQueryEvent | events.ExecuteLoadQueryEvent):
            raise self._failed_by_statement("LOAD DATA")
        elif event.event_type in _ROWS_OF_OTHERS:
            raise self._failed(
                f"the log has changes in a form that cannot be read event=`{event.event_type}`",
                "turn log_bin_compress, binlog_transaction_compression and binlog_row_value_options off, "
                "for all sessions; these changes are lost: run the job once with --fresh, with "
                "snapshot=`initial`",
            )

    def _place(self, event: Any) -> int:
        """Return the place behind an event."""
        return place_of(self._file, event.packet.log_pos)

    def _begin(self, event: Any, gtid: str | None, *, is_open: bool) -> Transaction:
        """Begin a transaction, unless it has begun."""
        if self._transaction is None:
            if self._segments is not None and self._confirmed >= self._segments.until:
                # No part of the table contains this one or a later one.
                self._flush()
                self._segments = None
                self._position = msgspec.structs.replace(self._position, segments=[])
            self._transaction = Transaction(self._confirmed, event.timestamp, gtid, is_open)
        return self._transaction

    def _end(self, event: Any) -> None:
        """End a transaction."""
        self._transaction = None
        self._confirmed = self._place(event)
        if self._is_full() or not self._worker.gathers():
            self._flush()
        self._move()

    def _move(self) -> None:
        """Move the position now and then, while there are no rows of the table."""
        now_s = self._clock.monotonic()
        if self._rows.ops or self._transaction is not None or now_s - self._moved_s < _MOVE_S:
            return
        self._moved_s = now_s
        if self._confirmed > self._position.confirmed:
            self._position = self._at(self._confirmed, 0)
            self._worker.hand_over(Piece(self._position))

    def _take_file(self, number: int, offset: int) -> None:
        """Go on in a file of the log: the server tells its name before its events."""
        if number == self._file:
            return
        if self._transaction is not None and self._transaction.rows:
            raise self._failed(
                "a transaction has no end in the log, as the server has lost a part of it in a crash",
                "sync_binlog = 1 keeps the log whole; run the job once with --fresh",
            )
        self._transaction = None
        self._flush()
        self._file, self._created = number, 0
        self._confirmed = max(self._confirmed, place_of(number, max(offset, FIRST_OFFSET)))

    def _take_description(self, event: Any) -> None:
        """Take the description of a file, which has the time at which the file was made."""
        if created_later(event, self._created):
            raise self._failed(
                "the log of the server was deleted (RESET MASTER), or is that of another server",
                "run the job once with --fresh, with snapshot=`initial`",
            )
        self._created = event.timestamp or self._created

    def _take_statement(self, event: Any) -> None:
        """Take a statement: of a transaction, or one that is in the log as it is."""
        text = first_words(event.query)
        word = text[:12].upper()
        if word.startswith(("BEGIN", "XA START")):
            begun = self._begin(event, None, is_open=True)
            begun.is_open, begun.prepared = True, word.startswith("XA")
            return
        transaction = self._begin(event, None, is_open=False)
        undone = word.startswith("ROLLBACK") and transaction.rows > 0
        if undone:
            raise self._failed(
                "a transaction was rolled back in part, and the log has its rows, as it has changed tables "
                "of an engine without transactions as well",
                "run the job once with --fresh, and change such tables in transactions of their own",
            )
        if word.startswith(("COMMIT", "ROLLBACK")) and not text[8:].strip().upper().startswith(
            "TO"
        ):
            self._end(event)
            return
        schema = event.schema.decode(errors="replace")
        effect = effect_of(text, schema, self._position.table)
        if effect is Effect.WRITTEN:
            raise self._failed_by_statement("binlog_format")
        if effect is Effect.REPLACED:
            raise self._failed(
                f"the table was dropped, renamed or replaced as a whole statement=`{text[:100]}`",
                "changes up to here were read; run the job once with --fresh, with snapshot=`initial`",
            )
        if effect is Effect.TRUNCATED:
            self._take_truncate()
        if not transaction.is_open:
            self._end(event)

    def _failed_by_statement(self, why: str) -> SourceError:
        return self._failed(
            f"rows were changed by a statement that is in the log instead of the rows ({why})",
            "let no session set binlog_format; run the job once with --fresh, with snapshot=`initial`",
        )

    def _failed(self, what: str, fix: str) -> SourceError:
        return SourceError(f"{what} {self._where()}", fix=fix)

    def _where(self) -> str:
        place = place_text(self._position.log, self._confirmed)
        return f"table=`{self._position.full_name}` position=`{place}`"

    # -- changes ------------------------------------------------------------------------------------

    def _take_rows(self, event: Any) -> None:
        """Take the changes of rows that one statement has made."""
        transaction = self._begin(event, None, is_open=True)
        if transaction.prepared:
            raise self._failed(
                "the table was changed by a transaction of two phases (XA), whose rows are in the log "
                "before it is known whether they stay",
                "use plain transactions; run the job once with --fresh",
            )
        if event.columns != self._columns:
            self._take_columns(event.columns)
        size = ROW_BYTES + event.event_size // max(1, len(event.rows))
        for found in event.rows:
            new = self._whole(found, "after_") if "after_values" in found else None
            old = self._whole(found, "before_") if "before_values" in found else None
            if "values" in found:
                row = self._whole(found, "")
                new, old = (None, row) if type(event).__name__ == "DeleteRowsEvent" else (row, None)
            moved = (
                new is not None
                and old is not None
                and any(new[name] != old[name] for name in self._position.key)
            )
            for op, row_after, before in effects(
                new, old, inserted=old is None, moved=moved, is_contained=self._contained
            ):
                self._add(op, row_after or {}, before, size)

    def _whole(self, found: dict[str, Any], prefix: str) -> Row:
        """Return the values of a row.

        Raises:
            SourceError: the log does not have all of them.
        """
        row: Row = found[f"{prefix}values"]
        for name, why in found[f"{prefix}none_sources"].items():
            if why == "empty set":
                row[name] = set()
            elif why == "cols bitmap" and (
                name in self._rows_schema.names or name in self._position.key
            ):
                raise self._failed(
                    f"a change does not have the value of a column, as binlog_row_image is not FULL in all "
                    f"sessions column=`{name}`",
                    "run the job once with --fresh, with snapshot=`initial`; or leave the column out of "
                    "schema=",
                )
        return row

    def _take_columns(self, columns: Sequence[Any]) -> None:
        """Take the columns that the log describes.

        Raises:
            SourceError: the table has other columns than before, or the log does not name them.
        """
        self._flush()
        names = [each.name for each in columns]
        if None in names:
            raise self._failed(
                "the log does not name the columns, as binlog_row_metadata was not FULL",
                "SET GLOBAL binlog_row_metadata = FULL, and run the job once with --fresh",
            )
        check_columns(
            names,
            known=self._known,
            rows=self._rows_schema.names,
            wanted=[name for name in self._rows_schema.names if self._is_read(name)],
            key=self._position.key,
            new_columns=self._settings.new_columns,
            columns_now=self._columns_now,
            where=self._where(),
        )
        self._known |= set(names)
        self._columns = columns
        self._by_name = {each.name: each for each in columns}

    def _is_read(self, name: str) -> bool:
        """Return True if a column of the table is read, of the rows after or before the changes."""
        before = self._settings.before
        return name in self._schema.names or (
            before is not None and before + name in self._schema.names
        )

    def _contained(self, row: Row | None) -> bool:
        """Return True if the part of the table with this row was read with this transaction."""
        if self._segments is None:
            return False
        assert row is not None
        assert self._transaction is not None
        position = self._position
        key = []
        for name, kind in zip(position.key, position.key_kinds, strict=True):
            value = row[name]
            if value is None:
                raise self._failed(
                    f"a change has no key column=`{name}`", "give its row another key"
                )
            if kind == "bytes":
                value = whole_bytes(self._by_name[name], value)
            key.append(key_kind(kind).text(value))
        return self._segments.contain(key, self._transaction.place)

    def _take_truncate(self) -> None:
        assert self._transaction is not None
        if self._segments is not None:
            everywhere = self._segments.contain_everywhere(self._transaction.place)
            if everywhere is None:
                raise self._failed(
                    "the table was truncated while it was read", "run the job once with --fresh"
                )
            if everywhere:
                return
        self._add("truncate", dict.fromkeys(self._by_name), None, ROW_BYTES)

    def _add(self, op: str, row: Row, old: Row | None, size: int) -> None:
        """Add a row, unless it was returned before."""
        if self._is_full():
            self._flush()
        transaction = self._transaction
        assert transaction is not None
        transaction.rows += 1
        if transaction.place == self._passed[0] and transaction.rows <= self._passed[1]:
            return
        self._rows.add(op, row, old, transaction, (transaction.place, transaction.rows))
        self._rows.size_bytes += size

    def _is_full(self) -> bool:
        rows = self._rows
        return len(rows.ops) >= self._settings.batch_rows or rows.size_bytes >= _PIECE_BYTES

    def _flush(self) -> None:
        """Make a piece of the rows so far, and hand it over."""
        rows = self._rows
        if not rows.ops:
            return
        self._rows = ChangedRows()
        begun = self._transaction
        # Behind the last row of a transaction, its end belongs to the piece.
        position = self._at(self._confirmed, 0 if begun is None else begun.rows)
        batch = change_batch(
            self._schema,
            self._settings,
            self._rows_schema,
            rows.ops,
            lambda field, name, before: self._column(field, name, rows.old if before else rows.new),
            lambda kind: self._metadata(kind, rows.transactions),
        )
        ready_ms = rows.transactions[0].time_s * 1000
        marks = np.array(rows.marks, np.int64)
        self._position = position
        self._worker.hand_over(Piece(position, batch, marks, [], rows.size_bytes, ready_ms))

    def _at(self, confirmed: int, done: int) -> Position:
        return msgspec.structs.replace(
            self._position,
            confirmed=confirmed,
            done=done,
            created=self._created,
            columns=sorted(self._known),
        )

    def _column(self, wanted: pa.Field, name: str, rows: Sequence[Row | None]) -> pa.Array:
        """Return a column of the table."""
        column = self._by_name.get(name)
        if column is None:
            return pa.nulls(len(rows), wanted.type)  # it was added later
        values = [None if row is None else row[name] for row in rows]
        return from_log(column, values, wanted.type)

    def _metadata(self, kind: str, transactions: Sequence[Transaction]) -> pa.Array:
        values: list[Any]
        if kind == "place":
            values = [each.place for each in transactions]
        elif kind == "gtid":
            values = [each.gtid for each in transactions]
        else:
            values = [each.time_s * 1_000_000 for each in transactions]
        return pa.array(values, METADATA[kind])
