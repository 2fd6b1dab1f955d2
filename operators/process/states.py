"""The states of a process function in one subtask, and the event time of the current key.

States are opened, handed to the function, cut and restored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ...errors import PlanError, StateError
from ...state.hashing import hash_key, hash_keys, key_group_of, key_groups_of
from ...state.keyed.base import ABSENT, KeyedBackend, Tables
from ...state.keyed.committed import CommittedTables
from ...state.keyed.descriptors import AggregatingState
from ...state.keyed.handles import BroadcastHandle, OperatorListHandle
from ...state.keyed.keys import Token
from ...state.keyed.ttl import Expiry
from ...state.keyed.undo import UndoLog, UndoTables
from ...state.queryable import NotKept
from ...state.snapshot import RestoredState, StateInfo, StateSnapshot, TableCut
from ...state.values import Index
from ..base import OperatorContext
from ..keyed_backend import ProcessingClock, open_keyed_backend
from ..per_record.base import UserFunction
from ..queries import QueriedEntries, old_values_max
from ..time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress
from .context import Context
from .declared import DeclaredStates

_SWEEP_MS: Final = 1_000


class _EventTime:
    """The watermark, and the event time of the current record."""

    def __init__(self, context: Context[Any]) -> None:
        self._context = context

    def now(self) -> int:
        return self._context.watermark

    def passed(self) -> int:
        return self._context._passed

    def use(self) -> int:
        timestamp = self._context.timestamp
        return self._context.watermark if timestamp is None else timestamp


def infos(declared: DeclaredStates) -> list[StateInfo]:
    """Return the declarations of all states but timers."""
    lists = [descriptor.handle().info for descriptor in declared.lists.values()]
    broadcast = [d.handle(lambda: False).info for d in declared.broadcast.values()]
    return [spec.info for spec in declared.specs().values()] + lists + broadcast


class FunctionStates:
    """All states of one copy of a process function.

    Args:
        declared: the declarations.
        function: the copy; gets the handles as attributes.
        user: the step, for errors.
        context: of the subtask.
        times: of the current record, for state that expires by event time.
        may_write: whether broadcast state can be written at the moment.
        undo: records the function's changes, if given.
    """

    def __init__(
        self,
        declared: DeclaredStates,
        function: Any,
        user: UserFunction,
        context: OperatorContext,
        times: Context[Any],
        may_write: Callable[[], bool],
        undo: UndoLog | None = None,
    ) -> None:
        self._context = context
        self._declared = declared.keyed
        self._user = user
        self._function = function
        self.backend: KeyedBackend = open_keyed_backend(context, declared.keys, declared.specs())
        read = [one.state for one in declared.queryable(None, "") if one.committed]
        self.committed = CommittedTables(self.backend, read, old_values_max(context.options))
        self._expiries: dict[str, Expiry] = {}
        self._items: dict[str, OperatorListHandle[Any] | BroadcastHandle[Any, Any]] = {}
        self._handles: dict[str, Any] = {}
        self._keyed: dict[int, str] = {}
        kept: Tables = self.committed if read else self.backend
        tables = kept if undo is None else UndoTables(kept, undo)
        processing, event = ProcessingClock(context.clock), _EventTime(times)
        for name, descriptor in declared.keyed.items():
            ttl = descriptor.ttl
            if ttl is not None:
                clock = event if ttl.time == "event" else processing
                self._expiries[name] = Expiry(declared.ttl_ms[name], ttl, clock)
            handle = descriptor.handle(tables, self._expiries.get(name))
            self._handles[descriptor.attribute] = handle
            self._keyed[id(handle)] = name
        for name, listed in declared.lists.items():
            self._items[name] = self._handles[listed.attribute] = listed.handle()
        for name, broadcast in declared.broadcast.items():
            self._items[name] = self._handles[broadcast.attribute] = broadcast.handle(may_write)
        for item in self._items.values():
            item.undo = undo
        for attribute, handle in self._handles.items():
            # In the instance, where they hide the descriptors, whatever its class does to set attributes.
            object.__setattr__(function, attribute, handle)
        self._cancel_sweep: Callable[[], None] | None = None
        if any(expiry.ttl.cleanup_per_second for expiry in self._expiries.values()):
            self._cancel_sweep = context.timers.call_later(_SWEEP_MS, self._sweep)

    def restore(self, state: RestoredState) -> Awaitable[None]:
        """Restore state; keyed state in a thread."""
        self.committed.restored(self._context.restored_checkpoint)
        for handle in self._items.values():
            handle.restore(state, self._context.operator_name)
        return self._context.run_in_thread(lambda: self._restore_keyed(state))

    def _restore_keyed(self, state: RestoredState) -> None:
        try:
            self.backend.restore(state, self._context.clock.now_ms())
        except StateError as error:
            fresh = StateError(
                f"{error.message} step=`{self._context.operator_name}`",
                where=error.where or str(self._user.origin),
                fix=error.fix,
            )
            raise fresh from error

    def snapshot(self) -> StateSnapshot:
        """Return a table per keyed state, and items for the rest."""
        self._check_handles()
        dead_until = {name: expiry.all_dead_until() for name, expiry in self._expiries.items()}
        snapshot = StateSnapshot()
        for name, cut in self.backend.snapshot(dead_until).items():
            if isinstance(cut, TableCut):
                snapshot.tables[name] = cut
            else:
                snapshot.files[name] = cut
        for name, handle in self._items.items():
            snapshot.items[name] = handle.cut()
        return snapshot

    def query(self, name: str, checkpoint_id: int) -> Any:
        """Return what the current key has in a state, without a change of it; see `Operator.query`."""
        descriptor, expiry = self._declared[name], self._expiries.get(name)
        dead_until = None if expiry is None else expiry.dead_until()
        value = self._read(name, checkpoint_id)
        if self.backend.specs[name].layout.entry is not None:
            entries = value if dead_until is None else _living(value, dead_until)
            return QueriedEntries(entries, is_map=descriptor.kind == "map")
        if value is not ABSENT and dead_until is not None:
            value = ABSENT if value[1] <= dead_until else value[0]
        if value is not ABSENT and isinstance(descriptor, AggregatingState):
            return descriptor.aggregate.result(value)
        return value

    def _read(self, name: str, checkpoint_id: int) -> Any:
        """Return the value of the current key, or an iterator of its entries."""
        if checkpoint_id:
            kept = self.committed.kept.get(name)
            if kept is None:
                raise NotKept
            return kept.as_of(checkpoint_id)
        if self.backend.specs[name].layout.entry is not None:
            return self.backend.entry_table(name).entries()
        return self.backend.value_table(name).get()

    def name_of(self, handle: object) -> str | None:
        """Return the name of the keyed state that a handle belongs to."""
        return self._keyed.get(id(handle))

    def keyed_attributes(self) -> Sequence[str]:
        """Return the attributes that are keyed state."""
        return [name for name, handle in self._handles.items() if id(handle) in self._keyed]

    def close(self) -> None:
        """Release resources."""
        if self._cancel_sweep is not None:
            self._cancel_sweep()
        self.backend.close()

    def _sweep(self) -> None:
        """Remove some expired entries, without a current key."""
        for name, expiry in self._expiries.items():
            has_entries = self.backend.specs[name].layout.entry is not None
            table = (self.backend.entry_table if has_entries else self.backend.value_table)(name)
            table.sweep(expiry.ttl.cleanup_per_second, expiry.all_dead_until())
        self._cancel_sweep = self._context.timers.call_later(_SWEEP_MS, self._sweep)

    def _check_handles(self) -> None:
        """Check the handles: an assignment to the attribute would look like state, and be lost at
        the next failure."""
        for attribute, handle in self._handles.items():
            try:
                found = getattr(self._function, attribute, None)
            except PlanError:  # the handle was deleted, and the declaration found
                found = None
            if found is not handle:
                raise StateError(
                    f"the attribute of a state was assigned to attribute=`{attribute}` "
                    f"step=`{self._user.step}`",
                    where=str(self._user.origin),
                    fix=f"write self.{attribute}.set(...)",
                )


def _living(entries: Iterator[tuple[Any, Any]], dead_until: int) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a table with a TTL that have not expired, without their last uses."""
    for entry, (value, last_used) in entries:
        if last_used > dead_until:
            yield entry, value


