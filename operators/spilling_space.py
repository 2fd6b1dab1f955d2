"""State of an operator that need not fit into memory: the shared parts of its tables over sorted runs.

`SpillingSpace` has the memory budget, threads, directory and layout that the tables of one operator
subtask share. `ExpiryBound` says which rows have expired, and `DueRows` finds those whose time has come.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from ..state.aggregates.accumulators import Mask
from ..state.hashing import Hashes, hash_columns, identity_columns, key_groups_of
from ..state.runs.layout import Records, RowLayout
from ..state.runs.merge import Expired
from ..state.runs.run_file import FilePool
from ..state.runs.spilling_table import Delta, SpillingTable, TableShape
from ..state.settings import MemoryShare, RunSettings
from ..state.slots.key_index import BatchKeys, KeyHasher, KeyIndex, plain_column
from ..state.snapshot import RestoredState
from ..state.values import Index
from .aggregation.keyed_aggregate import identity_seed
from .base import Operator, OperatorContext
from .elements import WATERMARK_MIN
from .sizes import parse_size

_MANAGED_MEMORY: Final = "taskmanager.memory.managed.size"
_IDENTITY_VERSION: Final = 1
RESTORE_ROWS: Final = 1 << 16
"""The rows that are restored at a time."""
_IN_MEMORY: Final = 4
"""State in memory may take one part in this many of the budget before it moves to disk."""
_PAIR_BYTES: Final = 8 + 8
_PAIRS_MIN: Final = 64
_DUE_PART: Final = 8
"""Pairs of rows that are due next may take one part in this many of the budget."""
DUE_HASHES: Final = 1 << 14
"""The pairs that are handled at a time."""
Times: TypeAlias = Index
Pairs: TypeAlias = tuple[Times, Hashes]
"""Times, and the hashes of keys."""
D = TypeVar("D", bound=Delta)


class SpillingOperator(Operator):
    """An operator whose state is on local disk, and need not fit into memory, if the options say so."""

    @property
    def _uses_disk(self) -> bool:
        """True if the state may be on disk."""
        raise NotImplementedError

    def _restore(self, state: RestoredState) -> None:
        """Restore the state of the operator, in any thread."""
        raise NotImplementedError

    def restore(self, state: RestoredState) -> Awaitable[None] | None:
        """Restore the state of the operator; in a thread of its own if there may be files.

        Files are read from end to end, which takes time for state larger than memory.
        """
        if self._uses_disk:
            return self.context.run_in_thread(lambda: self._restore(state))
        self._restore(state)
        return None


class CellHasher(KeyHasher):
    """Computes the identity of a key together with a number, the last column.

    In runs the first lane is the hash of the key alone: rows of one key lie side by side, and belong to
    its key group. In memory the lanes are exchanged, since the cells of a key would be searched one by
    one if they had the same first lane.
    """

    def __init__(self, types: Sequence[pa.DataType], seed: int) -> None:
        super().__init__([*types, pa.int64()], seed, dense=False)

    def identify(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes | None]:
        hashes, checks = self.identify_in_runs(columns)
        return checks, hashes

    def identify_in_runs(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes]:
        """Return the lanes of rows in runs."""
        return hash_columns(columns[:-1]), identity_columns(columns, self._seed)


class ExpiryBound:
    """The bound of a number in each row, such as a pane or a time: rows up to it have expired.

    Merges ask for it from other threads, while the mailbox moves it.

    Args:
        number: the name of the column.
    """

    def __init__(self, number: str, max_parallelism: int) -> None:
        self._number, self._max_parallelism = number, max_parallelism
        self.limit: int = np.iinfo(np.int64).min
        self._further: Index | None = None

    def move(self, limit: int, further: Index | None = None) -> None:
        """Set the bound.

        Args:
            further: by key group, the later bounds of those that have progressed further; they hold
                until the bound has reached them.
        """
        self.limit = limit
        if further is not None:
            self._further = further
        elif self._further is not None and int(self._further.max()) <= limit:
            self._further = None

    def has_expired(self, hashes: Hashes, numbers: Index) -> Mask:
        """Return which rows with these first lanes and numbers have expired by now."""
        return self._has_expired(hashes, numbers, self.limit, self._further)

    def now(self) -> Expired:
        """Return a function that finds the rows that have expired by now."""
        return partial(self._records_expired, self.limit, self._further)

    def __call__(self, records: Records) -> Mask:
        return self._records_expired(self.limit, self._further, records)

    def _records_expired(self, limit: int, further: Index | None, records: Records) -> Mask:
        numbers = RowLayout.numbers(records, self._number)
        return self._has_expired(records["hash"], numbers, limit, further)

    def _has_expired(
        self, hashes: Hashes, numbers: Index, limit: int, further: Index | None
    ) -> Mask:
        bounds: int | Index = limit
        if further is not None:
            bounds = np.maximum(further[key_groups_of(hashes, self._max_parallelism)], limit)
        expired: Mask = numbers <= bounds
        return expired


class SpillingSpace:
    """The shared parts of the tables of one operator subtask: memory, threads, a directory, and layout.

    Args:
        name: of the tables.
        schema: the columns of a row.
        keys: the fields of the key columns.
        number: the name of an int64 column that identifies a row together with the key; None if the key
            alone does.
        expired: finds the rows that merges leave out.

    Attributes:
        hasher: computes the identity of rows in memory.
        key_hasher: computes the identity of keys alone.
        identify: computes the lanes of rows in runs.
        share: returns the current bytes of all tables together.
    """

    def __init__(
        self,
        context: OperatorContext,
        name: str,
        schema: pa.Schema,
        keys: Sequence[pa.Field],
        number: str | None,
        expired: Expired | None,
    ) -> None:
        types, seed = [field.type for field in keys], identity_seed(context.job_name)
        self._keys = tuple(field.name for field in keys)
        # Keys are looked up on disk by their hashes, so an index without hashes would not work.
        self.hasher = self.key_hasher = KeyHasher(types, seed, dense=False)
        self.identify: Callable[[Sequence[pa.Array]], tuple[Hashes, Hashes | None]]
        self.identify = self.key_hasher.identify
        if number is not None:
            self.hasher = cell_hasher = CellHasher(types, seed)
            self.identify = cell_hasher.identify_in_runs
        self.share = MemoryShare(_managed_memory(context))
        self.threads = ThreadPoolExecutor(2, thread_name_prefix=f"runs-{context.operator_name}")
        self.directory = context.local_directory() / name
        self.directory.mkdir()
        numbers = itertools.count(1)
        self.new_id: Callable[[], str] = lambda: f"{name}-{context.file_token}-{next(numbers)}"
        self.settings = replace(RunSettings(), mapped_bytes=self.share())
        self.pool = FilePool(
            self.directory, self.settings.pool_bytes, self.settings.pool_file_bytes_min
        )
        self.shape = TableShape(
            schema=schema,
            keys=self._keys if number is None else (*self._keys, number),
            wide=not self.hasher.exact or keys[0].nullable,
            identity="" if self.hasher.exact else f"{_IDENTITY_VERSION}-{seed:016x}",
            identify=self.identify_rows,
            key_groups=context.key_groups,
            max_parallelism=context.max_parallelism,
            expired=expired,
        )

    @property
    def room(self) -> int:
        """The bytes that state may take before it moves here from a table in memory."""
        return self.share() // _IN_MEMORY

    def new_table(
        self, new_delta: Callable[[], D], memory_bytes: Callable[[], int] | None = None
    ) -> SpillingTable[D]:
        """Return an empty table; `memory_bytes` is its budget, by default that of the whole space."""
        return SpillingTable(
            self.shape,
            new_delta,
            self.directory,
            self.new_id,
            self.settings,
            self.threads.submit,
            memory_bytes or self.share,
            self.pool,
        )

    def keys_of(self, rows: pa.Table) -> list[pa.Array]:
        """Return the key columns of stored rows."""
        return [plain_column(rows.column(key)) for key in self._keys]

    def key_index(self, keys: Sequence[pa.Array]) -> tuple[KeyIndex, Index]:
        """Return an index of the keys in these columns, and the slot of each row's key."""
        index = KeyIndex(self.key_hasher)
        return index, index.lookup(BatchKeys(self.key_hasher, keys)).astype(np.intp)

    def identify_rows(self, table: pa.Table) -> tuple[Hashes, Hashes | None]:
        """Return the lanes of stored rows."""
        return self.identify([plain_column(table.column(key)) for key in self.shape.keys])

    def close(self) -> None:
        """Release memory, threads and unused files; called after the tables."""
        self.pool.close()
        self.threads.shutdown(wait=False)
        self.share.close()


