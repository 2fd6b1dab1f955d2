"""Keys of a batch -> slots, with the keys themselves kept once per slot, as Arrow pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .dense import DenseSlots
from .hashing import Hashes, check_key_type, hash_columns, identity_columns
from .slots import Rows, Slots, SlotTable

_MAX_PIECES = 64


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

    def __init__(self, types: Sequence[pa.DataType], seed: int) -> None:
        for type_ in types:
            check_key_type(type_)
        self._seed = seed
        # The hash of an integer is a bijection: only null needs telling apart.
        self._exact = len(types) == 1 and (
            pa.types.is_integer(types[0]) or pa.types.is_boolean(types[0])
        )
        self.dense = len(types) == 1 and pa.types.is_integer(types[0]) and types[0] != pa.uint64()
        """The keys are numbers that fit int64, and may lie close together."""

    def identify(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes | None]:
        """The two lanes of each row's identity; None where all of the second are 0."""
        hashes = hash_columns(columns)
        if not self._exact:
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


class KeyIndex:
    """The keys of one piece of keyed state (one window, one running aggregate).

    Integer keys that lie close together are indexed by a plain array as long as they do.
    """

    def __init__(self, hasher: KeyHasher) -> None:
        self._hasher = hasher
        self._dense: DenseSlots | None = DenseSlots() if hasher.dense else None
        self._table = SlotTable()
        self._pieces: list[list[pa.Array]] = []

    @property
    def size(self) -> int:
        """How many keys there are: slots are 0 to size - 1."""
        return self._table.size if self._dense is None else self._dense.size

    def clear(self) -> None:
        """Forget all keys; keeps the memory of the index."""
        if self._dense is None:
            self._table.clear()
        else:
            self._dense.clear()
        self._pieces = []

    def lookup(self, keys: BatchKeys, which: Rows | slice | None = None) -> Slots:
        """The slot of each key of the rows `which` (None: of all); new keys are kept."""
        slots, fresh = self._find(keys, which)
        if fresh.size:
            if isinstance(which, slice):
                fresh = fresh + which.start
            elif which is not None:
                fresh = which[fresh]
            indices = pa.array(fresh)
            self._pieces.append([stored_keys(column).take(indices) for column in keys.columns])
            if len(self._pieces) > _MAX_PIECES:
                self._pieces = [_joined(self._pieces)]
        return slots

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
        self._dense = None
        if self._pieces:
            self._table.fill(*self._hasher.identify(self.keys()))

    def keys(self) -> list[pa.Array]:
        """The key columns, one entry per slot."""
        if len(self._pieces) > 1:
            self._pieces = [_joined(self._pieces)]
        return self._pieces[0] if self._pieces else []

    def freeze(self) -> Callable[[], tuple[Hashes, list[pa.Array]]]:
        """A cut of the keys as they are now: a function that returns hashes and key columns."""
        pieces, hasher = list(self._pieces), self._hasher

        def make() -> tuple[Hashes, list[pa.Array]]:
            if not pieces:
                return np.empty(0, np.uint64), []
            keys = _joined(pieces)
            return hasher.identify(keys)[0], keys

        return make


def _joined(pieces: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(list(column)) for column in zip(*pieces, strict=True)]