def progress_table(name: str) -> KeyGroupTable:
    """Return the table of the progress of event time."""
    return KeyGroupTable.of_times(name, "window", WATERMARK_COLUMN)


class ShownProgress:
    """Sets the current key, and shows its event time in the user's context.

    Args:
        table: the name of the table with the progress; empty if it is not part of the state.
        backend: the keyed state.
        context: the context of the subtask.
        shown: the user's context.
    """

    def __init__(
        self, table: str, backend: KeyedBackend, context: OperatorContext, shown: Context[Any]
    ) -> None:
        self._backend, self._context, self._shown = backend, context, shown
        self._time = TimeProgress(progress_table(table))
        self._time.open(context)

    @property
    def watermark(self) -> int:
        """The watermark of the subtask, which all keys have reached."""
        return self._time.watermark

    def advance(self, timestamp: int) -> None:
        """Advance event time to `timestamp` for all keys."""
        self._time.advance(timestamp)
        self._show(self.watermark)

    def _show(self, watermark: int) -> None:
        self._shown.watermark = watermark
        self._shown._passed = self.watermark

    # --- keys ----------------------------------------------------------------------------------

    def groups_of(self, keys: list[Any]) -> Sequence[int]:
        """Return the key groups of some keys, for `enter`; -1 where they are not needed."""
        if not self._time.differs and not self._backend.needs_key_groups:
            return [-1] * len(keys)
        groups: list[int] = self._groups(keys).tolist()
        return groups

    def places(
        self, keys: list[Any], numbers: Index | None
    ) -> tuple[Iterable[Any], Iterable[Token], Iterable[Any]]:
        """Return keys, and with each the token and the place for the cursor; see `KeyedBackend.places`.

        The loop that takes them is followed by `leave`.
        """
        groups = self.groups_of(keys)
        shown = self._shown_for(keys, groups) if self._time.differs else keys
        return (shown, *self._backend.places(keys, groups, numbers))

    def _shown_for(self, keys: list[Any], groups: Sequence[int]) -> Iterator[Any]:
        """Yield keys; the event time of each is shown until the next is asked for."""
        for key, group in zip(keys, groups, strict=True):
            self._show(self._time.now_of(group))
            yield key

    def _groups(self, keys: list[Any]) -> Index:
        return key_groups_of(hash_keys(keys), self._context.max_parallelism).astype(np.int64)

    def of_keys(self, keys: list[Any]) -> int | Index:
        """Return the watermark of each key, or of all."""
        return self._time.now(self._groups(keys) if self._time.differs else None)

    @property
    def differs(self) -> bool:
        """True if some keys have progressed further than the subtask."""
        return self._time.differs

    def enter(self, key: Any, group: int) -> None:
        """Set the current key."""
        self._backend.set_key(key, group)
        if self._time.differs:
            self._show(self._time.now_of(group))

    def enter_one(self, key: Any) -> None:
        """Set a single current key."""
        group = -1
        if self._time.differs or self._backend.needs_key_groups:
            group = key_group_of(hash_key(key), self._context.max_parallelism)
        self.enter(key, group)

    def leave(self) -> None:
        """Unset the current key."""
        self._backend.clear_key()
        self._show(self.watermark)

    # --- state ---------------------------------------------------------------------------------

    def cut(self) -> TableCut:
        """Return the event time of each key group."""
        return self._time.cut()

    def restore(self, state: RestoredState) -> None:
        """Restore event time; a key never goes back."""
        self._time.restore(state)
        self._show(self.watermark)
