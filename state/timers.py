"""Timers by key: one per (key, tag), in the order of time, in a table that goes into the snapshot.

What is pending is a dictionary, cut in parts as that of the memory backend (`keyed/cuts.py`), so that a
snapshot costs the mailbox the same however many timers there are. The order is kept by a heap beside it,
which is not part of the state: an entry of the heap counts only if it is the one that `_queued` names, and
goes back into the heap if its timer was moved to a later time. So a timer that every record moves on
costs the heap nothing until the old time has come, and cancelling never searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final, TypeAlias

import pyarrow as pa

from .codecs import codec_of
from .evolution import adapt
from .keyed.base import ABSENT
from .keyed.canonical import DELETED, Layout, Rows
from .keyed.cuts import PARTS, Changes, Cut, part_of
from .keyed.identity import encode_token, key_of, token
from .keyed.key_shape import KeyShape, entry_codec
from .snapshot import TableCut

Address: TypeAlias = tuple[Any, Any]
"""The tokens of a key and of a tag."""
STALE_ENTRIES_MIN: Final = 1_024
"""The heap is not cleaned for fewer entries that no longer count."""


def timer_layout(keys: KeyShape, tags: Any = str) -> Layout:
    """The columns of a table of timers; its `info` declares the state.

    Args:
        keys: the keys of the operator.
        tags: the type of the tags: str, or anything that can be a key, such as `tuple[int, int]`.
    """
    return Layout(keys, "timers", codec_of(int), entry_codec(tags))


class TimerTable:
    """The timers of one clock in one operator subtask. All methods run in the subtask's mailbox.

    Args:
        layout: of `timer_layout`.
        max_parallelism: the number of key groups.
    """

    def __init__(self, layout: Layout, max_parallelism: int) -> None:
        self._layout = layout
        self._max_parallelism = max_parallelism
        self._changes = Changes()
        self._times: list[dict[Address, int]] = [{} for _ in range(PARTS)]
        self._size = 0
        self._heap: list[tuple[int, bytes, int, Address]] = []
        self._queued: dict[Address, int] = {}
        """The time of the one entry of an address in the heap that counts; never after its timer."""
        self._numbers = count()

    def __len__(self) -> int:
        """How many timers are pending."""
        return self._size

    @property
    def next_time(self) -> int | None:
        """When the earliest timer is due, ms; None if there is none."""
        front = self._front()
        return None if front is None else front[0]

    def get(self, key: Any, tag: Any) -> int | None:
        """When the timer of this key and tag is due, ms; None if there is none."""
        address = (token(key), token(tag))
        return self._times[part_of(address)].get(address)

    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        """Let the timer of this key and tag be due at `timestamp` (ms); one that is pending is moved.

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

    def cancel(self, key: Any, tag: Any) -> bool:
        """Delete the timer of this key and tag; false if there was none."""
        address = (token(key), token(tag))
        if address not in self._times[part_of(address)]:
            return False
        self._write(address, ABSENT)
        return True

    def pop_due(self, until: int) -> Iterator[tuple[int, Any, Any]]:
        """Remove the timers due at or before `until` (ms): `(timestamp, key, tag)`, one at a time.

        In the order of time; those of one key and time in the order of their tags. Timers that are set
        or cancelled between two steps of the iteration count from then on.
        """
        while (front := self._front()) is not None and front[0] <= until:
            timestamp, _, _, address = heappop(self._heap)
            del self._queued[address]
            self._write(address, ABSENT)
            yield timestamp, key_of(address[0]), key_of(address[1])

    def snapshot(self) -> TableCut:
        """A consistent cut, at a cost that does not grow with the number of timers."""
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
        """Take over the rows of a snapshot, those of own key groups; called once, on an empty table.

        Raises:
            StateError: it is not a table of timers with these keys and tags.
        """
        schema = self._layout.schema()
        rows = self._layout.rows(adapt(table, schema))
        for key, tag, timestamp in zip(rows.keys, rows.entries, rows.values, strict=True):
            address = (token(key), token(tag))
            self._times[part_of(address)][address] = timestamp
        self._size = len(rows)
        self._rebuild_heap()
        self._changes.restored(rebase=not table.schema.equals(schema))

    def _write(self, address: Address, timestamp: Any) -> None:
        """Set or remove (`ABSENT`) the time of an address; the old one goes into an open cut's log."""
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

    def _push(self, address: Address, timestamp: int) -> None:
        if len(self._heap) > 2 * self._size + STALE_ENTRIES_MIN:
            self._rebuild_heap()  # it has the new time: that is written first
            return
        self._queued[address] = timestamp
        heappush(self._heap, self._entry(address, timestamp))

    def _entry(self, address: Address, timestamp: int) -> tuple[int, bytes, int, Address]:
        """Behind the tag a number, since keys of different types cannot be compared."""
        tag = address[1]
        order = tag.encode() if type(tag) is str else encode_token(tag)
        return timestamp, order, next(self._numbers), address

    def _rebuild_heap(self) -> None:
        self._queued = {address: at for times in self._times for address, at in times.items()}
        self._heap = [self._entry(address, at) for address, at in self._queued.items()]
        heapify(self._heap)

    def _front(self) -> tuple[int, bytes, int, Address] | None:
        """The entry of the earliest timer; what is in front of it and does not count is removed."""
        heap, queued = self._heap, self._queued
        while heap:
            timestamp, _, _, address = heap[0]
            if queued.get(address) != timestamp:
                heappop(heap)
                continue
            due = self._times[part_of(address)].get(address)
            if due == timestamp:
                return heap[0]
            heappop(heap)
            if due is None:
                del queued[address]
            else:
                queued[address] = due
                heappush(heap, self._entry(address, due))
        return None

    # In threads, while the table goes on.

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


def _add(rows: Rows, address: Address, timestamp: Any) -> None:
    rows.keys.append(key_of(address[0]))
    rows.entries.append(key_of(address[1]))
    rows.values.append(timestamp)
