"""Opens the backend of keyed state with access by single keys, by the job's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import OptionError
from ..state.keyed.base import KeyedBackend
from ..state.keyed.canonical import TableSpec
from ..state.keyed.keys import KeyShape
from ..state.keyed.memory import MemoryBackend
from ..state.keyed.rollback import KEEP_STATE_OPTION, KEPT_BYTES_MAX, KEPT_BYTES_MAX_OPTION
from ..state.keyed.timers import MemoryTimerTable, SpillingTimerTable, TimersOnDisk, TimerTable
from ..state.settings import MemoryShare, RocksDBSettings
from .base import OperatorContext
from .clock import Clock
from .extras import missing_extra
from .sizes import parse_size

_TYPE: Final = "state.backend.type"
_MEMORY: Final = ("hashmap", "memory")
_ROCKSDB: Final = "rocksdb"
_OPTION: Final = "state.backend.rocksdb."
_TIMERS_PART: Final = 8
"""All timers of a process in memory may take one part in this many of the budget, beside it."""


def check_state_backend(options: Mapping[str, str]) -> None:
    """Check that the backend the options name is available here.

    Raises:
        OptionError: there is no such backend, or its package is not installed.
    """
    kind = options.get(_TYPE, _MEMORY[0])
    if kind not in (*_MEMORY, _ROCKSDB):
        raise OptionError(
            f"no such state backend {_TYPE}=`{kind}`",
            fix=f"it can be: {', '.join((*_MEMORY, _ROCKSDB))}",
        )
    missing = missing_extra("rocksdb", f"the state backend {_TYPE}=`{kind}`")
    if kind == _ROCKSDB and missing is not None:
        raise OptionError(missing.message, fix=missing.fix)


def lies_in_rocksdb(options: Mapping[str, str]) -> bool:
    """Return True if the options put keyed state on disk."""
    return options.get(_TYPE) == _ROCKSDB


def kept_bytes_max(options: Mapping[str, str]) -> int:
    """Return how many bytes of old values a table in memory keeps, to go back to a checkpoint; 0: none."""
    if options.get(KEEP_STATE_OPTION, "false").strip().lower() != "true":
        return 0
    text = options.get(KEPT_BYTES_MAX_OPTION)
    return KEPT_BYTES_MAX if text is None else parse_size(text, KEPT_BYTES_MAX_OPTION)


def open_keyed_backend(
    context: OperatorContext, keys: KeyShape, specs: Mapping[str, TableSpec]
) -> KeyedBackend:
    """Open the backend of an operator subtask.

    Args:
        context: of the subtask; its options name the backend.
        keys: the shape of the keys.
        specs: the states, by name.

    Raises:
        OptionError: there is no such backend, or its package is not installed.
    """
    check_state_backend(context.options)
    if not lies_in_rocksdb(context.options):
        return MemoryBackend(keys, specs, context.max_parallelism, kept_bytes_max(context.options))
    from ..state.rocksdb.backend import RocksDBBackend  # imported here, as it needs an extra

    return RocksDBBackend(
        keys,
        specs,
        context.max_parallelism,
        directory=context.local_directory() / "rocksdb",
        key_groups=context.key_groups,
        file_token=context.file_token,
        settings=rocksdb_settings(context.options),
    )


def open_timer_table(context: OperatorContext, spec: TableSpec) -> TimerTable:
    """Open a table of timers of an operator subtask.

    Args:
        context: of the subtask; its options name the backend.
        spec: the name of the state, and its layout by `timer_layout`.
    """
    kept = 0 if lies_in_rocksdb(context.options) else kept_bytes_max(context.options)
    memory = MemoryTimerTable(spec.name, spec.layout, context.max_parallelism, kept)
    if not lies_in_rocksdb(context.options):
        return memory
    settings = rocksdb_settings(context.options)

    def open_on_disk() -> TimersOnDisk:
        from ..state.rocksdb.timers import RocksDBTimerTable  # imported here, as it needs an extra

        return RocksDBTimerTable(
            spec,
            context.max_parallelism,
            directory=context.local_directory() / spec.name,
            key_groups=context.key_groups,
            file_token=context.file_token,
            settings=settings,
        )

    share = MemoryShare(settings.memory_bytes // _TIMERS_PART)
    return SpillingTimerTable(memory, share, open_on_disk)


class ProcessingClock:
    """The machine's clock, by which state expires; see `ttl.TtlClock`."""

    def __init__(self, clock: Clock) -> None:
        self.now = self.passed = self.use = clock.now_ms


def rocksdb_settings(options: Mapping[str, str]) -> RocksDBSettings:
    """Return the settings from the options; others keep their defaults."""
    default = RocksDBSettings()

    def size(key: str, otherwise: int) -> int:
        return parse_size(options[key], key) if key in options else otherwise

    return RocksDBSettings(
        memory_bytes=size("taskmanager.memory.managed.size", default.memory_bytes),
        write_buffer_ratio=float(
            options.get(f"{_OPTION}memory.write-buffer-ratio", default.write_buffer_ratio)
        ),
        write_buffer_bytes=size(f"{_OPTION}writebuffer.size", default.write_buffer_bytes),
        write_buffers=int(options.get(f"{_OPTION}writebuffer.count", default.write_buffers)),
        threads=int(options.get(f"{_OPTION}thread.num", default.threads)),
        open_files=int(options.get(f"{_OPTION}files.open", default.open_files)),
        block_bytes=size(f"{_OPTION}block.blocksize", default.block_bytes),
        held_bytes=size("headgate.state.rocksdb.held-values-max", default.held_bytes),
    )
