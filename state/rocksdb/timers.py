"""Timers that need not fit into memory: two databases, by key and by time.

The first one has the time of each key and tag, laid out like a map state; it is the state, so its files
are the checkpoint. The second one has the order. Its keys are the time, the tag and then the key of the
first database; it is in no checkpoint, and is written again from the first one after a restore.

An iteration goes through the second database in its order, as it was when the iteration came to a time,
and looks into the first one for what has changed since. So what is set meanwhile needs no place in it:
each iteration knows the earliest time that was set since it looked, and looks again before it passes that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ..hashing import hash_key, key_group_of
from ..keyed.canonical import TableSpec
from ..keyed.keys import Token, decode_token, encode_token, key_of, token
from ..keyed.timers import Pending, TimersOnDisk, tag_order
from ..keygroups import KeyGroupRange
from ..settings import RocksDBSettings
from ..snapshot import FilesCut, RestoredState
from .cut import DatabaseCut
from .database import Database
from .layout import GROUP_BYTES, EntryReader, group_prefix, value_functions
from .restore import Restorer

_TIME: Final = struct.Struct(">Q")
_SIGN: Final = 1 << 63
_FIRST: Final = -_SIGN
_LAST: Final = _SIGN - 1
_NEVER: Final = _SIGN
"""A time after all times."""
_END_OF_TAG: Final = b"\0\0"
_END_OF_TIME: Final = b"\xff"
"""Comes after all tags: those of text are UTF-8, and others begin with a letter."""
_LOOK_EVERY: Final = 1 << 14
"""After this many timers an iteration looks again: while it goes on, RocksDB frees neither memory nor files
of what it sees.
"""
_TOGETHER: Final = 4_096
"""Timers that are written together by a restore."""


class RocksDBTimerTable(TimersOnDisk):
    """The timers of one clock in one operator subtask, on local disk.

    Args:
        spec: the name of the state, and its layout by `timer_layout`.
        max_parallelism: the number of key groups.
        directory: a directory that only this table uses.
        key_groups: the key groups of the subtask.
        file_token: the beginning of the ids of files, unique for ever among the attempts and subtasks of
            the operator.
    """

    def __init__(
        self,
        spec: TableSpec,
        max_parallelism: int,
        *,
        directory: Path,
        key_groups: KeyGroupRange,
        file_token: str,
        settings: RocksDBSettings,
    ) -> None:
        self._spec, self._max_parallelism = spec, max_parallelism
        self._encode, self._decode = value_functions(spec.layout)
        self._token, self._cuts = file_token, 0
        directory.mkdir(parents=True, exist_ok=True)
        self._times = Database(directory / "times", settings, key_groups)
        self._order = Database(directory / "order", settings, key_groups)
        self._size = 0
        self._earliest, self._exact = _FIRST, False
        """No timer is due before `_earliest`, except at a time that is being handled; one is due then, if
        `_exact`. A search for the earliest one does not go through what was removed before.
        """
        self._readers: list[_Reader] = []
        self._of_key: tuple[Token, bytes] = (None, b"")
        """The token of the key that was used last, and its bytes with the key group."""

    def __len__(self) -> int:
        return self._size

    @property
    def next_time(self) -> int | None:
        if not self._size:
            return None
        if not self._exact:
            first = next(iter(_Reader(self, self._earliest, _LAST)), None)
            if first is None:  # all have the time that is being handled
                return None
            self._earliest, self._exact = first[0], True
        return self._earliest

    def get(self, key: Any, tag: Any) -> int | None:
        data = self._times.get(self._address(key, token(tag)))
        return None if data is None else self._decode(data)

    def set(self, key: Any, tag: Any, timestamp: int) -> None:
        tag = token(tag)
        address = self._address(key, tag)
        data = self._times.get(address)
        if data is None:
            self._size += 1
        else:
            before = self._decode(data)
            if before == timestamp:
                return
            self._leave(before, tag, address)
        self._times.put(address, self._encode(timestamp))
        self._order.put(_place(timestamp, tag, address), b"")
        if timestamp <= self._earliest:
            self._earliest, self._exact = timestamp, True
        for reader in self._readers:
            reader.missed = min(reader.missed, timestamp)

    def cancel(self, key: Any, tag: Any) -> bool:
        tag = token(tag)
        address = self._address(key, tag)
        data = self._times.get(address)
        if data is None:
            return False
        self._remove(self._decode(data), tag, address)
        return True

    def pop_due(self, until: int) -> Iterator[Pending]:
        yield from self._pop(_Reader(self, self._earliest, until))

    def pop_after(self, timer: Pending, until: int) -> Iterator[Pending]:
        reader = _Reader(self, timer[0], until)
        reader.now = timer[0]
        self._came_to(timer[0])
        yield from self._pop(reader, timer)

    def _pop(self, outermost: _Reader, first: Pending | None = None) -> Iterator[Pending]:
        """Yield `first`, then pop what a reader finds, and what is set meanwhile to earlier times."""
        readers = [outermost]
        self._readers.append(outermost)
        try:
            if first is not None:
                yield first
            while readers:
                reader = readers[-1]
                if reader.now is not None and reader.missed < reader.now:
                    earlier = _Reader(self, reader.missed, reader.now - 1)
                    reader.missed = reader.now
                    readers.append(earlier)
                    self._readers.append(earlier)
                elif (found := reader.take()) is not None:
                    due, address = found
                    if self._is_due(due, address):
                        key, end = decode_token(address, GROUP_BYTES)
                        tag, _ = decode_token(address, end)
                        self._remove(due, tag, address)
                        yield due, key_of(key), key_of(tag)
                elif reader.go_on():
                    assert reader.now is not None
                    self._came_to(reader.now)
                else:
                    self._readers.remove(readers.pop())
                    handled = readers[-1].now if readers else reader.until
                    assert handled is not None
                    self._came_to(handled)
        finally:
            for reader in readers:  # the iteration was given up
                self._readers.remove(reader)
                if reader.now is not None and reader.now < self._earliest:
                    self._earliest, self._exact = reader.now, False

    def _came_to(self, now: int) -> None:
        """Note that no timer is due up to this time, except those of the time being handled."""
        if self._earliest <= now:
            self._earliest, self._exact = min(now + 1, _LAST), False

    def _is_due(self, timestamp: int, address: bytes) -> bool:
        data = self._times.get(address)
        return data is not None and self._decode(data) == timestamp

    def take_over(self, timers: Iterator[Pending]) -> None:
        self._add(
            (timestamp, token(tag), self._address(key, token(tag)))
            for timestamp, key, tag in timers
        )

    def _add(
        self, timers: Iterable[tuple[int, Token, bytes]], *, ordered_only: bool = False
    ) -> None:
        """Add timers that are not there; `ordered_only`: their order is missing."""
        timers = iter(timers)
        while some := list(islice(timers, _TOGETHER)):
            if not ordered_only:
                self._times.apply([(address, self._encode(at)) for at, _, address in some])
            self._order.apply([(_place(*one), b"") for one in some])
            self._size += len(some)

    def snapshot(self) -> FilesCut:
        self._cuts += 1
        database, layout = self._times, self._spec.layout
        directory = database.directory.with_name(f"cut-{self._cuts}")
        cut = DatabaseCut(database, directory, f"{self._token}/{self._spec.name}", self._cuts)
        reader = EntryReader(layout, self._max_parallelism)
        return cut.as_files_cut(reader, layout.identity, _FIRST)

    def restore(self, state: RestoredState) -> None:
        Restorer(self._spec, self._times, self._max_parallelism, 0).restore(state)
        self._add(self._restored(), ordered_only=True)

    def _restored(self) -> Iterator[tuple[int, Token, bytes]]:
        for address, data in self._times.all():
            _, end = decode_token(address, GROUP_BYTES)
            yield self._decode(data), decode_token(address, end)[0], address

    def close(self) -> None:
        self._times.close()
        self._order.close()

    def _address(self, key: Any, tag: Token) -> bytes:
        """Return the key of a timer in the first database."""
        of_key = token(key)
        if of_key != self._of_key[0]:
            group = key_group_of(hash_key(key), self._max_parallelism)
            self._of_key = of_key, group_prefix(group) + encode_token(of_key)
        return self._of_key[1] + encode_token(tag)

    def _remove(self, timestamp: int, tag: Token, address: bytes) -> None:
        self._times.delete(address)
        self._leave(timestamp, tag, address)
        self._size -= 1

    def _leave(self, timestamp: int, tag: Token, address: bytes) -> None:
        """Remove the place of a timer in the order."""
        self._order.delete(_place(timestamp, tag, address))
        if timestamp == self._earliest:
            self._exact = False


class _Reader:
    """Reads the order of timers, one time after the other, as it was when this was made.

    Attributes:
        until: the last time that is read.
        now: the time that is being read; None between two times.
        missed: the earliest time that was set since.
    """

    def __init__(self, table: RocksDBTimerTable, start: int, until: int) -> None:
        self.until = until
        self.now: int | None = None
        self._table = table
        self._look(start)

    def _look(self, start: int) -> None:
        """Read from this time on, with what was set since."""
        self.missed, self._taken = _NEVER, 0
        end = _TIME.pack(self.until + _SIGN) + _END_OF_TIME
        self._places = iter(self._table._order.between(_TIME.pack(start + _SIGN), end))
        self._next = next(self._places, None)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while self._next is not None:
            yield self._parsed(self._next[0])
            self._next = next(self._places, None)

    @staticmethod
    def _parsed(place: bytes) -> tuple[int, bytes]:
        """Return the time of a place in the order, and the key in the first database."""
        at = place.index(_END_OF_TAG, _TIME.size) + len(_END_OF_TAG)
        return _TIME.unpack_from(place)[0] - _SIGN, place[at:]

    def take(self) -> tuple[int, bytes] | None:
        """Return the next timer of the present time; None if there are no more."""
        if self.now is None or self._next is None:
            return None
        found = self._parsed(self._next[0])
        if found[0] != self.now:
            return None
        self._next = next(self._places, None)
        self._taken += 1
        return found

    def go_on(self) -> bool:
        """Go on to the next time; return False if there is none."""
        self.now = None
        upcoming = self.until if self._next is None else self._parsed(self._next[0])[0]
        if self.missed <= upcoming:
            self._look(self.missed)
        elif self._taken >= _LOOK_EVERY:
            self._look(upcoming)
        if self._next is None:
            return False
        self.now = self._parsed(self._next[0])[0]
        return True


def _place(timestamp: int, tag: Token, address: bytes) -> bytes:
    """Return the key of a timer in the second database."""
    ordered = tag_order(tag).replace(b"\0", b"\0\xff")
    return b"".join((_TIME.pack(timestamp + _SIGN), ordered, _END_OF_TAG, address))
