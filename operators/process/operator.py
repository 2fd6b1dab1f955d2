"""Runs a copy of the user's object: sets the current key, calls it, emits its results.

The function may have one input, two keyed ones, or a keyed and a broadcast one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from itertools import chain, islice
from types import GeneratorType
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import HeadgateError, StateError
from ...state.keyed.undo import UndoLog, UndoTimers
from ...state.queryable import KeyScan
from ...state.snapshot import (
    ItemsCut,
    KeptState,
    RestoredState,
    StateInfo,
    StateSnapshot,
    state_info,
)
from ...state.values import Index
from ..base import OperatorContext
from ..elements import Batch, ColumnBatch
from ..functions.dead_letters import FAIL
from ..functions.key_function import KeyFunction
from ..functions.user_code import user_error, user_failures
from ..per_record.base import UserFunction, pieces
from ..rows import RowReader, to_list, to_rows
from .at_the_end import AtTheEnd
from .attempts import Attempts
from .context import (
    BroadcastContext,
    Context,
    EventTimers,
    ProcessingTimers,
    Timer,
    TimerClock,
    Timers,
)
from .declared import LATEST, WATERMARK_TABLE, DeclaredStates
from .emitter import Emitter
from .functions import KeyedProcess, Process, ProcessFunction
from .running import running_copy
from .states import FunctionStates, ShownProgress, infos, progress_table
from .timers import FunctionTimers, TimerFiring, timer_infos

Key: TypeAlias = tuple[str, ...] | Callable[[Any], Hashable]
"""The key columns of a column stream, or a function of a record."""
_NO_TIMERS: Final = "a timer was set, and the function has no on_timer"
_NO_KEY: Final = "there are no timers in on_broadcast and finish: they have no key"
_MODE: Final = "execution.runtime-mode"
_BATCH: Final = "BATCH"


class ProcessInput(msgspec.Struct, frozen=True):
    """One input of a process step: the reader of its records, and their keys (None: no keys)."""

    reader: RowReader
    key: Key | None


class ProcessStep(msgspec.Struct, frozen=True):
    """The parts of a process step. Picklable.

    Attributes:
        function: the user's object, copied for each subtask.
        user: the step, its origin and result columns.
        inputs: one or two.
        declared: the states.
        sides: the names of the side outputs.
        timed: records have event times.
    """

    function: ProcessFunction[Any, Any]
    user: UserFunction
    inputs: tuple[ProcessInput, ...]
    declared: DeclaredStates
    sides: tuple[str, ...]
    timed: bool


class ProcessOperator(AtTheEnd):
    """The common part of process operators: state, timers, life cycle."""

    def __init__(self, step: ProcessStep) -> None:
        self._step = step
        self._user = step.user
        self._function: Any = running_copy(step.function, step.declared.attributes)
        self._key_functions = {
            id(given.key): KeyFunction(given.key) for given in step.inputs if callable(given.key)
        }
        self._writable = False
        self._opened = False
        self._attempts: Attempts | None = None
        """The error policy; None: an error of the function fails the job at once."""
        self._states: FunctionStates | None = None
        self._timers: FunctionTimers | None = None
        self._firing: TimerFiring | None = None
        self._timed = step.timed
        self.emits_at_end = type(step.function).finish is not ProcessFunction.finish

    @property
    def pending_timers(self) -> int | None:
        """See `Operator`; None: the function sets none."""
        return None if self._timers is None else self._timers.pending

    @property
    def _watermark_table(self) -> str:
        """The table of the snapshot with the watermark, if results may depend on it after a
        restore; or empty."""
        return WATERMARK_TABLE if self._step.timed else ""

    def states(self) -> Sequence[StateInfo]:
        declared, name = self._step.declared, self._watermark_table
        timers = timer_infos(declared.keys) if declared.timers else []
        watermark = [progress_table(name).info()] if name else []
        latest = [state_info(LATEST, "split")] if self._keeps_latest else []
        return [*infos(declared), *timers, *watermark, *latest]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        declared = self._step.declared
        self._emitter = Emitter(self._user, self._step.sides, self._step.timed, self.output)
        self._context: Context[Any] = self._new_context()
        undo = None
        if self._user.on_error != FAIL:
            undo = UndoLog(lambda: self._context.key, self._set_key)
            self._attempts = Attempts(self._user, undo, self._emitter, context, self.output)
        if declared.timers:
            self._timers = FunctionTimers(declared.keys, context, self._on_clock)
            self._firing = TimerFiring(self._timers, context, self, self.output)
        self._give_timers(self._context, self._timers, StateError(_NO_TIMERS))
        self._subtask_context: BroadcastContext[Any] = BroadcastContext(
            self._emitter, self._for_each_key
        )
        self._give_timers(self._subtask_context, None, StateError(_NO_KEY))
        self._states = FunctionStates(
            declared,
            self._function,
            self._user,
            context,
            self._context,
            lambda: self._writable,
            undo,
        )
        if self._timers is not None:
            self._states.committed.points += self._timers.points
        self._progress = ShownProgress(self._watermark_table, self._backend, context, self._context)

    def _new_context(self) -> Context[Any]:
        """Return the context of the user's function for records and timers."""
        return Context(self._emitter)

    def _give_timers(
        self, context: Context[Any], timers: FunctionTimers | None, refusal: StateError
    ) -> None:
        event: Timers | None = None
        processing: Timers | None = None
        arm: Callable[[], None] = lambda: None  # noqa: E731  never called without timers
        if timers is not None:
            event, processing, arm = timers.event, timers.processing, timers.arm
            if self._attempts is not None:
                undo = self._attempts.undo
                event = UndoTimers(timers.event, undo)
                processing = UndoTimers(timers.processing, undo)
        context.event_time = EventTimers(context, event, refusal)
        if timers is not None and self.context.options.get(_MODE) == _BATCH:
            processing, refusal = None, _no_clock(self._user)
        context.processing_time = ProcessingTimers(
            context, processing, refusal, self.context.clock, arm
        )

    def restore(self, state: RestoredState) -> Awaitable[None]:
        """Restore the state and the progress of event time."""
        assert self._states is not None
        self._progress.restore(state)
        for item in state.items.get(LATEST, ()):
            self._saw(msgspec.msgpack.decode(item, type=int))
        waiting = self._states.restore(state)
        return waiting if self._timers is None else self._restore_timers(waiting, state)

    async def _restore_timers(self, waiting: Awaitable[None], state: RestoredState) -> None:
        timers = self._timers
        assert timers is not None
        await waiting
        await self.context.run_in_thread(lambda: timers.restore(state))
        timers.arm()

    def _open_function(self) -> None:
        """Call the user's `open`, after a restore, so that it sees the state."""
        if self._opened:
            return
        self._opened = True
        self._writable = True
        try:
            self._function.open(self.context)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, None, error) from error
        finally:
            self._writable = False

    # records

    def _keys_of(self, batch: Batch, records: list[Any], key: Key | None) -> list[Any]:
        if key is None:
            return [None] * len(records)  # a stream without keys
        if not callable(key):
            assert isinstance(batch, ColumnBatch)
            lists = [to_list(batch.data.column(name)) for name in key]
            return lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))
        keys: list[Any] = []
        try:
            self._key_functions[id(key)].extend(keys, records)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(
                self._user.step, self._user.origin, records[len(keys)], error
            ) from error
        self._step.declared.keys.check(keys)
        return keys

    def _process_keyed(
        self,
        batch: Batch,
        given: ProcessInput,
        function: Callable[[Any, Any], Iterable[Any] | None],
    ) -> None:
        """Call `function(record, context)` for each record, with its key."""
        self._open_function()
        for piece in pieces(batch):
            records = given.reader(piece)
            keys = self._keys_of(piece, records, given.key)
            if self._attempts is None:
                numbers = _numbers_of(piece, given.key)
                self._process_piece(keys, numbers, records, piece, function)
            else:
                self._attempt_piece(self._attempts, keys, records, piece, function)
        self._flush()

    def _process_piece(
        self,
        keys: list[Any],
        numbers: Index | None,
        records: list[Any],
        batch: Batch,
        function: Callable[[Any, Any], Any],
    ) -> None:
        context, emitter, cursor = self._context, self._emitter, self._backend.cursor
        times = self._times_of(batch)
        places = self._progress.places(keys, numbers)
        timed, add = emitter.timed, emitter.add
        emitter.follow(context)
        results, stamps, limit = emitter.collected()
        try:
            # All that belongs to a record is set by the loop itself, without a call.
            for context.key, cursor.token, cursor.place, context.timestamp, record in zip(
                *places, times, records, strict=True
            ):
                try:
                    made = function(record, context)
                    kind = type(made)
                    if kind is GeneratorType:
                        more, room = made, limit - len(results)
                        made, kind = list(islice(more, room)), list
                        if len(made) == room:
                            made, kind = chain(made, more), chain
                except HeadgateError:
                    raise
                except user_failures() as error:
                    raise user_error(self._user.step, self._user.origin, record, error) from error
                if kind is tuple or kind is list:
                    results += made
                    if len(results) < limit:
                        if timed:
                            stamps += [context.timestamp] * len(made)
                        continue
                    del results[len(results) - len(made) :]
                elif made is None:
                    continue
                add(record, made)
                results, stamps, limit = emitter.collected()
        finally:
            emitter.time = None
            self._no_key()

    def _attempt_piece(
        self,
        attempts: Attempts,
        keys: list[Any],
        records: list[Any],
        batch: Batch,
        function: Callable[[Any, Any], Iterable[Any] | None],
    ) -> None:
        """Call the function for records under an error policy."""
        context, emitter = self._context, self._emitter
        try:
            for place, (key, time, record) in enumerate(
                zip(keys, self._times_of(batch), records, strict=True)
            ):
                context.timestamp = emitter.time = time

                def call(key: Any = key, record: Any = record) -> list[Any]:
                    self._set_key(key)
                    made = emitter.listed(record, function(record, context))
                    return attempts.check(made)

                results, error = attempts.call(call, record)
                if error is not None:
                    attempts.give_up(whole_record(batch, place), key, time, error)
                elif results:
                    emitter.add(record, results)
        finally:
            self._no_key()

    def _times_of(self, batch: Batch) -> Sequence[int | None]:
        """Return the event times of a batch's records; from here on results have times if these do."""
        self._emitter.timed = batch.timestamps is not None
        if batch.timestamps is None:
            return [None] * len(batch)
        if self.emits_at_end and len(batch):
            self._saw(int(batch.timestamps.max()))
        times: list[int | None] = batch.timestamps.tolist()
        return times

    def _no_key(self) -> None:
        self._progress.leave()
        self._context.timestamp = None

    # timers

    def on_watermark(self, timestamp: int) -> None:
        self._progress.advance(timestamp)
        if self._firing is None:
            self.output.emit_watermark(timestamp)
        else:
            self._firing.on_watermark(timestamp)

    def on_idle(self, idle: bool) -> None:
        if self._firing is None:
            self.output.emit_idle(idle)
        else:
            self._firing.on_idle(idle)

    def _on_clock(self) -> None:
        assert self._firing is not None
        self._firing.on_clock()

    def full(self) -> bool:
        return self._firing is not None and self._firing.holds_watermark

    def settled(self) -> bool:
        return self._firing is None or not self._firing.unfinished

    def begin_timers(self) -> None:
        """See `TimerOwner`."""
        self._open_function()

    def handle_timer(self, timestamp: int, key: Any, tag: str, clock: TimerClock) -> None:
        """Call `on_timer` with the key of a timer; see `TimerOwner`."""
        self._context.timestamp = timestamp if clock == "event" else None
        self._emitter.time = timestamp
        timer, attempts = Timer(tag, timestamp, clock), self._attempts
        if attempts is None:
            self._set_key(key)
            self._call_on_timer(key, timer)
            return

        def call() -> list[Any]:
            self._set_key(key)
            return self._made_on_timer(attempts, key, timer)

        results, error = attempts.call(call, timer)
        if error is not None:
            time = timestamp if self._emitter.timed else None
            attempts.give_up(timer, key, time, error)
        elif results:
            self._add_timer_results(key, timer, results)

    def end_timers(self) -> None:
        """See `TimerOwner`."""
        self._no_key()
        self._flush()

    def _flush(self) -> None:
        """Emit the results so far."""
        self._emitter.flush()

    def _set_key(self, key: Any) -> None:
        """Set the current key."""
        self._progress.enter_one(key)
        self._context.key = key

    def _call_on_timer(self, key: Any, timer: Timer) -> None:
        try:
            made = self._function.on_timer(timer, self._context)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, (key, timer), error) from error
        if made is not None:
            self._emitter.add((key, timer), made)

    def _made_on_timer(self, attempts: Attempts, key: Any, timer: Timer) -> list[Any]:
        made = self._function.on_timer(timer, self._context)
        return attempts.check(self._emitter.listed((key, timer), made))

    def _add_timer_results(self, key: Any, timer: Timer, results: list[Any]) -> None:
        self._emitter.add((key, timer), results)

    # life

    def query(self, state: str, key: Any, checkpoint_id: int = 0) -> Any:
        """See `Operator.query`; between slices, no key is current."""
        assert self._states is not None
        self._progress.enter_one(key)
        try:
            return self._states.query(state, checkpoint_id)
        finally:
            self._no_key()

    def scan(self, state: str, checkpoint_id: int = 0) -> KeyScan:
        assert self._states is not None
        return self._states.committed.scan(state, checkpoint_id)

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Return a table per keyed state, two of timers, one of the watermark, and items for the rest."""
        assert self._states is not None
        snapshot = self._states.snapshot()
        if self._timers is not None:
            self._timers.snapshot_into(snapshot)
        if name := self._watermark_table:
            snapshot.tables[name] = self._progress.cut()
        if self._keeps_latest and self._latest is not None:
            snapshot.items[LATEST] = ItemsCut([msgspec.msgpack.encode(self._latest)])
        # Behind the cuts that are written: what changes from here on goes into the logs of these.
        self._states.committed.cut(checkpoint_id)
        return snapshot

    def keep(self) -> dict[str, KeptState]:
        if self._states is None:
            return {}
        timers = {} if self._timers is None else self._timers.keep()
        return {**self._states.backend.keep(), **timers}

    def finish(self) -> None:
        """End the input: event-time timers fire; those of the machine's clock never will."""
        self._open_function()
        if self._firing is not None:
            self._firing.complete()
        if self._timers is not None:
            self._timers.drop_processing()
        if self.emits_at_end:
            self._finish_function()

    def close(self) -> None:
        if self._timers is not None:
            self._timers.disarm()
        if self._firing is not None:
            self._firing.close()
        try:
            if self._opened:
                self._function.close()
        finally:
            if self._timers is not None:
                self._timers.close()
            if self._states is not None:
                self._states.close()

    def forget(self) -> None:
        for name in ("_context", "_subtask_context"):
            if (context := vars(self).get(name)) is not None:
                context._forget()
        super().forget()


