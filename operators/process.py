"""KeyedProcess: the user's own operator over keyed records, with state it declares."""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa

from ..errors import HeadgateError, PlanError, StateError
from ..state.descriptors import BroadcastState, KeyedState, OperatorListState, StateDescriptor
from ..state.hashing import hash_keys, key_groups_of
from ..state.keyed.base import KeyedBackend
from ..state.keyed.key_shape import KeyShape, keys_of_columns, keys_of_type
from ..state.keyed.ttl import Expiry
from ..state.operator_state import BroadcastHandle, OperatorListHandle
from ..state.snapshot import RestoredState, StateInfo, StateSnapshot, TableCut
from .base import Operator, OperatorContext
from .clock import Clock
from .durations import parse_duration
from .elements import WATERMARK_MIN, Batch, ColumnBatch
from .flat_map import Results
from .functions import is_async
from .keyed_backend import open_keyed_backend
from .per_record import UserFunction, pieces
from .rows import to_list
from .user_code import FAILURES, user_error

K = TypeVar("K")
In = TypeVar("In")
Out = TypeVar("Out")

_SWEEP_MS: Final = 1_000


class Context(Generic[K]):
    """What a process function may know about the record at hand.

    Attributes:
        key: the record's key.
        timestamp: its event time, ms since 1970 UTC; None if the stream has no event time.
        watermark: how far event time has come, ms; far in the past before the first watermark.
    """

    __slots__ = ("key", "timestamp", "watermark")

    key: K

    def __init__(self) -> None:
        self.timestamp: int | None = None
        self.watermark: int = WATERMARK_MIN


class KeyedProcess(Generic[K, In, Out]):
    """A function of keyed records with state. Each subtask works with a copy of the instance given.

    State is declared in the class body with descriptors (`hg.ValueState` and the others). Attributes set
    in `__init__` or `open` are configuration, not state: they are not in checkpoints.
    """

    def open(self, ctx: OperatorContext) -> None:
        """Called in each subtask before its first record, after a restore too."""

    def on_record(self, record: In, ctx: Context[K]) -> Iterable[Out] | None:
        """Handle one record; return or yield what goes on, if anything."""
        raise NotImplementedError

    def close(self) -> None:
        """Called when the subtask ends, also after failures. Must not raise."""


@dataclass(frozen=True)
class Declared:
    """The states of one process function, checked at plan time. Picklable.

    `ttl_ms` has the durations of the keyed states that expire.
    """

    keyed: dict[str, KeyedState]
    lists: dict[str, OperatorListState[Any]]
    broadcast: dict[str, BroadcastState[Any, Any]]
    ttl_ms: dict[str, int]
    keys: KeyShape


def declared_states(
    function: KeyedProcess[Any, Any, Any],
    key_fields: Sequence[pa.Field] | None,
    where: str,
    *,
    event_time: bool,
) -> Declared:
    """Read the descriptors of a function's class, its base classes included.

    Args:
        function: the user's object.
        key_fields: the key columns; None: keys are of the type that the class says.
        where: the user's line, for errors.
        event_time: whether the stream has event time.

    Raises:
        PlanError: two states of one name, a type that cannot be a key or is not known, or values that
            expire by event time where there is none.
    """
    found: dict[str, StateDescriptor] = {}
    for attribute, descriptor in _descriptors(type(function)).items():
        other = found.get(descriptor.name)
        if other is not None:
            raise PlanError(
                f"two states have the name `{descriptor.name}`: attributes `{other.attribute}` and "
                f"`{attribute}` of `{type(function).__name__}`",
                where=where,
                fix="leave out name=, or give another",
            )
        found[descriptor.name] = descriptor
    try:
        keys = keys_of_type(_key_type(type(function)))
        if key_fields is not None:
            keys = keys_of_columns(key_fields)
        keyed = {n: d for n, d in found.items() if isinstance(d, KeyedState)}
        ttl_ms = {
            name: parse_duration(descriptor.ttl.after, f"ttl of state `{name}`")
            for name, descriptor in keyed.items()
            if descriptor.ttl is not None
        }
        for name, milliseconds in ttl_ms.items():
            if milliseconds < 1:
                raise PlanError(f"ttl of state `{name}` must be at least 1 ms")
            ttl = keyed[name].ttl
            if ttl is not None and ttl.time == "event" and not event_time:
                raise PlanError(
                    f"state `{name}` expires by event time, and the stream has none",
                    fix='call .event_time("column", max_out_of_order="10s") before',
                )
        for name, descriptor in keyed.items():
            descriptor.spec(keys, ttl_ms.get(name))
        lists = {n: d for n, d in found.items() if isinstance(d, OperatorListState)}
        for listed in lists.values():
            listed.handle()
        broadcast = {n: d for n, d in found.items() if isinstance(d, BroadcastState)}
        for shared in broadcast.values():
            shared.handle(lambda: False)
    except HeadgateError as error:
        raise PlanError(error.message, where=error.where or where, fix=error.fix) from error
    return Declared(keyed, lists, broadcast, ttl_ms, keys)


