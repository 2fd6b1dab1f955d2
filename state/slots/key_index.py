"""The keys of a batch -> slots, with the keys themselves kept once per slot, as pieces of Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ..hashing import Hashes, check_key_type, hash_columns, identity_columns
from ..values import Array
from .table import DenseSlots, Rows, Slots, SlotTable

PIECE_BYTES_MAX = 1 << 21
"""Pieces of keys are joined up to this size: a copy of 2 MiB at most."""


def stored_key_type(type_: pa.DataType) -> pa.DataType:
    """The type under which keys of a column are kept, emitted and snapshotted."""
    if pa.types.is_dictionary(type_):
        return stored_key_type(type_.value_type)
    if type_ == pa.string_view():
        return pa.string()
    if type_ == pa.binary_view():
        return pa.binary()
    return type_


def stored_keys(column: pa.Array) -> pa.Array:
    """The column under its `stored_key_type`."""
    type_ = stored_key_type(column.type)
    return column if column.type == type_ else column.cast(type_)


class KeyHasher:
    """Computes the identity of keys made of columns of the given types.

    Raises:
        StateError: a type that cannot be a key.
    """

    def __init__(self, types: Sequence[pa.DataType], seed: int, *, dense: bool = True) -> None:
        for type_ in types:
            check_key_type(type_)
        self._seed = seed
        # The hash of an integer is a bijection: only null needs telling apart.
        self.exact = len(types) == 1 and (
            pa.types.is_integer(types[0]) or pa.types.is_boolean(types[0])
        )
        """Keys that are not null are told apart by their hash alone."""
        fit = len(types) == 1 and pa.types.is_integer(types[0]) and types[0] != pa.uint64()
        self.dense = dense and fit
        """The keys are numbers that fit int64, and may lie close together."""

    def identify(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes | None]:
        """The two lanes of each row's identity; None where all of the second are 0."""
        hashes = hash_columns(columns)
        if not self.exact:
            return hashes, identity_columns(columns, self._seed)
        if not columns[0].null_count:
            return hashes, None
        return hashes, columns[0].is_null().to_numpy(zero_copy_only=False).astype("uint64")


class BatchKeys:
    """The keys of one batch. Hashes are computed once, and only if somebody wants them."""

    __slots__ = ("_hasher", "_lanes", "columns", "integers")

    def __init__(self, hasher: KeyHasher, columns: Sequence[pa.Array]) -> None:
        self.columns = columns
        self.integers: npt.NDArray[np.int64] | None = None
        self._hasher = hasher
        self._lanes: tuple[Hashes, Hashes | None] | None = None
        if hasher.dense and not columns[0].null_count:
            integers = columns[0].to_numpy(zero_copy_only=False)
            self.integers = integers.astype(np.int64, copy=False)

    def lanes(self, which: Rows | slice | None) -> tuple[Hashes, Hashes | None]:
        """The identities (see `KeyHasher.identify`) of some rows; None: of all."""
        if self._lanes is None:
            self._lanes = self._hasher.identify(self.columns)
        hashes, checks = self._lanes
        if which is None:
            return hashes, checks
        return hashes[which], None if checks is None else checks[which]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The keys of some slots in a row; never changes."""

    columns: list[pa.Array]
    nbytes: int

    @property
    def rows(self) -> int:
        return len(self.columns[0])


class KeyIndex:
    """The keys of one piece of keyed state (one window, one running aggregate).

    Integer keys that lie close together are indexed by a plain array as long as they do.
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
        """Memory in use, without the keys."""
        return self._table.nbytes + (0 if self._dense is None else self._dense.nbytes)

    @property
    def key_bytes(self) -> int:
        """Memory of the keys."""
        return sum(piece.nbytes for piece in self._pieces)

    def memory(self) -> list[Array]:
        """The arrays of the index."""
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

    def lookup(self, keys: BatchKeys, which: Rows | slice | None = None) -> Slots:
        """The slot of each key of the rows `which` (None: of all); new keys are kept."""
        return self.lookup_new(keys, which)[0]

    def lookup_new(
        self, keys: BatchKeys, which: Rows | slice | None = None
    ) -> tuple[Slots, list[pa.Array]]:
        """The same, and the keys that are new, which have the last slots; no columns if none is."""
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
        """The slot of each identity, -1 where there is none; not with a hasher that is `dense`."""
        assert self._dense is None
        return self._table.find(hashes, checks)

    def lanes(self) -> tuple[Hashes, Hashes | None]:
        """The identity of each slot's key (views); not with a hasher that is `dense`."""
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
        """The keys spread too far, or one is null: from now on they are found by their hashes."""
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
        """The key columns of the slots from `low` to `high`, one entry per slot.

        Raises:
            StateError: they are larger than one array can be.
        """
        taken = _slices(self._pieces, low, self.size if high is None else high)
        return _joined(taken) if taken else []

    def take(self, slots: Rows) -> list[pa.Array]:
        """The keys of some slots."""
        if len(self._pieces) == 1:
            indices = pa.array(slots)
            return [column.take(indices) for column in self._pieces[0].columns]
        # piece by piece: pyarrow would join them all first
        order = np.argsort(slots, kind="stable")
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        indices = pa.array(back)
        found = self.cut().take(slots[order])
        return [plain_column(column).take(indices) for column in found]

    def cut(self) -> KeyCut:
        """The keys as they are now."""
        return KeyCut(list(self._pieces), self.size)


@dataclass(frozen=True, slots=True)
class KeyCut:
    """The keys of an index at a cut; for any thread."""

    _pieces: list[_Piece]
    size: int

    def take(self, which: Rows | slice) -> list[pa.ChunkedArray]:
        """The keys of these slots, which ascend. No columns if there never was a key."""
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


def taken_keys(column: pa.Array, rows: Rows) -> pa.Array:
    """The keys of some rows under their `stored_key_type`."""
    if pa.types.is_dictionary(column.type):
        return stored_keys(column.take(pa.array(rows)))
    return stored_keys(column).take(pa.array(rows))


def plain_column(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column in one array.

    Raises:
        StateError: it is larger than one array can be.
    """
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return _concatenated(column.chunks) if column.num_chunks else pa.array([], column.type)


def too_much_text(error: Exception) -> StateError:
    """What to say when offsets of 32 bits run over."""
    return StateError(
        f"the text of the keys of one subtask is larger than 2 GiB reason=`{error}`",
        fix="cast the key column to large_string (or large_binary), or raise the parallelism",
    )


def _slices(pieces: list[_Piece], low: int, high: int) -> list[list[pa.Array]]:
    """The slots from `low` to `high` of each piece; an empty one if there are none, for its types."""
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
