"""Reads the streams of one subtask: a thread fetches and decodes, the mailbox takes finished pieces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import SourceError, StateError
from ...operators.base import OperatorContext
from ...operators.drops import DropKind
from ...operators.elements import Batch, ColumnBatch
from ...operators.source import SourceReader
from ..bad_records import BadRecordHandler
from ..formats.format import UndecodableError
from .client import cannot_use, connect, is_lost, persistently, reason_of, too_old
from .fields import Fields, fields_decoder, payload_decoder
from .model import (
    FIRST,
    METADATA,
    NO_STREAM,
    REJECTED_SCHEMA,
    UNKNOWN,
    RedisSettings,
    StreamInfo,
    StreamSplit,
    decoded,
    in_pairs,
    info_of,
    order_of,
    seen_at,
)

_ENTRY_BYTES: Final = 200
"""About what an entry takes beside its fields."""
_FIRST_COUNT: Final = 64
"""So many entries are asked for as long as nothing is known about their size."""
_BLOCK_MS: Final = 200
"""The thread looks at least this often whether the reader was closed."""
_LOOK_S: Final = 0.02
"""Several streams of a cluster are on several servers, which cannot be waited for at once."""
_log = logging.getLogger("headgate.connectors.redis")


@dataclass(slots=True)
class _Piece:
    """Consecutive entries of one stream, decoded.

    Attributes:
        name: of the stream.
        batch: the good records; None if there are none.
        ids: theirs.
        bad: the other entries: id, fields and reason.
        after: the id of the last entry.
        seen: as in the position.
        size_bytes: of what it keeps in memory.
        ended: nothing of the stream follows.
    """

    name: str
    batch: pa.RecordBatch | None
    ids: list[str]
    bad: list[tuple[str, Fields, str]]
    after: str
    seen: int
    size_bytes: int = 0
    ended: bool = False


@dataclass(slots=True)
class _Shared:
    """The state that the thread and the mailbox share; `changed` guards it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    pieces: deque[_Piece] = field(default_factory=deque)
    waiting_bytes: int = 0
    """The bytes of all pieces."""
    paused: frozenset[str] = frozenset()
    commands: list[Callable[[], None]] = field(default_factory=list)
    """Requests for the thread to make, as they may block."""
    lost: int = 0
    """Entries that were trimmed before they were read, and are not yet counted."""
    error: BaseException | None = None
    closed: bool = False


