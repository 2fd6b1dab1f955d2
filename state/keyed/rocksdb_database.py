"""One RocksDB: the entries of one state of one operator subtask, without write-ahead log."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rocksdict import Checkpoint, DbClosedError, Rdict, ReadOptions, WriteBatch

from ...errors import StorageError
from ..keygroups import KeyGroupRange
from .backend_settings import RocksDBSettings
from .rocksdb_keys import END_OF_GROUPS, behind, bounds_of, group_prefix
from .rocksdb_settings import database_options, shared_memory, without_log

if TYPE_CHECKING:
    from .rocksdb_cut import Cut

_FLUSHES: Final = 4
_FEW_ENTRIES: Final = 2_000
_POLL_S: Final = 0.002


class Database:
    """Bytes under bytes.

    Reads and writes run in the mailbox; `checkpoint` in threads. While a cut is open, every key is noted
    in it before it is written.

    Args:
        directory: where it lies; created, and deleted by `close`.
        groups: the key groups of this subtask: no others are seen.
    """

    def __init__(self, directory: Path, settings: RocksDBSettings, groups: KeyGroupRange) -> None:
        self.directory, self.settings, self.groups = directory, settings, groups
        self.inherited: dict[str, str] = {}
        """Ids of the files that came from a checkpoint, by name."""
        self._memory = shared_memory(settings)
        self._no_log = without_log()
        self._cuts: tuple[Cut, ...] = ()
        self._cuts_guard = threading.Lock()
        self.get: Callable[[bytes], bytes | None]
        self._open()

    def _open(self) -> None:
        self._db = Rdict(str(self.directory), self.options())
        self._db.set_write_options(self._no_log)
        self.get = self._db.get

    def options(self, *, copy: bool = False) -> Any:
        """The options it is opened with."""
        return database_options(self.settings, self._memory, copy=copy)

    def replace(self, lay_out: Callable[[Path], None], inherited: dict[str, str]) -> None:
        """Give up the (empty) content for the database that `lay_out` puts into the directory."""
        self._db.close()
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        lay_out(self.directory)
        self.inherited = inherited
        self._open()

    # --- reads and writes ----------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        """Set the value of a key."""
        if self._cuts:
            self._note(key)
        self._db[key] = value

    def delete(self, key: bytes) -> None:
        """Remove a key, if there."""
        if self._cuts:
            self._note(key)
        del self._db[key]

    def _note(self, key: bytes) -> None:
        for cut in self._cuts:
            cut.note(key)

    def under(self, prefix: bytes) -> Span:
        """The entries whose keys begin with a prefix."""
        return Span(self._db, prefix, behind(prefix))

    def all(self, start: bytes = b"") -> Span:
        """The entries of the own key groups, from `start` on."""
        first, stop = bounds_of(self.groups)
        return Span(self._db, max(first, start), stop)

    # --- cuts ----------------------------------------------------------------------------------

    def watch(self, cut: Cut) -> Span:
        """All entries as they are now; `cut` hears of every key before it is written from now on."""
        self._memory.fit()
        with self._cuts_guard:
            self._cuts = (*self._cuts, cut)
        return self.all()

    def unwatch(self, cut: Cut) -> None:
        """`cut` need hear no more."""
        with self._cuts_guard:
            self._cuts = tuple(other for other in self._cuts if other is not cut)

    def checkpoint(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Hard links to all files, and the manifest that goes with them, in a new directory.

        Returns what is known of files by name: of those that were there before and after.

        Creating a checkpoint writes what is only in memory, and keeps all other Python code waiting for
        it (rocksdict holds the interpreter's lock: 180 ms for 40 MB). So first most is written without
        waiting; what comes meanwhile is written in the next round, and so on.
        """
        for _ in range(_FLUSHES):
            self._db.flush(False)
            while self._number("num-immutable-mem-table"):
                if self._number("background-errors"):
                    raise StorageError(f"RocksDB cannot write directory=`{self.directory}`")
                time.sleep(_POLL_S)
            if self._number("num-entries-active-mem-table") < _FEW_ENTRIES:
                break
        before = self._db.live_files()
        Checkpoint(self._db).create_checkpoint(str(directory))
        known = {file["name"].strip("/"): {**file, "level": 0} for file in self._db.live_files()}
        known.update({file["name"].strip("/"): file for file in before})
        return known

    def _number(self, name: str) -> int:
        return int(self._db.property_int_value(f"rocksdb.{name}") or 0)

    # --- restore -------------------------------------------------------------------------------

    def apply(self, changes: list[tuple[bytes, bytes | None]]) -> None:
        """Set values, or remove the keys (None); before any cut."""
        apply_changes(self._db, changes, self._no_log)

    def clip(self) -> None:
        """Remove everything outside the own key groups."""
        first, stop = bounds_of(self.groups)
        self._db.delete_range(
            group_prefix(0), first, self._no_log
        )  # cuts read the groups of bounds
        self._db.delete_range(stop, END_OF_GROUPS, self._no_log)

    def ingest(self, files: list[Path]) -> None:
        """Take over files of sorted entries, which are moved away."""
        self._db.ingest_external_file([str(file) for file in files])
        for file in files:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close it and delete its files; must not raise."""
        with suppress(DbClosedError):  # it could not be opened again by `replace`
            self._db.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def apply_changes(db: Any, changes: list[tuple[bytes, bytes | None]], write_options: Any) -> None:
    """Set values in a database, or remove keys (None)."""
    batch = WriteBatch(raw_mode=True)
    for key, value in changes:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    db.write(batch, write_options)


class Span:
    """The entries of a database from `start` to before `stop`, as they are when this is made.

    (rocksdict's own snapshots would not do: what iterates over one sees later writes.)
    """

    def __init__(self, db: Any, start: bytes, stop: bytes) -> None:
        # Held as long as the iterator, which has only a pointer to the bound in it. rocksdict's lower
        # bound has no effect.
        self._options = ReadOptions()
        self._options.set_iterate_upper_bound(stop)
        self._iterator = db.iter(self._options)
        self._start, self._stop = start, stop

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        iterator, stop = self._iterator, self._stop
        iterator.seek(self._start)
        while iterator.valid():
            key = iterator.key()
            if key >= stop:
                return
            yield key, iterator.value()
            iterator.next()
        iterator.status()

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        iterator = self._iterator
        iterator.seek(key)
        if iterator.valid():
            value: bytes | None = iterator.value() if iterator.key() == key else None
            return value
        iterator.status()
        return None

    def last_key(self) -> bytes | None:
        """The last key, if any."""
        iterator = self._iterator
        iterator.seek_to_last()
        if iterator.valid():
            key: bytes = iterator.key()
            return key if key >= self._start else None
        iterator.status()
        return None


def link(source: Path, target: Path) -> None:
    """The file under another name; a copy where the file system knows no links, or is another one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
