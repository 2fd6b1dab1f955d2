"""An index from the keys of a batch to slots, which keeps each key once, in pieces of Arrow columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ..hashing import Hashes, check_key_type, hash_columns, identity_columns, mixed
from ..values import Array
from .table import DenseSlots, Rows, Slots, SlotTable

PIECE_BYTES_MAX = 1 << 21
"""Pieces of keys are joined up to this size: a copy of 2 MiB at most."""
_JOINED_BYTES_MAX = 1 << 16
"""Pieces of this size together are joined when some keys are read."""
_SCANNED = 4_096
"""The keys in one piece of a scan."""
_ENTRY_BYTES = 8 + 8 + 4 * 6
"""The bytes of a key's entry: both lanes of its identity, and 4 to 8 cells of the index."""


def stored_key_type(type_: pa.DataType) -> pa.DataType:
    """Return the type in which the keys of a column are kept, emitted and snapshotted."""
    if pa.types.is_dictionary(type_):
        return stored_key_type(type_.value_type)
    if type_ == pa.string_view():
        return pa.string()
    if type_ == pa.binary_view():
        return pa.binary()
    return type_


def stored_keys(column: pa.Array) -> pa.Array:
    """Return the column with its `stored_key_type`."""
    type_ = stored_key_type(column.type)
    return column if column.type == type_ else column.cast(type_)


class KeyHasher:
    """Computes the identity of keys made of columns of the given types.

    Raises:
        StateError: a column is of a type that cannot be a key.
    """

    def __init__(self, types: Sequence[pa.DataType], seed: int, *, dense: bool = True) -> None:
        for type_ in types:
            check_key_type(type_)
        self._seed = seed
        self.types = list(map(stored_key_type, types))
        """The types in which the keys are kept."""
        # The hash of an integer is a bijection, so only null needs a second lane.
        self.exact = len(types) == 1 and (
            pa.types.is_integer(types[0]) or pa.types.is_boolean(types[0])
        )
        """True if keys that are not null differ whenever their hashes do."""
        fit = len(types) == 1 and pa.types.is_integer(types[0]) and types[0] != pa.uint64()
        self.dense = dense and fit
        """True if the keys are numbers that fit int64, which may lie close together."""

    def identify(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes | None]:
        """Return the two lanes of each row's identity; None if the second lane is 0 throughout."""
        hashes = hash_columns(columns)
        if not self.exact:
            return hashes, identity_columns(columns, self._seed)
        if not columns[0].null_count:
            return hashes, None
        return hashes, columns[0].is_null().to_numpy(zero_copy_only=False).astype("uint64")