class RedisReader(SourceReader):
    """Reads some streams."""

    can_pause_splits = True

    def __init__(self, settings: RedisSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the fields of entries.
            schema: the columns to return.
        """
        self._settings = settings
        self._schema = schema
        self._decode = (
            fields_decoder(values)
            if settings.format is None
            else payload_decoder(settings.format, settings.field, values)
        )
        self._streams: dict[str, StreamSplit] = {}
        """Those that have not ended, with the positions of the mailbox."""
        self._positions: dict[str, StreamSplit] = {}
        """The positions of all streams, for the consumer group."""
        self._cuts: dict[int, list[StreamSplit]] = {}
        self._fetched: dict[str, StreamSplit] = {}
        """The positions of the thread, of the streams that have not ended there."""
        self._count = min(_FIRST_COUNT, settings.batch_rows)
        self._ends: dict[str, int] = {}
        """The numbers of entries that were ever added to streams, as of the last look."""
        self._shared = _Shared()
        self._client: Any = None

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._bad = BadRecordHandler(
            self._settings.on_bad_record, context, reject, "what writes to the stream"
        )
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add_splits(self, splits: Sequence[bytes]) -> None:
        for stream in map(decoded, splits):
            name = stream.stream
            if stream.stop is not None and self._settings.stop is None:
                raise _no_stop_any_more(stream)
            self._streams[name] = self._positions[name] = stream
            self._fetched[name] = msgspec.structs.replace(stream)
            self.context.splits.opened(name)
        if self._streams:
            threading.Thread(
                target=self._run, name=f"redis {self.context.operator_name}", daemon=True
            ).start()

    # -- the mailbox --------------------------------------------------------------------------------

    def poll(self) -> Batch | None:
        while True:
            self._arrived.clear()
            piece = self._next_piece()
            if piece is None:
                return None
            if piece.bad:
                self._handle_bad(piece)
            position = self._positions[piece.name]
            position.after, position.seen = piece.after, piece.seen
            if piece.ended:
                del self._streams[piece.name]
                self.context.splits.ended(piece.name)
            if piece.batch is not None and piece.batch.num_rows:
                self.context.splits.reading(piece.name)
                return ColumnBatch(piece.batch)

    def _next_piece(self) -> _Piece | None:
        """Take the first piece of a stream that is not paused, or only its first rows."""
        shared, wanted = self._shared, self.rows_wanted
        with shared.changed:
            self.context.drops.add(DropKind.DELETED, shared.lost)
            shared.lost = 0
            for place, piece in enumerate(shared.pieces):
                if piece.name in shared.paused:
                    continue
                if wanted and not piece.bad and len(piece.ids) > wanted:
                    first, shared.pieces[place] = _cut(piece, wanted)
                    return first
                del shared.pieces[place]
                shared.waiting_bytes -= piece.size_bytes
                shared.changed.notify_all()
                return piece
            if shared.error is not None:
                raise shared.error
        return None

    async def wait(self) -> None:
        await self._arrived.wait()

    @property
    def finished(self) -> bool:
        return not self._streams

    def pause_splits(self, splits: frozenset[str]) -> None:
        with self._shared.changed:
            self._shared.paused = splits
            self._shared.changed.notify_all()
        self._arrived.set()

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(each) for each in self._streams.values()]

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        if self._settings.group is not None:
            self._cuts[checkpoint_id] = [
                msgspec.structs.replace(each) for each in self._positions.values()
            ]

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Write the positions of the checkpoint to the group. They are information: failures are logged."""
        cut = self._cuts.get(checkpoint_id, [])
        self._cuts = {id_: kept for id_, kept in self._cuts.items() if id_ > checkpoint_id}
        if cut:
            self._command(partial(self._write_group, cut))

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._cuts.pop(checkpoint_id, None)

    def lag_records(self) -> dict[str, int] | None:
        """Return the entries left by stream, as of the call before: the thread looks them up."""
        self._command(self._look_up_ends, once=True)
        ends, lag = self._ends, {}
        for name, each in list(self._streams.items()):
            end = ends.get(name, UNKNOWN) if each.stop is None else each.stop_seen
            if end != UNKNOWN and each.seen != UNKNOWN:
                lag[name] = max(0, end - each.seen)
        return lag

    def lag_s(self) -> float | None:
        with self._shared.changed:
            times = [order_of(piece.ids[0])[0] for piece in self._shared.pieces if piece.ids]
        return max(0.0, (self.context.clock.now_ms() - min(times)) / 1000) if times else 0.0

    def close(self) -> None:
        """Stop the thread, which closes the connection."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()

    def _command(self, command: Callable[[], None], *, once: bool = False) -> None:
        with self._shared.changed:
            if self._shared.error is None and not (once and command in self._shared.commands):
                self._shared.commands.append(command)
                self._shared.changed.notify_all()

    def _handle_bad(self, piece: _Piece) -> None:
        def first() -> tuple[str, str, bytes]:
            id_, fields, reason = piece.bad[0]
            text = b", ".join(name + b": " + value for name, value in fields.items())
            return f"{piece.name} id {id_}", reason, text

        def rejected() -> pa.RecordBatch:
            rows = [
                {
                    "stream": piece.name,
                    "id": id_,
                    "reason": reason,
                    "fields": [{"name": name, "value": value} for name, value in fields.items()],
                }
                for id_, fields, reason in piece.bad
            ]
            return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

        self._bad.handle(len(piece.bad), first, rejected)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        shared, context = self._shared, self.context
        try:
            name = f"headgate-{context.job_name}-{context.operator_name}"
            self._client = connect(self._settings.address, name)
            while (commands := self._commands_or_room()) is not None:
                for command in commands:
                    command()
                if not commands:
                    self._fetch_all()
        except BaseException as error:
            with shared.changed:
                shared.error = error
            self._wake()
        finally:
            if self._client is not None:
                with contextlib.suppress(Exception):
                    self._client.close()

    def _persistently(self, work: Callable[[], Any]) -> Any:
        """Ask the server, and again while it is away for a moment."""
        import redis

        def goes_on() -> bool:
            with self._shared.changed:
                return not self._shared.closed

        try:
            return persistently(work, self.context.clock, goes_on)
        except redis.RedisError as error:
            if is_lost(error):
                raise cannot_use(self._settings.address, error) from error
            raise SourceError(
                f"streams cannot be read server=`{self._settings.address}`: {reason_of(error)}",
                fix="check that they are still streams, and the rights of the user (ACL): XINFO, XRANGE, "
                "XREAD",
            ) from error

    def _commands_or_room(self) -> list[Callable[[], None]] | None:
        """Wait for commands, and return them; return none if pieces fit, None if closed."""
        shared = self._shared

        def goes_on() -> bool:
            return bool(shared.closed or shared.commands or self._to_fetch())

        with shared.changed:
            shared.changed.wait_for(goes_on)
            commands, shared.commands = shared.commands, []
            return None if shared.closed and not commands else commands

    def _to_fetch(self) -> list[str]:
        """Return the streams to read now, none while too much waits; `changed` is held.

        Pieces of paused streams must not hold up the others.
        """
        shared = self._shared
        waiting = shared.waiting_bytes >= self._settings.buffer_bytes and any(
            piece.name not in shared.paused for piece in shared.pieces
        )
        return [] if waiting else [name for name in self._fetched if name not in shared.paused]

    def _fetch_all(self) -> None:
        """Read the next entries of each stream; if there are none, wait for some."""
        with self._shared.changed:
            names = self._to_fetch()
        found = False
        for name in names:
            found = self._fetch(name) or found
        if not found:
            self._wait_for_entries(names)

    def _wait_for_entries(self, names: Sequence[str]) -> None:
        if self._settings.address.cluster and len(names) > 1:
            time.sleep(_LOOK_S)
            return
        after = {name: self._fetched[name].after for name in names if name in self._fetched}
        if after:
            self._persistently(lambda: self._client.xread(after, count=1, block=_BLOCK_MS))

    def _fetch(self, name: str) -> bool:
        """Read the next entries of a stream, and hand them to the mailbox; return True if it went on."""
        at, count = self._fetched[name], self._count
        info, entries = self._persistently(lambda: self._ask(at, count))
        lost = self._check_lost(at, info)
        if lost and not entries and order_of(at.after) < order_of(info.last):
            at.after, at.seen = info.last, info.added
        if entries:
            seen, holes = at.seen, order_of(info.deleted) > order_of(at.after)
            at.after = entries[-1][0]
            at.seen = UNKNOWN if holes or seen == UNKNOWN else seen + len(entries)
            if order_of(at.after) >= order_of(info.last):
                at.seen = info.added
        ended = at.stop is not None and (
            len(entries) < count or order_of(at.after) >= order_of(at.stop)
        )
        self._ends[name] = info.added
        if not (entries or ended or lost):
            return False
        piece = self._piece(at, entries, ended)
        if ended:
            del self._fetched[name]
        with self._shared.changed:
            self._shared.lost += lost
            self._shared.pieces.append(piece)
            self._shared.waiting_bytes += piece.size_bytes
        self._wake()
        return True

    def _ask(self, at: StreamSplit, count: int) -> tuple[StreamInfo, list[tuple[str, Fields]]]:
        """Return a stream and its next entries, both as of the same moment."""
        import redis

        pipeline = self._client.pipeline(transaction=True)
        pipeline.xinfo_stream(at.stream)
        pipeline.xrange(at.stream, f"({at.after}", at.stop or "+", count=count)
        told, entries = pipeline.execute(raise_on_error=False)
        if isinstance(told, redis.ResponseError) and "no such key" in str(told):
            return NO_STREAM, []
        for answer in (told, entries):
            if isinstance(answer, Exception):
                raise answer
        info = info_of(told)
        if info is None:
            raise too_old(self._settings.address)
        return info, [(id_.decode(), in_pairs(fields)) for id_, fields in entries]

    def _check_lost(self, at: StreamSplit, info: StreamInfo) -> int:
        """Return how many entries were trimmed before they were read; in doubt, at least 1.

        Raises:
            SourceError: some were, and the user has not chosen to skip them; or the stream is another one.
        """
        settings = self._settings
        if order_of(info.last) < order_of(at.after):
            raise SourceError(
                f"a stream has no entry at the position of the job stream=`{at.stream}` "
                f"position=`{at.after}`: its last id is {info.last}; was it deleted and created again?",
                fix="give the source another name, so that it begins from the start",
            )
        there = info.first is not None and order_of(info.first) <= order_of(at.after)
        if there or order_of(info.last) == order_of(at.after):
            return 0
        if at.after == FIRST:
            # The source begins with what there is.
            at.seen = seen_at(info, at.after)
            return 0
        lost = 1 if at.seen == UNKNOWN else info.removed - at.seen
        if lost <= 0:
            return 0
        number = "some" if at.seen == UNKNOWN else f"{lost:,}"
        what = f"{number} entries after {at.after} were deleted before they were read"
        if settings.on_lost == "fail":
            raise SourceError(
                f"a stream has lost entries stream=`{at.stream}`: {what}",
                fix="keep entries for longer (MAXLEN, MINID); on_lost='skip' goes on with the first one "
                "that is left",
            )
        _log.warning("the job goes on without entries stream=`%s`: %s", at.stream, what)
        at.seen = seen_at(info, at.after)
        return lost

    def _piece(self, at: StreamSplit, entries: list[tuple[str, Fields]], ended: bool) -> _Piece:
        """Decode entries of one stream."""
        ids, fields = [id_ for id_, _ in entries], [found for _, found in entries]
        sizes = [
            _ENTRY_BYTES + sum(len(name) + len(value) for name, value in each.items())
            for each in fields
        ]
        if sizes:
            fitting = self._settings.buffer_bytes // 4 // max(sizes)
            self._count = max(1, min(self._settings.batch_rows, fitting, self._count * 4))
        try:
            decoded = self._decode(fields)
        except UndecodableError as error:
            place = f"{at.stream} id {ids[error.index]}"
            raise SourceError(error.message, where=place, fix=error.fix) from error
        bad = [(ids[index], fields[index], reason) for index, reason in decoded.bad]
        if bad:
            places = {index for index, _ in decoded.bad}
            ids = [id_ for index, id_ in enumerate(ids) if index not in places]
        batch = decoded.batch()
        return _Piece(
            at.stream,
            None if batch is None else self._with_metadata(batch, at.stream, ids),
            ids,
            bad,
            at.after,
            at.seen,
            sum(sizes) + _ENTRY_BYTES,
            ended,
        )

    def _with_metadata(self, values: pa.RecordBatch, stream: str, ids: list[str]) -> pa.RecordBatch:
        """Return the rows with the columns of `metadata`, and only those columns that are read."""
        made = {column: kind for kind, column in self._settings.metadata.items()}
        find: dict[str, Callable[[], list[Any]]] = {
            "stream": lambda: [stream] * len(ids),
            "id": lambda: ids,
            "timestamp": lambda: [order_of(id_)[0] for id_ in ids],
        }
        columns = [
            pa.array(find[made[column.name]](), METADATA[made[column.name]])
            if column.name in made
            else values.column(column.name)
            for column in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _look_up_ends(self) -> None:
        import redis

        for name in list(self._fetched):
            try:
                info = info_of(self._client.xinfo_stream(name))
            except redis.RedisError:
                continue  # reading reports it
            if info is not None:
                self._ends[name] = info.added

    def _write_group(self, positions: Sequence[StreamSplit]) -> None:
        """Write positions to the consumer group, which is created if necessary."""
        import redis

        group = self._settings.group
        for at in positions:
            read = None if at.seen == UNKNOWN else at.seen
            try:
                try:
                    self._client.xgroup_setid(at.stream, group, at.after, entries_read=read)
                except redis.ResponseError as error:
                    if "NOGROUP" not in str(error):
                        raise
                    self._client.xgroup_create(at.stream, group, at.after, entries_read=read)
            except redis.RedisError as error:
                _log.warning(
                    "a position was not written to the group group=`%s` stream=`%s`: %s",
                    *(group, at.stream, reason_of(error)),
                )

    def _wake(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed, and there is no one left to wake
            self._loop.call_soon_threadsafe(self._arrived.set)


def _cut(piece: _Piece, rows: int) -> tuple[_Piece, _Piece]:
    """Return the first rows of a piece without bad entries, and the rest of it."""
    assert piece.batch is not None
    left = len(piece.ids) - rows
    first = _Piece(
        piece.name,
        piece.batch.slice(0, rows),
        piece.ids[:rows],
        [],
        piece.ids[rows - 1],
        UNKNOWN if piece.seen == UNKNOWN else piece.seen - left,
    )
    rest = _Piece(
        piece.name,
        piece.batch.slice(rows),
        piece.ids[rows:],
        [],
        piece.after,
        piece.seen,
        piece.size_bytes,
        piece.ended,
    )
    return first, rest


def _no_stop_any_more(stream: StreamSplit) -> StateError:
    return StateError(
        f"stream {stream.stream} is restored with an end, id {stream.stop}, and the source has no stop= "
        "any more: streams that have ended already would not be read on",
        fix="keep stop=; or give the source another name, with start= at the ids to go on from",
    )
