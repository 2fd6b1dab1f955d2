"""Finds patterns: buffers records until the watermark reaches them, then matches them in order.

Each key has one timer for its next event: its first buffered record, or the end of the time of a
run. So records and deadlines of a key are handled in event-time order, whatever the watermarks, and
the work that a watermark makes due is cut into slices between which barriers pass
(`process/timers.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from ...errors import HeadgateError, PlanError, StateError
from ...state.keyed.keys import token
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot
from ...state.values import Index
from ..async_calls.map_async import TIMED_OUT
from ..base import OperatorContext
from ..elements import WATERMARK_MAX, Batch
from ..functions.user_code import user_error, user_failures
from ..per_record.base import pieces
from ..process.context import Timer
from ..process.emitter import SideOutput
from ..process.operator import ProcessOperator, ProcessStep
from ..time_progress import KeyGroupTable
from ..windows.late import LateOutput
from .buffer import NodeId, SharedBuffer
from .conditions import Expressions
from .match import Match
from .matcher import Matcher, Rules
from .store import EVENTS, NODES, RUNS, WAITING, Waiting, load_runs

TIMED_OUT_COUNTER: Final = "pattern_matches_timed_out"
PARTIAL_OPTION: Final = "headgate.match.partial-max"
PARTIAL_MAX: Final = 100_000
RECORDS_PER_TIMER: Final = 256
"""The most records of one key handled at a time; then its timer is set again."""
_WATERMARK: Final = "match_watermark"
_LIMITS: Final = KeyGroupTable.of_times("match_limits", "window", "within", "gap")
"""The times that the pattern sets, ms; -1 for none."""
_TIMED_OUT: Final[SideOutput[Any]] = SideOutput()
_TIMED_OUT.name = TIMED_OUT


class MatchOperator(ProcessOperator):
    """Runs a pattern.

    Args:
        step: the records it takes; its `declared` are `MatchStates`.
        rules: the pattern.
        expressions: those of its conditions.
        select: turns a match into a result; None: matches are emitted as they are.
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

    @property
    def _watermark_table(self) -> str:
        return _WATERMARK

    @property
    def _limits(self) -> tuple[int, ...]:
        limits = self._rules.within_ms, self._rules.gap_ms
        return tuple(-1 if limit is None else limit for limit in limits)

    def states(self) -> Sequence[StateInfo]:
        return [*super().states(), _LIMITS.info()]

    optional_sides = frozenset({TIMED_OUT})

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        assert self._timers is not None
        self._due = self._timers.event
        backend = self._backend
        self._waiting = Waiting(backend)
        self._runs = backend.value_table(RUNS)
        self._buffer = SharedBuffer(backend.entry_table(EVENTS), backend.entry_table(NODES))
        self._matcher = Matcher(self._rules, self._buffer)
        self._late_output = LateOutput(context, self.output)
        self._timed_out = context.metrics.counter(TIMED_OUT_COUNTER)
        self._partial_max = int(context.options.get(PARTIAL_OPTION, PARTIAL_MAX))

    # --- records -------------------------------------------------------------------------------

    def process(self, batch: Batch, input_index: int) -> None:
        if batch.timestamps is None and len(batch):
            raise PlanError(
                f"`{self._user.step}` needs event time, but its input has none",
                fix='add .event_time(..., max_out_of_order="10s") before the pattern',
            )
        if batch.timestamps is None:
            return
        now = self._watermark_of(batch)
        for piece in pieces(self._late_output.split(batch, batch.timestamps <= now, now)):
            self._keep(piece)

    def _watermark_of(self, batch: Batch) -> int | Index:
        """Return how far event time is for the key of each record, or for all."""
        if not self._progress.differs:
            return self._progress.watermark
        given, keys = self._step.inputs[0], list[Any]()
        for piece in pieces(batch):
            keys += self._keys_of(piece, given.reader(piece), given.key)
        return self._progress.of_keys(keys)

    def _keep(self, batch: Batch) -> None:
        """Buffer records until the watermark."""
        given, backend = self._step.inputs[0], self._backend
        records = given.reader(batch)
        keys = self._keys_of(batch, records, given.key)
        groups = self._progress.groups_of(keys)
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

    def _call_on_timer(self, key: Any, timer: Timer) -> None:
        """Handle what is due of a key, or a part if there is much."""
        matcher = self._matcher
        matcher.runs = load_runs(self._runs)
        self._buffer.begin(matcher.runs.held)
        for _ in range(RECORDS_PER_TIMER):
            if not self._handle_next(key):
                break
            if matcher.size > self._partial_max:
                raise self._too_much(key)
        self._buffer.flush()
        if not matcher.runs.idle:
            matcher.runs.held = self._buffer.held
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
        """Handle the next record, or the next expiry, of a key; return False if none is due."""
        matcher, emitter, watermark = self._matcher, self._emitter, self._context.watermark
        at, time = matcher.next_deadline(), self._waiting.next_time(key)
        if at is not None and (time is None or at <= time):
            if at > watermark:
                return False
            emitter.time = at
            matched, timed_out = matcher.on_deadline(at)
            for node in timed_out:
                emitter.emit(_TIMED_OUT, self._match(key, node))
            self._timed_out.inc(len(timed_out))
        elif time is not None:
            if time > watermark:
                return False
            at = time
            matched = matcher.on_record(*self._waiting.pop(key))
        elif watermark == WATERMARK_MAX and matcher.runs.complete:
            matched = matcher.on_end()
        else:
            return False
        for node in matched:
            match = self._match(key, node)
            emitter.time = match.end if at is None else at
            self._emit(match)
        return True

    def _too_much(self, key: Any) -> StateError:
        return StateError(
            f"too many partial matches for one key of a pattern step=`{self._user.step}` key=`{key!r}` "
            f"partial=`{self._matcher.size}`",
            where=str(self._user.origin),
            fix='add within("1h"), or until(...) to a stage that repeats, or an after-match strategy; '
            f"or raise {PARTIAL_OPTION}",
        )

    # --- results -------------------------------------------------------------------------------

    def _match(self, key: Any, node: NodeId) -> Match[Any]:
        """Return the match of a node, which is released."""
        match = Match(key, self._matcher.taken(node), *self._matcher.span(node))
        self._buffer.release(node)
        return match

    def _emit(self, match: Match[Any]) -> None:
        result: Any = match
        if self._select is not None:
            try:
                result = self._select(match)
            except HeadgateError:
                raise
            except user_failures() as error:
                raise user_error(self._user.step, self._user.origin, match, error) from error
        self._emitter.add(match, [result])

    # --- state ---------------------------------------------------------------------------------

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot buffered records, runs, the records they took, and the times that the pattern sets."""
        snapshot = super().snapshot(checkpoint_id)
        snapshot.tables[_LIMITS.name] = _LIMITS.cut(self.context.key_groups, *self._limits)
        return snapshot

    def restore(self, state: RestoredState) -> Awaitable[None]:
        """Restore buffered records and runs.

        Raises:
            StateError: the pattern had another form.
        """
        self._check_shape(state)
        table = _LIMITS.restored(state)
        other_times = table is not None and any(
            set(table.column(field.name).to_pylist()) - {limit}
            for field, limit in zip(_LIMITS.columns, self._limits, strict=True)
        )
        # The snapshot does not have the windows of stages, so they are assumed to have changed.
        other_times = other_times or any(self._rules.windows)
        return self._restored(super().restore(state), other_times)

    async def _restored(self, waiting: Awaitable[None], other_times: bool) -> None:
        await waiting
        await self.context.run_in_thread(partial(self._take_over, other_times))

    def _take_over(self, other_times: bool) -> None:
        """Rebuild what is not state; set timers again if the times of the pattern have changed."""
        self._waiting.restored(self._keys_in(WAITING))
        for key in self._keys_in(RUNS) if other_times else ():
            self._matcher.runs = load_runs(self._runs)
            deadline, due = self._matcher.next_deadline(), self._due.get(key, "")
            if deadline is not None and (due is None or deadline < due):
                self._due.set(key, "", deadline)
        self._progress.leave()

    def _keys_in(self, table: str) -> Iterator[Any]:
        """Yield the keys that have entries in a table, each made the current one."""
        keys = {token(key): key for key, _ in self._backend.addresses(table)}
        for key in keys.values():
            self._set_key(key)
            yield key

    def _check_shape(self, state: RestoredState) -> None:
        old = state.states.get(RUNS)
        new = next(info for info in self.states() if info.name == RUNS)
        if old is not None and old.version != new.version:
            raise StateError(
                f"the partial matches are of a pattern of another form step=`{self._user.step}`",
                where=str(self._user.origin),
                fix="conditions may change, stages may not: give the step another name to start afresh",
            )