def _no_clock(function: UserFunction) -> StateError:
    return StateError(
        f"step `{function.step}` sets a timer by the machine's clock, which batch jobs do not have",
        where=str(function.origin),
        fix=f"use ctx.event_time, or run the job as a stream: {_MODE}=STREAMING",
    )


def _numbers_of(batch: Batch, key: Key | None) -> Index | None:
    """Return the keys of a batch if they are a column of numbers that fit int64; or else None."""
    if not isinstance(batch, ColumnBatch) or not isinstance(key, tuple) or len(key) > 1:
        return None
    column = batch.data.column(key[0])
    if not pa.types.is_integer(column.type) or column.type == pa.uint64() or column.null_count:
        return None
    numbers: Index = column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return numbers


def whole_record(batch: Batch, place: int) -> Any:
    """Return a record with all its columns, also those that the function does not read."""
    if not isinstance(batch, ColumnBatch):
        return batch.records[place]
    return to_rows(batch.data.slice(place, 1))[0]


class KeyedProcessOperator(ProcessOperator):
    """Runs a `KeyedProcess`, or a `Process`, whose records have no key."""

    _function: KeyedProcess[Any, Any, Any] | Process[Any, Any]

    def process(self, batch: Batch, input_index: int) -> None:
        self._process_keyed(batch, self._step.inputs[0], self._function.on_record)


