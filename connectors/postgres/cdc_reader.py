"""Reads the changes of one table: a thread gets and decodes them, the mailbox takes finished pieces.

A position is a place in the log before which all transactions were read, and the number of rows that were
returned of the transaction that follows. The server sends that transaction again as a whole, and the rows
that were returned are passed over.

The table itself is read first, if the user wants that, in the order of its key, while nothing is taken from
the stream. The stream begins before that, so it has changes that the rows contain already. They are told
by their transactions: what the transaction in which a part of the table was read could see is in the rows,
and is left out of the stream. So reading may be interrupted: the rest is read in another transaction later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import SourceError
from ..changes.rows import check_end, snapshot_batch
from ..fetched_splits import Piece
from ..rows_reader import ROW_BYTES, key_at
from .cdc_model import TEXTS, CdcSettings, Position, Segment, decoded
from .cdc_stream import IDLE_S, Streaming, about, another_table
from .client import Connection, connect
from .pieces import PostgresRowsReader
from .replication import Stream, check_slot, identity_of, lsn_of, lsn_text, slot_state
from .tables import find_table
from .values import copied_lines, from_texts, parse_rows

_IN_USE_S_MAX: Final = 120.0
"""The reader before this one has this time to leave the slot; the server notices within a minute."""
_log = logging.getLogger("headgate.connectors.postgres")


class CdcReader(PostgresRowsReader[Position]):
    """Reads the changes of a table: the table first, and then the stream.

    Attributes:
        settings: of the source.
        rows: all columns of the table that the user wants.
        schema: the columns to return.
        end: the end of the server's log, as far as it is known.
        ended: the piece that ends the split was handed over.
    """

    def __init__(self, settings: CdcSettings, rows: pa.Schema, schema: pa.Schema) -> None:
        super().__init__(settings.address, settings.buffer_bytes)
        self.settings = settings
        self.rows = rows
        self.schema = schema
        self.end = 0
        self.ended = False
        self._cuts: dict[int, int] = {}
        self._confirm = 0
        """The place in the log up to which completed checkpoints have read; `_shared.changed` guards it."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        found = [decoded(split) for split in splits]  # there is one at most
        for position in found:
            position.stop = check_end(
                f"slot {position.slot}",
                position.stop,
                bounded=self.settings.bounded,
                other="name and slot",
            )
            self._position = position
        self.begin(found, "postgres")

    def cut(self, piece: Piece[Position], rows: int) -> Position:
        if piece.position.reading_table:
            last = key_at(piece.marks, rows - 1)
            return msgspec.structs.replace(piece.position, last=last)
        confirmed, transaction, done = map(int, piece.marks[rows - 1])
        return msgspec.structs.replace(
            piece.position, confirmed=confirmed, transaction=transaction, done=done
        )

    def offsets(self, piece: Piece[Position]) -> npt.NDArray[np.int64]:
        if piece.position.reading_table:
            return np.full(len(piece.marks), -1, np.int64)
        return np.ascontiguousarray(np.asarray(piece.marks)[:, 1])

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        for position in self._positions.values():
            self._cuts[checkpoint_id] = position.confirmed

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Let the server forget the changes before the position of the checkpoint."""
        cut = self._cuts.get(checkpoint_id, 0)
        self._cuts = {id_: kept for id_, kept in self._cuts.items() if id_ > checkpoint_id}
        with self._shared.changed:
            self._confirm = max(self._confirm, cut)
            self._shared.changed.notify_all()

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._cuts.pop(checkpoint_id, None)

    def lag_bytes(self) -> int | None:
        if not self.end:
            return None
        return sum(
            max(0, self.end - self._positions[name].confirmed) for name in list(self._going_on)
        )

    # -- the thread ---------------------------------------------------------------------------------

    def confirmed(self) -> int:
        """Return the place in the log up to which completed checkpoints have read."""
        with self._shared.changed:
            return self._confirm

    def read(self) -> None:
        """Read the table, unless that was done, and then the stream until the reader is closed."""
        if self._position.reading_table:
            self._read_table()
        self._read_stream()

    def move(self, piece: Piece[Position]) -> None:
        self._position = piece.position

    # -- the table ----------------------------------------------------------------------------------

    def _read_table(self) -> None:
        """Read the rest of the table, in the order of its key, in one transaction."""
        position = msgspec.structs.replace(self._position)
        if position.last is None:
            position.segments = []
        else:
            *whole, partial = position.segments
            position.segments = [*whole, msgspec.structs.replace(partial, upto=position.last)]
        connection = connect(self.settings.address, self._application)
        try:
            with about(self.settings):
                self._check_name(connection, position)
                snapshot, until = self._begin_snapshot(connection, position.horizon)
                position.segments.append(Segment(None, snapshot, until))
                for lines in self._table_rows(connection, position):
                    self._hand_over_rows(lines, position)
        finally:
            connection.close()
        done = msgspec.structs.replace(self._position, segments=position.segments)
        done.reading_table, done.last = False, None
        if done.stop is not None:  # else rows of parts that were read later are of a later moment
            done.stop = max(done.stop, position.segments[-1].until)
        self.hand_over(Piece(done))

    def _check_name(self, connection: Connection, position: Position) -> None:
        """Check that the table still has its name, by which its rows are read.

        Raises:
            SourceError: it has not.
        """
        table = (position.table[0], position.table[1])
        found = identity_of(connection, self.settings.publication, table, position.oid)
        if not position.oid or found.oid == position.oid:
            return
        if found.oid is not None:
            raise another_table(position)
        again = "run the job once with --fresh, with snapshot=`initial`"
        if found.name is None:
            raise SourceError(
                f"the table was dropped before its rows were read table=`{'.'.join(table)}`",
                fix=again,
            )
        raise SourceError(
            f"the table has another name now, and its rows were not read yet table=`{'.'.join(table)}` "
            f"name=`{found.name}`",
            fix=f"give it its old name until they are read; or {again} and table= the new name",
        )

    def published_now(self, position: Position) -> str:
        settings, table = self.settings, (position.table[0], position.table[1])
        with connect(settings.address, self._application) as connection, about(settings):
            found = identity_of(connection, settings.publication, table, position.oid)
        if position.oid and found.oid not in (None, position.oid):
            raise another_table(position)
        what = f"table=`{'.'.join(table)}` publication=`{settings.publication}` "
        what += f"position=`{lsn_text(position.confirmed)}`"
        again = "run the job once with --fresh, with snapshot=`initial`"
        if found.oid is None and found.name is None:
            raise SourceError(f"the table was dropped, so no changes come {what}", fix=again)
        if found.oid is None:
            return (
                position.published
            )  # it was renamed: its next change fails, and none comes before
        if found.published is None:
            raise SourceError(
                f"the table is not in the publication any more, so its changes do not come {what}",
                fix=f"ALTER PUBLICATION {settings.publication} ADD TABLE {'.'.join(table)}; changes "
                f"since it was taken out are lost: {again}",
            )
        if position.published not in ("", found.published):
            if settings.on_lost == "fail":
                raise SourceError(
                    f"the table was taken out of the publication and added again, so changes in between "
                    f"are lost {what}",
                    fix=f"{again}; on_lost=`skip` goes on without them",
                )
            _log.warning("changes were lost, as the table was not in the publication: %s", what)
            self.put(lost=1)
        return found.published

    def _begin_snapshot(self, connection: Connection, horizon: int) -> tuple[str, int]:
        """Begin a transaction that sees everything from before the slot; return what it sees, and when."""
        waited = 0
        while True:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
            end = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            assert end is not None
            if int(row[0].split(":")[0]) >= horizon:
                return row[0], lsn_of(end[0])
            connection.execute("ROLLBACK")
            waited += 1
            if waited % 300 == 100:
                _log.warning(
                    "the table is read as soon as transactions end that began before the slot"
                )
            self.pause(0.1)

    def _table_rows(self, connection: Connection, position: Position) -> Iterator[list[bytes]]:
        """Return the rows behind `last`, in blocks of lines of CSV; the key comes first."""
        from psycopg import sql

        key: Any = [
            sql.SQL("{} COLLATE {}").format(sql.Identifier(name), sql.Identifier("C"))
            if base in TEXTS
            else sql.Identifier(name)
            for name, base in zip(position.key, position.key_types, strict=True)
        ]
        columns = [*position.key, *self.wanted()]
        statement = sql.SQL("COPY (SELECT {} FROM {}").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(*position.table)
        )
        if position.last is not None:
            after: Any = [
                sql.SQL("{}::{}").format(sql.Literal(text), sql.Identifier("pg_catalog", base))
                for text, base in zip(position.last, position.key_types, strict=True)
            ]
            statement += sql.SQL(" WHERE ({}) > ({})").format(
                sql.SQL(", ").join(key), sql.SQL(", ").join(after)
            )
        statement += sql.SQL(" ORDER BY {}) TO STDOUT (FORMAT csv)").format(sql.SQL(", ").join(key))
        return copied_lines(
            connection, statement, self.settings.batch_rows, self.settings.buffer_bytes
        )

    def wanted(self) -> list[str]:
        """Return the columns of the table that are read."""
        return [name for name in self.rows.names if name in self.schema.names]

    def _hand_over_rows(self, lines: list[bytes], position: Position) -> None:
        wanted = self.wanted()
        names = [str(place) for place in range(len(position.key) + len(wanted))]
        texts = parse_rows(lines, names)
        keys = texts.select(range(len(position.key)))
        rows = {name: texts.column(len(position.key) + place) for place, name in enumerate(wanted)}
        values = {name: from_texts(name, rows[name], self.rows.field(name).type) for name in rows}
        batch = snapshot_batch(self.schema, self.settings, self.rows, values, texts.num_rows)
        last = key_at(keys, -1)
        behind = msgspec.structs.replace(position, last=last)
        self.hand_over(Piece(behind, batch, keys, size_bytes=batch.nbytes + ROW_BYTES))

    # -- the stream ---------------------------------------------------------------------------------

    def _read_stream(self) -> None:
        stream = Stream(self.settings.address, self._application, self.context.clock)
        try:
            self._check_slot(stream.system, stream.written)
            self._start(stream, self._position)
            Streaming(self, stream, self._position).go_on()
        finally:
            stream.close()

    def _check_slot(self, system: str, written: int) -> None:
        """Check that the slot still has what follows the position.

        Raises:
            SourceError: it has not.
        """
        settings, position = self.settings, self._position
        with (
            connect(settings.address, self._application) as connection,
            about(settings),
        ):
            state = slot_state(connection, settings.slot)
        again = "run the job once with --fresh, with snapshot=`initial`"
        if system != position.system:
            raise SourceError(
                f"the server is not the one whose changes were read server=`{settings.address}`",
                fix=f"give it the old address; or {again}",
            )
        if written < position.confirmed:
            raise SourceError(
                f"the server has not written its log up to the position server=`{settings.address}` "
                f"position=`{lsn_text(position.confirmed)}` log=`{lsn_text(written)}`: it was restored "
                "from a backup, or replaced by a standby that was behind, so changes would be passed over",
                fix=again,
            )
        if state is None:
            raise SourceError(
                f"the slot does not exist any more slot=`{settings.slot}` server=`{settings.address}`: "
                f"changes since {lsn_text(position.confirmed)} cannot be read",
                fix=f"it was dropped, or the server was replaced: {again}, which makes another slot",
            )
        check_slot(state, settings.slot, settings.address)
        reached = lsn_of(state["confirmed"])
        if reached > position.confirmed and settings.on_lost == "fail":
            raise SourceError(
                f"changes from {lsn_text(position.confirmed)} to {lsn_text(reached)} cannot be read any "
                f"more slot=`{settings.slot}`: somebody else has read them, or an older checkpoint or "
                "savepoint was restored",
                fix=f"restore the newest checkpoint; or {again}; on_lost=`skip` goes on with what is left",
            )
        if reached > position.confirmed:
            _log.warning("changes were lost from=`%d` to=`%d`", position.confirmed, reached)
            self.put(lost=1)
            self._position = msgspec.structs.replace(
                position, confirmed=reached, transaction=0, done=0
            )

    def columns_now(self) -> set[str]:
        """Return the columns that the table has now."""
        settings = self.settings
        with connect(settings.address, self._application) as connection, about(settings):
            table = find_table(connection, settings.table, settings.address)
        return set() if table is None else {each.name for each in table.columns}

    def _start(self, stream: Stream, position: Position) -> None:
        """Start the stream, once the reader before this one has left the slot."""
        settings = self.settings
        deadline = self.context.clock.monotonic() + _IN_USE_S_MAX
        while not stream.start(settings.slot, settings.publication, position.confirmed):
            if self.context.clock.monotonic() > deadline:
                raise SourceError(
                    f"another process reads the slot slot=`{settings.slot}`",
                    fix="each source needs a slot of its own; SELECT * FROM pg_stat_replication shows who "
                    "reads",
                )
            self.pause(IDLE_S)
