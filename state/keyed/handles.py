"""The handles that a user's function holds: state of the current key, by kind.

A handle does not know of keys or backends: its table does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from ..codecs import Codec
from .base import ABSENT, EntryTable, ValueTable

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
Added = TypeVar("Added", contravariant=True)
Result = TypeVar("Result", covariant=True)
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")


class AggregateFunction(Protocol[Added, ACC, Result]):
    """What an `AggregatingState` aggregates with."""

    def create(self) -> ACC:
        """An empty accumulator."""
        ...

    def add(self, accumulator: ACC, value: Added) -> ACC:
        """The accumulator with one more value; may change and return the one it got."""
        ...

    def result(self, accumulator: ACC) -> Result:
        """The result of the accumulator."""
        ...


class ValueHandle(Generic[T]):
    """One value."""

    def __init__(self, table: ValueTable, codec: Codec, default: Any) -> None:
        self._table = table
        self._release = codec.release
        self._default = None if default is None else codec.hold(default)

    def get(self) -> T:
        """The value; where there is none the default, or None without one.

        Changes in place of what is returned are not state: call `set`.
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
        """True if a value was set."""
        return self._table.get() is not ABSENT


class ListHandle(Generic[T]):
    """A list; adding does not read what is there."""

    def __init__(self, table: EntryTable) -> None:
        self._table = table

    def get(self) -> list[T]:
        """The elements, as a new list."""
        return [value for _, value in self._table.entries()]

    def __iter__(self) -> Iterator[T]:
        return (value for _, value in self._table.entries())

    def add(self, value: T) -> None:
        """Append one element."""
        self._table.put(self._table.last() + 1, value)

    def add_all(self, values: Iterable[T]) -> None:
        """Append several."""
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
    """A map; each entry is read and written alone. The order of entries is not part of the state."""

    def __init__(self, table: EntryTable) -> None:
        self._table = table

    def get(self, key: K, default: V | None = None) -> V | None:
        """The value of an entry, or `default`."""
        value = self._table.get(key)
        return default if value is ABSENT else value

    def put(self, key: K, value: V) -> None:
        """Set an entry."""
        self._table.put(key, value)

    def remove(self, key: K) -> None:
        """Remove an entry, if there."""
        self._table.delete(key)

    def contains(self, key: K) -> bool:
        """True if there is such an entry."""
        return self._table.get(key) is not ABSENT

    def __contains__(self, key: object) -> bool:
        return self._table.get(key) is not ABSENT

    def keys(self) -> Iterator[K]:
        """The keys of the entries as they are now."""
        return (key for key, _ in self._table.entries())

    def values(self) -> Iterator[V]:
        """The values of the entries as they are now."""
        return (value for _, value in self._table.entries())

    def items(self) -> Iterator[tuple[K, V]]:
        """The entries as they are now."""
        return self._table.entries()

    def is_empty(self) -> bool:
        """True if there are no entries."""
        return self._table.empty()

    def clear(self) -> None:
        """Remove all entries."""
        self._table.clear()


class ReducingHandle(Generic[T]):
    """One value, combined from all that was added."""

    def __init__(self, table: ValueTable, reduce: Callable[[T, T], T]) -> None:
        self._table = table
        self._reduce = reduce

    def get(self) -> T | None:
        """The combined value; None if nothing was added."""
        value = self._table.get()
        return None if value is ABSENT else value

    def add(self, value: T) -> None:
        """Combine one more value with what is there."""
        before = self._table.get()
        self._table.put(value if before is ABSENT else self._reduce(before, value))

    def clear(self) -> None:
        """Forget what was added."""
        self._table.delete()


class AggregatingHandle(Generic[IN, OUT]):
    """An accumulator of another type than what is added."""

    def __init__(self, table: ValueTable, function: AggregateFunction[IN, Any, OUT]) -> None:
        self._table = table
        self._function = function

    def get(self) -> OUT | None:
        """The result of all that was added; None if nothing was."""
        accumulator = self._table.get()
        return None if accumulator is ABSENT else self._function.result(accumulator)

    def add(self, value: IN) -> None:
        """Add one more value."""
        accumulator = self._table.get()
        if accumulator is ABSENT:
            accumulator = self._function.create()
        self._table.put(self._function.add(accumulator, value))

    def clear(self) -> None:
        """Forget what was added."""
        self._table.delete()
