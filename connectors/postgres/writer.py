"""Writers of one table: rows travel by COPY, at once into the table, or into a table of staged rows.

Exactly once takes tables of its own in the database. The rows between two barriers are *staged* in a
table that the checkpoint names. When the checkpoint is complete, one transaction of the database moves
them to their place, drops the table, and notes that in the *marker*, a row for each writer. So a commit
that is repeated finds the marker and does nothing, also if it is that of a process that was thought to be
dead. A table that is missing without a marker is an error, and never silence.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import DataError, InternalError, JobError, TargetAwayError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import DROPPED_FIX
from ...state.snapshot import CommitPermit
from ..staging import Chunk, StagedEpoch, StagingWriter
from .binary import HEADER, TRAILER
from .client import Connection, connect, is_lost, reason_of, refusals
from .tables import check_json, is_nested, to_csv
from .target import MARKERS, SinkSettings, Target, checked_target

T = TypeVar("T")
_CHUNK_BYTES: Final = 8 << 20
"""Rows are sent in transactions of about this size, at the latest at the barrier."""
_AWAY_S: Final = 30.0
"""A call waits for at most this time for a server that is away."""
_PAUSE_S: Final = 0.2
_ROOM_MS: Final = 5
"""The time between two looks whether there is room."""
_COMMITS_MAX: Final = 20
"""So often a commit is tried that meets others of the same rows."""
_log = logging.getLogger("headgate.connectors.postgres")


class Staged(msgspec.Struct):
    """The committable of one epoch: what any process needs to commit it.

    Attributes:
        schema: of the staged table and of the marker.
        table: the staged table.
        writer: the marker.
        number: of the epoch, by which the marker advances.
        rows: in the staged table.
        target: schema and name of the table that the rows are for.
        columns: of the rows.
        key: of the table, if later rows replace earlier ones.
        deletes: some rows delete instead.
        identity: the server numbers a column, and must take our value instead.
    """

    schema: str
    table: str
    writer: str
    number: int
    rows: int
    target: tuple[str, str]
    columns: list[str]
    key: list[str]
    deletes: bool
    identity: bool


class LostRows(JobError):
    """Rows that a checkpoint needs are not in the database any more."""


@dataclass(slots=True)
class _Chunk(Chunk):
    """Rows that are sent in one transaction."""

    first_row: int = 0
    """The number of its first row in the epoch."""
    binary: bool = False
    """Whether its rows are in the binary form of `COPY`, and not in CSV."""
    parts: list[bytes] = field(default_factory=list)
    tried: bool = False
    """It was sent before, and the answer may have been lost."""


class PostgresWriter(StagingWriter[_Chunk]):
    """Writes the rows of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__(settings.exactly_once)
        self._settings = settings
        self._target: Target | None = None
        self._connection: Connection | None = None
        """The connection for chunks; `_turn` guards it."""
        self._commit_connection: Connection | None = None
        self._awaits_room = False
        """A timer looks whether there is room."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._application = f"headgate-{context.job_name}-{context.operator_name}"
        self._writer = f"{context.attempt}-{self._after}-{context.subtask_index}-{self._nonce}"

    def prepare(self) -> None:
        settings, context = self._settings, self.context
        connection = connect(settings.address, self._application)
        self._connection = connection
        with self.about():
            target = self._target = checked_target(connection, settings)
            names = f"{context.job_name}\0{context.operator_name}\0{target.full_name}".encode()
            self._prefix = f"hg_{hashlib.blake2s(names, digest_size=8).hexdigest()}_"
            if self._exactly_once:
                target.create_markers(connection)
                self.drop_dead(target.staged_tables(connection, self._prefix))

    def staged_name(self, place: str) -> str:
        return f"{self._prefix}{place}"

    def drop_staged(self, name: str) -> None:
        if self._connection is not None and not self._connection.closed:
            self._known_target.drop_staged(self._connection, name)

    def disconnect(self) -> None:
        for each in (self._connection, self._commit_connection):
            if each is not None:
                each.close()

    @property
    def place(self) -> str:
        return f"table=`{self._settings.table}`"

    def about(self) -> AbstractContextManager[Any]:
        settings = self._settings
        return refusals(
            f"rows cannot be written table=`{settings.table}` server=`{settings.address}`",
            "if the server names a value or a rule of the table, correct the rows before the sink; else "
            "check that it can be reached, and the rights on the table",
        )

    def is_lost(self, error: BaseException) -> bool:
        return is_lost(error)

    # -- the mailbox --------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        self.check()
        if not len(batch):
            return
        epoch = self.open_epoch()
        rows, binary = self._encode(batch.data, epoch.records)
        if self._chunk is not None and self._chunk.binary != binary:
            self.close_chunk()
        if self._chunk is None:
            self._chunk = _Chunk(epoch, epoch.chunks, first_row=epoch.records, binary=binary)
            epoch.chunks += 1
        chunk = self._chunk
        epoch.records += len(batch)
        chunk.parts.append(rows)
        chunk.size_bytes += len(rows)
        if chunk.size_bytes >= min(_CHUNK_BYTES, self._settings.buffer_bytes):
            self.close_chunk()
            self.send_in_background()
            self._await_room()

    def _encode(self, data: pa.RecordBatch, first_row: int) -> tuple[bytes, bool]:
        """Return rows as they are sent, and whether that is in binary form."""
        settings = self._settings
        for name in settings.key:
            if data.column(name).null_count:
                raise DataError(
                    f"a row has no value in a column of the key column=`{name}` table=`{settings.table}`",
                    fix="filter such rows out before the sink",
                )
        columns = [data.column(name) for name in settings.columns]
        for name, column in zip(settings.columns, columns, strict=True):
            if is_nested(column.type):
                check_json(name, column)
        if not settings.plain:
            rows = pa.array(range(first_row, first_row + data.num_rows), pa.int64())
            if settings.op is not None:
                columns.insert(0, _deletes(data.column(settings.op), settings.op))
            columns.insert(0, rows)
        encoder = self._known_target.binary
        encoded = None if encoder is None else encoder.encode(columns)
        return (to_csv(columns), False) if encoded is None else (encoded, True)

    def backlogged(self) -> bool:
        """Return True while too many bytes wait to be sent and a thread sends them."""
        with self._changed:
            return self._sending and self._waiting_bytes > self._settings.buffer_bytes

    def _await_room(self) -> None:
        """Look every few ms whether there is room, as the subtask reads nothing until a timer fires."""
        if self.backlogged() and not self._awaits_room:
            self._awaits_room = True
            self.context.timers.call_later(_ROOM_MS, self._look_for_room)

    def _look_for_room(self) -> None:
        self._awaits_room = False
        self._await_room()

    def committable(self, epoch: StagedEpoch) -> bytes:
        return msgspec.msgpack.encode(self._staged(epoch))

    def _staged(self, epoch: StagedEpoch) -> Staged:
        settings, target = self._settings, self._known_target
        return Staged(
            target.staging_schema,
            epoch.name,
            self._writer,
            epoch.number,
            epoch.records,
            (target.schema, target.name),
            list(settings.columns),
            list(settings.key),
            settings.op is not None,
            target.identity,
        )

    @property
    def _known_target(self) -> Target:
        if self._target is None:
            raise InternalError("the writer was not prepared")
        return self._target

    # -- threads ------------------------------------------------------------------------------------

    def send(self, chunk: _Chunk) -> None:
        import psycopg

        if self._connection is None or self._connection.closed:
            self._connection = connect(self._settings.address, self._application)
        connection, target, epoch = self._connection, self._known_target, chunk.epoch
        tried, chunk.tried = chunk.tried, True
        with connection.transaction(), connection.cursor() as cursor:
            if self._exactly_once:
                if chunk.number == 0:
                    target.create_staged(cursor, epoch.name)
                    target.add_marker(cursor, self._writer)
                if tried:
                    target.forget_rows(cursor, epoch.name, chunk.first_row)
                into = target.staged_name(epoch.name)
            elif self._settings.plain:
                into = psycopg.sql.Identifier(target.schema, target.name)
            else:
                into = target.create_temporary(cursor)
            ends = (HEADER, TRAILER) if chunk.binary else (b"", b"")
            with cursor.copy(target.copy_statement(into, binary=chunk.binary)) as copy:
                for part in (ends[0], *chunk.parts, ends[1]):
                    copy.write(part)
            if not self._exactly_once and not self._settings.plain:
                target.move(cursor, into, self._staged(epoch))

    def persistently(self, work: Callable[[], T]) -> T:
        """Do something with the server, and again if it is away for a moment."""
        import psycopg

        clock = self.context.clock
        deadline = clock.monotonic() + _AWAY_S
        while True:
            try:
                return work()
            except (psycopg.Error, JobError) as error:
                cause = error if isinstance(error, psycopg.Error) else error.__cause__
                if cause is None or not is_lost(cause) or self._closed:
                    raise
                if clock.monotonic() > deadline:
                    raise
                _log.warning("the sink tries again: %s", reason_of(cause))
                time.sleep(_PAUSE_S)

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        with self._commit_turn:
            for committable in committables:
                staged = msgspec.msgpack.decode(committable, type=Staged)
                try:
                    with self.about():
                        self.persistently(partial(self._commit, staged))
                except LostRows as error:
                    if self._settings.on_lost == "fail":
                        raise
                    _log.warning("the job goes on without rows: %s", error.message)
                except JobError as error:
                    if error.__cause__ is None or not is_lost(error.__cause__):
                        raise
                    raise TargetAwayError(error.message, fix=error.fix) from error.__cause__

    def _commit(self, staged: Staged) -> None:
        import psycopg

        if self._commit_connection is None or self._commit_connection.closed:
            self._commit_connection = connect(self._settings.address, self._application)
        for attempt in range(_COMMITS_MAX):
            try:
                with (
                    self._commit_connection.transaction(),
                    self._commit_connection.cursor() as cursor,
                ):
                    _move_once(cursor, self._known_target, staged)
                return
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                # Another subtask writes the same rows in another order.
                if attempt + 1 == _COMMITS_MAX:
                    raise


def _move_once(cursor: Any, target: Target, staged: Staged) -> None:
    """Move staged rows to their table, unless the marker says that it was done."""
    done = target.lock_marker(cursor, staged.schema, staged.writer)
    if done is not None and done >= staged.number:
        return
    if done is None or not target.exists(cursor, staged.schema, staged.table):
        raise LostRows(
            "rows of a checkpoint are not in the database, and there is no mark that they were committed "
            f"table=`{'.'.join(staged.target)}` staged=`{staged.schema}.{staged.table}` "
            f"rows=`{staged.rows}`",
            fix=f"somebody has dropped the table, or the rows of {MARKERS}, or the database was restored "
            "from an older backup; restore an older checkpoint, or say on_lost=`skip` to go on without; "
            f"{DROPPED_FIX}",
        )
    import psycopg

    source = psycopg.sql.Identifier(staged.schema, staged.table)
    target.move(cursor, source, staged)
    cursor.execute(psycopg.sql.SQL("DROP TABLE {}").format(source))
    target.advance_marker(cursor, staged.schema, staged.writer, staged.number)


_OPS: Final = ("insert", "update", "snapshot", "delete")


def _deletes(ops: pa.Array, name: str) -> pa.Array:
    """Return which rows delete."""
    if pa.types.is_dictionary(ops.type):
        ops = ops.dictionary_decode()
    known = pc.is_in(ops, value_set=pa.array(_OPS, ops.type))
    if not pc.all(known, min_count=0).as_py():
        bad = ops.filter(pc.invert(known))[0].as_py()
        raise DataError(
            f"a row has no operation that a table can do column=`{name}` value=`{bad}`",
            fix=f"the values are {', '.join(_OPS)}; filter other rows out before the sink",
        )
    return pc.equal(ops, "delete")
