"""Turns blocks in the order of their first event time into batches in event-time order. Pure.

It holds the records of read blocks that are beyond the first event time of the next block. So no
record is ever late: event time is declared to be just before the next block. All records exist, so that
watermarks are not heuristic, and of an event-time step only the last one counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...operators.base import Output
from ...operators.elements import WATERMARK_MAX, WATERMARK_MIN, Batch
from .blocks import Block, joined

RELEASED_ROWS: Final = 65_536
"""The number of records that are passed on at a time."""

Rows: TypeAlias = npt.NDArray[np.int64]


class Release(NamedTuple):
    """The next action of a receiver: records of an input, or event time has reached `watermark`."""

    batch: Batch | None
    input_index: int = 0
    watermark: int = WATERMARK_MIN


@dataclass(slots=True)
class _Run:
    """Records of one block, in event-time order, with their origin, which orders equal ones."""

    input_index: int
    batch: Batch
    rank: tuple[int, int, int]


@dataclass(slots=True)
class BlockOrder:
    """Takes blocks in their order, and returns batches and watermarks.

    Attributes:
        decode: makes the records of a block.
        exact: event time is declared between any two event times, and the records of different inputs
            come in one order: so timers fire where they belong among the records. Else that is done once
            for many records, which is the same for steps that wait for the watermark, and faster.
    """

    decode: Callable[[bytes], Batch]
    exact: bool
    _waiting: list[_Run] = field(default_factory=list)
    _rows: int = 0
    _enough: int = RELEASED_ROWS
    _phase: int = 0

    def take(self, block: Block) -> Iterator[Release]:
        """Take the next block, whose records are not yet released."""
        if block.phase != self._phase:
            yield from self._release(None)
            self._phase = block.phase
        if self._rows >= self._enough:
            yield from self._release(block.first_ms)
            # A large overlap is not sorted again for every block.
            self._enough = max(RELEASED_ROWS, 2 * self._rows)
        batch = self.decode(block.payload)
        self._waiting.append(_Run(block.input_index, batch, (block.edge, block.sender, block.seq)))
        self._rows += len(batch)

    def end(self) -> Iterator[Release]:
        """Release the rest: there are no more blocks."""
        yield from self._release(None)

    def _release(self, before: int | None) -> Iterator[Release]:
        """Release the records before an event time (ms), or all."""
        due: list[_Run] = []
        kept: list[_Run] = []
        for run in self._waiting:
            cut = len(run.batch)
            if before is not None:
                # Records without event time are from blocks that are in order already.
                times = run.batch.timestamps
                cut = cut if times is None else int(np.searchsorted(times, before, side="left"))
            if cut:
                due.append(_Run(run.input_index, run.batch.slice(0, cut), run.rank))
            if cut < len(run.batch):
                rest = run.batch.slice(cut, len(run.batch) - cut)
                kept.append(_Run(run.input_index, rest, run.rank))
        self._waiting = kept
        self._rows = sum(len(run.batch) for run in kept)
        if due:
            yield from (
                _exactly(due, watermarks=bool(self._phase)) if self.exact else _by_input(due)
            )
        if before is not None and before > WATERMARK_MIN and self._phase:
            yield Release(None, watermark=before - 1)


def _exactly(due: list[_Run], *, watermarks: bool) -> Iterator[Release]:
    """Yield the records of all inputs by event time; among equal ones those of the first input come
    first."""
    inputs = sorted({run.input_index for run in due})
    batches = [_sorted(due, index) for index in inputs]
    times = np.concatenate([_times(batch) for batch in batches])
    owners = np.repeat(np.arange(len(inputs)), [len(batch) for batch in batches])
    order = np.argsort(times, kind="stable")
    times, owners = times[order], owners[order]
    changes = np.flatnonzero((np.diff(times) != 0) | (np.diff(owners) != 0)) + 1
    given = [0] * len(inputs)
    last = WATERMARK_MIN
    for start, end in itertools.pairwise([0, *changes.tolist(), len(times)]):
        now, owner = int(times[start]), int(owners[start])
        if watermarks and now > last:
            yield Release(None, watermark=now - 1)
            last = now
        yield Release(batches[owner].slice(given[owner], end - start), inputs[owner])
        given[owner] += end - start


def _by_input(due: list[_Run]) -> Iterator[Release]:
    for index in sorted({run.input_index for run in due}):
        yield Release(_sorted(due, index), index)


def _sorted(due: list[_Run], index: int) -> Batch:
    """Return the records of one input by event time; equal ones in order of arrival."""
    runs = sorted((run for run in due if run.input_index == index), key=lambda run: run.rank)
    batch = joined([run.batch for run in runs])
    if len(runs) == 1 or batch.timestamps is None:
        return batch
    return batch.take(np.argsort(batch.timestamps, kind="stable"))


def _times(batch: Batch) -> Rows:
    if batch.timestamps is None:
        return np.full(len(batch), WATERMARK_MIN, np.int64)
    return batch.timestamps


@dataclass(slots=True)
class FinalWatermarkOutput(Output):
    """The output of an event-time step, of whose watermarks only the last one counts.

    Where event time matters, records have been sorted by it, and the watermarks are derived from
    that order.
    """

    output: Output

    def emit(self, batch: Batch) -> None:
        self.output.emit(batch)

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.output.emit_side(tag, batch)

    def emit_watermark(self, timestamp: int) -> None:
        if timestamp == WATERMARK_MAX:
            self.output.emit_watermark(timestamp)

    def emit_idle(self, idle: bool) -> None:
        """Ignore idleness: a source that is read to its end is never idle."""
