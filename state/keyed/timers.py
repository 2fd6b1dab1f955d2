"""Timers by key: one per (key, tag), in the order of time, in a table that goes into the snapshot.

Pending timers are in a dictionary, cut in parts like those of the memory backend (`cuts.py`), so that a
snapshot costs the mailbox the same however many timers there are. Their order is kept beside it and is
not part of the state: *buckets* with the addresses of one time, and a heap of those times. An address
counts in one bucket only, the one that `_queued` names, and goes into another one if its timer was moved
to a later time. So a timer that every record moves on costs nothing in the order until the old time has
come, and cancelling never searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, Final, TypeAlias

import pyarrow as pa

from ..codecs import codec_of
from ..evolution import adapt
from ..snapshot import TableCut
from .base import ABSENT
from .canonical import DELETED, Layout, Rows
from .cuts import PARTS, Changes, Cut, part_of
from .keys import KeyShape, encode_token, entry_codec, key_of, token

Address: TypeAlias = tuple[Any, Any]
"""The tokens of a key and of a tag."""
STALE_ENTRIES_MIN: Final = 1_024
"""Buckets are cleaned only once this many addresses no longer count in them."""


def timer_layout(keys: KeyShape, tags: Any = str) -> Layout:
    """Return the columns of a table of timers; its `info` declares the state.

    Args:
        keys: the keys of the operator.
        tags: the type of the tags: str, or anything that can be a key, such as `tuple[int, int]`.
    """
    return Layout(keys, "timers", codec_of(int), entry_codec(tags))


class TimerTable:
    """The timers of one clock in one operator subtask. All methods run in the subtask's mailbox.

    Args:
        layout: the result of `timer_layout`.
        max_parallelism: the number of key groups.
    """

    def __init__(self, layout: Layout, max_parallelism: int) -> None:
        self._layout = layout
        self._max_parallelism = max_parallelism
        self._changes = Changes()
        self._times: list[dict[Address, int]] = [{} for _ in range(PARTS)]
        self._size = 0
        self._heap: list[int] = []
        self._buckets: dict[int, list[Address]] = {}
        self._in_buckets = 0
        self._queued: dict[Address, int] = {}
        """The time of the bucket in which an address counts, which is never after its timer."""

    def __len__(self) -> int:
        """Return the number of pending timers."""
        return self._size

    @property
    def next_time(self) -> int | None:
        """The time at which the earliest timer is due, ms; None if there is none."""
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
        """Return the time at which the timer of this key and tag is due, ms; None if there is none."""
        address = (token(key), token(tag))
        return self._times[part_of(address)].get(address)

    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        """Let the timer of this key and tag be due at `timestamp` (ms). A pending timer is moved.

        Raises:
            StateError: the key or the tag is of a type that cannot be a key.
        """
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
        """Delete the timer of this key and tag; return False if there was none."""
        address = (token(key), token(tag))
        if address not in self._times[part_of(address)]:
            return False
        self._write(address, ABSENT)
        return True

    def pop_due(self, until: int) -> Iterator[tuple[int, Any, Any]]:
        """Remove the timers due at or before `until` (ms) one at a time, and yield `(timestamp, key, tag)`.

        They come in the order of time, those of one key and time in the order of their tags. Changes of
        timers between two steps of the iteration take effect at once; `next_time` may leave out timers of
        the present time until the iteration ends.
        """
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
        """Return a consistent cut, at a cost that does not grow with the number of timers."""
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

    def restore(self, table: pa.Table) -> None:
        """Take over the rows of own key groups from a snapshot. It is called once, on an empty table.

        Raises:
            StateError: it is not a table of timers with these keys and tags.
        """
        schema = self._layout.schema()
        rows = self._layout.rows(adapt(table, schema))
        for key, tag, timestamp in zip(rows.keys, rows.entries, rows.values, strict=True):
            address = (token(key), token(tag))
            self._times[part_of(address)][address] = timestamp
        self._size = len(rows)
        self._rebuild_order()
        self._changes.restored(rebase=not table.schema.equals(schema))

    def _write(self, address: Address, timestamp: Any) -> None:
        """Set or remove (`ABSENT`) the time of an address. The old one goes into an open cut's log."""
        part = part_of(address)
        times, changes = self._times[part], self._changes
        old: Any = times.get(address, ABSENT)
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
        bucket.sort(key=_tag_order, reverse=True)
    return bucket


def _tag_order(address: Address) -> bytes:
    """Return the bytes by which the tags of a table are compared, whatever their type."""
    tag = address[1]
    return tag.encode() if type(tag) is str else encode_token(tag)


def _add(rows: Rows, address: Address, timestamp: Any) -> None:
    rows.keys.append(key_of(address[0]))
    rows.entries.append(key_of(address[1]))
    rows.values.append(timestamp)
