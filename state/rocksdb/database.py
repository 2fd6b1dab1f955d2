"""One RocksDB: the entries of one state of one operator subtask, without write-ahead log.

The databases of a process share a cache and write buffers. Files are merged by size (RocksDB's universal
compaction). Whatever a merge writes is new, and is uploaded with the next checkpoint. Merging level by
level, RocksDB's default, rewrites the whole state whenever the first level is full: with 1 % of the keys
changed between checkpoints that uploads 13 % of a full checkpoint each time (mean of 300). Here files are
merged only with others of their size, which uploads 1.7 % in the first 30 checkpoints and 3.0 % over 300,
including the merges of everything; most checkpoints upload only the 1 %. A state that grows is rewritten
once more each time it has doubled.

The cost of that is bounded: there are at most about `_RUNS` sorted runs that a read may look into, and
together they have at most twice the bytes of the largest, for a while three times during a merge of all.
More runs would hardly make it less (20: 2.9 %), fewer would make it more (8: 3.8 %). Reads of single keys
are as fast as with rocksdict's defaults, thanks to the Bloom filters; to begin an iteration takes two to
three times as long, as it goes through all runs.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary, finalize

from rocksdict import (
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DbClosedError,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
    UniversalCompactOptions,
    WriteBatch,
    WriteBufferManager,
    WriteOptions,
)

from ...errors import StorageError
from ..keygroups import KeyGroupRange
from ..settings import MemoryShare, RocksDBSettings
from .layout import END_OF_GROUPS, behind, bounds_of, group_prefix

_MIB: Final = 1 << 20
_ARENAS: Final = 16
_RUNS: Final = 12
"""The number of files, or of sets of files without overlap, from which on some are merged."""
_RUNS_SLOW: Final = 4 * _RUNS
_RUNS_STOP: Final = 8 * _RUNS
"""With this many runs writes wait. A merge of everything takes long, and checkpoints go on adding files
meanwhile.
"""
_SPACE_PERCENT: Final = 100
"""All runs are merged once the others together reach this percentage of the largest."""
_MANIFEST_BYTES: Final = 32 << 10
_BLOOM_BITS: Final = 10


class SharedMemory:
    """The memory for blocks, indexes, filters and unwritten data of all databases with the same budget.

    It counts as one table among those of the process that share the budget.
    """

    def __init__(self, budget_bytes: int, write_buffer_ratio: float) -> None:
        self._share = MemoryShare(budget_bytes)
        finalize(self, self._share.close)
        self._ratio = write_buffer_ratio
        self._bytes = self._share()
        self.cache = Cache(self._bytes)
        self.write_buffers = WriteBufferManager.new_write_buffer_manager_with_cache(
            int(self._bytes * write_buffer_ratio), False, self.cache
        )

    def fit(self) -> None:
        """Grow or shrink to the present share."""
        share = self._share()
        if share != self._bytes:
            self._bytes = share
            self.cache.set_capacity(share)
            self.write_buffers.set_buffer_size(int(share * self._ratio))


_shared: WeakValueDictionary[tuple[int, float], SharedMemory] = WeakValueDictionary()
_guard = threading.Lock()


def shared_memory(settings: RocksDBSettings) -> SharedMemory:
    """Return the memory of this process for databases with these settings. It is freed with the last of
    them.
    """
    budget = (settings.memory_bytes, settings.write_buffer_ratio)
    with _guard:
        memory = _shared.get(budget)
        if memory is None:
            memory = _shared[budget] = SharedMemory(*budget)
        return memory


def database_options(settings: RocksDBSettings, memory: SharedMemory, *, copy: bool = False) -> Any:
    """Return the options of a database; `copy`: it is only read, and may lack files."""
    options = Options(raw_mode=True)
    options.create_if_missing(not copy)
    if copy:
        options.set_paranoid_checks(False)
        options.set_disable_auto_compactions(True)
    options.set_write_buffer_manager(memory.write_buffers)
    options.set_write_buffer_size(settings.write_buffer_bytes)
    options.set_max_write_buffer_number(settings.write_buffers)
    options.set_arena_block_size(max(4096, min(_MIB, settings.write_buffer_bytes // _ARENAS)))
    options.set_block_based_table_factory(_table_options(settings, memory))
    options.set_compression_type(DBCompressionType.lz4())
    _merge_by_size(options)
    options.set_max_background_jobs(settings.threads)
    options.set_max_open_files(settings.open_files)
    # The manifest is part of every checkpoint, so a new one is begun before it gets long. The log is in
    # no checkpoint.
    options.set_max_manifest_file_size(_MANIFEST_BYTES)
    options.set_manifest_preallocation_size(4096)
    options.set_max_log_file_size(_MIB)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    return options


def _merge_by_size(options: Any) -> None:
    universal = UniversalCompactOptions()
    universal.max_size_amplification_percent = _SPACE_PERCENT
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_universal_compaction_options(universal)
    options.set_level_zero_file_num_compaction_trigger(_RUNS)
    options.set_level_zero_slowdown_writes_trigger(_RUNS_SLOW)
    options.set_level_zero_stop_writes_trigger(_RUNS_STOP)


def _table_options(settings: RocksDBSettings, memory: SharedMemory) -> Any:
    tables = BlockBasedOptions()
    tables.set_block_cache(memory.cache)
    tables.set_block_size(settings.block_bytes)
    tables.set_bloom_filter(_BLOOM_BITS, False)
    # Otherwise indexes and filters would lie outside the budget.
    tables.set_cache_index_and_filter_blocks(True)
    tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
    return tables


def without_log() -> Any:
    """Return options by which writes go to memory only: after a crash the checkpoint is restored."""
    options = WriteOptions()
    options.disable_wal = True
    return options


# --- a database ------------------------------------------------------------------------------------


_FLUSHES: Final = 4
_FEW_ENTRIES: Final = 2_000
_POLL_S: Final = 0.002
_FILE_BYTES: Final = 64 << 20
_LOOK_EVERY: Final = 4096


Changes: TypeAlias = list[tuple[bytes, bytes | None]]
"""Values for keys; None removes a key."""


class OpenCut(Protocol):
    """A cut that needs to know which keys are written while it is open."""

    def note(self, key: bytes) -> None:
        """Note a key that is about to be written."""
        ...


class Database:
    """A database of byte strings under byte strings.

    Reads and writes run in the mailbox, `checkpoint` and some writes in threads. While a cut is open, every
    key is noted in it before it is written.

    Args:
        directory: the directory of the database, which is created, and deleted by `close`.
        groups: the key groups of this subtask. No others are seen.
    """

    def __init__(self, directory: Path, settings: RocksDBSettings, groups: KeyGroupRange) -> None:
        self.directory, self.settings, self.groups = directory, settings, groups
        self.inherited: dict[str, str] = {}
        """The ids of files from a checkpoint, by name."""
        self._memory = shared_memory(settings)
        self._no_log = without_log()
        self._cuts: tuple[OpenCut, ...] = ()
        self._cuts_guard = threading.Lock()
        self.get: Callable[[bytes], bytes | None]
        self._open()

    def _open(self) -> None:
        self._db = Rdict(str(self.directory), self.options())
        self._db.set_write_options(self._no_log)
        self.get = self._db.get

    def options(self, *, copy: bool = False) -> Any:
        """Return the options with which the database is opened."""
        return database_options(self.settings, self._memory, copy=copy)

    def replace(self, lay_out: Callable[[Path], None], inherited: dict[str, str]) -> None:
        """Replace the (empty) database by the one that `lay_out` puts into the directory."""
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
        """Remove a key if it is there."""
        if self._cuts:
            self._note(key)
        del self._db[key]

    def get_all(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of several keys, None where there is none; best in the order of keys."""
        found: list[bytes | None] = self._db.get(keys)
        return found

    def write(self, changes: Changes, known_to: OpenCut | None = None) -> None:
        """Set values, or remove keys where the value is None; best in the order of keys.

        Any thread may call this, if no other one writes the same keys. `known_to` is a cut that has these
        values already, and gets no note of the keys.
        """
        for cut in self._cuts:
            if cut is not known_to:
                for key, _ in changes:
                    cut.note(key)
        apply_changes(self._db, changes, self._no_log)

    def _note(self, key: bytes) -> None:
        for cut in self._cuts:
            cut.note(key)

    def under(self, prefix: bytes) -> Span:
        """Return the entries whose keys begin with a prefix."""
        return self.between(prefix, behind(prefix))

    def between(self, start: bytes, stop: bytes) -> Span:
        """Return the entries from `start` to before `stop`."""
        return Span(self._db, start, stop)

    def all(self, start: bytes = b"") -> Span:
        """Return the entries of the own key groups, from `start` on."""
        first, stop = bounds_of(self.groups)
        return self.between(max(first, start), stop)

    # --- cuts ----------------------------------------------------------------------------------

    def watch(self, cut: OpenCut) -> Span:
        """Return all entries as they are now. From now on every key is noted in `cut` before it is
        written.
        """
        self._memory.fit()
        with self._cuts_guard:
            self._cuts = (*self._cuts, cut)
        return self.all()

    def unwatch(self, cut: OpenCut) -> None:
        """Stop noting keys in `cut`."""
        with self._cuts_guard:
            self._cuts = tuple(other for other in self._cuts if other is not cut)

    def checkpoint(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Make hard links to all files, and the manifest that goes with them, in a new directory.

        Creating a checkpoint writes everything that is only in memory, and all other Python code has to
        wait for it (rocksdict holds the interpreter's lock: 180 ms for 40 MB). So most data is first
        flushed without holding the lock, in rounds, each of which writes what came during the one before.

        Returns:
            RocksDB's description of the files by name, of those before the checkpoint and those after it.
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

    def apply(self, changes: Changes) -> None:
        """Set values, or remove keys where the value is None; only while no cut is open."""
        apply_changes(self._db, changes, self._no_log)

    def clip(self) -> None:
        """Remove everything outside the own key groups."""
        first, stop = bounds_of(self.groups)
        self._db.delete_range(
            group_prefix(0), first, self._no_log
        )  # cuts read the key groups of file bounds
        self._db.delete_range(stop, END_OF_GROUPS, self._no_log)

    def ingest(self, files: list[Path]) -> None:
        """Take over files of sorted entries. The files are moved."""
        self._db.ingest_external_file([str(file) for file in files])
        for file in files:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the database and delete its files; must not raise."""
        with suppress(DbClosedError):  # `replace` could not open it again
            self._db.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def apply_changes(db: Any, changes: Changes, write_options: Any) -> None:
    """Set values in a database, or remove keys where the value is None."""
    batch = WriteBatch(raw_mode=True)
    for key, value in changes:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    db.write(batch, write_options)


class Loader:
    """Puts many sorted entries into a database as files, without going through its memory."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._files: list[Path] = []
        self._writer: Any = None

    def add(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Add entries in the order of keys, all greater than those added before."""
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
        """Put all added entries into the database."""
        if self._writer is not None:
            self._end()
        if self._files:
            self._database.ingest(self._files)
            self._files = []


class Span:
    """The entries of a database from `start` to before `stop`, as they are when this is made.

    (rocksdict's own snapshots do not help: an iterator over one sees later writes.)
    """

    def __init__(self, db: Any, start: bytes, stop: bytes) -> None:
        # Held as long as the iterator, which only has a pointer to the bound in it. rocksdict's lower
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
        """Return the value of a key, or None."""
        iterator = self._iterator
        iterator.seek(key)
        if iterator.valid():
            value: bytes | None = iterator.value() if iterator.key() == key else None
            return value
        iterator.status()
        return None

    def last_key(self) -> bytes | None:
        """Return the last key, or None."""
        iterator = self._iterator
        iterator.seek_to_last()
        if iterator.valid():
            key: bytes = iterator.key()
            return key if key >= self._start else None
        iterator.status()
        return None


def link(source: Path, target: Path) -> None:
    """Give the file another name; make a copy where the file system has no links, or the target is on
    another one.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
