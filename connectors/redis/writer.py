"""Writers of one stream: entries go there at once, or are staged until their checkpoint is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import InternalError, JobError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import DROPPED_FIX
from ...state.snapshot import CommitPermit
from ..formats.format import Format
from ..staging import Chunk, StagedEpoch, StagingWriter
from .client import Address, connect, is_lost, persistently, reason_of
from .fields import entry_encoder
from .keys import ADD, DROP, MARKER_S, MOVE, STAGE, SinkKeys, Staged
from .packed import offsets_of

_CHUNK_ENTRIES: Final = 500
_CHUNK_BYTES: Final = 256 << 10
"""A chunk ends behind the entry with which it reaches this number of entries or bytes."""
_WAIT_S: Final = 0.2
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
class _Chunk(Chunk):
    """Packed entries that are sent by one request."""

    parts: list[bytes] = field(default_factory=list)
    entries: int = 0


class RedisWriter(StagingWriter[_Chunk]):
    """Writes the entries of one subtask."""

    def __init__(self, settings: SinkSettings, exactly_once: bool) -> None:
        super().__init__(exactly_once)
        self._settings = settings
        self._schema: Any = None
        self._encode: Callable[[Any], pa.Array] | None = None
        self._client: Any = None
        self._limit = "" if settings.max_length is None else str(settings.max_length)
        self._add: Any = None
        self._stage: Any = None
        self._move: Any = None
        self._moved = (0, 0.0)
        """The last epoch of this writer that the server has in its stream, and when it got there."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._keys = SinkKeys.of(self._settings.stream, context)
        place = f"{context.attempt}_{self._after}_{context.subtask_index}_{self._nonce}"
        self._marker = self._keys.marker(place)

    def prepare(self) -> None:
        context = self.context
        name = f"headgate-{context.job_name}-{context.operator_name}"
        client = self._client = connect(self._settings.address, name)
        self._add, self._stage, self._move = map(client.register_script, (ADD, STAGE, MOVE))
        if self._exactly_once:
            with self.about():
                self.drop_dead(key.decode() for key in client.hkeys(self._keys.index))

    def staged_name(self, place: str) -> str:
        return self._keys.staged(place)

    def drop_staged(self, name: str) -> None:
        self._client.eval(DROP, 2, name, self._keys.index)

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def place(self) -> str:
        return f"stream=`{self._settings.stream}`"

    def is_lost(self, error: BaseException) -> bool:
        return is_lost(error)

    # -- the mailbox --------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        self.check()
        if not len(batch):
            return
        settings, data = self._settings, batch.data
        if self._encode is None or data.schema != self._schema:
            self._schema = data.schema
            self._encode = entry_encoder(
                settings.format, settings.field, data.schema, settings.stream
            )
        packed = self._encode(data)
        offsets, texts = offsets_of(packed), packed.buffers()[2]
        start = 0
        while start < len(packed):
            chunk = self._open_chunk()
            stop = _end_of_chunk(chunk, offsets, start)
            size = int(offsets[stop] - offsets[start])
            chunk.parts.append(texts.slice(int(offsets[start]), size).to_pybytes())
            chunk.entries += stop - start
            chunk.size_bytes += size
            chunk.epoch.records += stop - start
            start = stop
            if chunk.entries >= _CHUNK_ENTRIES or chunk.size_bytes >= _CHUNK_BYTES:
                self.close_chunk()
                self.send_in_background()
                self._wait_for_room()

    def _open_chunk(self) -> _Chunk:
        epoch = self.open_epoch()
        if self._chunk is None:
            self._chunk = _Chunk(epoch, epoch.chunks)
            epoch.chunks += 1
        return self._chunk

    def _wait_for_room(self) -> None:
        """Wait while too many bytes wait to be sent: that is the backpressure."""
        with self._changed:
            while self._waiting_bytes > self._settings.buffer_bytes and self._sending:
                self._changed.wait(_WAIT_S)
        self.check()

    def committable(self, epoch: StagedEpoch) -> bytes:
        staged = Staged(
            *(self._settings.stream, epoch.name, self._keys.index, self._marker),
            *(epoch.number, epoch.chunks, epoch.records),
        )
        return msgspec.msgpack.encode(staged)

    # -- threads ------------------------------------------------------------------------------------

    def send(self, chunk: _Chunk) -> None:
        settings, name, packed = self._settings, chunk.epoch.name, b"".join(chunk.parts)
        if self._exactly_once:
            keys = [name, self._keys.index]
            if not self._stage(keys=keys, args=[chunk.number, packed]):
                raise LostEntries(
                    f"the server has lost entries that it had acknowledged stream=`{settings.stream}` "
                    f"key=`{name}`",
                    fix="the job writes them again if it restarts; make the server keep what it "
                    "acknowledges (appendonly yes, maxmemory-policy noeviction)",
                )
            return
        self._add(keys=[settings.stream], args=[packed, self._limit])

    def persistently(self, work: Callable[[], Any]) -> Any:
        return persistently(work, self.context.clock, lambda: not self._closed)

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        with self._commit_turn:
            for committable in committables:
                staged = msgspec.msgpack.decode(committable, type=Staged)
                with self.about():
                    self._commit(staged)

    def _commit(self, staged: Staged) -> None:
        skips = self._settings.on_lost == "skip"
        for chunk in range(staged.chunks):
            move = partial(self._move_once, staged, chunk)
            try:
                try:
                    self.persistently(move)
                except ForgottenCommit as error:
                    if not skips:
                        raise
                    _log.warning("the job goes on: %s", error.message)
                    self.persistently(move)
            except LostEntries as error:
                if not skips:
                    raise
                _log.warning("the job goes on without entries: %s", error.message)
                self.drop_staged(staged.key)
                return

    def _move_once(self, staged: Staged, chunk: int) -> None:
        """Move a chunk of staged entries to the stream, unless that was done."""
        if self._move is None:
            raise InternalError("the writer was not prepared")
        clock, (before, at) = self.context.clock, self._moved
        ours = staged.marker == self._marker and clock.monotonic() - at < MARKER_S / 2
        moved = self._move(
            keys=[staged.stream, staged.key, staged.index, staged.marker],
            args=[
                staged.number,
                chunk,
                staged.chunks,
                self._limit,
                MARKER_S,
                before if ours else 0,
            ],
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
                f"on_lost=`skip` to go on without; {DROPPED_FIX}",
            )

    @contextmanager
    def about(self) -> Iterator[None]:
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


def _end_of_chunk(chunk: _Chunk, offsets: npt.NDArray[np.int64], start: int) -> int:
    """Return up to which row a chunk takes entries, which is at least one.

    Args:
        chunk: with room for an entry.
        offsets: where each row begins in the bytes of all rows, and the end.
        start: the row to begin with.
    """
    full = np.searchsorted(offsets, offsets[start] + _CHUNK_BYTES - chunk.size_bytes)
    return min(len(offsets) - 1, start + _CHUNK_ENTRIES - chunk.entries, int(full))
