"""Descriptors: state as it is declared in the body of a process function's class.

    class Spend(hg.KeyedProcess[str, Payment, Alert]):
        total = hg.ValueState[float](default=0.0, ttl="1d")

The attribute's name is the state's name, unless `name=` is given (after a rename, give the old name). On
a running instance the attribute is a handle to the state of the current key.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from datetime import timedelta
from typing import (
    Any,
    ClassVar,
    Final,
    ForwardRef,
    Generic,
    Literal,
    Self,
    TypeVar,
    get_args,
    overload,
)

from ...errors import PlanError
from ..codecs import Codec, codec_of
from ..forms import returned_type
from ..queryable import Queryable
from .base import EntryTable, Tables, ValueTable
from .canonical import Layout, TableSpec
from .handles import (
    AggregatingFunction,
    AggregatingHandle,
    BroadcastHandle,
    ListHandle,
    MapHandle,
    OperatorListHandle,
    ReducingHandle,
    ValueHandle,
)
from .keys import KeyShape, entry_codec
from .ttl import Expiry, StateTtl, TtlEntryTable, TtlValueTable, ttl_of

H = TypeVar("H")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")

Migrate = Callable[[Any, int], Any]
"""`(old value as plain data, its version) -> value`. Structs are passed as dicts."""


class StateDescriptor:
    """The base of all descriptors: name and type."""

    parameters: ClassVar[int] = 1
    """The number of type parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attribute = ""
        self.owner: type[Any] | None = None

    def __set_name__(self, owner: type[Any], attribute: str) -> None:
        self.owner = owner
        self.attribute = attribute
        self.name = self.name or attribute

    def types(self) -> tuple[Any, ...]:
        """Return the type parameters; Any where none were given.

        Raises:
            PlanError: a type given as text is not known.
        """
        args = self._arguments()
        if not args:
            return (Any,) * self.parameters
        return tuple(Any if isinstance(arg, TypeVar) else self._resolved(arg) for arg in args)

    def _arguments(self) -> tuple[Any, ...]:
        """Return the type parameters as they are written; empty if there are none."""
        return get_args(getattr(self, "__orig_class__", None)) or get_args(self._annotation())

    def _annotation(self) -> Any:
        annotation = getattr(self.owner, "__annotations__", {}).get(self.attribute)
        hint = self._resolved(ForwardRef(annotation)) if isinstance(annotation, str) else annotation
        while typing.get_origin(hint) in (ClassVar, Final):
            (hint,) = get_args(hint)
        return hint

    def _resolved(self, hint: Any) -> Any:
        if not isinstance(hint, ForwardRef):
            return hint
        module = sys.modules.get(getattr(self.owner, "__module__", ""))
        holder = type("_Holder", (), {"__annotations__": {"hint": hint.__forward_arg__}})
        try:
            return typing.get_type_hints(
                holder, vars(module) if module else {}, include_extras=True
            )["hint"]
        except NameError as error:
            raise PlanError(
                f"the type of a state is not known: {error} state=`{self.name}`",
                fix="define the class, and import its types, at the top of a module",
            ) from error


