"""The handles that a user's function holds: state of the current key, and state of the subtask.

A handle of keyed state knows nothing of keys or backends: its table does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import pyarrow as pa

from ...errors import StateError
from ..codecs import Codec
from ..evolution import ENCODING, check_compatible
from ..snapshot import ItemsCut, Redistribution, RestoredState, StateInfo, state_info
from .base import ABSENT, EntryTable, ValueTable
from .keys import decode_token, encode_token, key_of, token
from .undo import UndoLog

INT_MAX: Final = (1 << 30) - 1
INT_MIN: Final = -INT_MAX
"""Ints in these bounds fit any state of ints. The interpreter compares them fastest."""
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
Added = TypeVar("Added", contravariant=True)
Result = TypeVar("Result", covariant=True)
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")
Handle = TypeVar("Handle", bound="ValueHandle[Any]")


class AggregatingFunction(Protocol[Added, ACC, Result]):
    """The function of an `AggregatingState`."""

    def create(self) -> ACC:
        """Return an empty accumulator."""
        ...

    def add(self, accumulator: ACC, value: Added) -> ACC:
        """Return the accumulator with one more value. It may change and return the one it was given."""
        ...

    def result(self, accumulator: ACC) -> Result:
        """Return the result of the accumulator."""
        ...


class ValueHandle(Generic[T]):
    """A handle of one value."""

    __slots__ = ("_default", "_release", "_table")
    _release: Callable[[Any], Any]

    def __init__(self, table: ValueTable, codec: Codec, default: Any) -> None:
        self._table = table
        self._release = codec.release
        self._default = None if default is None else codec.hold(default)

    def get(self) -> T:
        """Return the value, or else the default, which is None if none was declared.

        Changing the returned object does not change the state: call `set`.
        """
        value: Any = self._table.get()
        if value is ABSENT:
            default = self._default
            return None if default is None else self._release(default)  # type: ignore[return-value]
        return value  # type: ignore[no-any-return]

    def set(self, value: T) -> None:
        """Set the value. Raises TypeError if it is not of the declared type."""
        self._table.put(value)

    def clear(self) -> None:
        """Remove the value: the next `get` returns the default."""
        self._table.delete()

    def exists(self) -> bool:
        """Return True if a value was set."""
        return self._table.get() is not ABSENT


class BoundValueTable(ValueTable):
    """A table whose functions are those of a handle. They run for each record, so the handle binds all
    that they need.
    """

    _hold: Callable[[Any], Any]
    """Returns the form in which a value is held."""

    def _bind(self, kind: Callable[[Any, Any], ValueHandle[Any]]) -> None:
        """Take the functions of handles of a kind, which are made of the table and of the held value of a
        key without one.
        """
        self._kind = kind
        functions = kind(self, ABSENT)
        self.get = functions.get  # type: ignore[method-assign]
        self.put = functions.set  # type: ignore[method-assign]
        self.delete = functions.clear  # type: ignore[method-assign]

    def _unbind(self) -> None:
        """Let go of these functions, which refer to the table."""
        for name in ("get", "put", "delete"):
            del self.__dict__[name]

    def handle(self, default: Any) -> ValueHandle[Any]:
        return self._kind(self, None if default is None else self._hold(default))

    def get(self) -> Any:
        raise NotImplementedError  # hidden by the function of the handle

    def put(self, value: Any) -> None:
        raise NotImplementedError  # hidden by the function of the handle

    def delete(self) -> None:
        raise NotImplementedError  # hidden by the function of the handle


def with_own_code(kind: type[Handle]) -> type[Handle]:
    """Give a class of value handles a copy of the code of each access that it inherits, and return it.

    The interpreter adapts code to the class for which it runs. If a function uses states of two classes
    that share code, this never settles: a read and a write of three such states took 15 % longer.
    """
    for name in ("get", "set"):
        if name not in vars(kind):
            shared = getattr(kind, name)
            setattr(kind, name, FunctionType(shared.__code__.replace(), shared.__globals__, name))
    return kind


class ListHandle(Generic[T]):
    """A handle of a list. Adding elements does not read the list."""

    def __init__(self, table: EntryTable) -> None:
        self._table = table

    def get(self) -> list[T]:
        """Return the elements as a new list."""
        return [value for _, value in self._table.entries()]

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._table.entries())

    def add(self, value: T) -> None:
        """Append one element."""
        self._table.put(self._table.last() + 1, value)

    def add_all(self, values: Iterable[T]) -> None:
        """Append several elements."""
        for position, value in enumerate(values, self._table.last() + 1):
            self._table.put(position, value)

    def update(self, values: Iterable[T]) -> None:
        """Replace all elements."""
        listed = list(values)
        self._table.clear()
        self.add_all(listed)

    def clear(self) -> None:
        """Remove all elements."""
        self._table.clear()


class MapHandle(Generic[K, V]):
    """A handle of a map. Each entry is read and written alone. The order of entries is not part of the
    state.
    """

    def __init__(self, table: EntryTable) -> None:
        self._table = table

    def get(self, key: K, default: V | None = None) -> V | None:
        """Return the value of an entry, or `default`."""
        value = self._table.get(key)
        return default if value is ABSENT else value

    def put(self, key: K, value: V) -> None:
        """Set an entry."""
        self._table.put(key, value)

    def remove(self, key: K) -> None:
        """Remove an entry if it is there."""
        self._table.delete(key)

    def contains(self, key: K) -> bool:
        """Return True if there is such an entry."""
        return self._table.get(key) is not ABSENT

    def __contains__(self, key: object) -> bool:
        return self._table.get(key) is not ABSENT

    def keys(self) -> Iterator[K]:
        """Return the keys of the present entries."""
        return (key for key, _ in self._table.entries())

    def values(self) -> Iterator[V]:
        """Return the values of the present entries."""
        return (value for _, value in self._table.entries())

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as they are now."""
        return self._table.entries()

    def is_empty(self) -> bool:
        """Return True if there are no entries."""
        return self._table.empty()

    def clear(self) -> None:
        """Remove all entries."""
        self._table.clear()


