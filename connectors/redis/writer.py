"""Writers of one stream: entries go there at once, or are staged until their checkpoint is complete."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from ...errors import InternalError, JobError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import DISCARDED_COUNTER, SinkWriter
from ...state.snapshot import CommitPermit
from ..formats.format import Format
from .client import Address, connect, is_lost, persistently, reason_of
from .fields import Entry, entry_encoder
from .keys import DROP, MARKER_S, MOVE, STAGE, SinkKeys, Staged, pack

_CHUNK_ENTRIES: Final = 500
_CHUNK_BYTES: Final = 256 << 10
"""A chunk ends behind the entry with which it reaches this number of entries or bytes."""
_WAIT_S: Final = 0.2
_LOOK_MS: Final = 500
_log = logging.getLogger("headgate.connectors.redis")


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `redis_sink`, which documents them."""

    stream: str
    address: Address
    format: Format
    field: str
    max_length: int | None
    on_lost: str
    buffer_bytes: int


class LostEntries(JobError):
    """Entries that a checkpoint needs are not in the server any more."""


class ForgottenCommit(LostEntries):
    """The server has lost a commit that it had acknowledged."""


@dataclass(slots=True)
class _Epoch:
    """The entries between two barriers."""

    number: int
    key: str
    chunks: int = 0
    entries: int = 0


@dataclass(slots=True)
class _Chunk:
    """Entries of one epoch that are sent by one request."""

    epoch: _Epoch
    number: int
    entries: list[Entry] = field(default_factory=list)
    size_bytes: int = 0