class Attribute(StateDescriptor, Generic[H]):
    """The attribute itself: it is the descriptor in the class, and a handle in a running instance."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> H: ...
    def __get__(self, instance: object | None, owner: type[Any]) -> Self | H:
        # In a running instance, handles of the same names hide the descriptors.
        if instance is None:
            return self
        raise PlanError(
            f"this instance does not run in a job, so it has no state state=`{self.name}`",
            fix="use state in on_record; give configuration to __init__ as plain attributes",
        )


class KeyedState(StateDescriptor):
    """The base of state per key, with time to live, version and migration."""

    kind: ClassVar[str]
    per_window: bool = False
    """True if the state of a window function belongs to key and window; see `hg.per_window`."""

    def __init__(
        self,
        *,
        ttl: str | timedelta | StateTtl | None = None,
        name: str = "",
        version: int = 1,
        migrate: Migrate | None = None,
        queryable: str | Queryable = "",
    ) -> None:
        super().__init__(name)
        self.ttl = ttl_of(ttl)
        self.version = version
        self.migrate = migrate
        self.queryable = queryable
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise PlanError(f"version must be a whole number of at least 1 value=`{version}`")
        if version > 1 and migrate is None:
            raise PlanError(
                f"a state of version {version} needs migrate=",
                fix="migrate=lambda value, version: ..., which makes a new value of an old one",
            )

    def value_type(self) -> Any:
        """Return the type of the values that are kept."""
        return self.types()[0]

    def entry(self) -> Codec | None:
        """Return the codec for the keys of entries, if there are entries."""
        return None

    def spec(self, keys: KeyShape, ttl_ms: int | None) -> TableSpec:
        """Return the declaration of the table."""
        layout = Layout(
            keys,
            self.kind,
            codec_of(self.value_type()),
            self.entry(),
            with_ttl=ttl_ms is not None,
        )
        return TableSpec(self.name, layout, ttl_ms, self.version, self.migrate)

    def handle(self, backend: Tables, expiry: Expiry | None) -> Any:
        """Return the handle that the user's function holds."""
        raise NotImplementedError

    def _values(self, backend: Tables, expiry: Expiry | None) -> ValueTable:
        table = backend.value_table(self.name)
        return table if expiry is None else TtlValueTable(table, expiry)

    def _entries(self, backend: Tables, expiry: Expiry | None) -> EntryTable:
        table = backend.entry_table(self.name)
        return table if expiry is None else TtlEntryTable(table, expiry)


class ValueState(KeyedState, Attribute[ValueHandle[T]], Generic[T]):
    """One value per key.

    Args:
        default: the value that `get` returns where nothing was set; None without it.
        ttl: how long a value lives after its last write: a duration, or `StateTtl`.
        name: the state's name, if it is not that of the attribute.
        version: the version of the type, to be increased when it changes in more than added, removed and
            widened fields.
        migrate: a function that makes a value of this version from `(old value as plain data, old
            version)`.
        queryable: the name, unique in the job, under which clients outside the job read the state by
            key, or `Queryable`; empty: they do not.
    """

    kind = "value"

    def __init__(
        self,
        *,
        default: T | None = None,
        ttl: str | timedelta | StateTtl | None = None,
        name: str = "",
        version: int = 1,
        migrate: Migrate | None = None,
        queryable: str | Queryable = "",
    ) -> None:
        super().__init__(ttl=ttl, name=name, version=version, migrate=migrate, queryable=queryable)
        self.default = default

    def spec(self, keys: KeyShape, ttl_ms: int | None) -> TableSpec:
        spec = super().spec(keys, ttl_ms)
        if self.default is not None:
            try:
                spec.layout.value.hold(self.default)
            except TypeError as error:
                raise PlanError(f"default of state `{self.name}`: {error}") from error
        return spec

    def handle(self, backend: Tables, expiry: Expiry | None) -> ValueHandle[T]:
        codec = backend.specs[self.name].layout.value
        table = self._values(backend, expiry)
        return table.handle(self.default) or ValueHandle(table, codec, self.default)


class ListState(KeyedState, Attribute[ListHandle[T]], Generic[T]):
    """A list per key. Elements expire one by one. The arguments are those of `ValueState`."""

    kind = "list"

    def entry(self) -> Codec:
        return codec_of(int)

    def handle(self, backend: Tables, expiry: Expiry | None) -> ListHandle[T]:
        return ListHandle(self._entries(backend, expiry))


class MapState(KeyedState, Attribute[MapHandle[K, V]], Generic[K, V]):
    """A map per key. Entries are read and written, and expire, one by one. The arguments are those of
    `ValueState`.
    """

    kind = "map"
    parameters = 2

    def value_type(self) -> Any:
        return self.types()[1]

    def entry(self) -> Codec:
        return entry_codec(self.types()[0])

    def handle(self, backend: Tables, expiry: Expiry | None) -> MapHandle[K, V]:
        return MapHandle(self._entries(backend, expiry))