class ReducingHandle(Generic[T]):
    """A handle of one value, combined from all added values."""

    def __init__(self, table: ValueTable, reduce: Callable[[T, T], T]) -> None:
        self._get, self._put, self._delete = table.get, table.put, table.delete
        self._reduce = reduce

    def get(self) -> T | None:
        """Return the combined value; None if nothing was added."""
        value = self._get()
        return None if value is ABSENT else value

    def add(self, value: T) -> None:
        """Combine one more value with the present one."""
        before = self._get()
        self._put(value if before is ABSENT else self._reduce(before, value))

    def clear(self) -> None:
        """Forget all added values."""
        self._delete()


class AggregatingHandle(Generic[IN, OUT]):
    """A handle of an accumulator, which has another type than the added values."""

    def __init__(self, table: ValueTable, function: AggregatingFunction[IN, Any, OUT]) -> None:
        self._get, self._put, self._delete = table.get, table.put, table.delete
        self._function = function

    def get(self) -> OUT | None:
        """Return the result of all added values; None if nothing was added."""
        accumulator = self._get()
        return None if accumulator is ABSENT else self._function.result(accumulator)

    def add(self, value: IN) -> None:
        """Add one more value."""
        accumulator = self._get()
        if accumulator is ABSENT:
            accumulator = self._function.create()
        self._put(self._function.add(accumulator, value))

    def clear(self) -> None:
        """Forget all added values."""
        self._delete()


# --- state of the subtask --------------------------------------------------------------------------


