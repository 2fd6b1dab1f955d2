"""A consistent cut of a RocksDB that goes on changing: files for checkpoints, tables for savepoints.

A cut writes nothing in the mailbox: an iterator goes on seeing the state as it was when it was made, and
from then on the cut notes the keys that are written. A thread then writes what is only in memory to files
and links them. These files contain later writes too, so for every noted key the value that the iterator
sees goes into one more small file, and a restore puts it back. (Flushing in the mailbox instead would
stop the subtask for 60 to 200 ms per checkpoint.)

Values that a table holds and had not written at the cut are part of the state at the cut, and the iterator
does not see them. The thread writes them first, so that they come into the files like all others. Those
that did not get there by the time of the files go into the small file.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa

from ..keyed.canonical import Rows
from ..keyed.keys import decode_token
from ..snapshot import CollectedFiles, FilesCut, LocalFile
from .database import Changes, Database, OpenCut, Span
from .layout import GROUP_BYTES, EntryReader, group_of

META_VERSION: Final = 1
NOTED_MAX: Final = 500_000
"""A cut that noted this many keys because no thread came to it is sealed in the mailbox."""
ROWS_PER_TABLE: Final = 65_536


class FileMeta(msgspec.Struct, frozen=True, array_like=True):
    """A file of the database: its name, its id, and the key groups of its entries."""

    name: str
    id: str
    first_key_group: int
    last_key_group: int


class DatabaseMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the files of a cut.

    `private` has small files that belong to this cut alone: RocksDB's manifest and the file that points
    to it. `undo` is the id of the file with the values that a restore puts back; empty: there is none.
    """

    version: int
    files: list[FileMeta]
    private: dict[str, bytes]
    undo: str = ""


class Unwritten(Protocol):
    """The values at a cut that the database did not have then; see `write_back.Frozen`."""

    cut: OpenCut | None
    written: set[Any]

    def drain(self) -> None:
        """Write what is left."""
        ...

    def known(self, key: bytes) -> bool:
        """Return True if there is such a value for this key."""
        ...

    def changes(self, without: Collection[Any] = ()) -> Changes:
        """Return the values, except those of some tokens."""
        ...