class DueRows:
    """Finds the rows on disk whose time has come, without reading all of them each time.

    The time of a row on disk is not known without reading it. So there are pairs of time and hash, 16
    bytes each, of the rows that are due next, up to a *horizon*. Rows that are written to disk are added
    if they are due before the horizon. When there are more pairs than their part of the memory allows,
    the horizon comes nearer. When time reaches it, all rows are read once, and the horizon moves on.

    Pairs are ordered by time and then by hash, so that the horizon can lie between rows of the same
    time. Pairs that are added together are one run, in order. Each run is at least as long as the next
    one was, or else they are merged. A row may have changed since its pair was added, or be in memory:
    a caller that looks up the rows of a pair checks their times.

    Args:
        table: the rows.
        times_of: returns the times at which stored rows are due, ms.
        memory_bytes: returns the budget of the table.
    """

    def __init__(
        self,
        table: SpillingTable[Any],
        times_of: Callable[[Records], Times],
        memory_bytes: Callable[[], int],
    ) -> None:
        self._table, self._times_of = table, times_of
        self._memory_bytes = memory_bytes
        self._runs: list[Pairs] = []
        self._horizon: tuple[int, np.uint64] | None = None
        """The last pair that would be known here; None: all rows on disk are known."""
        self._through = WATERMARK_MIN

    def forget(self) -> None:
        """Forget all pairs, because rows were restored."""
        self._runs, self._horizon = [], (WATERMARK_MIN, np.uint64(0))

    def add(self, times: Times, hashes: Hashes) -> None:
        """Add rows that are written to disk, by their times and the first lanes of their identity."""
        wanted = times > self._through
        if self._horizon is not None:
            wanted &= ~_is_before(*self._horizon, times, hashes)
        if not wanted.any():
            return
        times, hashes = times[wanted], hashes[wanted]
        while self._runs and len(self._runs[-1][0]) < len(times):
            before = self._runs.pop()
            times, hashes = np.concatenate([before[0], times]), np.concatenate([before[1], hashes])
        self._runs.append(_ordered(times, hashes))
        room = max(_PAIRS_MIN, self._memory_bytes() // _DUE_PART // _PAIR_BYTES)
        if sum(len(run[0]) for run in self._runs) > room:
            times, hashes = _ordered(*map(np.concatenate, zip(*self._runs, strict=True)))
            if len(times) > room:
                times, hashes = times[: room // 2], hashes[: room // 2]
                self._horizon = int(times[-1]), hashes[-1]
            self._runs = [(times, hashes)]

    def due(self, after: int, until: int) -> Iterator[Pairs]:
        """Yield the pairs of times after `after` and up to `until`, in order and in portions.

        No rows may be added meanwhile. `after` is where the last call ended.
        """
        self._through = after
        while self._table.spilled:
            times, hashes = self._pop(until)
            first = int(np.searchsorted(times, after, "right"))
            for low in range(first, len(times), DUE_HASHES):
                yield times[low : low + DUE_HASHES], hashes[low : low + DUE_HASHES]
            if self._horizon is None or until < self._horizon[0]:
                break
            self._look_ahead(self._horizon)
        self._through = until

    def _look_ahead(self, known: tuple[int, np.uint64]) -> None:
        """Read all rows on disk, and add those behind the horizon."""
        self._horizon = None
        for rows in self._table.packed_on_disk():
            times = self._times_of(rows.records)
            behind = _is_before(*known, times, rows.hashes)
            self.add(times[behind], rows.hashes[behind])

    def _pop(self, until: int) -> Pairs:
        """Remove and return the pairs up to a time, in order, each once."""
        due: list[Pairs] = [(np.zeros(0, np.int64), np.zeros(0, np.uint64))]
        for number, (times, hashes) in enumerate(self._runs):
            at = int(np.searchsorted(times, until, "right"))
            due.append((times[:at], hashes[:at]))
            self._runs[number] = times[at:], hashes[at:]
        self._runs = [run for run in self._runs if len(run[0])]
        return _ordered(*map(np.concatenate, zip(*due, strict=True)))


def by_hash(hashes: Hashes) -> Iterator[tuple[Index, Hashes]]:
    """Yield rows with these hashes, and their hashes, in parts. All rows of one hash are in one part."""
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    low = 0
    while low < len(order):
        last = hashes[min(low + RESTORE_ROWS, len(order)) - 1]
        high = int(np.searchsorted(hashes, last, "right"))
        yield order[low:high], hashes[low:high]
        low = high


def is_in_portion(portion: Pairs, times: Times, hashes: Hashes) -> Mask:
    """Return which rows are due with this portion of `DueRows.due`; each row is in one at most."""
    firsts, lasts = ((portion[0][at], portion[1][at]) for at in (0, -1))
    return ~_is_before(times, hashes, *firsts) & ~_is_before(*lasts, times, hashes)


def _ordered(times: Times, hashes: Hashes) -> Pairs:
    """Return pairs in order, each once."""
    order = np.lexsort((hashes, times))
    times, hashes = times[order], hashes[order]
    again = (times[1:] == times[:-1]) & (hashes[1:] == hashes[:-1])
    if again.any():
        kept = np.flatnonzero(np.append(True, ~again))
        times, hashes = times[kept], hashes[kept]
    return times, hashes


def _is_before(
    time: int | Times, hash_: np.uint64 | Hashes, times: int | Times, hashes: np.uint64 | Hashes
) -> Mask:
    """Return for which pairs the first one is before the second one."""
    before: Mask = (time < times) | ((time == times) & (hash_ < hashes))
    return before


def _managed_memory(context: OperatorContext) -> int:
    text = context.options.get(_MANAGED_MEMORY)
    return RunSettings().memory_bytes if text is None else parse_size(text, _MANAGED_MEMORY)
