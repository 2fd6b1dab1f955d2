"""The layout of keyed state in a RocksDB: the bytes of keys and values, and rows of canonical tables from
them.

Key: key group (2 bytes, big-endian), key, namespace (only of states that have namespaces), entry key
(only of lists and maps); all but the first are written by `keys.encode_token`. Each part says where it
ends, so the entries of one key and namespace lie side by side, and positions of a list in their order.

Value: with a TTL first the time of the last use (8 bytes), then the value as its codec encodes it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..hashing import hash_keys, key_groups_of, mixed
from ..keyed.canonical import Layout, Rows, address_rows
from ..keyed.keys import Token, decode_token, encode_token, key_of, token
from ..keygroups import KeyGroupRange
from ..values import Array, Index

_GROUP: Final = struct.Struct(">H")
_INT_ADDRESS: Final = np.dtype([("group", ">u2"), ("tag", "S1"), ("value", ">u8")])
_INSTANT: Final = struct.Struct(">q")
_FIRST: Final = itemgetter(0)
GROUP_BYTES: Final = _GROUP.size
END_OF_GROUPS: Final = b"\xff\xff"
"""A key behind all others, as there are at most 32,768 key groups."""


def group_prefix(key_group: int) -> bytes:
    """Return the prefix of all keys of a key group; keys of lower groups come before it."""
    return _GROUP.pack(key_group)


def group_of(key: bytes) -> int:
    """Return the key group of a key."""
    group: int = _GROUP.unpack_from(key)[0]
    return group


def bounds_of(groups: KeyGroupRange) -> tuple[bytes, bytes]:
    """Return the first possible key of the key groups, and the first one behind them."""
    return group_prefix(groups.first), group_prefix(groups.last + 1)


def behind(prefix: bytes) -> bytes:
    """Return the first possible key behind those that begin with `prefix`, which is not all 0xff."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,))


def encode_addresses(key_groups: Sequence[int], keys: Sequence[Any]) -> list[bytes]:
    """Return the bytes of keys that have no namespace, behind those of their key groups."""
    if {*map(type, keys)} == {int}:
        try:
            return _encode_ints(np.array(key_groups), np.array(keys, np.int64))
        except OverflowError:  # beyond 64 bits
            pass
    return [
        group_prefix(group) + encode_token(token(key))
        for group, key in zip(key_groups, keys, strict=True)
    ]


def in_order(tokens: Collection[Token], max_parallelism: int) -> tuple[list[bytes], list[Token]]:
    """Return the bytes of keys that have no namespace, in the order of the database, and the tokens of
    these keys in that order.
    """
    if {*map(type, tokens)} == {int}:
        try:
            numbers = np.fromiter(tokens, np.int64, len(tokens))
        except OverflowError:  # beyond 64 bits
            pass
        else:
            groups = key_groups_of(mixed(numbers.view(np.uint64)), max_parallelism)
            order = np.lexsort((numbers, groups))
            numbers = numbers[order]
            return _encode_ints(groups[order], numbers), numbers.tolist()
    keys = list(map(key_of, tokens))
    groups = key_groups_of(hash_keys(keys), max_parallelism)
    found = sorted(zip(encode_addresses(groups.tolist(), keys), tokens, strict=True), key=_FIRST)
    return [address for address, _ in found], [where for _, where in found]


def _encode_ints(key_groups: Array, keys: Index) -> list[bytes]:
    """Return what `group_prefix` and `encode_token` make of ints of 64 bits."""
    rows = np.empty(len(keys), _INT_ADDRESS)
    rows["group"], rows["tag"] = key_groups, b"i"
    rows["value"] = keys.view(np.uint64) ^ np.uint64(1 << 63)
    encoded: list[bytes] = rows.view(f"V{_INT_ADDRESS.itemsize}").tolist()
    return encoded


