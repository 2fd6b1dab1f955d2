"""The two ends of a loop: the head sends in the external input and the feedback of the tail.

How they are connected, and when a loop ends, is up to the subtask (`runtime/task/iteration.py`).

A loop in rounds has its own event time, the number of the round: external input is round 0,
feedback of round n is round n + 1, and when round n is over at all subtasks, the watermark is n.
(Epochs as watermarks: Carbone et al., VLDB 2017, section 7.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    ItemsCut,
    RestoredState,
    StateInfo,
    StateSnapshot,
    TableCut,
    state_info,
)
from ..base import Operator, OperatorContext
from ..drops import DropKind
from ..elements import Batch, ColumnBatch, ObjectBatch
from ..sizes import parse_size
from .queue import MEMORY_BYTES, FeedbackQueue, QueuedBatch, Spill
from .stored import restored

LOG: Final = "feedback"
ROUND: Final = "round"
MEMORY_OPTION: Final = "headgate.iteration.memory"
DROPPED: Final = "loop_records_dropped"
_ROUND, _POSITION, _BATCH = "round", "position", "batch"
_TABLE: Final = pa.schema(
    [
        pa.field(KEY_GROUP_COLUMN, pa.int32(), False),
        pa.field(_ROUND, pa.int64(), False),
        pa.field(_POSITION, pa.int64(), False),
        pa.field(_BATCH, pa.large_binary(), False),
    ]
)
Matching = Callable[[Batch], int]
"""A function that counts the records of a batch that meet a condition."""


class Rounds(msgspec.Struct, frozen=True):
    """The end of a loop in rounds.

    Attributes:
        most: the most rounds.
        matching: another round runs only while some of its records meet this; None: all do.
    """

    most: int
    matching: Matching | None = None


class LoopSettings(msgspec.Struct, frozen=True):
    """The settings of a loop.

    Attributes:
        name: of its head: the address of its state.
        schema: columns of the records in it; None: Python objects.
        wait_ms: after its inputs have ended, it ends once it was empty for this long.
        rounds: None for a loop without rounds.
    """

    name: str
    schema: pa.Schema | None
    wait_ms: int = 0
    rounds: Rounds | None = None


class IterationHead(Operator):
    """Sends records into the loop; keeps the feedback that waits, and the logs of checkpoints."""

    stores_what_waits = True
    """Records in front of a barrier are accepted beyond the memory limit, too: a checkpoint does
    not wait for room."""

    def __init__(self, settings: LoopSettings) -> None:
        self.settings = settings
        self.queue = FeedbackQueue(settings.name)
        self.round = 0
        """The current round; always 0 in a loop without rounds."""
        self.restored_end = 0
        """Batches before this position were restored: they go first."""
        self.closed = False
        """Nothing more is sent: further feedback is dropped, and counted."""
        self._starts = [(0, 1)]
        """In a loop in rounds, the positions in the queue where rounds begin: (position, round),
        ascending."""
        self._arrived = 0
        self._rounds_at: dict[int, int] = {}
        """The round in which the barriers still in the loop were sent."""
        self._cuts: dict[int, tuple[int, list[tuple[int, int, QueuedBatch]]]] = {}

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        text = context.options.get(MEMORY_OPTION)
        memory = MEMORY_BYTES if text is None else parse_size(text, MEMORY_OPTION)
        self.queue = queue = FeedbackQueue(
            self.settings.name, memory, Spill(context.local_directory)
        )
        self._dropped = context.metrics.counter(DROPPED)
        context.metrics.gauge("loop_records_waiting", lambda: queue.rows)
        self._spilled = context.metrics.counter("loop_spilled_bytes")

    # -- records ------------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if self.settings.rounds is not None:
            times = np.full(len(batch), self.round, np.int64)
            if isinstance(batch, ColumnBatch):
                batch = ColumnBatch(batch.data, times)
            else:
                batch = ObjectBatch(batch.records, times)
        self.output.emit(batch)

    def full(self) -> bool:
        """True if further input would only go to disk. A loop in rounds needs the input to end first."""
        return self.settings.rounds is None and self.queue.over_memory

    @property
    def limit(self) -> int:
        """Return the position after the last batch that may be sent in now."""
        if self.settings.rounds is None:
            return self.queue.end
        return next(
            (start for start, number in self._starts if number > self.round), self.queue.end
        )

    @property
    def ready(self) -> bool:
        """True if a feedback batch may be sent in."""
        return self.queue.next < self.limit

    def come_back(self, batch: Batch) -> None:
        """Accept a batch that reached the tail."""
        if self.closed:
            self._drop(len(batch))
            return
        self._arrived += self._count(batch)
        before = self.queue.spilled_bytes
        self.queue.put(batch)
        if self.queue.spilled_bytes > before:
            self._spilled.inc(self.queue.spilled_bytes - before)

    def take_arrived(self) -> int:
        """Return how many relevant records came back since the last call."""
        arrived, self._arrived = self._arrived, 0
        return arrived

    def _count(self, batch: Batch) -> int:
        rounds = self.settings.rounds
        if rounds is None or rounds.matching is None:
            return len(batch)
        return rounds.matching(batch)

    def close_loop(self) -> None:
        """Close the loop: drop what will not be sent in any more."""
        self.closed = True
        self._drop(self.queue.drop(self.queue.end))

    def _drop(self, rows: int) -> None:
        self._dropped.inc(rows)
        self.context.drops.add(DropKind.FEEDBACK, rows)

    # -- rounds -------------------------------------------------------------------------------------

    def round_came_back(self, end: int) -> None:
        """Note that this round is complete: feedback from position `end` on belongs to the round
        after next."""
        self._starts.append((end, self.round + 2))
        while len(self._starts) > 1 and self._starts[1][1] <= self.round:
            self._starts.pop(0)

    def next_round(self) -> None:
        """Release the feedback of this round."""
        self.round += 1

    def _round_of(self, position: int) -> int:
        if self.settings.rounds is None:
            return 0
        return self._starts[bisect_right(self._starts, (position, 2**62)) - 1][1]

    # -- state --------------------------------------------------------------------------------------

    def barrier(self, checkpoint_id: int) -> None:
        """Begin a log: the barrier goes into the loop."""
        self.queue.barrier(checkpoint_id)
        self._rounds_at[checkpoint_id] = self.round

    def barrier_came_back(self, checkpoint_id: int, end: int) -> bool:
        """Make the cut: the barrier is back, after position `end - 1`. Return False if it was aborted."""
        found = self.queue.returned(checkpoint_id, end)
        if found is None:
            return False
        (start, _), entries = found
        numbered = [
            (self._round_of(position), position, entry)
            for position, entry in enumerate(entries, start)
        ]
        self._cuts[checkpoint_id] = self._rounds_at.pop(checkpoint_id), numbered
        return True

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.queue.aborted(checkpoint_id)
        self._rounds_at.pop(checkpoint_id, None)

    def states(self) -> Sequence[StateInfo]:
        infos = [state_info(LOG, LOG, _TABLE)]
        if self.settings.rounds is not None:
            infos.append(state_info(ROUND, "union"))
        return infos

    def pickled_states(self) -> Sequence[str]:
        return [LOG] if self.settings.schema is None else []

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        number, entries = self._cuts.pop(checkpoint_id)
        group, step = self.context.key_groups.first, self.settings.name

        def table(_: int | None) -> pa.Table:
            columns = [
                pa.array([group] * len(entries), pa.int32()),
                pa.array([number for number, _, _ in entries], pa.int64()),
                pa.array([position for _, position, _ in entries], pa.int64()),
                pa.array([entry.encoded(step) for _, _, entry in entries], pa.large_binary()),
            ]
            return pa.Table.from_arrays(columns, schema=_TABLE)

        cut = StateSnapshot(tables={LOG: TableCut(table)})
        if self.settings.rounds is not None:
            cut.items[ROUND] = ItemsCut([msgspec.msgpack.encode(number)], "union")
        return cut

    def restore(self, state: RestoredState) -> None:
        """Restore the logs. Heads may have been cut in adjacent rounds: all continue with the later one.

        Some head is in the later round, so the earlier one was over at all of them.
        """
        found = [msgspec.msgpack.decode(item, type=int) for item in state.items.get(ROUND, ())]
        self.round = max(found, default=0)
        table = state.tables.get(LOG)
        if table is not None:
            ordered = table.sort_by(
                [(_ROUND, "ascending"), (KEY_GROUP_COLUMN, "ascending"), (_POSITION, "ascending")]
            )
            numbers = ordered.column(_ROUND).to_pylist()
            for number, data in zip(numbers, ordered.column(_BATCH), strict=True):
                self._restore_batch(number, data.as_py())
        if self.settings.rounds is not None:
            self._starts = [(0, self.round), (self.restored_end, self.round + 1)]

    def _restore_batch(self, number: int, data: bytes) -> None:
        batch = restored(data, self.settings.schema, self.settings.name)
        self.queue.put(batch)
        if number <= self.round:
            self.restored_end = self.queue.end
        else:
            self._arrived += self._count(batch)


class IterationTail(Operator):
    """Ends a loop: its output goes to the head of its slot."""

    def process(self, batch: Batch, input_index: int) -> None:
        self.output.emit(batch)
