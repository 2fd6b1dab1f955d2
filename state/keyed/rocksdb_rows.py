"""Between the bytes in a RocksDB and canonical tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from rocksdict import SstFileWriter

from ..hashing import hash_keys, key_groups_of
from .canonical import Layout, Rows, address_rows
from .rocksdb_database import Database
from .rocksdb_keys import Places, split_value, value_functions

_FILE_BYTES: Final = 64 << 20
_LOOK_EVERY: Final = 4096


class RowReader:
    """Entries as rows of the canonical table of a state."""

    def __init__(self, layout: Layout, max_parallelism: int) -> None:
        self._layout, self._max_parallelism = layout, max_parallelism
        self._places = Places(layout)

    def add(self, rows: Rows, key: bytes, data: bytes, dead_until: int) -> None:
        """Add an entry to `rows`, unless it was last used at or before `dead_until` (ms)."""
        layout = self._layout
        encoded, last_used = split_value(data, layout.with_ttl)
        if layout.with_ttl:
            if last_used <= dead_until:
                return
            rows.last_used.append(last_used)
        address, namespace = self._places.address(key)
        rows.keys.append(address)
        rows.values.append(layout.value.decode(encoded))
        if layout.namespaced:
            rows.namespaces.append(namespace)
        if layout.entry is not None:
            rows.entries.append(self._places.entry(key, self._places.address_end(key)))

    def table(self, rows: Rows) -> pa.Table:
        """The rows as a table."""
        return self._layout.table(rows, self._max_parallelism)


def entries_from(rows: Rows, layout: Layout, max_parallelism: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries of rows, in the order of keys. Raises TypeError for values of another type."""
    places, (encode, _) = Places(layout), value_functions(layout)
    groups = key_groups_of(hash_keys(rows.keys), max_parallelism).tolist()
    entries = [
        (places.encode(group, key, namespace, entry), encode(_held(value, used, layout)))
        for group, (key, namespace, entry, value, used) in zip(
            groups, address_rows(rows), strict=True
        )
    ]
    entries.sort()
    return iter(entries)


def _held(value: Any, last_used: int, layout: Layout) -> Any:
    return (value, last_used) if layout.with_ttl else value


class Loader:
    """Puts many sorted entries into a database: as files, past its memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._files: list[Path] = []
        self._writer: Any = None

    def add(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Entries in the order of keys, all behind those added before."""
        for count, (key, value) in enumerate(entries, 1):
            writer = self._writer
            if writer is None:
                writer = self._begin()
            writer[key] = value
            if count % _LOOK_EVERY == 0 and writer.file_size() > _FILE_BYTES:
                self._end()

    def _begin(self) -> Any:
        directory = self._database.directory
        path = directory.with_name(f"{directory.name}-load-{len(self._files)}.sst")
        self._files.append(path)
        self._writer = SstFileWriter(self._database.options())
        self._writer.open(str(path))
        return self._writer

    def _end(self) -> None:
        self._writer.finish()
        self._writer = None

    def finish(self) -> None:
        """All that was added is in the database now."""
        if self._writer is not None:
            self._end()
        if self._files:
            self._database.ingest(self._files)
            self._files = []
