"""The declarations in the class of a process function, read and checked at plan time."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from ...errors import HeadgateError, PlanError
from ...state.keyed.canonical import Layout, TableSpec
from ...state.keyed.descriptors import (
    AggregatingState,
    BroadcastState,
    KeyedState,
    OperatorListState,
    StateDescriptor,
)
from ...state.keyed.keys import KeyShape, keys_of_columns, keys_of_type
from ..durations import parse_duration
from ..queries import QueryableState, queryable_state
from .functions import Process, ProcessFunction

TIMER_TABLES: Final = ("timers_event", "timers_processing")
"""The names of the tables of timers."""
WATERMARK_TABLE: Final = "function_watermark"
"""The name of the table with the progress of event time, for records that have it."""
LATEST: Final = "function_latest"
"""The name of the items with the latest event time, for the results of `finish`."""


@dataclass(frozen=True)
class DeclaredStates:
    """The states of one process function, checked at plan time. Picklable.

    `ttl_ms` has the durations of the keyed states that expire; `timers` is true if it handles
    timers.
    """

    keyed: dict[str, KeyedState]
    lists: dict[str, OperatorListState[Any]]
    broadcast: dict[str, BroadcastState[Any, Any]]
    ttl_ms: dict[str, int]
    keys: KeyShape
    timers: bool

    @property
    def attributes(self) -> list[str]:
        """The attributes of the function that are states."""
        every = [*self.keyed.values(), *self.lists.values(), *self.broadcast.values()]
        return [descriptor.attribute for descriptor in every]

    def queryable(self, columns: Sequence[str] | None, where: str) -> tuple[QueryableState, ...]:
        """Return the states that clients read; `columns` are the key columns of the stream, if any.

        Raises:
            PlanError: a name in `queryable=` cannot be one.
        """
        return tuple(
            each
            for name, descriptor in self.keyed.items()
            for each in queryable_state(
                descriptor.queryable,
                name,
                descriptor.kind,
                self.keys,
                columns,
                where,
                _values_of(descriptor, descriptor.spec(self.keys, self.ttl_ms.get(name)).layout),
            )
        )

    def specs(self) -> dict[str, TableSpec]:
        """Return the tables of the keyed states, by name."""
        return {
            name: descriptor.spec(self.keys, self.ttl_ms.get(name))
            for name, descriptor in self.keyed.items()
        }


def _values_of(descriptor: KeyedState, layout: Layout) -> pa.Schema | None:
    """Return what a client reads as an Arrow column; None if its type is not known."""
    if layout.value.encoding is not None or isinstance(descriptor, AggregatingState):
        return None
    type_ = layout.value.type_
    if layout.entry is not None:
        if descriptor.kind == "map":
            type_ = pa.struct([("key", layout.entry.type_), ("value", type_)])
        type_ = pa.list_(type_)
    return pa.schema([("value", type_)])


def declared_states(
    function: ProcessFunction[Any, Any],
    key_fields: Sequence[pa.Field] | None,
    where: str,
    *,
    event_time: bool,
    keyed: bool = True,
) -> DeclaredStates:
    """Read the descriptors of a function's class, its base classes included.

    Args:
        function: the user's object.
        key_fields: the key columns; None: keys have the type that the class names.
        where: the user's line, for errors.
        event_time: whether the stream has event time.
        keyed: whether the stream has keys.

    Raises:
        PlanError: state per key or timers without keys, two states of one name, a type that cannot
            be a key or is unknown, or values that expire by event time where there is none.
    """
    found = _by_name(type(function), where)
    try:
        if not keyed:
            _check_keyless(function, found)
        keys = keys_of_type(_key_type(type(function)) if keyed else Any)
        if key_fields is not None:
            keys = keys_of_columns(key_fields)
        by_key = {n: d for n, d in found.items() if isinstance(d, KeyedState)}
        ttl_ms = _ttls(by_key, event_time)
        for name, descriptor in by_key.items():
            descriptor.spec(keys, ttl_ms.get(name))
        lists = {n: d for n, d in found.items() if isinstance(d, OperatorListState)}
        for listed in lists.values():
            listed.handle()
        broadcast = {n: d for n, d in found.items() if isinstance(d, BroadcastState)}
        for shared in broadcast.values():
            shared.handle(lambda: False)
    except HeadgateError as error:
        raise PlanError(error.message, where=error.where or where, fix=error.fix) from error
    timers = type(function).on_timer is not ProcessFunction.on_timer
    return DeclaredStates(by_key, lists, broadcast, ttl_ms, keys, timers)


def _check_keyless(function: ProcessFunction[Any, Any], found: dict[str, StateDescriptor]) -> None:
    """Raise PlanError if a function of a stream without keys needs keys."""
    kind = type(function).__name__
    for name, descriptor in found.items():
        if isinstance(descriptor, KeyedState):
            raise PlanError(
                f"`{kind}.{descriptor.attribute}` is state per key, and the stream has no keys "
                f"state=`{name}`",
                fix="call .key_by(...) or .key_with(...) before; or declare state of the subtask: "
                "hg.OperatorListState, hg.BroadcastState",
            )
    keys = Any if isinstance(function, Process) else _key_type(type(function))
    if keys not in (Any, None, type(None)):
        raise PlanError(
            f"`{kind}` has keys of type {getattr(keys, '__name__', keys)}, and the stream has no keys",
            fix="call .key_by(...) or .key_with(...) before, or write None for the type of the key",
        )
    if type(function).on_timer is not ProcessFunction.on_timer:
        raise PlanError(
            f"`{kind}` has on_timer, and timers belong to keys, which the stream does not have",
            fix="call .key_with(lambda record: 0) before, for one key in one subtask, or key_by",
        )


def _by_name(kind: type[Any], where: str) -> dict[str, StateDescriptor]:
    found: dict[str, StateDescriptor] = {}
    for attribute, descriptor in _descriptors(kind).items():
        other = found.get(descriptor.name)
        if other is not None:
            raise PlanError(
                f"two states have the name `{descriptor.name}`: attributes `{other.attribute}` and "
                f"`{attribute}` of `{kind.__name__}`",
                where=where,
                fix="leave out name=, or give another",
            )
        if descriptor.name in (*TIMER_TABLES, WATERMARK_TABLE, LATEST):
            raise PlanError(
                f"this is the name of a table of timers state=`{descriptor.name}`",
                where=where,
                fix="give the state another name",
            )
        found[descriptor.name] = descriptor
    return found


def _ttls(keyed: dict[str, KeyedState], event_time: bool) -> dict[str, int]:
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
    return ttl_ms


def _descriptors(kind: type[Any]) -> dict[str, StateDescriptor]:
    """Return the descriptors by attribute; a subclass's attribute hides that of its base."""
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes.update(vars(base))
    return {name: d for name, d in attributes.items() if isinstance(d, StateDescriptor)}


def _key_type(kind: type[Any]) -> Any:
    """Return the first type parameter of the process function as a class gives it, or Any."""
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            origin = typing.get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, ProcessFunction):
                hint = typing.get_args(generic)[0]
                return Any if isinstance(hint, TypeVar | typing.ForwardRef) else hint
    return Any