class ReducingState(KeyedState, Attribute[ReducingHandle[T]], Generic[T]):
    """One value per key, combined from all added values. The other arguments are those of `ValueState`.

    Args:
        reduce: `(value so far, added value) -> value`.
    """

    kind = "reducing"

    def __init__(
        self,
        reduce: Callable[[T, T], T],
        *,
        ttl: str | timedelta | StateTtl | None = None,
        name: str = "",
        version: int = 1,
        migrate: Migrate | None = None,
        queryable: str | Queryable = "",
    ) -> None:
        super().__init__(ttl=ttl, name=name, version=version, migrate=migrate, queryable=queryable)
        self.reduce = reduce

    def value_type(self) -> Any:
        return super().value_type() if self._arguments() else returned_type(self.reduce)

    def handle(self, backend: Tables, expiry: Expiry | None) -> ReducingHandle[T]:
        return ReducingHandle(self._values(backend, expiry), self.reduce)


class AggregatingState(KeyedState, Attribute[AggregatingHandle[IN, OUT]], Generic[IN, ACC, OUT]):
    """An accumulator per key. The other arguments are those of `ValueState`.

    Args:
        aggregate: an object with `create()`, `add(accumulator, value)` and `result(accumulator)`, or a
            class of such objects.
    """

    kind = "aggregating"
    parameters = 3

    def __init__(
        self,
        aggregate: AggregatingFunction[IN, ACC, OUT] | type[AggregatingFunction[IN, ACC, OUT]],
        *,
        ttl: str | timedelta | StateTtl | None = None,
        name: str = "",
        version: int = 1,
        migrate: Migrate | None = None,
        queryable: str | Queryable = "",
    ) -> None:
        super().__init__(ttl=ttl, name=name, version=version, migrate=migrate, queryable=queryable)
        self.aggregate: AggregatingFunction[IN, ACC, OUT] = (
            aggregate() if isinstance(aggregate, type) else aggregate
        )
        for method in ("create", "add", "result"):
            if not callable(getattr(self.aggregate, method, None)):
                raise PlanError(
                    f"an aggregate needs the method `{method}` type=`{type(self.aggregate).__name__}`",
                    fix="give an object with create(), add(accumulator, value) and result(accumulator)",
                )

    def value_type(self) -> Any:
        return self.types()[1] if self._arguments() else returned_type(self.aggregate.create)

    def handle(self, backend: Tables, expiry: Expiry | None) -> AggregatingHandle[IN, OUT]:
        return AggregatingHandle(self._values(backend, expiry), self.aggregate)


class OperatorListState(Attribute[OperatorListHandle[T]], Generic[T]):
    """A list that belongs to the subtask and not to a key.

    Args:
        redistribution: the distribution after a restore: with `split` each element goes to one subtask,
            with `union` to all.
        name: the state's name, if it is not that of the attribute.
    """

    def __init__(
        self, redistribution: Literal["split", "union"] = "split", *, name: str = ""
    ) -> None:
        super().__init__(name)
        if redistribution not in ("split", "union"):
            raise PlanError(
                f"redistribution must be split or union value=`{redistribution}`",
                fix="BroadcastState is for what is the same in all subtasks",
            )
        self.redistribution = redistribution

    def handle(self) -> OperatorListHandle[T]:
        """Return the handle that the user's function holds."""
        return OperatorListHandle(self.name, codec_of(self.types()[0]), self.redistribution)


class BroadcastState(Attribute[BroadcastHandle[K, V]], Generic[K, V]):
    """A small map that is the same in all subtasks. It is held in memory.

    In a `KeyedProcess` it can be written in `open`, where all subtasks make the same changes.
    """

    parameters = 2

    def __init__(self, *, name: str = "") -> None:
        super().__init__(name)

    def handle(self, may_write: Callable[[], bool]) -> BroadcastHandle[K, V]:
        """Return the handle that the user's function holds."""
        return BroadcastHandle(self.name, codec_of(self.types()[1]), may_write)
