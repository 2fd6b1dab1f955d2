"""Tables of RocksDB whose values are held in memory, and are written to the database later.

A read or write of RocksDB takes microseconds. So a table holds the values of the keys that were used last,
under the tokens of these keys, and a change stays in memory at first. Changes reach the database in steps:

1. A value that is put is in `_changed`. It has not been written.
2. When there are many of these, or at a cut, they become a set of `Frozen` values. A newer value of such a
   key does not change that set, and the next set is made only of what this one leaves. So the mailbox
   writes a set a piece at a time beside the records, while the thread that collects the files of a cut
   writes from the other side of the same list; a lock keeps the pieces apart.
3. What has been written may be forgotten.

A cut takes place without a write: the state at a cut is the content of the database together with the
values that are frozen at that moment (see `cut.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..hashing import hash_key, key_group_of
from ..keyed.base import ABSENT, Cursor, KeyWalk
from ..keyed.canonical import TableSpec
from ..keyed.handles import INT_MAX, INT_MIN, BoundValueTable, ValueHandle, with_own_code
from ..keyed.keys import Token, decode_token, encode_token, key_of
from ..settings import MemoryShare
from .database import Changes, Database, OpenCut
from .layout import GROUP_BYTES, group_prefix, in_order, value_functions
from .tables import Table

VISIT_KEYS: Final = 4096
"""The number of keys whose values are read together."""
_FETCHES: Final = 64
"""After this many common reads, one batch shows whether its values are still read."""
_FEW: Final = 16
"""One value in this many is read alone."""
_WRITE_KEYS: Final = 1024
"""The least number of values that are written together beside the records."""
_ENTRY_BYTES: Final = 150
"""Roughly the memory of a key and its place, beside their bytes."""
_BYTES_EACH: Final = 64 << 10
"""The size that is assumed of a value before one was written or read, in bytes."""
_UNKNOWN: Final = object()


class _HeldHandle(ValueHandle[Any]):
    """A handle of values that are held encoded, with all that an access needs.

    Args:
        table: the table.
        missing: the value of a key without one, as it is held; None or `ABSENT` are returned themselves.
    """

    __slots__ = ("_changed", "_cursor", "_known", "_missing", "_owner")

    def __init__(self, table: HeldValueTable, missing: Any) -> None:
        self._owner, self._cursor, self._missing = table, table._cursor, missing
        self._changed, self._known = table._changed, table._known
        self._release = table._decode

    def get(self) -> Any:
        held = self._find()
        if held is ABSENT:
            held = self._missing
        return held if held is None or held is ABSENT else self._release(held)

    def _find(self) -> Any:
        where = self._cursor.token
        held = self._changed.get(where, _UNKNOWN)
        if held is _UNKNOWN:
            held = self._known.get(where, _UNKNOWN)
            if held is _UNKNOWN:
                held = self._owner._load(where)
        return held

    def set(self, value: Any) -> None:
        table = self._owner
        self._changed[self._cursor.token] = held = table._hold(value)
        table._put_bytes += len(held)

    def clear(self) -> None:
        self._changed[self._cursor.token] = ABSENT

    def exists(self) -> bool:
        return self._find() is not ABSENT


@with_own_code
class _NumberHandle(_HeldHandle):
    """A handle of numbers, which are held as they are."""

    __slots__ = ("_plain",)

    def __init__(self, table: HeldValueTable, missing: Any) -> None:
        super().__init__(table, missing)
        self._plain = table.spec.layout.value.plain

    def get(self) -> Any:
        # This is `_find`, written out, which saves a call per record.
        where = self._cursor.token
        held = self._changed.get(where, _UNKNOWN)
        if held is _UNKNOWN:
            held = self._known.get(where, _UNKNOWN)
            if held is _UNKNOWN:
                held = self._owner._load(where)
        return self._missing if held is ABSENT else held

    def set(self, value: Any) -> None:
        if type(value) is not self._plain:
            value = self._owner._hold(value)
        self._changed[self._cursor.token] = value


@with_own_code
class _IntHandle(_NumberHandle):
    """A handle of ints."""

    __slots__ = ()

    def set(self, value: Any) -> None:
        if type(value) is not int or value > INT_MAX or value < INT_MIN:
            value = self._owner._hold(value)
        self._changed[self._cursor.token] = value


class Frozen:
    """The values that a table had for some keys at one moment, and those that are not yet in its database.

    Attributes:
        values: the values by token, in the form in which the table holds them. They never change.
        left: the tokens whose values are to be written. Only used with the lock of the table.
        written: the tokens whose values have been written.
        cut: the cut that was made at that moment, if there was one. It needs no note of these writes.

    Args:
        table: the table.
        values: see above.
    """

    __slots__ = ("_table", "cut", "left", "values", "written")

    def __init__(self, table: HeldValueTable, values: dict[Token, Any]) -> None:
        self._table = table
        self.values = values
        self.left: list[Token] = list(values)
        self.written: set[Token] = set()
        self.cut: OpenCut | None = None

    def drain(self) -> None:
        """Write what is left; runs in a thread."""
        while self._table.write_some(self):
            pass

    def known(self, key: bytes) -> bool:
        """Return True if the database has the value of this key only since that moment."""
        return decode_token(key, GROUP_BYTES)[0] in self.values

    def changes(self, without: Collection[Token] = ()) -> Changes:
        """Return the values as they lie in the database, except those of some tokens."""
        return self._table.encoded([w for w in self.values if w not in without], self.values)


class HeldValueTable(Table, BoundValueTable):
    """A table with one value per key, which lives without a limit of time and has no namespace.

    All methods run in the mailbox, unless they say otherwise.

    Args:
        spec: of the state.
        database: of the state.
        cursor: has the token of the current key.
        max_parallelism: the number of key groups.
        share: the memory that keys and values may take; closed with the table.
    """

    def __init__(
        self,
        spec: TableSpec,
        database: Database,
        cursor: Cursor,
        max_parallelism: int,
        share: MemoryShare,
    ) -> None:
        super().__init__(spec, database, cursor)
        codec = spec.layout.value
        # Numbers are held as they are: any that `hold` takes can be written later. All other values are
        # held encoded, so that an error of their encoding is that of the call that puts them.
        self._as_it_is = codec.plain_ints or codec.plain in (float, bool)
        self._hold = codec.hold if self._as_it_is else codec.encode
        self._encode, self._decode = value_functions(spec.layout)
        self._max_parallelism, self._share = max_parallelism, share
        self._changed: dict[Token, Any] = {}
        """The values since the last freeze."""
        self._known: dict[Token, Any] = {}
        """Other values, those that are frozen among them."""
        self._frozen = Frozen(self, {})
        self._lock = threading.Lock()
        self._loads = self._batch = self._fetches = self._due = self._put_bytes = 0
        self._bytes_each = _BYTES_EACH
        self._part = 1
        self._bound()
        if codec.plain_ints:
            self._bind(_IntHandle)
        else:
            self._bind(_NumberHandle if self._as_it_is else _HeldHandle)

    def _load(self, where: Token) -> Any:
        """Read a single value that is not held."""
        self._loads += 1
        key = key_of(where)
        group = key_group_of(hash_key(key), self._max_parallelism)
        data = self.database.get(group_prefix(group) + encode_token(where))
        if data is not None and len(data) > self._bytes_each:
            self._bytes_each = len(data)
        held = self._known[where] = self._held(data)
        return held

    def _held(self, data: bytes | None) -> Any:
        if data is None:
            return ABSENT
        return self._decode(data) if self._as_it_is else data

    # --- batches -------------------------------------------------------------------------------

    def keys_to_visit(self) -> int:
        """Return the number of keys that may be visited until the next call of `tidy`."""
        return max(1, min(VISIT_KEYS, self._part // 2))

    def fetch(self, tokens: Sequence[Token]) -> None:
        """Read the values of keys together that are not held, if they are likely to be read."""
        loads, before = self._loads, self._batch
        self._loads, self._batch = 0, len(tokens)
        if loads and loads * _FEW >= before:
            self._fetches = _FETCHES
        if not self._fetches:
            return
        self._fetches -= 1
        known = self._known
        missing = {*tokens}.difference(self._changed).difference(known)
        if len(missing) * _FEW < len(tokens):
            self._fetches = 0  # a look at each key would cost more than the reads
        if not missing:
            return
        addresses, wanted = in_order(missing, self._max_parallelism)
        values = self.database.get_all(addresses)
        known.update(zip(wanted, map(self._held, values), strict=True))
        self._measure(zip(addresses, values, strict=True))

    def tidy(self, visited: int) -> None:
        """Write some of the changes, and forget values if there are too many of them.

        Called after each `visited` keys, which are as many as `keys_to_visit` at most.
        """
        self._due += 2 * visited  # more than can have been added, so there is an end of it
        frozen = self._frozen
        if not frozen.left:
            self._due = 0
            if frozen.values:
                self._frozen = Frozen(self, {})
        elif self._due >= _WRITE_KEYS:
            self.write_some(frozen, self._due)
            self._due = 0
        if len(self._changed) >= self._part or self._put_bytes >= self._share() // 3:
            self._write_all(frozen)
            self.freeze()
        if len(self._known) >= 2 * self._part:
            self._known.clear()
            if self._frozen.left:
                self._known.update(self._frozen.values)
        self._bound()

    def _bound(self) -> None:
        """Set how many values each of three parts may have: the changed, the frozen and the others."""
        self._part = max(1, self._share() // (_ENTRY_BYTES + self._bytes_each) // 3)

    def _measure(self, entries: Iterable[tuple[bytes, bytes | None]]) -> None:
        sizes = [len(address) + len(data) for address, data in entries if data is not None]
        if sizes:
            least = 0 if self._bytes_each == _BYTES_EACH else self._bytes_each * 3 // 4
            # Older values are still held, so it falls slowly.
            self._bytes_each = max(least, sum(sizes) // len(sizes))

    # --- to the database -----------------------------------------------------------------------

    def freeze(self) -> Frozen:
        """Freeze the changes, together with frozen values that have not been written."""
        with self._lock:
            old = self._frozen
            values = {where: old.values[where] for where in old.left}
            old.left.clear()
            values.update(self._changed)
            self._frozen = Frozen(self, values)
        self._known.update(self._changed)
        self._changed.clear()
        self._put_bytes = 0
        return self._frozen

    def write_some(self, frozen: Frozen, limit: int = VISIT_KEYS) -> bool:
        """Write up to `limit` frozen values; return False if none were left. Any thread may call this."""
        with self._lock:
            taken = frozen.left[-limit:]
            if not taken:
                return False
            changes = self.encoded(taken, frozen.values)
            self.database.write(changes, frozen.cut)
            del frozen.left[-limit:]
            frozen.written.update(taken)
        self._measure(changes)
        return True

    def _write_all(self, frozen: Frozen) -> None:
        while self.write_some(frozen):
            pass

    def flush(self) -> None:
        """Write all changes, so that reads of the database find them."""
        self._write_all(self._frozen)
        if self._changed:
            self._write_all(self.freeze())

    def encoded(self, tokens: Collection[Token], values: Mapping[Token, Any]) -> Changes:
        """Return the values of some keys as they lie in the database, in its order. Any thread may call
        this.
        """
        encode, as_it_is = self._encode, self._as_it_is
        changes: Changes = []
        for address, where in zip(*in_order(tokens, self._max_parallelism), strict=True):
            held = values[where]
            if held is ABSENT:
                changes.append((address, None))
            else:
                changes.append((address, encode(held) if as_it_is else held))
        return changes

    def close(self) -> None:
        """Close the share, and let go of all that refers to the table, so that it goes with its backend.

        A thread that collects the files of a cut may still write.
        """
        self._share.close()
        self._unbind()
        del self._frozen

    # --- all keys ------------------------------------------------------------------------------

    def addresses(self) -> Iterator[tuple[Any, Any]]:
        self.flush()
        return super().addresses()

    def walk(self) -> KeyWalk:
        return _FlushedWalk(super().walk(), self.flush)

    def sweep(self, limit: int, dead_until: int) -> int:
        raise NotImplementedError  # these values live without a limit of time


class _FlushedWalk(KeyWalk):
    """A walk that sees what has not been written."""

    def __init__(self, inner: KeyWalk, flush: Callable[[], None]) -> None:
        self._inner, self._flush = inner, flush

    def next_piece(self) -> Any:
        self._flush()
        return self._inner.next_piece()

    def passed(self, current_key: Any) -> bool:
        return self._inner.passed(current_key)

    def key(self, current_key: Any) -> Any:
        return self._inner.key(current_key)
