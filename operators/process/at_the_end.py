"""The calls of process functions besides records and timers: end of input, and checkpoint notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...errors import HeadgateError, StateError
from ...state.keyed.base import KeyedBackend
from ...state.snapshot import CommitPermit
from ..base import Operator
from ..functions.user_code import user_error, user_failures
from ..per_record.base import UserFunction
from .context import BroadcastContext, Context
from .emitter import Emitter
from .states import FunctionStates


class AtTheEnd(Operator):
    """Calls `finish` and the checkpoint notices of a process function."""

    _function: Any
    _user: UserFunction
    _emitter: Emitter
    _context: Context[Any]
    _subtask_context: BroadcastContext[Any]
    """The context of `finish` and `on_broadcast`."""
    _states: FunctionStates | None
    _timed: bool
    """True if records have event times."""
    _latest: int | None = None
    """The latest event time of records, kept if there is a `finish`, whose results get it."""
    _completed = 0
    """The newest checkpoint that the function was notified of."""

    @property
    def _backend(self) -> KeyedBackend:
        assert self._states is not None
        return self._states.backend

    def _flush(self) -> None:
        """Emit the results so far."""
        raise NotImplementedError

    def _set_key(self, key: Any) -> None:
        """Set the current key."""
        raise NotImplementedError

    def _no_key(self) -> None:
        """Unset the current key."""
        raise NotImplementedError

    @property
    def _keeps_latest(self) -> bool:
        return self.emits_at_end and self._timed

    def _saw(self, time: int) -> None:
        self._latest = time if self._latest is None else max(self._latest, time)

    def _finish_function(self) -> None:
        """Call the user's `finish` and emit its results."""
        context, emitter = self._subtask_context, self._emitter
        emitter.timed = self._timed
        context.watermark = self._context.watermark
        context.timestamp = emitter.time = self._time_at_end() if self._timed else None
        try:
            made = self._function.finish(context)
            self._add_last_results(made)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, None, error) from error
        self._flush()

    def _add_last_results(self, made: Iterable[Any] | None) -> None:
        if made is not None:
            self._emitter.add(None, made)

    def _time_at_end(self) -> int:
        """Return the event time of results of `finish`: 1970 if there was no record."""
        return 0 if self._latest is None else self._latest

    def on_checkpoint_complete(self, permit: CommitPermit) -> None:
        if self._states is not None:
            self._states.committed.completed(permit.checkpoint_id)
        if permit.checkpoint_id > self._completed:
            self._completed = permit.checkpoint_id
            self._tell(self._function.on_checkpoint_complete, permit.checkpoint_id)

    def drop_point(self, checkpoint_id: int) -> None:
        if self._states is not None:
            self._states.committed.aborted(checkpoint_id)

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        super().on_checkpoint_aborted(checkpoint_id)
        self._tell(self._function.on_checkpoint_aborted, checkpoint_id)

    def _tell(self, method: Callable[[int], None], checkpoint_id: int) -> None:
        try:
            method(checkpoint_id)
        except HeadgateError:
            raise
        except user_failures() as error:
            raise user_error(self._user.step, self._user.origin, None, error) from error

    def _for_each_key(self, state: Any, function: Callable[[Any, Any], None]) -> None:
        """See `BroadcastContext.for_each_key`."""
        assert self._states is not None
        name = self._states.name_of(state)
        if name is None:
            raise StateError(
                f"for_each_key needs a keyed state of this function, got `{type(state).__name__}` "
                f"step=`{self._user.step}`",
                where=str(self._user.origin),
                fix="keyed states: "
                + (", ".join(f"self.{a}" for a in self._states.keyed_attributes()) or "none"),
            )
        # for state that expires by event time
        self._context.timestamp = self._subtask_context.timestamp
        try:
            for key, _ in self._backend.addresses(name):
                self._set_key(key)
                function(key, state)
        finally:
            self._no_key()
