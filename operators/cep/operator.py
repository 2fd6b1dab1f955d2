"""Finds patterns: keeps records until the watermark has reached them, then hands them over in order.

Each key has one timer, for whatever is next: its first record that waits, or the end of the time of a run.
So records and deadlines of a key are handled in the order of event time, however watermarks come, and work
that a watermark makes due is cut into slices between which barriers go (`process/firing.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, PlanError, StateError
from ...state.hashing import hash_keys, key_groups_of
from ...state.keyed.identity import token
from ...state.snapshot import (
    KEY_GROUP_COLUMN,
    RestoredState,
    StateInfo,
    StateSnapshot,
    TableCut,
    state_info,
)
from ..async_io.map_async import TIMED_OUT
from ..base import OperatorContext
from ..elements import WATERMARK_MAX, WATERMARK_MIN, Batch
from ..per_record import pieces
from ..process.context import Timer
from ..process.operator import ProcessOperator, ProcessStep
from ..process.sides import SideOutput
from ..user_code import FAILURES, user_error
from ..window_aggregate import LATE, LATE_COUNTER
from .buffer import NodeId, SharedBuffer
from .conditions import Expressions
from .match import Match
from .matcher import Matcher, Rules
from .store import EVENTS, NODES, RUNS, WAITING, Waiting, load_runs

TIMED_OUT_COUNTER: Final = "numPartialMatchesTimedOut"
RECORDS_PER_TIMER: Final = 256
"""Records of one key that are handled at a time; then its timer is set again."""
_WATERMARK: Final = "match_watermark"
_WATERMARK_SCHEMA: Final = pa.schema(
    [
        pa.field(KEY_GROUP_COLUMN, pa.int32(), False),
        pa.field("watermark", pa.int64(), False),
    ]
)
_TIMED_OUT: Final[SideOutput[Any]] = SideOutput()
_TIMED_OUT.name = TIMED_OUT


class MatchOperator(ProcessOperator):
    """Runs a pattern.

    Args:
        step: the records it takes; its `declared` are `MatchStates`.
        rules: the pattern.
        expressions: those of its conditions.
        select: what becomes of a match; None: it goes on as it is.
    """

    def __init__(
        self,
        step: ProcessStep,
        rules: Rules,
        expressions: Expressions,
        select: Callable[[Match[Any]], Any] | None,
    ) -> None:
        super().__init__(step)
        self._rules = rules
        self._expressions = expressions
        self._select = select
        self._watermark = WATERMARK_MIN

    def states(self) -> Sequence[StateInfo]:
        watermark = state_info(_WATERMARK, "window", _WATERMARK_SCHEMA, (KEY_GROUP_COLUMN,))
        return [*super().states(), watermark]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        assert self._timers is not None
        self._due = self._timers.event
        backend = self._backend
        self._waiting = Waiting(backend)
        self._runs = backend.value_table(RUNS)
        self._buffer = SharedBuffer(backend.entry_table(EVENTS), backend.entry_table(NODES))
        self._matcher = Matcher(self._rules, self._buffer)
        self._late_records = context.metrics.counter(LATE_COUNTER)
        self._timed_out = context.metrics.counter(TIMED_OUT_COUNTER)

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if batch.timestamps is None and len(batch):
            raise PlanError(
                f"`{self._user.step}` needs event time, but its input has none",
                fix='add .event_time(..., max_out_of_order="10s") before the pattern',
            )
        if batch.timestamps is None:
            return
        is_late = batch.timestamps <= self._watermark
        if is_late.any():
            late = np.flatnonzero(is_late)
            self._late_records.inc(len(late))
            self.output.emit_side(LATE, batch.take(late))
            batch = batch.take(np.flatnonzero(~is_late))
        for piece in pieces(batch):
            self._keep(piece)

    def _keep(self, batch: Batch) -> None:
        """Let records wait for the watermark."""
        given, backend = self._step.inputs[0], self._backend
        records = given.reader(batch)
        keys = self._keys_of(batch, records, given.key)
        groups = [-1] * len(keys)
        if backend.needs_key_groups:
            groups = key_groups_of(hash_keys(keys), self.context.max_parallelism).tolist()
        assert batch.timestamps is not None
        times, answers = batch.timestamps.tolist(), self._expressions.answers(batch)
        try:
            for key, group, time, record, bits in zip(
                keys, groups, times, records, answers, strict=True
            ):
                backend.set_key(key, group)
                self._waiting.add(key, time, record, bits)
                due = self._due.get(key, "")
                if due is None or time < due:
                    self._due.set(key, "", time)
        finally:
            backend.clear_key()

    # --- time ----------------------------------------------------------------------------------

    def on_watermark(self, timestamp: int) -> None:
        self._watermark = max(self._watermark, timestamp)
        super().on_watermark(timestamp)

    def _call_on_timer(self, key: Any, timer: Timer) -> None:
        """Handle what is due of a key; if that is much, only some of it."""
        matcher = self._matcher
        self._buffer.begin()
        matcher.runs = load_runs(self._runs)
        for _ in range(RECORDS_PER_TIMER):
            if not self._handle_next(key):
                break
        self._buffer.flush()
        if not matcher.runs.idle:
            self._runs.put(matcher.runs.plain())
        else:
            self._runs.delete()
        times = (matcher.next_deadline(), self._waiting.next_time(key))
        left = [time for time in times if time is not None]
        if matcher.runs.complete:
            left.append(WATERMARK_MAX)
        if left:
            self._due.set(key, "", min(left))

    def _handle_next(self, key: Any) -> bool:
        """Handle the next record, or the next end of a time, of a key; false if none is due."""
        matcher, emitter = self._matcher, self._emitter
        deadline, time = matcher.next_deadline(), self._waiting.next_time(key)
        if deadline is not None and (time is None or deadline <= time):
            if deadline > self._watermark:
                return False
            emitter.time = deadline
            matched, timed_out = matcher.on_deadline(deadline)
            for node in timed_out:
                emitter.emit(_TIMED_OUT, self._match(key, node))
            self._timed_out.inc(len(timed_out))
        elif time is not None:
            if time > self._watermark:
                return False
            emitter.time = time
            matched = matcher.on_record(*self._waiting.pop(key))
        elif self._watermark == WATERMARK_MAX and matcher.runs.complete:
            emitter.time = None
            matched = matcher.on_end()
        else:
            return False
        for node in matched:
            self._emit(self._match(key, node))
        return True

    # --- results -------------------------------------------------------------------------------

    def _match(self, key: Any, node: NodeId) -> Match[Any]:
        """What a node stands for; it is released."""
        match = Match(key, self._matcher.taken(node), *self._matcher.span(node))
        self._buffer.release(node)
        return match

    def _emit(self, match: Match[Any]) -> None:
        if self._emitter.time is None:
            self._emitter.time = match.end
        result: Any = match
        if self._select is not None:
            try:
                result = self._select(match)
            except HeadgateError:
                raise
            except FAILURES as error:
                raise user_error(self._user.step, self._user.origin, match, error) from error
        self._emitter.add(match, [result])

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Tables of what waits, of runs, and of what they took; the watermark, once per key group."""
        snapshot = super().snapshot(checkpoint_id)
        own, watermark = self.context.key_groups, self._watermark

        def make(_: int | None) -> pa.Table:
            groups = np.arange(own.first, own.last + 1, dtype=np.int32)
            times = np.full(len(groups), watermark)
            return pa.Table.from_arrays([pa.array(groups), times], schema=_WATERMARK_SCHEMA)

        snapshot.tables[_WATERMARK] = TableCut(make, keys=(KEY_GROUP_COLUMN,))
        return snapshot

    def restore(self, state: RestoredState) -> Awaitable[None]:
        """Take over what waits and what is under way.

        Raises:
            StateError: it is of a pattern of another form.
        """
        self._check_shape(state)
        table = state.tables.get(_WATERMARK)
        if table is not None and table.num_rows:
            self._watermark = int(table.column("watermark").to_numpy().min())
        return self._restored(super().restore(state))

    async def _restored(self, waiting: Awaitable[None]) -> None:
        await waiting
        self._waiting.restored(self._keys_that_wait())
        self._backend.clear_key()

    def _keys_that_wait(self) -> Iterator[Any]:
        keys = {token(key): key for key, _ in self._backend.addresses(WAITING)}
        for key in keys.values():
            self._set_key(key)
            yield key

    def _check_shape(self, state: RestoredState) -> None:
        old = state.states.get(RUNS)
        new = next(info for info in self.states() if info.name == RUNS)
        if old is not None and old.version != new.version:
            raise StateError(
                f"what is under way is of a pattern of another form step=`{self._user.step}`",
                where=str(self._user.origin),
                fix="conditions may change, stages may not: give the step another name, to begin anew",
            )