class CoProcessOperator(ProcessOperator):
    """Runs a `CoProcess`: each input has its method, all else is shared."""

    def process(self, batch: Batch, input_index: int) -> None:
        functions = (self._function.on_first, self._function.on_second)
        self._process_keyed(batch, self._step.inputs[input_index], functions[input_index])


class BroadcastProcessOperator(ProcessOperator):
    """Runs a `BroadcastProcess`: input 0 is keyed, input 1 is broadcast to all subtasks."""

    def process(self, batch: Batch, input_index: int) -> None:
        if input_index == 0:
            self._process_keyed(batch, self._step.inputs[0], self._function.on_record)
        else:
            self._process_broadcast(batch)

    def on_watermark(self, timestamp: int) -> None:
        self._subtask_context.watermark = max(self._progress.watermark, timestamp)
        super().on_watermark(timestamp)

    def restore(self, state: RestoredState) -> Awaitable[None]:
        waiting = super().restore(state)
        self._subtask_context.watermark = self._progress.watermark
        return waiting

    def _process_broadcast(self, batch: Batch) -> None:
        self._open_function()
        context, emitter, attempts = self._subtask_context, self._emitter, self._attempts
        for piece in pieces(batch):
            records = self._step.inputs[1].reader(piece)
            for place, (record, time) in enumerate(
                zip(records, self._times_of(piece), strict=True)
            ):
                context.timestamp = emitter.time = time
                if attempts is not None:
                    self._attempt_broadcast(attempts, piece, place, record, time)
                    continue
                made = self._call_on_broadcast(record)
                if made is not None:
                    emitter.add(record, made)
        self._flush()

    def _attempt_broadcast(
        self, attempts: Attempts, batch: Batch, place: int, record: Any, time: int | None
    ) -> None:
        """Handle a broadcast record under an error policy."""

        def call() -> list[Any]:
            self._writable = True
            try:
                made = self._function.on_broadcast(record, self._subtask_context)
                return attempts.check(self._emitter.listed(record, made))
            finally:
                self._writable = False

        results, error = attempts.call(call, record)
        if error is not None:
            attempts.give_up(whole_record(batch, place), None, time, error)
        elif results:
            self._emitter.add(record, results)

    def _call_on_broadcast(self, record: Any) -> Iterable[Any] | None:
        """Return the results for one record; a generator runs to its end here, so that it may write."""
        self._writable = True
        try:
            made = self._function.on_broadcast(record, self._subtask_context)
            return made if made is None or not hasattr(made, "__next__") else list(made)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, record, error) from error
        finally:
            self._writable = False

    def _for_each_key(self, state: Any, function: Callable[[Any, Any], None]) -> None:
        """Forbid changes of broadcast state, which must not depend on keys; see
        `BroadcastContext.for_each_key`."""
        if self._attempts is not None:
            # A failure in one subtask alone would let broadcast state differ between subtasks.
            self._attempts.undo.keep_always()
        before, self._writable = self._writable, False
        try:
            super()._for_each_key(state, function)
        finally:
            self._writable = before
