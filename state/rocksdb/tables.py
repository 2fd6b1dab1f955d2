"""The tables of RocksDB: the way from a state and the current key to entries of a database."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final

from ..keyed.base import ABSENT, Cursor, EntryTable, KeyWalk, ValueTable, no_current_key
from ..keyed.canonical import TableSpec
from ..keyed.keys import encode_token, token
from .database import Database
from .layout import Places, last_use, value_functions

_WALKED: Final = 256
"""The keys that one piece of a walk has."""


class _Walk(KeyWalk):
    """Goes over a table in the order of its keys' bytes."""

    def __init__(self, database: Database, places: Places) -> None:
        self._database, self._places = database, places
        self._last = b""
        self._over = False

    def next_piece(self) -> list[tuple[Hashable, Any]] | None:
        if self._over:
            return None
        found: list[tuple[Hashable, Any]] = []
        # Behind all entries of the last key: none of them begins with this byte.
        for key, _ in self._database.all(self._last and self._last + b"\xff"):
            address = key[: self._places.address_end(key)]
            if address != self._last:
                if len(found) == _WALKED:
                    return found
                self._last = address
                found.append((address, self.key(address)))
        self._over = True
        return found

    def passed(self, current_key: Hashable) -> bool:
        assert isinstance(current_key, bytes)
        return self._over or current_key <= self._last

    def key(self, current_key: Hashable) -> Any:
        assert isinstance(current_key, bytes)
        return self._places.address(current_key)[0]


class Table:
    """The base of both kinds of tables. The place of the cursor has the bytes of key and namespace."""

    def __init__(self, spec: TableSpec, database: Database, cursor: Cursor) -> None:
        self.spec, self.database = spec, database
        self._cursor = cursor
        self._places = Places(spec.layout)
        self._encode, self._decode = value_functions(spec.layout)
        self._swept_to = b""

    def _address(self) -> bytes:
        """Return the bytes of the current key and namespace."""
        place = self._cursor.place
        if not isinstance(place, bytes):
            raise no_current_key()
        return place

    def addresses(self) -> Iterator[tuple[Any, Any]]:
        """Yield the key and namespace of every address in the table."""
        places = self._places
        before = b""
        for key, _ in self.database.all():
            address = key[: places.address_end(key)]
            if address != before:
                before = address
                yield places.address(key)

    def walk(self) -> KeyWalk:
        """Return a walk over the keys."""
        return _Walk(self.database, self._places)

    def sweep(self, limit: int, dead_until: int) -> int:
        removed = 0
        for looked_at, (key, data) in enumerate(self.database.all(self._swept_to)):
            if looked_at == limit:
                self._swept_to = key
                return removed
            if last_use(data) <= dead_until:
                self.database.delete(key)
                removed += 1
        self._swept_to = b""
        return removed


class RocksDBValueTable(Table, ValueTable):
    """A table with one value per address, each of which is read and written alone.

    A sweep reads the database beside the records, so it would have to know the values that are held in
    memory: those that expire are not. Nor are those of namespaces, which a batch does not know before.
    """

    def get(self) -> Any:
        data = self.database.get(self._address())
        return ABSENT if data is None else self._decode(data)

    def put(self, value: Any) -> None:
        self.database.put(self._address(), self._encode(value))

    def delete(self) -> None:
        self.database.delete(self._address())


class RocksDBEntryTable(Table, EntryTable):
    """A table whose entries lie side by side behind their address."""

    def get(self, entry: Any) -> Any:
        data = self.database.get(self._address() + encode_token(token(entry)))
        return ABSENT if data is None else self._decode(data)

    def put(self, entry: Any, value: Any) -> None:
        key = self._address() + self._places.encode_entry(entry)
        self.database.put(key, self._encode(value))

    def delete(self, entry: Any) -> None:
        self.database.delete(self._address() + encode_token(token(entry)))

    def entries(self) -> Iterator[tuple[Any, Any]]:
        address = self._address()
        start, entry, decode = len(address), self._places.entry, self._decode
        found = self.database.under(address)
        return ((entry(key, start), decode(data)) for key, data in found)

    def last(self) -> int:
        address = self._address()
        key = self.database.under(address).last_key()
        return -1 if key is None else int(self._places.entry(key, len(address)))

    def empty(self) -> bool:
        return self.database.under(self._address()).last_key() is None

    def clear(self) -> None:
        for key, _ in self.database.under(self._address()):
            self.database.delete(key)
