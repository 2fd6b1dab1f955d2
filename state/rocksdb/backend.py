"""The RocksDB backend: keyed state larger than memory, with access by single keys.

Each state lies in a database of its own, so that it can be added, removed and restored without the
others. Memory, threads and the moment of a cut are shared. Values are encoded, so each read makes a fresh
object.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from ...errors import StateError
from ..hashing import hash_key, key_group_of
from ..keyed.base import ABSENT, EntryTable, KeyedBackend, KeyWalk, ValueTable
from ..keyed.canonical import TableSpec
from ..keyed.keys import KeyShape, encode_token, token
from ..keygroups import KeyGroupRange
from ..settings import RocksDBSettings
from ..snapshot import FilesCut, RestoredState, TableCut
from .cut import DatabaseCut
from .database import Database
from .layout import EntryReader, Places, encode_addresses, group_prefix, last_use, value_functions
from .restore import Restorer

_ALIVE: Final = -(2**63)
_WALKED: Final = 256
"""The keys that one piece of a walk has."""
_VISIT_KEYS: Final = 4096
_VISIT_BYTES: Final = 16 << 20
"""The values of one state that are held for the keys of a batch: this many, or so much of them by
the size of those before.
"""


class _Position:
    """The address of all access: the bytes of the current key, for some tables together with the
    namespace.
    """

    __slots__ = ("is_set", "key")
    key: bytes

    def __init__(self) -> None:
        self.is_set = False

    def __getattr__(self, name: str) -> Any:
        # Called only if there is no such attribute, so the check costs nothing while there is a key.
        raise StateError(
            "keyed state was used without a current key",
            fix="use it in on_record, where the key is that of the record",
        )

    def set(self, key: bytes) -> None:
        """Set the current key."""
        self.key = key
        self.is_set = True

    def clear(self) -> None:
        """Unset the current key."""
        if self.is_set:
            del self.key
            self.is_set = False


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


class _Table:
    """The base of both kinds of tables."""

    def __init__(self, spec: TableSpec, database: Database, position: _Position) -> None:
        self.spec, self.database = spec, database
        self._position = position
        self._places = Places(spec.layout)
        self._encode, self._decode = value_functions(spec.layout)
        self._swept_to = b""

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


class RocksDBValueTable(_Table, ValueTable):
    """A table with one value per address.

    The keys of a batch are known before its first record. Meanwhile their values are held, so that
    they are read together, and written together. A sweep would have to know them too: it reads the
    database beside the records, so values that expire are not held.
    """

    def __init__(self, spec: TableSpec, database: Database, position: _Position) -> None:
        super().__init__(spec, database, position)
        self._holds = False
        self._can_hold = spec.ttl_ms is None and not spec.layout.namespaced
        self._held: dict[bytes, bytes | None] = {}
        self._written: set[bytes] = set()
        self._reads, self._bytes_each = 0, 1

    def hold(self, addresses: Sequence[bytes]) -> None:
        """Hold the values of these addresses from now on, if they are likely to be read."""
        if not self._can_hold:
            return
        self._holds = True
        likely, self._reads = 2 * self._reads >= len(addresses), 0
        if likely:
            wanted = sorted(set(addresses))
            self._held.update(zip(wanted, self.database.get_all(wanted), strict=True))

    def write_held(self) -> None:
        """Write the values that changed, and hold none from now on."""
        held, written = self._held, self._written
        if written:
            self.database.write([(key, held[key]) for key in sorted(written)])
            written.clear()
        if held:
            size = sum(len(data) for data in held.values() if data is not None)
            self._bytes_each = max(1, size // len(held))
            held.clear()
        self._holds = False

    def keys_to_hold(self) -> int:
        """Return the number of keys whose values may be held."""
        return max(1, min(_VISIT_KEYS, _VISIT_BYTES // self._bytes_each))

    def get(self) -> Any:
        key, held = self._position.key, self._held
        if self._holds:
            self._reads += 1
            if key not in held:
                held[key] = self.database.get(key)
            data = held[key]
        else:
            data = self.database.get(key)
        return ABSENT if data is None else self._decode(data)

    def put(self, value: Any) -> None:
        self._put(self._encode(value))

    def delete(self) -> None:
        if self._holds:
            self._put(None)
        else:
            self.database.delete(self._position.key)

    def _put(self, data: bytes | None) -> None:
        key = self._position.key
        if self._holds:
            self._held[key] = data
            self._written.add(key)
        else:
            assert data is not None
            self.database.put(key, data)


class RocksDBEntryTable(_Table, EntryTable):
    """A table whose entries lie side by side behind their address."""

    def get(self, entry: Any) -> Any:
        data = self.database.get(self._position.key + encode_token(token(entry)))
        return ABSENT if data is None else self._decode(data)

    def put(self, entry: Any, value: Any) -> None:
        key = self._position.key + self._places.encode_entry(entry)
        self.database.put(key, self._encode(value))

    def delete(self, entry: Any) -> None:
        self.database.delete(self._position.key + encode_token(token(entry)))

    def entries(self) -> Iterator[tuple[Any, Any]]:
        address = self._position.key
        start, entry, decode = len(address), self._places.entry, self._decode
        found = self.database.under(address)
        return ((entry(key, start), decode(data)) for key, data in found)

    def last(self) -> int:
        address = self._position.key
        key = self.database.under(address).last_key()
        return -1 if key is None else int(self._places.entry(key, len(address)))

    def empty(self) -> bool:
        return self.database.under(self._position.key).last_key() is None

    def clear(self) -> None:
        for key, _ in self.database.under(self._position.key):
            self.database.delete(key)


class RocksDBBackend(KeyedBackend):
    """All keyed state of one operator subtask, in databases on local disk.

    Args:
        directory: a directory that only this subtask uses.
        key_groups: the key groups of the subtask.
        file_token: the beginning of the ids of files, unique for ever among the attempts and subtasks of
            the operator.
    """

    needs_key_groups: ClassVar[bool] = True

    def __init__(
        self,
        keys: KeyShape,
        specs: Mapping[str, TableSpec],
        max_parallelism: int,
        *,
        directory: Path,
        key_groups: KeyGroupRange,
        file_token: str,
        settings: RocksDBSettings,
    ) -> None:
        super().__init__(keys, specs, max_parallelism)
        self._directory, self._token = directory, file_token
        self._cuts = 0
        self._groups = [group_prefix(group) for group in range(max_parallelism)]
        self._plain, self._spaced = _Position(), _Position()
        self._namespace = encode_token(token(None))
        self._any_spaced = any(spec.layout.namespaced for spec in self.specs.values())
        self._tables: dict[str, RocksDBValueTable | RocksDBEntryTable] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for number, (name, spec) in enumerate(self.specs.items()):
            database = Database(directory / f"db-{number}", settings, key_groups)
            position = self._spaced if spec.layout.namespaced else self._plain
            kind = RocksDBValueTable if spec.layout.entry is None else RocksDBEntryTable
            self._tables[name] = kind(spec, database, position)
        self._values = [t for t in self._tables.values() if isinstance(t, RocksDBValueTable)]

    def value_table(self, name: str) -> ValueTable:
        table = self._tables[name]
        assert isinstance(table, RocksDBValueTable)
        return table

    def entry_table(self, name: str) -> EntryTable:
        table = self._tables[name]
        assert isinstance(table, RocksDBEntryTable)
        return table

    def set_key(self, key: Any, key_group: int = -1) -> None:
        encoded = encode_token(token(key))
        if key_group < 0:
            key_group = key_group_of(hash_key(key), self.max_parallelism)
        address = self._groups[key_group] + encoded
        self._plain.set(address)
        if self._any_spaced:
            self._spaced.set(address + self._namespace)

    def visit(self, keys: Sequence[Any], key_groups: Sequence[int]) -> Iterator[Any]:
        low = 0
        while low < len(keys):
            high = low + min((table.keys_to_hold() for table in self._values), default=_VISIT_KEYS)
            yield from self._visit_some(keys[low:high], key_groups[low:high])
            self._write_held()
            low = high

    def _visit_some(self, keys: Sequence[Any], key_groups: Sequence[int]) -> Iterator[Any]:
        addresses = encode_addresses(key_groups, keys)
        for table in self._values:
            table.hold(addresses)
        plain, spaced, any_spaced = self._plain, self._spaced, self._any_spaced
        plain.is_set = True
        for key, plain.key in zip(keys, addresses, strict=True):
            if any_spaced:
                spaced.set(plain.key + self._namespace)
            yield key

    def _write_held(self) -> None:
        for table in self._values:
            table.write_held()

    @property
    def current_key(self) -> Hashable:
        return self._plain.key

    def set_namespace(self, namespace: Any) -> None:
        self._namespace = encode_token(token(namespace))
        if self._any_spaced and self._plain.is_set:
            self._spaced.set(self._plain.key + self._namespace)

    def clear_key(self) -> None:
        self._write_held()
        self._plain.clear()
        self._spaced.clear()

    def addresses(self, name: str) -> Iterator[tuple[Any, Any]]:
        return self._tables[name].addresses()

    def walk(self, name: str) -> KeyWalk:
        return self._tables[name].walk()

    def snapshot(self, dead_until: Mapping[str, int]) -> dict[str, TableCut | FilesCut]:
        self._cuts += 1
        return {name: self._cut(name, dead_until.get(name, _ALIVE)) for name in self._tables}

    def _cut(self, name: str, dead_until: int) -> FilesCut:
        database, layout = self._tables[name].database, self.specs[name].layout
        directory = database.directory
        directory = directory.with_name(f"{directory.name}-cut-{self._cuts}")
        cut = DatabaseCut(database, directory, f"{self._token}/{name}", self._cuts)
        reader = EntryReader(layout, self.max_parallelism)
        return cut.as_files_cut(reader, layout.identity, dead_until)

    def restore(self, state: RestoredState, now_ms: int) -> None:
        for name, table in self._tables.items():
            Restorer(self.specs[name], table.database, self.max_parallelism, now_ms).restore(state)

    def close(self) -> None:
        for table in self._tables.values():
            table.database.close()
        self._tables.clear()
