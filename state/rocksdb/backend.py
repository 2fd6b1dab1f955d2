"""The RocksDB backend: keyed state larger than memory, with access by single keys.

Each state lies in a database of its own, so that it can be added, removed and restored without the
others. Memory, threads and the moment of a cut are shared. Values of keys that were used last are held in
memory (`write_back.py`). Each read of a value that can change in place makes a fresh object.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

from ..hashing import hash_key, hash_keys, key_group_of, key_groups_of
from ..keyed.base import NO_KEY, Cursor, EntryTable, KeyedBackend, KeyWalk, ValueTable
from ..keyed.canonical import TableSpec
from ..keyed.keys import KeyShape, Token, encode_token, key_of, token, tokens_of
from ..keygroups import KeyGroupRange
from ..settings import MemoryShare, RocksDBSettings
from ..snapshot import FilesCut, RestoredState, TableCut
from ..values import Index
from .cut import DatabaseCut
from .database import Database
from .layout import EntryReader, encode_addresses, group_prefix
from .restore import Restorer
from .tables import RocksDBEntryTable, RocksDBValueTable
from .write_back import VISIT_KEYS, HeldValueTable

_ALIVE: Final = -(2**63)


class RocksDBBackend(KeyedBackend):
    """All keyed state of one operator subtask, in databases on local disk.

    Args:
        directory: a directory that only this subtask uses.
        key_groups: the key groups of the subtask.
        file_token: the beginning of the ids of files, unique for ever among the attempts and subtasks of
            the operator.
    """

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
        self.cursor, self._spaced = Cursor(), Cursor()
        self._namespace = encode_token(token(None))
        self._any_spaced = any(spec.layout.namespaced for spec in self.specs.values())
        self._tables: dict[str, RocksDBValueTable | HeldValueTable | RocksDBEntryTable] = {}
        self._held: list[HeldValueTable] = []
        directory.mkdir(parents=True, exist_ok=True)
        for number, (name, spec) in enumerate(self.specs.items()):
            database = Database(directory / f"db-{number}", settings, key_groups)
            self._tables[name] = self._table(spec, database, settings.held_bytes)
        self._encodes = len(self._held) < len(self._tables)
        """A key is encoded when it becomes the current one, and not only when its values are written."""
        self._asked = False
        self._entered = 0

    def _table(
        self, spec: TableSpec, database: Database, held_bytes: int
    ) -> RocksDBValueTable | HeldValueTable | RocksDBEntryTable:
        cursor = self._spaced if spec.layout.namespaced else self.cursor
        if spec.layout.entry is not None:
            return RocksDBEntryTable(spec, database, cursor)
        if spec.ttl_ms is not None or spec.layout.namespaced:
            return RocksDBValueTable(spec, database, cursor)
        share = MemoryShare(held_bytes)
        table = HeldValueTable(spec, database, cursor, self.max_parallelism, share)
        self._held.append(table)
        return table

    def value_table(self, name: str) -> ValueTable:
        table = self._tables[name]
        assert isinstance(table, ValueTable)
        return table

    def entry_table(self, name: str) -> EntryTable:
        table = self._tables[name]
        assert isinstance(table, RocksDBEntryTable)
        return table

    # --- keys ----------------------------------------------------------------------------------

    @property
    def needs_key_groups(self) -> bool:
        return self._encodes or self._asked

    def set_key(self, key: Any, key_group: int = -1) -> None:
        cursor = self.cursor
        cursor.token = where = token(key)
        self._encodes = self._encodes or self._asked
        if self._encodes:
            if key_group < 0:
                key_group = key_group_of(hash_key(key), self.max_parallelism)
            cursor.place = self._groups[key_group] + encode_token(where)
            if self._any_spaced:
                self._set_spaced()
        self._entered += 1
        if self._entered >= self._keys_to_visit():
            self._tidy()

    def places(
        self, keys: Sequence[Any], key_groups: Sequence[int], numbers: Index | None = None
    ) -> tuple[Iterable[Token], Iterable[Any]]:
        self._spaced.clear()
        self._encodes = self._encodes or self._asked
        places: Iterable[Any] = repeat(NO_KEY, len(keys))
        if self._encodes:
            places = encode_addresses(self._groups_of(keys, key_groups), keys)
        tokens = keys if numbers is not None else tokens_of(keys)
        return chain.from_iterable(self._fetched(tokens)), places

    def _fetched(self, tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
        """Yield tokens in pieces, for whose keys the tables have made ready when a piece is yielded."""
        low = 0
        while low < len(tokens):
            self._tidy()
            some = tokens[low : low + self._keys_to_visit()]
            self._entered = len(some)
            for table in self._held:
                table.fetch(some)
            yield some
            low += len(some)
        self._tidy()

    def _groups_of(self, keys: Sequence[Any], key_groups: Sequence[int]) -> Sequence[int]:
        if not keys or key_groups[0] >= 0:
            return key_groups
        found: list[int] = key_groups_of(hash_keys(keys), self.max_parallelism).tolist()
        return found

    def _keys_to_visit(self) -> int:
        return min((table.keys_to_visit() for table in self._held), default=VISIT_KEYS)

    def _tidy(self) -> None:
        if self._entered:
            for table in self._held:
                table.tidy(self._entered)
        self._entered = 0

    @property
    def current_key(self) -> Hashable:
        if self._encodes:
            found: Hashable = self.cursor.place
            return found
        self._asked = True  # so that the next keys are encoded together
        where = self.cursor.token
        key_group = key_group_of(hash_key(key_of(where)), self.max_parallelism)
        return self._groups[key_group] + encode_token(where)

    def set_namespace(self, namespace: Any) -> None:
        self._namespace = encode_token(token(namespace))
        if self._any_spaced and self.cursor.is_set:
            self._set_spaced()

    def _set_spaced(self) -> None:
        self._spaced.place = self.cursor.place + self._namespace

    def clear_key(self) -> None:
        self.cursor.clear()
        self._spaced.clear()

    def addresses(self, name: str) -> Iterator[tuple[Any, Any]]:
        return self._tables[name].addresses()

    def walk(self, name: str) -> KeyWalk:
        return self._tables[name].walk()

    # --- cuts and restores ---------------------------------------------------------------------

    def snapshot(self, dead_until: Mapping[str, int]) -> dict[str, TableCut | FilesCut]:
        self._cuts += 1
        return {name: self._cut(name, dead_until.get(name, _ALIVE)) for name in self._tables}

    def _cut(self, name: str, dead_until: int) -> FilesCut:
        table, layout = self._tables[name], self.specs[name].layout
        directory = table.database.directory
        directory = directory.with_name(f"{directory.name}-cut-{self._cuts}")
        held = table.freeze() if isinstance(table, HeldValueTable) else None
        cut = DatabaseCut(table.database, directory, f"{self._token}/{name}", self._cuts, held)
        reader = EntryReader(layout, self.max_parallelism)
        return cut.as_files_cut(reader, layout.identity, dead_until)

    def restore(self, state: RestoredState, now_ms: int) -> None:
        for name, table in self._tables.items():
            Restorer(self.specs[name], table.database, self.max_parallelism, now_ms).restore(state)

    def close(self) -> None:
        for table in self._tables.values():
            table.database.close()
        for held in self._held:
            held.close()
        self._tables.clear()
        self._held.clear()