def _descriptors(kind: type[Any]) -> dict[str, StateDescriptor]:
    """Descriptors by attribute; a subclass's attribute hides that of its base."""
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes.update(vars(base))
    return {name: d for name, d in attributes.items() if isinstance(d, StateDescriptor)}


def _key_type(kind: type[Any]) -> Any:
    """The first type parameter of KeyedProcess, as a class says it; Any if it does not."""
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            if typing.get_origin(generic) is KeyedProcess:
                hint = typing.get_args(generic)[0]
                return Any if isinstance(hint, TypeVar | typing.ForwardRef) else hint
    return Any


def check_process(function: object, where: str) -> None:
    """Raise PlanError unless it is a usable instance of KeyedProcess."""
    if isinstance(function, type) and issubclass(function, KeyedProcess):
        raise PlanError(
            f"process needs an instance, got the class `{function.__name__}`",
            where=where,
            fix=f"write process({function.__name__}(), name=...)",
        )
    if not isinstance(function, KeyedProcess):
        raise PlanError(
            f"process needs a KeyedProcess, got `{type(function).__name__}`",
            where=where,
            fix="derive a class from hg.KeyedProcess[key, record, result]; map and flat_map "
            "take functions",
        )
    if is_async(function.on_record) or inspect.isasyncgenfunction(function.on_record):
        raise PlanError(
            f"on_record must be a plain function, and that of `{type(function).__name__}` is async",
            where=where,
            fix="do the awaiting in an async map before or behind it",
        )


class _ProcessingTime:
    """The clock of the machine."""

    def __init__(self, clock: Clock) -> None:
        self.now = self.use = clock.now_ms


class _EventTime:
    """The watermark, and the event time of the record at hand."""

    def __init__(self, context: Context[Any]) -> None:
        self._context = context

    def now(self) -> int:
        return self._context.watermark

    def use(self) -> int:
        timestamp = self._context.timestamp
        return self._context.watermark if timestamp is None else timestamp


