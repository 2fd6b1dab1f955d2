"""Reads binary messages column by column: one cursor per message, and all of them move together.

Each cursor has the end of its own message as its limit. So a damaged message is found where it breaks the
rules of its format, and cannot shift its neighbours: they are never read from where it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s: TypeAlias = npt.NDArray[np.int64]
UInt64s: TypeAlias = npt.NDArray[np.uint64]
Bools: TypeAlias = npt.NDArray[np.bool_]

TRUNCATED: Final = "it ends within a value"
BYTES_MAX: Final = 1 << 30
"""The most bytes of messages that are read at once."""
_PAD: Final = 24
"""Bytes behind the last message, so that words can be read at every cursor."""
_HIGH: Final = np.uint64(0x8080808080808080)
_LOW: Final = np.uint64(0x7F7F7F7F7F7F7F7F)


class Cursors:
    """The bytes of some messages, and which of these are found to be damaged.

    Methods that read take `at`, the positions of some cursors, `end`, where their messages end, and `rows`,
    the numbers of these messages. They return values and new positions, which never exceed the ends. The
    values of damaged messages have no meaning, but are within bounds.

    Attributes:
        start: of each message.
        end: of each message.
        failed: True for the messages that are damaged.
        reasons: what is wrong with them, by their numbers.
    """

    def __init__(self, messages: Sequence[bytes], skipped: int = 0) -> None:
        """Make cursors.

        Args:
            messages: less than 2 GiB in all.
            skipped: the size of a header in front of each message, which is known to be there.
        """
        sizes = np.fromiter(map(len, messages), np.int64, len(messages))
        joined = b"".join([*messages, bytes(_PAD)])
        joined += bytes(-len(joined) % 8)
        self._buffer = pa.py_buffer(joined)
        self._bytes = np.frombuffer(joined, np.uint8)
        self._words = self._bytes.view(np.uint64)
        self.end: Int64s = np.cumsum(sizes)
        self.start: Int64s = self.end - sizes + skipped
        self.failed: Bools = np.zeros(len(messages), np.bool_)
        self.reasons: dict[int, str] = {}

    def fail(self, rows: Int64s, reason: str) -> None:
        """Note that these messages are damaged; the first reason counts."""
        for row in rows.tolist():
            self.reasons.setdefault(row, reason)
        self.failed[rows] = True

    def move(self, at: Int64s, by: Int64s | int, end: Int64s, rows: Int64s) -> Int64s:
        """Return positions `by` bytes further; a message that ends before is damaged."""
        moved = at + by
        over = (moved > end) | (moved < at)
        if over.any():
            self.fail(rows[over], TRUNCATED)
            moved[over] = end[over]
        return moved

    def byte(self, at: Int64s, end: Int64s, rows: Int64s) -> tuple[npt.NDArray[np.uint8], Int64s]:
        """Read one byte."""
        return self._bytes.take(at), self.move(at, 1, end, rows)

    def word(self, at: Int64s) -> UInt64s:
        """Return the eight bytes at these positions, the first one as the lowest; nothing moves."""
        index = at >> 3
        shift = ((at & 7) << 3).astype(np.uint64)
        low = self._words.take(index) >> shift
        # Shifts by 64 are undefined, so this one takes two steps.
        return low | ((self._words.take(index + 1) << np.uint64(1)) << (np.uint64(63) - shift))

    def varint(self, at: Int64s, end: Int64s, rows: Int64s) -> tuple[UInt64s, Int64s]:
        """Read numbers of seven bits per byte, the lowest first."""
        first = self._bytes.take(at)
        if not len(first) or int(first.max()) < 0x80:
            return first.astype(np.uint64), self.move(at, 1, end, rows)
        word = self.word(at)
        stops = ~word & _HIGH
        lowest = stops & (~stops + np.uint64(1))
        mask = lowest | (lowest - np.uint64(1))  # all bits if no byte is the last one
        value = word & mask & _LOW
        for bits, kept in (
            (1, 0x007F007F007F007F),
            (2, 0x00003FFF00003FFF),
            (4, 0x000000000FFFFFFF),
        ):
            # Join pairs of groups, so that each step has half as many groups of twice the size.
            groups = np.uint64(kept)
            rest = value & ~groups
            value = (value & groups) | (rest >> np.uint64(bits))
        moved = at + (np.bitwise_count(mask) >> np.uint8(3))
        long = np.flatnonzero(stops == 0)
        if len(long):
            self._finish_long(value, moved, long, rows)
        return value, self.move(at, moved - at, end, rows)

    def _finish_long(self, value: UInt64s, moved: Int64s, long: Int64s, rows: Int64s) -> None:
        """Add the ninth and tenth byte to the numbers `long`, which have 56 bits so far."""
        ninth = self._bytes.take(moved[long])
        value[long] |= (ninth & np.uint8(0x7F)).astype(np.uint64) << np.uint64(56)
        moved[long] += 1
        longer = long[ninth >= 0x80]
        if len(longer):
            tenth = self._bytes.take(moved[longer])
            value[longer] |= (tenth & np.uint8(1)).astype(np.uint64) << np.uint64(63)
            moved[longer] += 1
            self.fail(rows[longer[tenth > 1]], "a number has more than 64 bits")

    def zigzag(self, at: Int64s, end: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Read numbers with a sign, in the form that Avro has for all of them."""
        value, at = self.varint(at, end, rows)
        return unzigzag(value), at

    def fixed(self, size: int, at: Int64s, end: Int64s, rows: Int64s) -> tuple[UInt64s, Int64s]:
        """Read numbers of four or eight bytes, the lowest byte first."""
        moved = self.move(at, size, end, rows)
        word = self.word(at)
        return (word if size == 8 else word & np.uint64(0xFFFFFFFF)), moved

    def sized(
        self, sizes: Int64s, at: Int64s, end: Int64s, rows: Int64s
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Move over values of these sizes; return their starts, their sizes, and the new positions."""
        wrong = (sizes < 0) | (sizes > end - at)
        if wrong.any():
            self.fail(rows[wrong], "a value is longer than what is left of the message")
            at = np.where(wrong, end, at)
            sizes = np.where(wrong, 0, sizes)
        return at, sizes, at + sizes

    def slices(self, starts: Int64s, sizes: Int64s) -> pa.Array:
        """Return the bytes of values, which are in order and do not overlap, as a binary array."""
        if not len(starts):
            return pa.array([], pa.binary())
        # Values alternate with the gaps between them, so nothing is copied yet.
        offsets = np.empty(2 * len(starts), np.int32)
        offsets[0::2] = starts
        offsets[1::2] = starts + sizes
        buffers = [None, pa.py_buffer(offsets), self._buffer]
        both = pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, buffers)
        return both.take(pa.array(np.arange(0, len(offsets), 2)))

    def bytes_at(self, at: Int64s) -> npt.NDArray[np.uint8]:
        """Return one byte each."""
        return self._bytes.take(at)


def unzigzag(value: UInt64s) -> Int64s:
    """Return numbers with a sign, of which 0, 1, 2, 3 stand for 0, -1, 1, -2."""
    one = np.uint64(1)
    return ((value >> one) ^ (~(value & one) + one)).view(np.int64)


def zigzag(value: Int64s) -> UInt64s:
    """Return numbers without a sign for numbers with one; the inverse of `unzigzag`."""
    return ((value << np.int64(1)) ^ (value >> np.int64(63))).view(np.uint64)


def encode_varints(value: UInt64s) -> pa.Array:
    """Return numbers as a binary array, seven bits per byte, the lowest first."""
    sizes = np.ones(len(value), np.int64)
    rest = value >> np.uint64(7)
    while rest.any():
        sizes += rest != 0
        rest >>= np.uint64(7)
    offsets = np.zeros(len(value) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    for place in range(int(sizes.max(initial=0))):
        chosen = np.flatnonzero(sizes > place)
        group = (value[chosen] >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(0x7F)
        group[sizes[chosen] > place + 1] |= np.uint8(0x80)
        data[offsets[chosen] + place] = group
    return binary_array(offsets, data)


def binary_array(offsets: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> pa.Array:
    """Return a binary array of these offsets and bytes, without nulls."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def same_sized(matrix: npt.NDArray[Any]) -> pa.Array:
    """Return a binary array of the rows of a matrix of bytes."""
    rows, size = matrix.shape
    offsets = np.arange(0, rows * size + size, max(size, 1), dtype=np.int32)[: rows + 1]
    if not size:
        offsets = np.zeros(rows + 1, np.int32)
    return binary_array(offsets, np.ascontiguousarray(matrix).reshape(-1))
