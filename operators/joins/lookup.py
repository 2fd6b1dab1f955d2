"""Lookup join: each record with the entry for its key in a table, or from a coroutine function."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, overload

import pyarrow as pa

from ...errors import PlanError
from ..async_io.map_async import OnTimeout
from ..async_io.plan import TIMEOUT, add_map_async, check_coroutine
from ..async_io.retry import Retry
from ..dead_letters import OnErrorLike
from ..durations import Duration, parse_duration
from ..functions import check_takes
from ..graph import Origin
from ..origin import capture_origin
from ..per_record import MAX_IN_FLIGHT
from ..required_name import named
from ..schema import SchemaLike, unknown_column
from ..stream_base import StreamBase, into_schema
from .columns import free_name, plain_schema
from .static_lookup import LookupHow, add_table_lookup
from .static_table import StaticTable

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")

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


class Lookups(StreamBase[T], Generic[T]):
    """Joins with data outside the job."""

    @overload
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: LookupFunction,
        *,
        into: SchemaLike,
        name: str,
        suffix: str | None = ...,
        cache_rows: int = ...,
        cache_for: Duration = ...,
        max_in_flight: int = ...,
        timeout: Duration = ...,
        ordered: bool = ...,
        retry: Retry | None = ...,
        on_timeout: OnTimeout = ...,
        on_error: OnErrorLike = ...,
    ) -> Stream[Any]: ...
    @overload
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: StaticTable,
        *,
        how: LookupHow = ...,
        suffix: str | None = ...,
        name: str = ...,
    ) -> Stream[Any]: ...
    def lookup(
        self,
        key: str | tuple[str, ...],
        function: LookupFunction | StaticTable,
        *,
        how: LookupHow = "left",
        suffix: str | None = None,
        name: str = "",
        into: SchemaLike | None = None,
        cache_rows: int | None = None,
        cache_for: Duration | None = None,
        max_in_flight: int | None = None,
        timeout: Duration | None = None,
        ordered: bool | None = None,
        retry: Retry | None = None,
        on_timeout: OnTimeout | None = None,
        on_error: OnErrorLike | None = None,
    ) -> Stream[Any]:
        """Join each record with what a coroutine function, or a static table, has for its key.

        Args:
            key: the column whose value `function` gets; with several it gets a tuple.
            function: from a key to a record (a mapping or an object) with the columns of `into`, or
                None, which gives nulls; or a table made by `hg.static_table`.
            how: for tables: `left` gives nulls where the table has no row, `inner` drops such
                records.
            suffix: appended to found columns whose names are taken.
            name: for functions, the address of the state.
            into: for functions, the columns that are found; they may be null in the result.
            cache_rows: for functions, the answers kept per process and step, None among them; 0:
                none. The default is 10,000.
            cache_for: for functions, how long an answer is valid; the default is 1m.
            max_in_flight: for functions, as for `map_async`; so are the arguments after it.
        """
        origin = capture_origin()
        given = {
            "into": into,
            "cache_rows": cache_rows,
            "cache_for": cache_for,
            "max_in_flight": max_in_flight,
            "timeout": timeout,
            "ordered": ordered,
            "retry": retry,
            "on_timeout": on_timeout,
            "on_error": on_error,
        }
        calls: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if isinstance(function, StaticTable):
            if calls:
                raise PlanError(
                    f"a lookup in a table makes no calls: {', '.join(calls)} do not apply",
                    where=str(origin),
                    fix="leave them out; the table says which columns it brings",
                )
            return add_table_lookup(self, key, function, how, suffix, name, origin)
        if how != "left":
            raise PlanError(
                f"how=`{how}` is for tables: where a function finds nothing the record gets nulls",
                where=str(origin),
                fix='leave it out, and add .filter("column IS NOT NULL")',
            )
        if into is None:
            raise PlanError(
                "lookup with a function needs into=: the columns that the function finds",
                where=str(origin),
                fix='such as into={"name": "string"}, or a Struct class',
            )
        return self._ask(key, function, suffix=suffix, name=name, origin=origin, **calls)

    @named("async step", "records with calls in flight are stored under this name")
    def _ask(
        self,
        key: str | tuple[str, ...],
        function: LookupFunction,
        *,
        into: SchemaLike,
        name: str,
        suffix: str | None,
        origin: Origin,
        cache_rows: int = CACHE_ROWS,
        cache_for: Duration = CACHE_FOR,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeout: Duration = TIMEOUT,
        ordered: bool = True,
        retry: Retry | None = None,
        on_timeout: OnTimeout = "fail",
        on_error: OnErrorLike = "fail",
    ) -> Stream[Any]:
        settings = {"max_in_flight": max_in_flight, "timeout": timeout, "ordered": ordered}
        policies = {"retry": retry, "on_timeout": on_timeout, "on_error": on_error}
        joined, schema = _joined(
            self, key, function, into, name, suffix, cache_rows, cache_for, origin
        )
        more: dict[str, Any] = {**settings, **policies, "lifetime": function}
        return add_map_async(self, None, joined, name=name, into=schema, origin=origin, **more)


def _joined(
    stream: StreamBase[Any],
    key: str | tuple[str, ...],
    function: LookupFunction,
    into: SchemaLike,
    name: str,
    suffix: str | None,
    cache_rows: int,
    cache_for: Duration,
    origin: Origin,
) -> tuple[LookUp, pa.Schema]:
    """Return the function of the step and the columns it makes.

    Raises:
        PlanError: a column does not exist, names clash, or the number of rows is wrong.
    """
    schema = plain_schema(stream._columns("lookup", origin))
    keys = (key,) if isinstance(key, str) else tuple(key)
    for column in keys:
        if column not in schema.names:
            raise unknown_column(column, schema, "lookup", str(origin))
    check_coroutine(function, "lookup", origin)
    check_takes(function, ("the key",), "lookup", origin)
    if isinstance(cache_rows, bool) or not isinstance(cache_rows, int) or cache_rows < 0:
        raise PlanError(
            f"cache_rows must be a whole number value=`{cache_rows}`",
            where=str(origin),
            fix="0 keeps nothing",
        )
    keep_ms = parse_duration(cache_for, "cache_for", str(origin))
    found, fields = into_schema(into, origin), list(schema)
    for field in found:
        taken = [each.name for each in fields]
        column = free_name(field.name, taken, found.names, suffix, (stream.name, name), origin)
        fields.append(pa.field(column, field.type, True))
    names = tuple(schema.names), tuple(found.names)
    return LookUp(function, keys, *names, cache_rows, keep_ms / 1_000), pa.schema(fields)
