"""The in-flight records of one subtask's part of a checkpoint: collected, and written to the store.

All records of one subtask and checkpoint are in one file, a pack for each exchange at each end
(`protocol/checkpoints/packs.py`): a restored subtask reads only what its channels had. A small amount is
stored in the manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import groupby
from typing import Final

import msgspec

from ...state.snapshot import ChannelAddress, OperatorSnapshot, StateHandle
from ..exchange.channel_state import InFlightRecords
from ..exchange.partition import OutgoingBarrier
from ..protocol.checkpoints.packs import PackBuilder, address_of
from .concurrency import in_thread
from .local_files import SnapshotTarget

STATE: Final = "channel-state"
"""The name of this state in the manifest."""
FILE_KIND: Final = "channel"


class InputCapture:
    """The records that arrive before the barriers of one checkpoint; known once all barriers are here."""

    def __init__(self, records: InFlightRecords) -> None:
        self.records = records
        self.alignment_ms = 0
        """The time from the first barrier to the last, ms."""
        self.processed_bytes = 0
        """The bytes of records processed in that time."""
        self._ended = asyncio.Event()

    def finish(self, alignment_ms: int, processed_bytes: int) -> None:
        """Note that all barriers are here."""
        self.alignment_ms = alignment_ms
        self.processed_bytes = processed_bytes
        self._ended.set()

    async def finished(self) -> None:
        """Wait for the last barrier. Aborting the checkpoint cancels the wait."""
        await self._ended.wait()


class InFlightCut:
    """The records that the barrier of one checkpoint overtook at one subtask."""

    def __init__(self, inputs: InputCapture | None, barriers: Sequence[OutgoingBarrier]) -> None:
        self.inputs = inputs
        """The capture of the inputs; None: nothing was overtaken there."""
        self._outgoing = barriers

    async def complete(self) -> None:
        """Wait until everything is known.

        Raises:
            ExchangeError: a record cannot be kept.
        """
        for outgoing in self._outgoing:
            await outgoing.settled()
        if self.inputs is not None:
            await self.inputs.finished()
        for _, records in self._records():
            if records.error is not None:
                raise records.error

    def _records(self) -> Iterator[tuple[str, InFlightRecords]]:
        """Yield the captured records; those of the inputs come first, as they were sent first."""
        if self.inputs is not None:
            yield "input", self.inputs.records
        for outgoing in self._outgoing:
            yield "output", outgoing.overtaken

    def release(self) -> None:
        """Release the records, as partitions remember their last barrier."""
        for outgoing in self._outgoing:
            outgoing.forget()

    def encode(self) -> tuple[list[StateHandle], bytes]:
        """Return all packs, with their places in the returned bytes. Slow: call it in a thread."""
        handles: list[StateHandle] = []
        content = bytearray()
        for kind, records in self._records():
            for address, runs in groupby(records.encoded(), partial(_pack_of, kind)):
                pack = PackBuilder(content, STATE, kind, address)
                for run in runs:
                    pack.add(*run)
                handles.append(pack.finish())
        return handles, bytes(content)


def _pack_of(kind: str, run: tuple[ChannelAddress, bytes, int]) -> ChannelAddress:
    return address_of(run[0], kind)


async def write_in_flight(
    cut: InFlightCut,
    operator: str,
    target: SnapshotTarget,
    *,
    threads: Executor,
    transfers: asyncio.Semaphore,
    begun: Callable[[str], None],
) -> OperatorSnapshot | None:
    """Write the records that `cut` has collected; return None if there are none.

    Args:
        cut: complete.
        operator: the head of the subtask's chain, whose name the file gets.
        target: the destination of the checkpoint.
        threads: for encoding.
        transfers: limits what all subtasks of this worker encode and upload at once.
        begun: called with the name of the file before it is written.
    """
    async with transfers:
        handles, content = await in_thread(threads, cut.encode)
        if not handles or target.store is None:
            return None
        if len(content) <= target.inline_bytes_max:
            placed = [
                msgspec.structs.replace(
                    h, inline=content[h.offset : h.offset + h.size_bytes], offset=0
                )
                for h in handles
            ]
        else:
            name = target.name_of(operator, STATE, FILE_KIND, "")
            begun(name)
            await target.write(name, content, threads)
            placed = [msgspec.structs.replace(handle, file=name) for handle in handles]
    return OperatorSnapshot(operator=operator, handles=tuple(placed))
