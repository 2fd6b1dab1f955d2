"""Reads the streams of one subtask: a thread fetches and decodes, the mailbox takes finished pieces."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import SourceError
from ..fetched_splits import CommandedReader, Piece, no_stop_any_more
from ..messages import MessageDecoder
from .client import cannot_use, connect, is_lost, persistently, reason_of, too_old
from .fields import Fields, entry_decoder
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
"""The number of entries that are asked for while nothing is known about their size."""
_BLOCK_MS: Final = 200
"""The thread looks at least this often whether the reader was closed."""
_LOOK_S: Final = 0.02
"""Several streams of a cluster are on several servers, which cannot be waited for at once."""
_log = logging.getLogger("headgate.connectors.redis")


class RedisReader(CommandedReader[StreamSplit]):
    """Reads some streams."""

    def __init__(self, settings: RedisSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the fields of entries.
            schema: the columns to return.
        """
        reading = settings.reading
        super().__init__(
            reading.buffer_bytes,
            reading.on_bad_record,
            "what writes to the stream",
            settings.group,
        )
        self._settings = settings
        self._decoder = MessageDecoder(
            entry_decoder(reading.columns.format, settings.field, values),
            schema,
            reading.columns.metadata,
            METADATA,
        )
        self._fetched: dict[str, StreamSplit] = {}
        """The positions of the thread, of the streams that have not ended there."""
        self._count = min(_FIRST_COUNT, reading.batch_rows)
        self._ends: dict[str, int] = {}
        """The numbers of entries that were ever added to streams, as of the last look."""
        self._client: Any = None

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        streams = [decoded(split) for split in splits]
        for stream in streams:
            if stream.stop is not None and self._settings.reading.stop is None:
                raise no_stop_any_more("stream", stream.name, f", id {stream.stop}", "the ids")
            self._fetched[stream.name] = msgspec.structs.replace(stream)
        self.begin(streams, "redis")

    def cut(self, piece: Piece[StreamSplit], rows: int) -> StreamSplit:
        at, left = piece.position, len(piece.marks) - rows
        seen = UNKNOWN if at.seen == UNKNOWN else at.seen - left
        return msgspec.structs.replace(at, after=piece.marks[rows - 1], seen=seen)

    def first_bad(self, piece: Piece[StreamSplit]) -> tuple[str, str, bytes]:
        (id_, fields), reason = piece.bad[0]
        text = b", ".join(name + b": " + value for name, value in fields.items())
        return f"{piece.position.name} id {id_}", reason, text

    def rejected(self, piece: Piece[StreamSplit]) -> pa.RecordBatch:
        rows = [
            {
                "stream": piece.position.name,
                "id": id_,
                "reason": reason,
                "fields": [{"name": name, "value": value} for name, value in fields.items()],
            }
            for (id_, fields), reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    def lag_records(self) -> dict[str, int] | None:
        """Return the entries left by stream, as of the call before: the thread looks them up."""
        self.command(self._look_up_ends, once=True)
        ends, lag = self._ends, {}
        for name in list(self._going_on):
            each = self._positions[name]
            end = ends.get(name, UNKNOWN) if each.stop is None else each.stop_seen
            if end != UNKNOWN and each.seen != UNKNOWN:
                lag[name] = max(0, end - each.seen)
        return lag

    # -- the thread ---------------------------------------------------------------------------------

    def fetch_forever(self) -> None:
        context = self.context
        name = f"headgate-{context.job_name}-{context.operator_name}"
        self._client = connect(self._settings.address, name)
        super().fetch_forever()

    def release(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()

    def _persistently(self, work: Callable[[], Any]) -> Any:
        """Ask the server, and again while it is away for a moment."""
        import redis

        try:
            return persistently(work, self.context.clock, lambda: not self.is_closed())
        except redis.RedisError as error:
            if is_lost(error):
                raise cannot_use(self._settings.address, error) from error
            raise SourceError(
                f"streams cannot be read server=`{self._settings.address}`: {reason_of(error)}",
                fix="check that they are still streams, and the rights of the user (ACL): XINFO, XRANGE, "
                "XREAD",
            ) from error

    def has_room(self) -> bool:
        return bool(self.readable(list(self._fetched)))

    def fetch(self) -> None:
        """Read the next entries of each stream; if there are none, wait for some."""
        with self._shared.changed:
            names = self.readable(list(self._fetched))
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
        self.put(piece, lost=lost)
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
        if at.after != FIRST and info.added < at.seen:
            self._forgotten(at, info)
            return 1
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
        if settings.reading.on_lost == "fail":
            raise SourceError(
                f"a stream has lost entries stream=`{at.stream}`: {what}",
                fix="keep entries for longer (MAXLEN, MINID); on_lost='skip' goes on with the first one "
                "that is left",
            )
        _log.warning("the job goes on without entries stream=`%s`: %s", at.stream, what)
        at.seen = seen_at(info, at.after)
        return lost

    def _forgotten(self, at: StreamSplit, info: StreamInfo) -> None:
        """Go on in a stream that has had fewer entries than were read of it, if the user allows that."""
        what = (
            f"of {at.seen:,} entries that were read the server knows {info.added:,}: it has forgotten "
            "entries that it had acknowledged, or the stream was deleted and created again"
        )
        if self._settings.reading.on_lost == "fail":
            raise SourceError(
                f"a stream has lost entries stream=`{at.stream}`: {what}",
                fix="compare the stream with what writes to it; on_lost='skip' goes on with the entries "
                "behind the position of the job",
            )
        _log.warning("the job goes on without entries stream=`%s`: %s", at.stream, what)
        at.seen = seen_at(info, at.after)

    def _piece(
        self, at: StreamSplit, entries: list[tuple[str, Fields]], ended: bool
    ) -> Piece[StreamSplit]:
        """Decode entries of one stream."""
        fields = [found for _, found in entries]
        sizes = [
            _ENTRY_BYTES + sum(len(name) + len(value) for name, value in each.items())
            for each in fields
        ]
        if sizes:
            fitting = self._settings.reading.buffer_bytes // 4 // max(sizes)
            self._count = max(1, min(self._settings.reading.batch_rows, fitting, self._count * 4))
        found = self._decoder.decode(
            entries,
            fields,
            lambda entry: f"{at.stream} id {entry[0]}",
            {
                "stream": lambda entry: at.stream,
                "id": itemgetter(0),
                "timestamp": lambda entry: order_of(entry[0])[0],
            },
        )
        ids = [id_ for id_, _ in found.good]
        return Piece(
            msgspec.structs.replace(at),
            found.batch,
            ids,
            found.bad,
            sum(sizes) + _ENTRY_BYTES,
            order_of(ids[0])[0] if ids else -1,
            ended,
        )

    def _look_up_ends(self) -> None:
        import redis

        for name in list(self._fetched):
            try:
                info = info_of(self._client.xinfo_stream(name))
            except redis.RedisError:
                continue  # reading reports it
            if info is not None:
                self._ends[name] = info.added

    def write_group(self, positions: Sequence[StreamSplit]) -> None:
        """Write positions to the consumer group, which is created if necessary."""
        import redis

        group = self._group
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