class BatchKeys:
    """The keys of one batch. Hashes are computed once, when they are first needed."""

    __slots__ = ("_hasher", "_lanes", "columns", "integers")

    def __init__(
        self,
        hasher: KeyHasher,
        columns: Sequence[pa.Array],
        integers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take the keys of a batch.

        Args:
            hasher: of the keys.
            columns: the keys.
            integers: the keys instead, for a hasher that is `dense`; they can only be looked for.
        """
        self.columns = columns
        self.integers = integers
        self._hasher = hasher
        self._lanes: tuple[Hashes, Hashes | None] | None = None
        if integers is None and hasher.dense and not columns[0].null_count:
            integers = columns[0].to_numpy(zero_copy_only=False)
            self.integers = integers.astype(np.int64, copy=False)

    def take(self, rows: Rows) -> BatchKeys:
        """Return some of the keys."""
        if not self.columns:
            assert self.integers is not None
            return BatchKeys(self._hasher, (), self.integers[rows])
        return BatchKeys(self._hasher, [taken_keys(column, rows) for column in self.columns])

    def lanes(self, which: Rows | slice | None) -> tuple[Hashes, Hashes | None]:
        """Return the identities (see `KeyHasher.identify`) of some rows; None: of all rows."""
        if self._lanes is None and not self.columns and self.integers is not None:
            self._lanes = mixed(self.integers.view(np.uint64)), None  # as `identify` does
        elif self._lanes is None:
            self._lanes = self._hasher.identify(self.columns)
        hashes, checks = self._lanes
        if which is None:
            return hashes, checks
        return hashes[which], None if checks is None else checks[which]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The keys of some consecutive slots. A piece never changes."""

    columns: list[pa.Array]
    nbytes: int

    @property
    def rows(self) -> int:
        return len(self.columns[0])


class KeyIndex:
    """The keys of one piece of keyed state (one window, one running aggregate).

    Integer keys are indexed by a plain array as long as they lie close together.
    """

    def __init__(self, hasher: KeyHasher) -> None:
        self._hasher = hasher
        self._dense: DenseSlots | None = DenseSlots() if hasher.dense else None
        self._table = SlotTable()
        self._pieces: list[_Piece] = []

    @property
    def size(self) -> int:
        """The number of keys: slots are 0 to size - 1."""
        return self._table.size if self._dense is None else self._dense.size

    @property
    def nbytes(self) -> int:
        """The memory in use, without that of the keys."""
        return self._table.nbytes + (0 if self._dense is None else self._dense.nbytes)

    @property
    def key_bytes(self) -> int:
        """The memory of the keys."""
        return sum(piece.nbytes for piece in self._pieces)

    @property
    def used_bytes(self) -> int:
        """The bytes that the keys and their entries take, without room to grow."""
        return self.size * _ENTRY_BYTES + self.key_bytes

    def memory(self) -> list[Array]:
        """Return the arrays of the index."""
        return self._table.memory() + ([] if self._dense is None else [self._dense.memory])

    def clear(self) -> None:
        """Forget all keys; keeps the memory of the index."""
        if self._table.size:
            self._table.clear()
        if self._dense is not None:
            self._dense.clear()
        elif self._hasher.dense:
            self._dense = DenseSlots()
        self._pieces = []

    def fill(self, columns: list[pa.Array], hashes: Hashes, checks: Hashes | None) -> None:
        """Take over distinct keys with their identities; only into an empty index, which is not dense."""
        assert self._dense is None
        self._table.fill(hashes, checks)
        self._keep(columns)

    def lookup(self, keys: BatchKeys, which: Rows | slice | None = None) -> Slots:
        """Return the slot of the key of each of the rows `which` (None: of all rows). New keys are
        added.
        """
        return self.lookup_new(keys, which)[0]

    def lookup_new(
        self, keys: BatchKeys, which: Rows | slice | None = None
    ) -> tuple[Slots, list[pa.Array]]:
        """Return the slots and the columns of the new keys, which have the last slots; no columns if no
        key is new.
        """
        slots, fresh = self._find(keys, which)
        if not fresh.size:
            return slots, []
        if isinstance(which, slice):
            fresh = fresh + which.start
        elif which is not None:
            fresh = which[fresh]
        columns = [taken_keys(column, fresh) for column in keys.columns]
        self._keep(columns)
        return slots, columns

    def find(self, hashes: Hashes, checks: Hashes | None) -> Slots:
        """Return the slot of each identity, -1 where there is none. Must not be called with a hasher that
        is `dense`.
        """
        assert self._dense is None
        return self._table.find(hashes, checks)

    def find_keys(self, keys: BatchKeys) -> Slots:
        """Return the slot of each row's key, -1 where it is absent. Changes nothing."""
        if self._dense is None:
            return self._table.find(*keys.lanes(None))
        if keys.integers is not None:
            return self._dense.find(keys.integers)
        (column,) = (
            keys.columns
        )  # with nulls, which are not here: they would have ended the dense index
        integers = column.fill_null(0).to_numpy(zero_copy_only=False)
        found = self._dense.find(integers.astype(np.int64, copy=False))
        found[column.is_null().to_numpy(zero_copy_only=False)] = -1
        return found

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """Return the identity of each slot's key (views). Must not be called with a hasher that is
        `dense`.
        """
        assert self._dense is None
        return self._table.lanes()

    def _find(self, keys: BatchKeys, which: Rows | slice | None) -> tuple[Slots, Rows]:
        if self._dense is not None:
            integers = keys.integers
            if integers is not None:
                found = self._dense.lookup(integers if which is None else integers[which])
                if found is not None:
                    return found
            self._leave_dense()
        return self._table.lookup(*keys.lanes(which))

    def _leave_dense(self) -> None:
        """Find keys by their hashes from now on, as they spread too far or one of them is null."""
        keys = self.keys()
        self._dense = None
        if keys:
            self._table.fill(*self._hasher.identify(keys))

    # --- the keys themselves -------------------------------------------------------------------

    def _keep(self, columns: list[pa.Array]) -> None:
        """Append the keys of new slots. Pieces of like size are joined, so each key is copied a few times.

        Large pieces stay as they are: no batch waits for a copy of all keys, and no piece comes near the
        2 GiB that Arrow's offsets can address.
        """
        pieces = self._pieces
        pieces.append(_Piece(columns, sum(column.nbytes for column in columns)))
        while len(pieces) > 1:
            before, last = pieces[-2], pieces[-1]
            nbytes = before.nbytes + last.nbytes
            if before.rows > 2 * last.rows or nbytes > PIECE_BYTES_MAX:
                break
            pieces[-2:] = [_Piece(_joined([before.columns, last.columns]), nbytes)]

    def keys(self, low: int = 0, high: int | None = None) -> list[pa.Array]:
        """Return the key columns of the slots from `low` to `high`, one entry per slot.

        Raises:
            StateError: the keys are larger than one array can be.
        """
        taken = _slices(self._pieces, low, self.size if high is None else high)
        return _joined(taken) if taken else []

    def take(self, slots: Rows) -> list[pa.Array]:
        """Return the keys of some slots."""
        if not self._pieces:
            return [pa.array([], type_) for type_ in self._hasher.types]
        if len(self._pieces) == 1:
            return [taken_keys(column, slots) for column in self._pieces[0].columns]
        if self.key_bytes <= _JOINED_BYTES_MAX:
            return [taken_keys(column, slots) for column in self.keys()]
        # Take from each piece: pyarrow would join all pieces first.
        order = np.argsort(slots, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        indices = pa.array(back)
        found = self.cut().take(slots[order])
        return [plain_column(column).take(indices) for column in found]

    def cut(self) -> KeyCut:
        """Return the keys as they are now."""
        return KeyCut(list(self._pieces), self.size)

    def go_back(self, cut: KeyCut) -> None:
        """Forget the keys that came after a cut."""
        if self._dense is None:
            self._table.forget(cut.size)
        else:
            self._dense.forget(cut.size)
        self._pieces = cut.held()


@dataclass(frozen=True, slots=True)
class KeyCut:
    """The keys of an index at a cut. It may be read in any thread."""

    _pieces: list[_Piece]
    size: int

    def held(self) -> list[_Piece]:
        """Return the pieces of an index that has these keys."""
        return list(self._pieces)

    def take(self, which: Rows | slice) -> list[pa.ChunkedArray]:
        """Return the keys of these slots, which must ascend. There are no columns if there never was a
        key.
        """
        if isinstance(which, slice):
            taken = _slices(self._pieces, which.start, which.stop)
        else:
            taken, start = [], 0
            for piece in self._pieces:
                low, high = np.searchsorted(which, [start, start + piece.rows])
                indices = pa.array(which[low:high] - start)
                taken.append([column.take(indices) for column in piece.columns])
                start += piece.rows
        return [pa.chunked_array(list(column)) for column in zip(*taken, strict=True)]

    def pieces(self, which: Rows | None = None) -> Iterator[list[pa.Array]]:
        """Yield the keys of these slots (ascending; None: of all) in pieces for scans."""
        count = self.size if which is None else len(which)
        for low in range(0, count, _SCANNED):
            high = min(low + _SCANNED, count)
            taken = self.take(slice(low, high) if which is None else which[low:high])
            yield [plain_column(column) for column in taken]


def taken_keys(column: pa.Array, rows: Rows) -> pa.Array:
    """Return the keys of some rows with their `stored_key_type`."""
    if pa.types.is_dictionary(column.type):
        return stored_keys(column.take(pa.array(rows)))
    if pa.types.is_integer(column.type) and not column.null_count:
        return pa.array(column.to_numpy().take(rows))  # pyarrow would take five times as long
    return stored_keys(column).take(pa.array(rows))


def plain_column(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column as one array.

    Raises:
        StateError: the column is larger than one array can be.
    """
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return _concatenated(column.chunks) if column.num_chunks else pa.array([], column.type)


def too_much_text(error: Exception) -> StateError:
    """Return the error for keys whose 32-bit offsets overflow."""
    return StateError(
        f"the text of the keys of one subtask is larger than 2 GiB reason=`{error}`",
        fix="cast the key column to large_string (or large_binary), or raise the parallelism",
    )


def _slices(pieces: list[_Piece], low: int, high: int) -> list[list[pa.Array]]:
    """Return the slots from `low` to `high` of each piece. If there are none, an empty slice gives the
    types.
    """
    found, start = [], 0
    for piece in pieces:
        first, last = max(low - start, 0), min(high - start, piece.rows)
        if first < last:
            found.append([column.slice(first, last - first) for column in piece.columns])
        start += piece.rows
    return found or [[column.slice(0, 0) for column in piece.columns] for piece in pieces[:1]]


def _joined(pieces: list[list[pa.Array]]) -> list[pa.Array]:
    if len(pieces) == 1:
        return pieces[0]
    return [_concatenated(list(column)) for column in zip(*pieces, strict=True)]


def _concatenated(arrays: list[pa.Array]) -> pa.Array:
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowInvalid as error:
        raise too_much_text(error) from error
