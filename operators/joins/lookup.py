"""Lookup join: a coroutine function finds the entry for each record's key, behind a cache."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

CACHE_ROWS: Final = 10_000
CACHE_FOR: Final = "1m"
LookupFunction: TypeAlias = Callable[[Any], Awaitable[Any]]
"""A function from a key to a record with the columns of `into`, or None."""


class Cache:
    """An LRU cache of answers by key, each for a limited time. Times are those of the event loop."""

    def __init__(self, rows: int, keep_s: float) -> None:
        self._rows, self._keep_s = rows, keep_s
        self._found: OrderedDict[Any, tuple[float, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Any) -> tuple[Any] | None:
        """Return the value in a tuple, or None if there is none or it has expired."""
        known = self._found.get(key)
        if known is None:
            return None
        since, value = known
        if asyncio.get_running_loop().time() - since >= self._keep_s:
            del self._found[key]
            return None
        self._found.move_to_end(key)
        return (value,)

    def put(self, key: Any, value: Any) -> None:
        """Store a value; if there are too many, the least recently used key is dropped."""
        self._found[key] = (asyncio.get_running_loop().time(), value)
        self._found.move_to_end(key)
        if len(self._found) > self._rows:
            self._found.popitem(last=False)


class LookUp:
    """The coroutine function of the step: it returns a record's values followed by those found.

    A copy for another process begins with an empty cache.
    """

    def __init__(
        self,
        function: LookupFunction,
        key: tuple[str, ...],
        own: tuple[str, ...],
        found: tuple[str, ...],
        cache_rows: int,
        keep_s: float,
    ) -> None:
        self._function, self._key, self._own, self._found = function, key, own, found
        self._cache_rows, self._keep_s = cache_rows, keep_s
        self.cache = Cache(cache_rows, keep_s)

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self._function, self._key, self._own, self._found, self._cache_rows, self._keep_s)
        return LookUp, values

    async def __call__(self, record: Any) -> tuple[Any, ...]:
        values = [_value(record, name) for name in self._key]
        key = values[0] if len(values) == 1 else tuple(values)
        known = self.cache.get(key)
        if known is None:
            found = await self._function(key)
            self.cache.put(key, found)
        else:
            (found,) = known
        added = [None if found is None else _value(found, name) for name in self._found]
        return (*(_value(record, name) for name in self._own), *added)


def _value(record: Any, name: str) -> Any:
    """Return a column of a record: a mapping, a generated row, or an object of the user's."""
    if isinstance(record, Mapping):
        return record[name]
    try:
        return getattr(record, name)
    except AttributeError:
        return record[name]  # a generated row, and a name that is no attribute
