"""Timers by key: one per (key, tag), in the order of time, in a table that goes into the snapshot.

`MemoryTimerTable` holds them in memory. `SpillingTimerTable` does so, too, while there are few, and moves
them to a table on disk (`rocksdb/timers.py`) once they have outgrown their part of the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Final, TypeAlias

import pyarrow as pa

from ..codecs import codec_of
from ..evolution import adapt
from ..queryable import CommittedPoints
from ..settings import MemoryShare
from ..snapshot import FilesCut, KeptState, RestoredState, TableCut
from .base import ABSENT, in_other_files
from .canonical import DELETED, Layout, Rows
from .cuts import PARTS, Changes, Cut, part_of
from .keys import KeyShape, Token, encode_token, entry_codec, key_of, token
from .rollback import KeptCut, KeptTable, kept_cuts

Address: TypeAlias = tuple[Any, Any]
"""The tokens of a key and of a tag."""
Pending: TypeAlias = tuple[int, Any, Any]
"""A timer: the time at which it is due, ms, its key and its tag."""
STALE_ENTRIES_MIN: Final = 1_024
"""Buckets are cleaned only once this many addresses no longer count in them."""
_TIMER_BYTES: Final = 400
"""The memory that a timer takes beside its key and tag: 230 bytes, or 350 if all times are different."""
_SAMPLED: Final = 256
"""One in this many timers is looked at for the sizes of keys and tags."""


def timer_layout(keys: KeyShape, tags: Any = str) -> Layout:
    """Return the columns of a table of timers; its `info` declares the state.

    Args:
        keys: the keys of the operator.
        tags: the type of the tags: str, or anything that can be a key, such as `tuple[int, int]`.
    """
    return Layout(keys, "timers", codec_of(int), entry_codec(tags))


class TimerTable(ABC):
    """The timers of one clock in one operator subtask. All methods run in the subtask's mailbox."""

    points: Sequence[CommittedPoints[KeptCut]] = ()
    """The checkpoints to which the table can go back; see `KeyedBackend.points`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of pending timers."""

    @property
    @abstractmethod
    def next_time(self) -> int | None:
        """The time at which the earliest timer is due, ms; None if there is none."""

    @abstractmethod
    def get(self, key: Any, tag: Any) -> int | None:
        """Return the time at which the timer of this key and tag is due, ms; None if there is none."""

    @abstractmethod
    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        """Let the timer of this key and tag be due at `timestamp` (ms). A pending timer is moved.

        Raises:
            StateError: the key or the tag is of a type that cannot be a key.
        """

    @abstractmethod
    def cancel(self, key: Any, tag: Any) -> bool:
        """Delete the timer of this key and tag; return False if there was none."""

    @abstractmethod
    def pop_due(self, until: int) -> Iterator[Pending]:
        """Remove the timers due at or before `until` (ms) one at a time, and yield `(timestamp, key, tag)`.

        They come in the order of time, those of one key and time in the order of their tags. Changes of
        timers between two steps of the iteration take effect at once, but a timer that is set to the time
        being handled comes after those that were due then. `next_time` may leave out timers of the
        present time until the iteration ends.
        """

    @abstractmethod
    def snapshot(self) -> TableCut | FilesCut:
        """Return a consistent cut, at a cost that does not grow with the number of timers."""

    @abstractmethod
    def restore(self, state: RestoredState) -> None:
        """Take over the timers of own key groups. It is called once, on an empty table.

        Raises:
            StateError: the stored timers have other keys or tags, or lie in files that this table
                cannot read.
        """

    def keep(self) -> KeptState | None:
        """Take the timers out, if they can go back to a checkpoint; see `KeyedBackend.keep`."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release resources; must not raise."""


