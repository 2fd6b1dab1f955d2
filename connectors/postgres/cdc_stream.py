"""Turns a stream of changes into pieces: the rows of changes in columns, with their positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import SourceError
from ...operators.base import OperatorContext
from ..changes.rows import ChangedRows, change_batch, effects
from ..changes.table import check_columns
from ..fetched_splits import Piece
from ..rows_reader import ROW_BYTES, Closed
from .cdc_model import METADATA, CdcSettings, Position, Segments
from .client import refusals
from .pgoutput import UNCHANGED, Begin, Change, Commit, Relation, Row, Truncate, decode
from .replication import Stream, lsn_text
from .values import from_texts

IDLE_S: Final = 0.05
"""The thread looks at least this often whether something is to be done."""
_REPORT_S: Final = 5.0
"""The server is told at least this often that the reader lives, and asked how far it is."""
_WATCH_S: Final = 10.0
"""While no changes come, the table and its publication are looked at this often."""
_WATCH_BUSY_S: Final = 60.0
"""While changes come, likewise."""
_PIECE_BYTES: Final = 4 << 20


class Outlet(Protocol):
    """The thread of a reader, for which a stream is read.

    Attributes:
        settings: of the source.
        rows: all columns of the table that the user wants.
        schema: the columns to return.
        end: the end of the server's log, as far as it is known.
        ended: the piece that ends the split was handed over.
    """

    settings: CdcSettings
    rows: pa.Schema
    schema: pa.Schema
    context: OperatorContext
    end: int
    ended: bool

    def is_closed(self) -> bool:
        """Return True if the thread should end."""
        ...

    def confirmed(self) -> int:
        """Return the place in the log up to which completed checkpoints have read."""
        ...

    def wanted(self) -> list[str]:
        """Return the columns of the table that are read."""
        ...

    def hand_over(self, piece: Piece[Position], serve: Callable[[], None]) -> None:
        """Give a piece to the mailbox, once it has room; call `serve` now and then until it has."""
        ...

    def columns_now(self) -> set[str]:
        """Return the columns that the table has now."""
        ...

    def published_now(self, position: Position) -> str:
        """Return what identifies the place of the table in the publication.

        Raises:
            SourceError: changes do not come any more, or not all have come.
        """
        ...


class Streaming:
    """Turns the messages of one stream into pieces."""

    def __init__(self, worker: Outlet, stream: Stream, position: Position) -> None:
        self._worker = worker
        self._clock = worker.context.clock
        self._settings = worker.settings
        self._schema = worker.schema
        self._stream = stream
        self._position = position
        self._passed = (position.transaction, position.done)
        """The rows of this transaction that were returned before."""
        self._segments = Segments(position) if position.segments else None
        self._confirmed = position.confirmed
        self._begin: Begin | None = None
        """The transaction whose rows come; None between two."""
        self._left_out = False
        """It was read before as a whole."""
        self._done = 0
        self._relation: Relation | None = None
        """The columns of our table; None until its first change."""
        self._key_places: list[int] = []
        self._others: set[int] = set()
        self._known = set(position.columns)
        self._reported_s = 0.0
        self._watched_s = self._clock.monotonic()
        self._reported = 0
        self._clear()

    def _clear(self) -> None:
        self._rows: ChangedRows[Row, Begin] = ChangedRows()
        self._has_unchanged = False
        """A row may have a value that was not sent."""

    def go_on(self) -> None:
        """Read until the reader is closed."""
        worker, stream = self._worker, self._stream
        while True:
            closed = worker.is_closed()
            self._serve(closed=closed)
            if closed:
                raise Closed
            messages = stream.receive(1000, IDLE_S)
            if not messages:
                self._flush()
                if self._settings.bounded and not worker.ended:
                    stream.report(self._reported, ask=True)
            self._watch(_WATCH_BUSY_S if messages else _WATCH_S)
            for message in messages:
                self._take(message)
            if self._begin is None:
                self._flush()
            worker.end = stream.end

    def _watch(self, every_s: float) -> None:
        """Look at the table now and then: of one that left the publication the server says nothing."""
        now_s = self._clock.monotonic()
        if now_s - self._watched_s >= every_s and not self._worker.ended:
            self._watched_s = now_s
            published = self._worker.published_now(self._position)
            self._position = msgspec.structs.replace(self._position, published=published)

    def _serve(self, *, closed: bool = False) -> None:
        """Report what is confirmed, and that the reader lives."""
        now_s, confirm = self._clock.monotonic(), self._worker.confirmed()
        if confirm > self._reported or now_s - self._reported_s >= _REPORT_S:
            self._reported_s, self._reported = now_s, max(confirm, self._reported)
            self._stream.report(self._reported, ask=not closed)
            self._worker.end = self._stream.end

    def _take(self, data: bytes) -> None:
        """Take one message."""
        sent = self._stream.keepalive(data)
        if sent is not None:
            # Everything that commits before it was sent. In a transaction its rows come first.
            stop = self._position.stop
            news = sent > self._confirmed or (stop is not None and sent >= stop)
            if self._begin is None and news:
                self._flush()
                self._pass(sent)
            return
        if self._worker.ended:
            return
        message = decode(data)
        if isinstance(message, Change):
            self._take_change(message)
            self._rows.size_bytes += ROW_BYTES + len(data)
            if message.kind == "U" and message.new is not None and UNCHANGED in message.new:
                self._has_unchanged = True
        elif isinstance(message, Begin):
            self._take_begin(message)
        elif isinstance(message, Commit):
            if self._begin is not None:
                self._begin = None
                self._confirmed = max(self._confirmed, message.end_lsn)
                self._flush_if_full()
        elif isinstance(message, Relation):
            self._take_relation(message)
        elif isinstance(message, Truncate):
            self._take_truncate(message)

    def _take_begin(self, begin: Begin) -> None:
        stop = self._position.stop
        if stop is not None and begin.commit_lsn >= stop:
            self._flush()
            self._pass(stop)
            return
        if self._segments is not None and begin.commit_lsn > self._segments.until:
            # No part of the table contains this one or a later one.
            self._flush()
            self._segments = None
            self._position = msgspec.structs.replace(self._position, segments=[])
        self._begin = begin
        self._left_out = begin.commit_lsn < self._confirmed
        self._done = 0

    def _pass(self, lsn: int) -> None:
        """Move the position to a place in the log before which nothing is left to read."""
        stop = self._position.stop
        ended = stop is not None and lsn >= stop and not self._worker.ended
        self._confirmed = max(self._confirmed, lsn)
        if self._worker.ended or (not ended and self._begin is not None):
            return
        if ended:
            self._watch(0.0)
        position = self._now()
        self._worker.ended = ended
        self._position = position
        self._worker.hand_over(Piece(position, ended=ended), self._serve)

    def _now(self) -> Position:
        """Return the position behind the last row."""
        if self._begin is None:
            return self._at(self._confirmed, 0, 0)
        return self._at(self._confirmed, self._begin.commit_lsn, self._done)

    def _at(self, confirmed: int, transaction: int, done: int) -> Position:
        return msgspec.structs.replace(
            self._position,
            confirmed=confirmed,
            transaction=transaction,
            done=done,
            columns=sorted(self._known),
        )

    # -- columns ------------------------------------------------------------------------------------

    def _take_relation(self, relation: Relation) -> None:
        """Take the columns of a table.

        Raises:
            SourceError: ours has other columns than before, or another name; or another has its name.
        """
        if (relation.schema, relation.name) != tuple(self._position.table):
            if relation.oid == self._position.oid:
                raise SourceError(
                    f"the table has another name now table=`{'.'.join(self._position.table)}` "
                    f"name=`{relation.schema}.{relation.name}`, and was changed under it",
                    fix="give it its old name until these changes are read; or run the job once with "
                    "table= the new name and --fresh",
                )
            self._others.add(relation.oid)
            return
        self._others.discard(relation.oid)
        self._flush()
        if self._position.oid not in (0, relation.oid):
            raise another_table(self._position)
        check_columns(
            relation.columns,
            known=self._known,
            rows=self._worker.rows.names,
            wanted=self._worker.wanted(),
            key=self._position.key,
            new_columns=self._settings.new_columns,
            columns_now=self._worker.columns_now,
            where=f"table=`{'.'.join(self._position.table)}` position=`{lsn_text(self._confirmed)}`",
        )
        self._known |= set(relation.columns)
        self._relation = relation
        self._key_places = [relation.columns.index(name) for name in self._position.key]

    # -- changes ------------------------------------------------------------------------------------

    def _take_change(self, change: Change) -> None:
        if change.relation in self._others or self._left_out or self._begin is None:
            return
        new, old = change.new, change.old
        moved = (
            new is not None
            and old is not None
            and bool(self._key_places)
            and any(
                old[place] != new[place] and new[place] is not UNCHANGED
                for place in self._key_places
            )
        )
        if new is not None and old is not None and change.whole:
            new = [
                before if value is UNCHANGED else value
                for value, before in zip(new, old, strict=True)
            ]
        done = effects(
            new, old, inserted=change.kind == "I", moved=moved, is_contained=self._contained
        )
        for op, row, before in done:
            self._add(op, row or [], before)

    def _contained(self, row: Row | None) -> bool:
        """Return True if the part of the table with this row was read with this transaction."""
        if self._segments is None:
            return False
        assert row is not None
        assert self._begin is not None
        key = [row[place] for place in self._key_places]
        texts = [value.decode() for value in key if isinstance(value, bytes)]
        if len(texts) < len(key):
            raise SourceError(
                f"a change has no key table=`{'.'.join(self._position.table)}`",
                fix="ALTER TABLE ... REPLICA IDENTITY DEFAULT, and run the job once with --fresh",
            )
        return self._segments.contain(texts, self._begin.xid)

    def _take_truncate(self, message: Truncate) -> None:
        if self._left_out or self._begin is None or self._relation is None:
            return
        if self._relation.oid not in message.relations:
            return
        contained = False
        if self._segments is not None:
            everywhere = self._segments.contain_everywhere(self._begin.xid)
            if everywhere is None:
                raise SourceError(
                    f"the table was truncated while it was read "
                    f"table=`{'.'.join(self._position.table)}`",
                    fix="run the job once with --fresh",
                )
            contained = everywhere
        if not contained:
            self._add("truncate", [None] * len(self._relation.columns), None)

    def _add(self, op: str, row: Row, old: Row | None) -> None:
        """Add a row, unless it was returned before."""
        # Not earlier: behind the last row of a transaction, its commit belongs to the piece.
        self._flush_if_full()
        begin = self._begin
        assert begin is not None
        self._done += 1
        if begin.commit_lsn == self._passed[0] and self._done <= self._passed[1]:
            return
        mark = (self._confirmed, begin.commit_lsn, self._done)
        self._rows.add(op, row, old, begin, mark)

    def _flush_if_full(self) -> None:
        rows = self._rows
        if len(rows.ops) >= self._settings.batch_rows or rows.size_bytes >= _PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Make a piece of the rows so far, and hand it over."""
        position, rows = self._now(), self._rows
        if not rows.ops:
            return
        ready_ms = rows.transactions[0].time_us // 1000
        piece = Piece(
            position, self._batch(), np.array(rows.marks, np.int64), [], rows.size_bytes, ready_ms
        )
        self._position = position
        self._clear()
        self._worker.hand_over(piece, self._serve)

    def _batch(self) -> pa.RecordBatch:
        """Return the rows as columns.

        Raises:
            SourceError: a value is not known, and the user has not asked to be told of that.
        """
        settings, relation = self._settings, self._relation
        assert relation is not None
        places = {name: place for place, name in enumerate(relation.columns)}
        unchanged: list[list[str]] = [[] for _ in self._rows.ops]
        for name in self._worker.wanted() if self._has_unchanged else []:
            place = places.get(name)
            if place is not None:
                for row, names in zip(self._rows.new, unchanged, strict=True):
                    if row[place] is UNCHANGED:
                        row[place] = None
                        names.append(name)
        if "unchanged" not in settings.metadata and any(unchanged):
            name = next(names[0] for names in unchanged if names)
            table = ".".join(self._position.table)
            raise SourceError(
                f"an update does not have the value of a column, which is large and was not changed "
                f"column=`{name}` table=`{table}`",
                fix=f"ALTER TABLE {table} REPLICA IDENTITY FULL for later updates; "
                'metadata={"unchanged": "a column"} tells which columns are null for this reason; or leave '
                "the column out of schema=",
            )
        return change_batch(
            self._schema,
            settings,
            self._worker.rows,
            self._rows.ops,
            lambda field, name, before: self._column(field, places.get(name), before=before),
            lambda kind: self._metadata(kind, unchanged),
        )

    def _column(self, wanted: pa.Field, place: int | None, *, before: bool) -> pa.Array:
        """Return a column of the table, of the rows after or before the changes."""
        rows = self._rows.old if before else self._rows.new
        if place is None:
            return pa.nulls(len(rows), wanted.type)  # it was added later
        values: Any = [None if row is None else row[place] for row in rows]
        return from_texts(wanted.name, values, wanted.type)

    def _metadata(self, kind: str, unchanged: list[list[str]]) -> pa.Array:
        values: list[Any]
        if kind == "lsn":
            values = [begin.commit_lsn for begin in self._rows.transactions]
        elif kind == "xid":
            values = [begin.xid for begin in self._rows.transactions]
        elif kind == "commit_time":
            values = [begin.time_us for begin in self._rows.transactions]
        else:
            values = unchanged
        return pa.array(values, METADATA[kind])


def another_table(position: Position) -> SourceError:
    """Return the error for a table that has the name of the one whose changes are read."""
    return SourceError(
        f"another table, made or renamed later, has the name of the one that was read "
        f"table=`{'.'.join(position.table)}` position=`{lsn_text(position.confirmed)}`",
        fix="give the old table its name back until its changes are read; or run the job once with "
        "--fresh, which reads the table that has the name now",
    )


def about(settings: CdcSettings) -> Any:
    return refusals(
        f"changes cannot be read table=`{settings.table}` server=`{settings.address}`",
        "check that it can be reached, and the rights: SELECT on the table, and the attribute REPLICATION",
    )
