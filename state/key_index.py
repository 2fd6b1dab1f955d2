"""Keys of a batch -> slots, with the keys themselves kept once per slot, as Arrow pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

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

    def identify(self, columns: Sequence[pa.Array]) -> tuple[Hashes, Hashes | None]:
        """The two lanes of each row's identity; None where all of the second are 0."""
        hashes = hash_columns(columns)
        if not self._exact:
            return hashes, identity_columns(columns, self._seed)
        if not columns[0].null_count:
            return hashes, None
        return hashes, columns[0].is_null().to_numpy(zero_copy_only=False).astype("uint64")


class KeyIndex:
    """The keys of one piece of keyed state (one window, one running aggregate)."""

    def __init__(self) -> None:
        self._table = SlotTable()
        self._pieces: list[list[pa.Array]] = []

    @property
    def size(self) -> int:
        """How many keys there are: slots are 0 to size - 1."""
        return self._table.size

    def clear(self) -> None:
        """Forget all keys; keeps the memory of the table."""
        self._table.clear()
        self._pieces = []

    def lookup(
        self,
        hashes: Hashes,
        checks: Hashes | None,
        columns: Sequence[pa.Array],
        rows: Rows | None = None,
    ) -> Slots:
        """The slot of each identity; new keys are kept.

        Args:
            hashes: first lane of `KeyHasher.identify`.
            checks: second lane.
            columns: where the keys of new slots are read from.
            rows: the row of `columns` each identity belongs to; None if they are aligned.
        """
        slots, fresh = self._table.lookup(hashes, checks)
        if fresh.size:
            indices = pa.array(fresh if rows is None else rows[fresh])
            self._pieces.append([stored_keys(column).take(indices) for column in columns])
            if len(self._pieces) > _MAX_PIECES:
                self._pieces = [_joined(self._pieces)]
        return slots

    def keys(self) -> list[pa.Array]:
        """The key columns, one entry per slot."""
        if len(self._pieces) > 1:
            self._pieces = [_joined(self._pieces)]
        return self._pieces[0] if self._pieces else []

    def freeze(self) -> Callable[[], tuple[Hashes, list[pa.Array]]]:
        """A cut of the keys as they are now: a function that returns hashes and key columns."""
        hashes, pieces = self._table.hashes.copy(), list(self._pieces)
        return lambda: (hashes, _joined(pieces))


def _joined(pieces: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(list(column)) for column in zip(*pieces, strict=True)]
