"""Records that a barrier overtook: kept in order per channel, as bytes for the store, and back.

A subtask that was itself restored may have records before it that came from channels which exist no more:
those of an earlier parallelism. They are in front of all that its channels bring, whichever those are, so
they are kept one run behind the other.

Columns are immutable and are kept by reference. Python objects are not: the receiver may change a record
it is about to process, so they are pickled when they are added.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import ExchangeError
from ...operators.elements import Batch, ColumnBatch, ObjectBatch
from ...state.codecs import dumps
from ...state.snapshot import ChannelAddress
from .wire import TIMESTAMPS_COLUMN, to_stream

FORMAT: Final = 1
"""First element of what `encode` makes; a newer headgate may write another one."""


class PickledRecords(msgspec.Struct, frozen=True):
    """A batch of Python objects as it was when it was added."""

    data: bytes
    rows: int


class InFlightRecords:
    """The records of some channels of one subtask that belong to one checkpoint."""

    def __init__(self) -> None:
        self._runs: list[tuple[ChannelAddress, list[ColumnBatch | PickledRecords]]] = []
        self._last: dict[ChannelAddress, list[ColumnBatch | PickledRecords]] = {}
        """The run that goes on, of each channel."""
        self.nbytes = 0
        """About what they take in memory."""
        self.error: ExchangeError | None = None
        """Why they cannot be kept, if so: then the checkpoint cannot be taken."""

    def __bool__(self) -> bool:
        return bool(self._runs) or self.error is not None

    def add_in_turn(self, channel: ChannelAddress, batch: Batch) -> None:
        """Keep `batch` behind everything that was added before."""
        if self._last and channel not in self._last:
            self._last.clear()
        self.add(channel, batch)

    def add(self, channel: ChannelAddress, batch: Batch) -> None:
        """Keep `batch` behind those of its channel. Never raises: see `error`."""
        if len(batch) == 0 or self.error is not None:
            return
        piece: ColumnBatch | PickledRecords
        if isinstance(batch, ColumnBatch):
            piece = batch
            self.nbytes += batch.nbytes
        else:
            try:
                data = dumps((batch.records, batch.timestamps))
            except Exception as error:
                self.error = ExchangeError(
                    f"a record on its way cannot be kept in an unaligned checkpoint "
                    f"operator=`{channel.source}` error=`{error!r}`",
                    fix="records must be picklable, or set "
                    "execution.checkpointing.unaligned.enabled to false",
                )
                self.error.__cause__ = error
                return
            piece = PickledRecords(data, len(batch))
            self.nbytes += len(data)
        if channel not in self._last:
            run = self._last[channel] = []
            self._runs.append((channel, run))
        self._last[channel].append(piece)

    def encoded(self) -> Iterator[tuple[ChannelAddress, bytes, int]]:
        """The runs: of which channel, the records as bytes, and how many they are. Takes its time.

        Those of an exchange are one behind the other. Exchanges have no order among themselves.
        """
        exchanges: dict[ChannelAddress, int] = {}
        by_exchange = sorted(
            self._runs, key=lambda run: exchanges.setdefault(run[0].exchange, len(exchanges))
        )
        for channel, pieces in by_exchange:
            rows = sum(p.rows if isinstance(p, PickledRecords) else len(p) for p in pieces)
            encoded = [
                piece.data if isinstance(piece, PickledRecords) else _columns(piece)
                for piece in pieces
            ]
            kinds = [isinstance(piece, PickledRecords) for piece in pieces]
            yield channel, msgspec.msgpack.encode((FORMAT, kinds, encoded)), rows


def decode(data: bytes, *, allow_pickle: bool = True) -> Iterator[Batch]:
    """The batches of a run, in order.

    Raises:
        ExchangeError: a newer headgate wrote them, or they are pickled, and must not be.
    """
    found = msgspec.msgpack.decode(data)
    if not isinstance(found, list) or found[:1] != [FORMAT]:
        raise ExchangeError(
            f"records on their way are in an unknown format format=`{str(found)[:20]}`",
            fix="restore with the version of headgate that took the checkpoint",
        )
    _, kinds, pieces = found
    for pickled, piece in zip(kinds, pieces, strict=True):
        if pickled and not allow_pickle:
            raise ExchangeError("records on their way are pickled: they are Python objects")
        if pickled:
            records, timestamps = pickle.loads(piece)
            yield ObjectBatch(records, timestamps)
        else:
            yield _batch(piece)


def _columns(batch: ColumnBatch) -> bytes:
    data = batch.data
    if batch.timestamps is not None:
        data = data.append_column(TIMESTAMPS_COLUMN, pa.array(batch.timestamps))
    return bytes(to_stream(data).to_pybytes())


def _batch(piece: bytes) -> ColumnBatch:
    data = pa.ipc.open_stream(pa.py_buffer(piece)).read_next_batch()
    last = data.num_columns - 1
    if last < 0 or data.schema.field(last).name != TIMESTAMPS_COLUMN.name:
        return ColumnBatch(data)
    timestamps = data.column(last).to_numpy(zero_copy_only=True).astype(np.int64, copy=False)
    return ColumnBatch(data.remove_column(last), timestamps)


class GateCapture:
    """The records that a gate keeps for one checkpoint while its barriers come in.

    `open` are the positions of the channels whose barrier has not come: records that arrive there are kept.
    """

    def __init__(self, checkpoint_id: int) -> None:
        self.checkpoint_id = checkpoint_id
        self.records = InFlightRecords()
        self.open: set[int] = set()