class RedisWriter(SinkWriter):
    """Writes the entries of one subtask."""

    def __init__(self, settings: SinkSettings, exactly_once: bool) -> None:
        self._settings = settings
        self._exactly_once = exactly_once
        self._schema: Any = None
        self._encode: Callable[[Any], list[Entry]] | None = None
        self._changed = threading.Condition()
        self._queue: deque[_Chunk] = deque()
        """Chunks to be sent, in order; `_changed` guards it and the four below."""
        self._waiting_bytes = 0
        self._failure = ""
        self._sending = False
        """A thread sends chunks that are full."""
        self._closed = False
        self._turn = threading.Lock()
        """Held while chunks are sent."""
        self._commit_turn = threading.Lock()
        self._client: Any = None
        self._stage: Any = None
        self._move: Any = None
        self._moved = (0, 0.0)
        """The last epoch of this writer that the server has in its stream, and when it got there."""
        self._number = 0
        self._epoch: _Epoch | None = None
        self._chunk: _Chunk | None = None
        self._unprepared: dict[str, _Epoch] = {}
        """Epochs with staged entries that no checkpoint can have yet."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._after = context.restored_checkpoint
        self._nonce = secrets.token_hex(6)
        self._keys = SinkKeys.of(self._settings.stream, context)
        place = f"{context.attempt}_{self._after}_{context.subtask_index}_{self._nonce}"
        self._marker = self._keys.marker(place)
        context.timers.call_later(_LOOK_MS, self._look)

    def _look(self) -> None:
        """Fail the attempt if entries cannot be sent, also while no record comes."""
        if not self._closed:
            self._check()
            self.context.timers.call_later(_LOOK_MS, self._look)

    def prepare(self) -> None:
        context = self.context
        name = f"headgate-{context.job_name}-{context.operator_name}"
        client = self._client = connect(self._settings.address, name)
        self._stage, self._move = client.register_script(STAGE), client.register_script(MOVE)
        if self._exactly_once:
            with self._about():
                self._drop_dead(client)

    def _drop_dead(self, client: Any) -> None:
        """Delete the staged entries that older attempts of this subtask left and no checkpoint has."""
        discarded = self.context.metrics.counter(DISCARDED_COUNTER)
        for key in client.hkeys(self._keys.index):
            if self._keys.is_dead(key.decode(), self.context):
                self._drop(key.decode())
                discarded.inc()

    def _drop(self, key: str) -> None:
        self._client.eval(DROP, 2, key, self._keys.index)

    # -- the mailbox --------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        self._check()
        if not len(batch):
            return
        settings, data = self._settings, batch.data
        if self._encode is None or data.schema != self._schema:
            self._schema = data.schema
            self._encode = entry_encoder(
                settings.format, settings.field, data.schema, settings.stream
            )
        for entry in self._encode(data):
            chunk = self._open_chunk()
            chunk.entries.append(entry)
            chunk.size_bytes += sum(map(len, entry))
            if len(chunk.entries) >= _CHUNK_ENTRIES or chunk.size_bytes >= _CHUNK_BYTES:
                self._close_chunk()
                self._send_in_background()
                self._wait_for_room()

    def _open_chunk(self) -> _Chunk:
        epoch = self._epoch
        if epoch is None:
            self._number += 1
            context = self.context
            place = f"{context.attempt}_{self._after}_{context.subtask_index}_{self._number}"
            # The key is never used again. It says which attempt made it, and behind which checkpoint.
            epoch = self._epoch = _Epoch(self._number, self._keys.staged(f"{place}_{self._nonce}"))
        if self._chunk is None:
            self._chunk = _Chunk(epoch, epoch.chunks)
            epoch.chunks += 1
        epoch.entries += 1
        return self._chunk

    def _close_chunk(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            with self._changed:
                self._queue.append(chunk)
                self._waiting_bytes += chunk.size_bytes

    def _send_in_background(self) -> None:
        """Send the full chunks in a thread, unless one does."""
        with self._changed:
            if self._sending:
                return
            self._sending = True
        number = self._number

        def send() -> None:
            try:
                self._send_until(number)
            except Exception as error:
                self._fail(error)
            finally:
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()

        self.context.run_in_thread(send)

    def _wait_for_room(self) -> None:
        """Wait while too many bytes wait to be sent: that is the backpressure."""
        with self._changed:
            while self._waiting_bytes > self._settings.buffer_bytes and self._sending:
                self._changed.wait(_WAIT_S)
        self._check()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or str(error)

    def _check(self) -> None:
        with self._changed:
            if self._failure:
                raise JobError(self._failure)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        self._after = checkpoint_id
        self._close_chunk()
        epoch, self._epoch = self._epoch, None
        return None if epoch is None else partial(self._precommit, epoch)

    def _precommit(self, epoch: _Epoch) -> list[bytes]:
        """Send the entries of an epoch, while later ones are written."""
        try:
            self._send_until(epoch.number)
        except JobError as error:
            if error.__cause__ is None or not is_lost(error.__cause__):
                # It cannot succeed later either, so the attempt must end.
                self._fail(error)
            raise
        if not self._exactly_once:
            return []
        with self._turn:
            if self._closed:
                raise self._was_closed()  # `close` deletes the staged entries
            self._unprepared.pop(epoch.key, None)
        staged = Staged(
            *(self._settings.stream, epoch.key, self._keys.index, self._marker),
            *(epoch.number, epoch.chunks, epoch.entries),
        )
        return [msgspec.msgpack.encode(staged)]

    def finish(self) -> Callable[[], None] | None:
        if self._exactly_once:
            return None
        self._close_chunk()
        return partial(self._send_until, self._number)

    def close(self) -> None:
        """Delete staged entries that no checkpoint has, in a thread, as the server may not answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

        def end() -> None:
            with self._turn, self._commit_turn, suppress(Exception):
                if self._client is None:
                    return
                try:
                    # What fails here is done by the next attempt.
                    for key in list(self._unprepared):
                        self._drop(key)
                finally:
                    self._client.close()

        with suppress(RuntimeError):
            self.context.run_in_thread(end).add_done_callback(_look_at)

    # -- threads ------------------------------------------------------------------------------------

    def _send_until(self, number: int) -> None:
        """Send all chunks of epochs up to this one, in order."""
        with self._turn:
            while True:
                with self._changed:
                    chunk = self._queue[0] if self._queue else None
                    if chunk is None or chunk.epoch.number > number:
                        return
                    if self._closed:
                        raise self._was_closed()
                with self._about():
                    self._persistently(partial(self._send, chunk))
                with self._changed:
                    self._queue.popleft()
                    self._waiting_bytes -= chunk.size_bytes
                    self._changed.notify_all()

    def _was_closed(self) -> JobError:
        return JobError(f"the sink was closed stream=`{self._settings.stream}`")

    def _send(self, chunk: _Chunk) -> None:
        """Send one chunk. It may have been sent before, if the connection broke."""
        settings, epoch = self._settings, chunk.epoch
        if self._exactly_once:
            self._unprepared[epoch.key] = epoch
            keys = [epoch.key, self._keys.index]
            if not self._stage(keys=keys, args=[chunk.number, pack(chunk.entries)]):
                raise LostEntries(
                    f"the server has lost entries that it had acknowledged stream=`{settings.stream}` "
                    f"key=`{epoch.key}`",
                    fix="the job writes them again if it restarts; make the server keep what it "
                    "acknowledges (appendonly yes, maxmemory-policy noeviction)",
                )
            return
        limit = () if settings.max_length is None else ("MAXLEN", "~", settings.max_length)
        pipeline = self._client.pipeline(transaction=False)
        for entry in chunk.entries:
            pipeline.execute_command("XADD", settings.stream, *limit, "*", *entry)
        pipeline.execute()

    def _persistently(self, work: Callable[[], None]) -> None:
        persistently(work, self.context.clock, lambda: not self._closed)

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        with self._commit_turn:
            for committable in committables:
                staged = msgspec.msgpack.decode(committable, type=Staged)
                with self._about():
                    self._commit(staged)

    def _commit(self, staged: Staged) -> None:
        skips = self._settings.on_lost == "skip"
        for chunk in range(staged.chunks):
            move = partial(self._move_once, staged, chunk)
            try:
                try:
                    self._persistently(move)
                except ForgottenCommit as error:
                    if not skips:
                        raise
                    _log.warning("the job goes on: %s", error.message)
                    self._persistently(move)
            except LostEntries as error:
                if not skips:
                    raise
                _log.warning("the job goes on without entries: %s", error.message)
                self._drop(staged.key)
                return

    def _move_once(self, staged: Staged, chunk: int) -> None:
        """Move a chunk of staged entries to the stream, unless that was done."""
        if self._move is None:
            raise InternalError("the writer was not prepared")
        limit = "" if self._settings.max_length is None else self._settings.max_length
        clock, (before, at) = self.context.clock, self._moved
        ours = staged.marker == self._marker and clock.monotonic() - at < MARKER_S / 2
        moved = self._move(
            keys=[staged.stream, staged.key, staged.index, staged.marker],
            args=[staged.number, chunk, staged.chunks, limit, MARKER_S, before if ours else 0],
        )
        if moved == -1:
            self._moved = (0, 0.0)
            raise ForgottenCommit(
                "the server does not remember an earlier commit that it had acknowledged, so its entries "
                f"may be lost as well stream=`{staged.stream}`",
                fix="compare the stream with its source, and make the server keep what it acknowledges "
                "(appendonly yes, appendfsync always); on_lost=`skip` goes on in such a case",
            )
        if moved == 1:
            if staged.marker == self._marker:
                self._moved = (max(before, staged.number), clock.monotonic())
        else:
            raise LostEntries(
                "entries of a checkpoint are not in the server, and there is no mark that they were added "
                f"stream=`{staged.stream}` key=`{staged.key}` entries=`{staged.entries}`",
                fix="the server has lost them (appendonly yes, maxmemory-policy noeviction), somebody has "
                "deleted the key, or the checkpoint is older than 90 days; restore an older one, or say "
                "on_lost=`skip` to go on without",
            )

    @contextmanager
    def _about(self) -> Iterator[None]:
        """Turn errors of the server in the block into a JobError."""
        import redis

        settings = self._settings
        try:
            yield
        except redis.RedisError as error:
            raise JobError(
                f"entries cannot be written stream=`{settings.stream}` server=`{settings.address}`: "
                f"{reason_of(error)}",
                fix="check that the server can be reached and has memory left, that the key is that of a "
                "stream, and the rights of the user (ACL)",
            ) from error


def _look_at(future: Any) -> None:
    """Look at the error, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
