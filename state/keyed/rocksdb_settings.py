"""The bounds of the RocksDBs of a process, and the memory that they share.

Files are merged by size (RocksDB's universal compaction). Whatever a merge writes is new, and goes up with
the next checkpoint. Merging level by level, RocksDB's default, rewrites the whole state whenever the first
level is full: with 1 % of the keys changed between checkpoints that uploads 13 % of a full checkpoint each
time (mean of 300). Here files come together with others of their size only: 1.7 % in the first 30
checkpoints, 3.0 % over 300, the merges with everything included; most checkpoints are the 1 %. A state
that grows is rewritten once more each time it has doubled.

What that costs is bounded: there are at most about `_RUNS` sorted runs that a read may look into, and
together they have at most twice the bytes of the largest, for a while three times during a merge of all.
More runs would hardly make it less (20: 2.9 %), fewer more (8: 3.8 %). Reads of single keys are as fast as
with rocksdict's defaults, thanks to the Bloom filters; to begin an iteration takes two to three times as
long, as it goes through all runs.
"""

from __future__ import annotations

import threading
from typing import Any, Final
from weakref import WeakValueDictionary, finalize

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    UniversalCompactOptions,
    WriteBufferManager,
    WriteOptions,
)

from ..runs.memory_shares import MemoryShare
from .backend_settings import RocksDBSettings

_MIB: Final = 1 << 20
_ARENAS: Final = 16
_RUNS: Final = 12
"""So many files, or sets of files without overlap, before some are merged."""
_RUNS_SLOW: Final = 4 * _RUNS
_RUNS_STOP: Final = 8 * _RUNS
"""Where writes wait. A merge of everything takes long, and checkpoints go on adding files meanwhile."""
_SPACE_PERCENT: Final = 100
"""Of the largest run: once the others have so much together, all are merged."""
_MANIFEST_BYTES: Final = 32 << 10
_BLOOM_BITS: Final = 10


class SharedMemory:
    """Blocks read, indexes, filters and data not yet written of all databases with the same budget.

    To the rest of the process it is one table among those that share the budget.
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
        """Grow or shrink to the share of now."""
        share = self._share()
        if share != self._bytes:
            self._bytes = share
            self.cache.set_capacity(share)
            self.write_buffers.set_buffer_size(int(share * self._ratio))


_shared: WeakValueDictionary[tuple[int, float], SharedMemory] = WeakValueDictionary()
_guard = threading.Lock()


def shared_memory(settings: RocksDBSettings) -> SharedMemory:
    """The memory of this process for databases with these settings; freed with the last of them."""
    budget = (settings.memory_bytes, settings.write_buffer_ratio)
    with _guard:
        memory = _shared.get(budget)
        if memory is None:
            memory = _shared[budget] = SharedMemory(*budget)
        return memory


def database_options(settings: RocksDBSettings, memory: SharedMemory, *, copy: bool = False) -> Any:
    """The options of a database; `copy`: of one that is only read, and may lack files."""
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
    # The manifest is part of every checkpoint, so it is begun anew before it gets long; the log of none.
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
    """Writes go to memory only: what survives a crash is the checkpoint."""
    options = WriteOptions()
    options.disable_wal = True
    return options