class MemoryTimerTable(TimerTable):
    """Timers in memory.

    They are in a dictionary, cut in parts like those of the memory backend (`cuts.py`), so that a snapshot
    costs the mailbox the same however many timers there are. Their order is kept beside it and is not part
    of the state: *buckets* with the addresses of one time, and a heap of those times. An address counts in
    one bucket only, the one that `_queued` names, and goes into another one if its timer was moved to a
    later time. So a timer that every record moves on costs nothing in the order until the old time has
    come, and cancelling never searches.

    Args:
        name: the name of the state.
        layout: the result of `timer_layout`.
        max_parallelism: the number of key groups.
        kept_bytes_max: how many bytes of old values the table keeps, to go back to a checkpoint; 0: it
            cannot.
    """

    def __init__(
        self, name: str, layout: Layout, max_parallelism: int, kept_bytes_max: int = 0
    ) -> None:
        self.name, self._layout = name, layout
        self._max_parallelism = max_parallelism
        self._changes = Changes()
        if kept_bytes_max:
            self.points = (kept_cuts(self._changes, kept_bytes_max),)
        self._times: list[dict[Address, int]] = [{} for _ in range(PARTS)]
        self._size = 0
        self._heap: list[int] = []
        self._buckets: dict[int, list[Address]] = {}
        self._in_buckets = 0
        self._queued: dict[Address, int] = {}
        """The time of the bucket in which an address counts, which is never after its timer."""

    def __len__(self) -> int:
        return self._size

    @property
    def next_time(self) -> int | None:
        while self._heap:
            at = self._heap[0]
            bucket = self._buckets[at]
            while bucket:
                if self._counts(bucket[-1], at):
                    return at
                bucket.pop()
                self._in_buckets -= 1
            del self._buckets[heappop(self._heap)]
        return None

    def get(self, key: Any, tag: Any) -> int | None:
        address = (token(key), token(tag))
        return self._times[part_of(address)].get(address)

    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        address = (token(key), token(tag))
        if self._times[part_of(address)].get(address) == timestamp:
            return
        self._write(address, timestamp)
        queued = self._queued.get(address)
        if queued is None or queued > timestamp:
            self._push(address, timestamp)
            if self._in_buckets > 2 * self._size + STALE_ENTRIES_MIN:
                self._rebuild_order()

    def cancel(self, key: Any, tag: Any) -> bool:
        address = (token(key), token(tag))
        if address not in self._times[part_of(address)]:
            return False
        self._write(address, ABSENT)
        return True

    def pop_due(self, until: int) -> Iterator[Pending]:
        begun: list[tuple[int, list[Address]]] = []
        while True:
            limit = begun[-1][0] - 1 if begun else until
            if self._heap and self._heap[0] <= limit:
                at = heappop(self._heap)
                bucket = self._buckets.pop(at)
                self._in_buckets -= len(bucket)
                begun.append((at, _in_order(bucket)))
            elif not begun:
                return
            elif not begun[-1][1]:
                begun.pop()
            else:
                at, bucket = begun[-1]
                address = bucket.pop()
                if self._counts(address, at):
                    del self._queued[address]
                    self._write(address, ABSENT)
                    yield at, key_of(address[0]), key_of(address[1])

    def snapshot(self) -> TableCut:
        cut = self._changes.cut()

        def make(since: int | None) -> pa.Table:
            try:
                rows = self._all_rows(cut) if since is None else self._changed_rows(cut, since)
                return self._layout.table(rows, self._max_parallelism, deltas=since is not None)
            finally:
                cut.open = False

        def discard() -> None:
            cut.open = False

        epoch = 0 if self._changes.rebase else cut.epoch
        return TableCut(
            make, self._layout.identity, epoch, discard=discard, confirm=self._changes.confirm
        )

    def keep(self) -> KeptState | None:
        if not self.points:
            return None
        return KeptTable.of(self._times, self.points[0], self._changes)

    def restore(self, state: RestoredState) -> None:
        if (kept := state.kept.get(self.name)) is not None:
            self._take_over(kept.content, state.checkpoint_id)
            return
        if state.files.get(self.name):
            raise in_other_files(self.name)
        table = state.tables.get(self.name)
        if table is not None:
            self._fill(table)

    def _fill(self, table: pa.Table) -> None:
        schema = self._layout.schema()
        rows = self._layout.rows(adapt(table, schema))
        for key, tag, timestamp in zip(rows.keys, rows.entries, rows.values, strict=True):
            address = (token(key), token(tag))
            self._times[part_of(address)][address] = timestamp
        self._size = len(rows)
        self._rebuild_order()
        self._changes.restored(rebase=not table.schema.equals(schema))

    def _take_over(self, kept: KeptTable[int], checkpoint_id: int) -> None:
        """Take over the timers of a subtask that has ended, as of a checkpoint."""
        old = kept.old_values(checkpoint_id)
        self._times = kept.parts
        for times, values in zip(self._times, old, strict=True):
            times.update(values)
            for address, timestamp in values.items():
                if timestamp is ABSENT:
                    del times[address]
        self._size = sum(map(len, self._times))
        self._rebuild_order()
        self._changes.restored()

    def close(self) -> None:
        pass

    def pending(self) -> Iterator[Pending]:
        """Yield all timers, in no particular order. None may be changed meanwhile."""
        for times in self._times:
            for address, timestamp in times.items():
                yield timestamp, key_of(address[0]), key_of(address[1])

    def _write(self, address: Address, timestamp: Any) -> None:
        """Set or remove (`ABSENT`) the time of an address. The old one goes into an open cut's log."""
        part = part_of(address)
        times, changes = self._times[part], self._changes
        old: Any = times.get(address, ABSENT)
        if address not in changes.dirty:
            if changes.newest is not None:
                changes.log(part, address, old)
            changes.dirty.add(address)
        if timestamp is ABSENT:
            del times[address]
            self._size -= 1
        else:
            times[address] = timestamp
            self._size += old is ABSENT

    def _push(self, address: Address, at: int) -> None:
        """Let an address count in the bucket of a time."""
        self._queued[address] = at
        bucket = self._buckets.get(at)
        if bucket is None:
            self._buckets[at] = [address]
            heappush(self._heap, at)
        else:
            bucket.append(address)
        self._in_buckets += 1

    def _rebuild_order(self) -> None:
        self._heap, self._buckets, self._in_buckets, self._queued = [], {}, 0, {}
        for times in self._times:
            for address, at in times.items():
                self._push(address, at)

    def _counts(self, address: Address, at: int) -> bool:
        """Return whether an address in the bucket of time `at` is due then. If its timer was moved, it
        goes to another bucket.
        """
        if self._queued.get(address) != at:
            return False
        due = self._times[part_of(address)].get(address)
        if due == at:
            return True
        del self._queued[address]
        if due is not None:
            self._push(address, due)
        return False

    # These methods run in threads while the table goes on.

    def _all_rows(self, cut: Cut) -> Rows:
        rows = Rows()
        for part in range(PARTS):
            held: dict[Any, Any] = self._times[part].copy()
            held.update(cut.overlay(part))
            for address, timestamp in held.items():
                if timestamp is not ABSENT:
                    _add(rows, address, timestamp)
        return rows

    def _changed_rows(self, cut: Cut, since: int) -> Rows:
        rows = Rows()
        seen: set[Any] = set()
        for addresses in self._changes.changed(since, cut):
            for address in addresses - seen:
                part = part_of(address)
                live: Any = self._times[part].get(address, ABSENT)
                timestamp = cut.find(part, address, live)
                _add(rows, address, DELETED if timestamp is ABSENT else timestamp)
            seen |= addresses
        return rows