class Places:
    """Takes the keys of one state apart, and puts them together."""

    def __init__(self, layout: Layout) -> None:
        self._namespaced = layout.namespaced
        self._entry = layout.entry

    def address_end(self, key: bytes) -> int:
        """Return the position of the entry key: the bytes before it are the same for one key and
        namespace.
        """
        end = decode_token(key, GROUP_BYTES)[1]
        return decode_token(key, end)[1] if self._namespaced else end

    def address(self, key: bytes) -> tuple[Any, Any]:
        """Return the user's key and namespace."""
        found, end = decode_token(key, GROUP_BYTES)
        namespace = decode_token(key, end)[0] if self._namespaced else None
        return key_of(found), None if namespace is None else key_of(namespace)

    def entry(self, key: bytes, start: int) -> Any:
        """Return the entry key, which begins at `start`."""
        return key_of(decode_token(key, start)[0])

    def encode_entry(self, entry: Any) -> bytes:
        """Return the bytes of an entry key. Raises TypeError if it is not of the declared type."""
        codec = self._entry
        assert codec is not None
        return encode_token(token(codec.hold(entry) if codec.encoding is None else entry))

    def encode(self, key_group: int, key: Any, namespace: Any, entry: Any) -> bytes:
        """Return the bytes of a whole key."""
        parts = [group_prefix(key_group), encode_token(token(key))]
        if self._namespaced:
            parts.append(encode_token(token(namespace)))
        if self._entry is not None:
            parts.append(self.encode_entry(entry))
        return b"".join(parts)


Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


def value_functions(layout: Layout) -> tuple[Encode, Decode]:
    """Return functions that encode and decode the values of a table; with a TTL these are (value, last
    use in ms).
    """
    encode, decode = layout.value.encode, layout.value.decode
    if not layout.with_ttl:
        return encode, decode
    pack, unpack, size = _INSTANT.pack, _INSTANT.unpack_from, _INSTANT.size

    def encode_pair(pair: tuple[Any, int]) -> bytes:
        return pack(pair[1]) + encode(pair[0])

    def decode_pair(data: bytes) -> tuple[Any, int]:
        return decode(data[size:]), unpack(data)[0]

    return encode_pair, decode_pair


def split_value(data: bytes, with_ttl: bool) -> tuple[bytes, int]:
    """Return the encoded value, and its last use (0 without TTL)."""
    return (data[_INSTANT.size :], last_use(data)) if with_ttl else (data, 0)


def last_use(data: bytes) -> int:
    """Return the time of the last use in the value of a table with a TTL."""
    instant: int = _INSTANT.unpack_from(data)[0]
    return instant


class EntryReader:
    """Turns entries into rows of the canonical table of a state."""

    def __init__(self, layout: Layout, max_parallelism: int) -> None:
        self._layout, self._max_parallelism = layout, max_parallelism
        self._places = Places(layout)

    def add(self, rows: Rows, key: bytes, data: bytes, dead_until: int) -> None:
        """Add an entry to `rows`, unless it was last used at or before `dead_until` (ms)."""
        layout = self._layout
        encoded, last_used = split_value(data, layout.with_ttl)
        if layout.with_ttl:
            if last_used <= dead_until:
                return
            rows.last_used.append(last_used)
        address, namespace = self._places.address(key)
        rows.keys.append(address)
        rows.values.append(layout.value.decode(encoded))
        if layout.namespaced:
            rows.namespaces.append(namespace)
        if layout.entry is not None:
            rows.entries.append(self._places.entry(key, self._places.address_end(key)))

    def table(self, rows: Rows) -> pa.Table:
        """Return the rows as a table."""
        return self._layout.table(rows, self._max_parallelism)


def entries_from(rows: Rows, layout: Layout, max_parallelism: int) -> Iterator[tuple[bytes, bytes]]:
    """Return the entries of rows in the order of keys. Raises TypeError for values of another type."""
    places, (encode, _) = Places(layout), value_functions(layout)
    groups = key_groups_of(hash_keys(rows.keys), max_parallelism).tolist()
    entries = [
        (places.encode(group, key, namespace, entry), encode(_held(value, used, layout)))
        for group, (key, namespace, entry, value, used) in zip(
            groups, address_rows(rows), strict=True
        )
    ]
    entries.sort()
    return iter(entries)


def _held(value: Any, last_used: int, layout: Layout) -> Any:
    return (value, last_used) if layout.with_ttl else value
