"""Records on their way in one subtask's part of a checkpoint: collected, and written to the store.

All of one subtask and checkpoint lie in one file, channel behind channel, each a piece with a checksum of
its own: a subtask that is restored reads the pieces of its channels only. A small amount travels in the
manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Final

import msgspec
import xxhash

from ...state.snapshot import OperatorSnapshot, StateHandle
from ..exchange.in_flight import InFlightRecords
from ..exchange.outlet import BarrierOutlet
from .state_files import Target
from .threads import to_the_end

STATE: Final = "channel-state"
"""What the manifest calls them."""
FILE_KIND: Final = "channel"


class InputCapture:
    """What comes in in front of the barriers of one checkpoint; known once all barriers are here."""

    def __init__(self, records: InFlightRecords) -> None:
        self.records = records
        self.alignment_ms = 0
        """From the first barrier to the last."""
        self.processed_bytes = 0
        """Of records in that time."""
        self._ended = asyncio.Event()

    def finish(self, alignment_ms: int, processed_bytes: int) -> None:
        """All barriers are here."""
        self.alignment_ms = alignment_ms
        self.processed_bytes = processed_bytes
        self._ended.set()

    async def finished(self) -> None:
        """Wait for the last barrier. A checkpoint that is given up cancels whoever waits."""
        await self._ended.wait()


class InFlightCut:
    """What the barrier of one checkpoint overtook at one subtask."""

    def __init__(self, inputs: InputCapture | None, outlets: Sequence[BarrierOutlet]) -> None:
        self.inputs = inputs
        """None: nothing was overtaken on its way in."""
        self._outlets = outlets

    async def complete(self) -> None:
        """Wait until everything is known.

        Raises:
            ExchangeError: a record cannot be kept.
        """
        for outlet in self._outlets:
            await outlet.settled()
        if self.inputs is not None:
            await self.inputs.finished()
        for _, records in self._records():
            if records.error is not None:
                raise records.error

    def _records(self) -> Iterator[tuple[str, InFlightRecords]]:
        """What was overtaken at the receiver comes first: it was sent first."""
        if self.inputs is not None:
            yield "input", self.inputs.records
        for outlet in self._outlets:
            yield "output", outlet.overtaken

    def release(self) -> None:
        """Hold nothing any longer: partitions remember their last barrier, not what it overtook."""
        for outlet in self._outlets:
            outlet.forget()

    def encode(self) -> tuple[list[StateHandle], bytes]:
        """All pieces, and where each lies in the bytes of all. Takes its time: for a thread."""
        handles: list[StateHandle] = []
        content = bytearray()
        for kind, records in self._records():
            for channel, data, rows in records.encoded():
                handle = StateHandle(
                    state=STATE,
                    kind=kind,
                    size_bytes=len(data),
                    checksum=xxhash.xxh3_64_hexdigest(data),
                    rows=rows,
                    channel=channel,
                    offset=len(content),
                )
                handles.append(handle)
                content += data
        return handles, bytes(content)


async def write_in_flight(
    cut: InFlightCut,
    operator: str,
    target: Target,
    *,
    threads: Executor,
    transfers: asyncio.Semaphore,
    begun: Callable[[str], None],
) -> OperatorSnapshot | None:
    """Write what `cut` has collected; None if that is nothing.

    Args:
        cut: complete.
        operator: the head of the subtask's chain, under whose name the file lies.
        target: where the checkpoint goes.
        threads: for encoding.
        transfers: bounds what all subtasks of this worker encode and upload at once.
        begun: told the name of the file before it is written.
    """
    loop = asyncio.get_running_loop()
    async with transfers:
        handles, content = await to_the_end(loop.run_in_executor(threads, cut.encode))
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