def _in_order(bucket: list[Address]) -> list[Address]:
    """Sort the bucket by tag, with the first tag last; addresses of equal tags keep the order in which
    they came.
    """
    if len(bucket) > 1:
        bucket.reverse()
        bucket.sort(key=lambda address: tag_order(address[1]), reverse=True)
    return bucket


def tag_order(tag: Token) -> bytes:
    """Return the bytes by which the tags of a table are compared, whatever their type."""
    return tag.encode() if type(tag) is str else encode_token(tag)


def _add(rows: Rows, address: Address, timestamp: Any) -> None:
    rows.keys.append(key_of(address[0]))
    rows.entries.append(key_of(address[1]))
    rows.values.append(timestamp)


class TimersOnDisk(TimerTable):
    """A table of timers that need not fit into memory."""

    @abstractmethod
    def take_over(self, timers: Iterator[Pending]) -> None:
        """Add timers, in any order, to an empty table."""

    @abstractmethod
    def pop_after(self, timer: Pending, until: int) -> Iterator[Pending]:
        """Yield the first timer of a time, which another table has popped, and go on as `pop_due` of
        that table would have done. All others were taken over.
        """


class SpillingTimerTable(TimerTable):
    """Timers in memory that move to disk, for good, when they take more than their part of the memory.

    A few timers cost what they cost in memory, and have no files. While due timers are handled, the table
    moves only between two times: so all timers of one time come in the order in which they would have
    come in memory.

    Args:
        memory: the table to begin with.
        share: the memory for the timers while they are there; it is closed with the table, or when they
            move.
        open_on_disk: opens the other table, which is empty.
    """

    def __init__(
        self,
        memory: MemoryTimerTable,
        share: MemoryShare,
        open_on_disk: Callable[[], TimersOnDisk],
    ) -> None:
        self._table: MemoryTimerTable | TimersOnDisk = memory
        self._memory: MemoryTimerTable | None = memory
        """The table in memory, while that is the table."""
        self._share, self._open_on_disk = share, open_on_disk
        self._popping = 0
        self._count, self._size_bytes = 0, 0.0
        self._limit = max(1, share() // _TIMER_BYTES)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def next_time(self) -> int | None:
        return self._table.next_time

    def get(self, key: Any, tag: Any) -> int | None:
        return self._table.get(key, tag)

    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        self._table.set(key, tag, timestamp)
        if self._memory is not None:
            self._count += 1
            if self._count % _SAMPLED == 1:
                self._look_at(key, tag)
            if not self._popping and len(self._memory) > self._limit:
                self._move(self._memory)

    def _look_at(self, key: Any, tag: Any) -> None:
        """Estimate how many timers fit into the memory, by the sizes of the keys and tags seen lately."""
        size = len(encode_token(token(key))) + len(encode_token(token(tag)))
        self._size_bytes += (size - self._size_bytes) / (1 + min(self._count // _SAMPLED, 15))
        self._limit = max(1, self._share() // (_TIMER_BYTES + int(self._size_bytes)))

    def cancel(self, key: Any, tag: Any) -> bool:
        return self._table.cancel(key, tag)

    def pop_due(self, until: int) -> Iterator[Pending]:
        self._popping += 1
        try:
            memory = self._memory
            if memory is None:
                yield from self._table.pop_due(until)
                return
            latest: int | None = None
            for timer in memory.pop_due(until):
                if latest is None or timer[0] > latest:  # all of the times before were handled
                    latest = timer[0]
                    if len(memory) > self._limit:
                        yield from self._move(memory).pop_after(timer, until)
                        return
                yield timer
        finally:
            self._popping -= 1

    def _move(self, memory: MemoryTimerTable) -> TimersOnDisk:
        """Let the timers lie on disk from now on."""
        on_disk = self._go_to_disk()
        on_disk.take_over(memory.pending())
        return on_disk

    def _go_to_disk(self) -> TimersOnDisk:
        self._table = on_disk = self._open_on_disk()
        self._memory = None
        self._share.close()
        return on_disk

    def snapshot(self) -> TableCut | FilesCut:
        return self._table.snapshot()

    def restore(self, state: RestoredState) -> None:
        """See `TimerTable`. Timers that lay on disk lie there again, and so do many from memory."""
        assert self._memory is not None
        rows = state.tables.get(self._memory.name)
        many = rows is not None and rows.num_rows > self._limit
        if many or state.files.get(self._memory.name):
            self._go_to_disk()
        self._table.restore(state)

    def close(self) -> None:
        self._share.close()
        self._table.close()