class DatabaseCut:
    """One cut of one database.

    Args:
        directory: a directory of the cut's own, created on demand and deleted by `release`.
        token: the beginning of the ids of new files.
        number: the number of the cut, unique in the database.
        unwritten: the values that are not in the database, if there are any.
    """

    def __init__(
        self,
        database: Database,
        directory: Path,
        token: str,
        number: int,
        unwritten: Unwritten | None = None,
    ) -> None:
        self._database = database
        self._directory = directory
        self._token, self._number = token, number
        self._noted: set[bytes] = set()
        self._known: dict[str, dict[str, Any]] | None = None
        self._guard = threading.Lock()
        self._unwritten = unwritten
        self._view: Span | None = database.watch(self)
        if unwritten is not None:
            unwritten.cut = self

    def note(self, key: bytes) -> None:
        """Note a key that is about to be written. Runs in the mailbox, or in the thread of a cut."""
        self._noted.add(key)
        if len(self._noted) > NOTED_MAX:
            self._seal()

    def _seal(self) -> None:
        with self._guard:
            if self._known is None and self._view is not None:
                self._known = self._database.checkpoint(self._directory)
                self._database.unwatch(self)

    def collect(self) -> CollectedFiles:
        """Return the files of the cut; runs in a thread."""
        if (unwritten := self._unwritten) is not None:
            unwritten.drain()
        self._seal()
        assert self._known is not None
        paths = sorted(self._directory.glob("*.sst"))
        begins = self._begins({path.name for path in paths})
        described = [self._describe(path, begins) for path in paths]
        files = [
            LocalFile(
                one.id,
                self._directory / one.name,
                self._known.get(one.name, {}).get("num_entries", 0),
                one.first_key_group,
                one.last_key_group,
            )
            for one in described
        ]
        undo = self._undo()
        if undo is not None:
            files.append(undo)
        names = ("CURRENT", "MANIFEST-*", "rocksdict-config.json")
        private = {path.name: path.read_bytes() for n in names for path in self._directory.glob(n)}
        meta = DatabaseMeta(
            version=META_VERSION,
            files=described,
            private=private,
            undo="" if undo is None else undo.id,
        )
        return CollectedFiles(files, msgspec.msgpack.encode(meta))

    def _begins(self, present: set[str]) -> dict[str, int]:
        """Return, for each file above level 0, the first key group from which a search in its level ends
        at it.

        A search opens the first file that does not end before the key, whether or not it finds the key
        there. So the owner of groups between two files needs the second one.
        """
        assert self._known is not None
        levels: dict[int, list[tuple[bytes, bytes, str]]] = {}
        for name, file in self._known.items():
            if name in present and file["level"] > 0:
                found = (file["start_key"], file["end_key"], name)
                levels.setdefault(file["level"], []).append(found)
        begins: dict[str, int] = {}
        for files in levels.values():
            behind = 0
            for start, end, name in sorted(files):
                begins[name] = min(behind, group_of(start))
                behind = group_of(end) + 1
        return begins

    def _describe(self, path: Path, begins: dict[str, int]) -> FileMeta:
        """Describe a file by the key groups that need it: a file of level 0 is needed by all, as every
        read opens it.
        """
        own, name = self._database.groups, path.name
        first, last = own.first, own.last
        assert self._known is not None
        known = self._known.get(name)
        if known is not None and known["level"] > 0:
            low = max(first, begins[name])
            high = min(last, group_of(known["end_key"]))
            if low <= high:
                first, last = low, high
        id_ = self._database.inherited.get(name) or f"{self._token}/{name}"
        return FileMeta(name, id_, first, last)

    def _undo(self) -> LocalFile | None:
        """Write the noted keys with their values at the cut, which are None where a key was absent."""
        own, view, unwritten = self._database.groups, self._view, self._unwritten
        assert view is not None
        keys: Collection[bytes] = self._noted.copy()
        restored: dict[bytes, bytes | None] = {}
        if unwritten is not None:
            again = {decode_token(key, GROUP_BYTES)[0] for key in keys if unwritten.known(key)}
            # The others of those written came into the files: either all were written before the thread
            # sealed the cut, or, as the writer came to seal it, later values have taken their place.
            restored.update(unwritten.changes(unwritten.written - again))
        restored.update((key, view.get(key)) for key in keys if key not in restored)
        if not restored:
            return None
        found = sorted(restored.items())
        name = f"undo-{self._number}"
        path = self._directory / name
        path.write_bytes(msgspec.msgpack.encode(found))
        return LocalFile(f"{self._token}/{name}", path, len(found), own.first, own.last)

    def tables(self, reader: EntryReader, dead_until: int) -> Iterator[pa.Table]:
        """Yield the rows at the cut as canonical tables; runs in a thread."""
        self._database.unwatch(self)
        assert self._view is not None
        rows, made = Rows(), 0
        for key, value in self._entries(self._view):
            reader.add(rows, key, value, dead_until)
            if len(rows) == ROWS_PER_TABLE:
                yield reader.table(rows)
                rows, made = Rows(), made + 1
        if len(rows) or not made:
            yield reader.table(rows)

    def _entries(self, view: Span) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries at the cut, in no particular order."""
        unwritten = {} if self._unwritten is None else dict(self._unwritten.changes())
        for key, value in view:
            if key not in unwritten:
                yield key, value
        for key, found in unwritten.items():
            if found is not None:
                yield key, found

    def release(self) -> None:
        """Release the resources of the cut."""
        self._database.unwatch(self)
        with self._guard:
            self._view = self._unwritten = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def as_files_cut(self, reader: EntryReader, keys: tuple[str, ...], dead_until: int) -> FilesCut:
        """Return the cut in the form that the runtime takes."""
        tables: Callable[[], Iterator[pa.Table]] = lambda: self.tables(reader, dead_until)  # noqa: E731
        return FilesCut(self.collect, tables, keys, self.release)