class OperatorListHandle(Generic[T]):
    """A list of this subtask. After a restore each element is in one subtask (split) or in all (union)."""

    def __init__(self, name: str, codec: Codec, redistribution: Redistribution) -> None:
        self.name = name
        self._codec = codec
        self._redistribution: Final = redistribution
        self._items: list[bytes] = []
        self.undo: UndoLog | None = None

    def get(self) -> list[T]:
        """Return the elements as a new list."""
        return list(map(self._codec.decode, self._items))

    def add(self, value: T) -> None:
        """Append one element. Raises TypeError if it is not of the declared type."""
        self._items.append(self._codec.encode(value))
        if self.undo is not None:
            self.undo.note(lambda: self._items.__delitem__(-1))

    def update(self, values: Iterable[T]) -> None:
        """Replace all elements."""
        self._replace(list(map(self._codec.encode, values)))

    def clear(self) -> None:
        """Remove all elements."""
        self._replace([])

    def _replace(self, items: list[bytes]) -> None:
        before, self._items = self._items, items
        if self.undo is not None:
            self.undo.note(lambda: setattr(self, "_items", before))

    @property
    def info(self) -> StateInfo:
        """The declaration for the snapshot."""
        return _items_info(self.name, self._redistribution, [("value", self._codec)])

    def cut(self) -> ItemsCut:
        """Return the present elements."""
        return ItemsCut(list(self._items), self._redistribution)

    def restore(self, state: RestoredState, operator: str) -> None:
        """Take over this subtask's share."""
        _check(state, self.info, operator)
        self._items = list(state.items.get(self.name, ()))


class BroadcastHandle(Generic[K, V]):
    """A map that is the same in all subtasks. `may_write` returns whether it can be changed at the
    moment.
    """

    def __init__(self, name: str, codec: Codec, may_write: Callable[[], bool]) -> None:
        self.name = name
        self._codec = codec
        self._may_write = may_write
        self._entries: dict[Any, bytes] = {}
        self.undo: UndoLog | None = None

    def get(self, key: K, default: V | None = None) -> V | None:
        """Return the value of an entry, or `default`."""
        held = self._entries.get(token(key))
        return default if held is None else self._codec.decode(held)

    def put(self, key: K, value: V) -> None:
        """Set an entry."""
        self._check_writable()
        name, held = token(key), self._codec.encode(value)
        self._note(name)
        self._entries[name] = held

    def remove(self, key: K) -> None:
        """Remove an entry if it is there."""
        self._check_writable()
        self._note(token(key))
        self._entries.pop(token(key), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._check_writable()
        before, self._entries = self._entries, {}
        if self.undo is not None:
            self.undo.note(lambda: setattr(self, "_entries", before))

    def contains(self, key: K) -> bool:
        """Return True if there is such an entry."""
        return token(key) in self._entries

    def keys(self) -> Iterator[K]:
        """Return the keys of the present entries."""
        return iter([key_of(found) for found in self._entries])

    def values(self) -> Iterator[V]:
        """Return the values of the present entries."""
        return iter([self._codec.decode(held) for held in self._entries.values()])

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as they are now."""
        return zip(self.keys(), self.values(), strict=True)

    def _note(self, name: Any) -> None:
        if self.undo is not None:
            before = self._entries.get(name)
            self.undo.note(lambda: self._restore(name, before))

    def _restore(self, name: Any, before: bytes | None) -> None:
        if before is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = before

    def _check_writable(self) -> None:
        if not self._may_write():
            raise StateError(
                f"broadcast state is read-only while a keyed record is handled state=`{self.name}`",
                fix="every subtask must make the same changes, and keyed records differ between them",
            )

    @property
    def info(self) -> StateInfo:
        """The declaration for the snapshot."""
        return _items_info(self.name, "broadcast", [("value", self._codec)])

    def cut(self) -> ItemsCut:
        """Return the present entries, which are small and held in memory."""
        pairs = list(self._entries.items())

        def make() -> list[bytes]:
            return [msgspec.msgpack.encode((encode_token(key), held)) for key, held in pairs]

        return ItemsCut(make, "broadcast")

    def restore(self, state: RestoredState, operator: str) -> None:
        """Take over one copy of the map."""
        _check(state, self.info, operator)
        pairs = (_decode_pair(item) for item in state.items.get(self.name, ()))
        self._entries = {decode_token(key)[0]: held for key, held in pairs}


_decode_pair = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode


def _items_info(name: str, kind: str, columns: list[tuple[str, Codec]]) -> StateInfo:
    fields = []
    for column, codec in columns:
        metadata = None if codec.encoding is None else {ENCODING: codec.encoding}
        fields.append(pa.field(column, codec.type_, codec.nullable, metadata))
    return state_info(name, kind, pa.schema(fields))


def _check(state: RestoredState, info: StateInfo, operator: str) -> None:
    old = state.states.get(info.name)
    if old is not None:
        check_compatible(old, info, operator)