class KeyedProcessOperator(Operator):
    """Runs a copy of the user's object: sets the current key, calls it, sends on what it gives.

    Args:
        function: the user's object.
        key: key columns of a column stream, or a function of a record.
        user: step, origin and result columns; its reader makes the records.
        declared: the states.
    """

    def __init__(
        self,
        function: KeyedProcess[Any, Any, Any],
        key: Sequence[str] | Callable[[Any], Hashable],
        user: UserFunction,
        declared: Declared,
    ) -> None:
        self._function = copy.deepcopy(function)
        self._key = key if callable(key) else tuple(key)
        self._user = user
        self._declared = declared
        self._context: Context[Any] = Context()
        self._writable = False
        self._backend: KeyedBackend | None = None
        self._expiries: dict[str, Expiry] = {}
        self._lists: dict[str, OperatorListHandle[Any]] = {}
        self._broadcast: dict[str, BroadcastHandle[Any, Any]] = {}
        self._handles: dict[str, Any] = {}
        self._opened = False
        self._cancel_sweep: Callable[[], None] | None = None

    @property
    def _specs(self) -> dict[str, Any]:
        declared = self._declared
        return {
            name: descriptor.spec(declared.keys, declared.ttl_ms.get(name))
            for name, descriptor in declared.keyed.items()
        }

    def states(self) -> Sequence[StateInfo]:
        lists = [descriptor.handle().info for descriptor in self._declared.lists.values()]
        broadcast = [d.handle(lambda: False).info for d in self._declared.broadcast.values()]
        return [spec.info for spec in self._specs.values()] + lists + broadcast

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        declared = self._declared
        self._backend = open_keyed_backend(context, declared.keys, self._specs)
        processing, event = _ProcessingTime(context.clock), _EventTime(self._context)
        for name, descriptor in declared.keyed.items():
            ttl = descriptor.ttl
            if ttl is not None:
                clock = event if ttl.time == "event" else processing
                self._expiries[name] = Expiry(declared.ttl_ms[name], ttl, clock)
            handle = descriptor.handle(self._backend, self._expiries.get(name))
            self._handles[descriptor.attribute] = handle
        for name, listed in declared.lists.items():
            self._lists[name] = self._handles[listed.attribute] = listed.handle()
        for name, broadcast in declared.broadcast.items():
            handle = broadcast.handle(lambda: self._writable)
            self._broadcast[name] = self._handles[broadcast.attribute] = handle
        # In the instance, where they hide the descriptors: access costs one look-up.
        vars(self._function).update(self._handles)
        if any(expiry.ttl.cleanup_per_second for expiry in self._expiries.values()):
            self._cancel_sweep = context.timers.call_later(_SWEEP_MS, self._sweep)

    def restore(self, state: RestoredState) -> Awaitable[None]:
        for handle in self._item_states().values():
            handle.restore(state, self.context.operator_name)
        return self.context.run_in_thread(lambda: self._restore_keyed(state))

    def _restore_keyed(self, state: RestoredState) -> None:
        assert self._backend is not None
        operator = self.context.operator_name
        try:
            self._backend.restore(state, self.context.clock.now_ms())
        except StateError as error:
            fresh = StateError(
                f"{error.message} step=`{operator}`",
                where=error.where or str(self._user.origin),
                fix=error.fix,
            )
            raise fresh from error

    def _open_function(self) -> None:
        """Call the user's `open`: after a restore, so that it sees the state."""
        self._opened = True
        self._writable = True
        try:
            self._function.open(self.context)
        except HeadgateError:
            raise
        except FAILURES as error:
            raise user_error(self._user.step, self._user.origin, None, error) from error
        finally:
            self._writable = False

    def process(self, batch: Batch, input_index: int) -> None:
        if not self._opened:
            self._open_function()
        for piece in pieces(batch):
            records = self._user.reader(piece)
            self._process(self._keys_of(piece, records), records, piece)

    def _keys_of(self, batch: Batch, records: list[Any]) -> list[Any]:
        key = self._key
        if not callable(key):
            assert isinstance(batch, ColumnBatch)
            lists = [to_list(batch.data.column(name)) for name in key]
            return lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))
        keys: list[Any] = []
        try:
            keys.extend(map(key, records))
        except HeadgateError:
            raise
        except FAILURES as error:
            raise user_error(
                self._user.step, self._user.origin, records[len(keys)], error
            ) from error
        self._declared.keys.check(keys)
        return keys

    def _process(self, keys: list[Any], records: list[Any], batch: Batch) -> None:
        backend, context, on_record = self._backend, self._context, self._function.on_record
        assert backend is not None
        groups = [-1] * len(keys)
        if backend.needs_key_groups:
            groups = key_groups_of(hash_keys(keys), self.context.max_parallelism).tolist()
        times: Sequence[int | None] = [None] * len(keys)
        if batch.timestamps is not None:
            times = batch.timestamps.tolist()
        results = Results(self._user, batch.timestamps, self.output)
        set_key, add = backend.set_key, results.add
        try:
            for index, (key, group, time) in enumerate(zip(keys, groups, times, strict=True)):
                set_key(key, group)
                context.key, context.timestamp = key, time
                made = on_record(records[index], context)
                if made is not None:
                    add(index, records[index], made)
        except HeadgateError:
            raise
        except FAILURES as error:
            raise user_error(self._user.step, self._user.origin, records[index], error) from error
        finally:
            backend.clear_key()
            context.timestamp = None
        results.flush()

    def on_watermark(self, timestamp: int) -> None:
        self._context.watermark = timestamp
        self.output.emit_watermark(timestamp)

    def _sweep(self) -> None:
        """Remove some of what has expired, without a key at hand."""
        assert self._backend is not None
        for name, expiry in self._expiries.items():
            has_entries = self._backend.specs[name].layout.entry is not None
            table = (self._backend.entry_table if has_entries else self._backend.value_table)(name)
            table.sweep(expiry.ttl.cleanup_per_second, expiry.dead_until())
        self._cancel_sweep = self.context.timers.call_later(_SWEEP_MS, self._sweep)

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """A table per keyed state; items for the rest."""
        assert self._backend is not None
        self._check_handles()
        dead_until = {name: expiry.dead_until() for name, expiry in self._expiries.items()}
        snapshot = StateSnapshot()
        for name, cut in self._backend.snapshot(dead_until).items():
            if isinstance(cut, TableCut):
                snapshot.tables[name] = cut
            else:
                snapshot.files[name] = cut
        for name, handle in self._item_states().items():
            snapshot.items[name] = handle.cut()
        return snapshot

    def _item_states(self) -> dict[str, OperatorListHandle[Any] | BroadcastHandle[Any, Any]]:
        return {**self._lists, **self._broadcast}

    def _check_handles(self) -> None:
        """An assignment to the attribute would look like state, and be lost at the next failure."""
        attributes = vars(self._function)
        for attribute, handle in self._handles.items():
            if attributes.get(attribute) is not handle:
                raise StateError(
                    f"the attribute of a state was assigned to attribute=`{attribute}` "
                    f"step=`{self._user.step}`",
                    where=str(self._user.origin),
                    fix=f"write self.{attribute}.set(...)",
                )

    def finish(self) -> None:
        if not self._opened:
            self._open_function()

    def close(self) -> None:
        if self._cancel_sweep is not None:
            self._cancel_sweep()
        try:
            if self._opened:
                self._function.close()
        finally:
            if self._backend is not None:
                self._backend.close()
