"""Where keys are read: which subtask has each key, and the bytes that name it there."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from ...errors import HeadgateError
from ...operators.queries import plain_key
from ...state.hashing import hash_key, hash_keys, key_group_of, key_groups_of
from ...state.keyed.base import ABSENT
from ...state.keyed.keys import ClientKeys, encode_key
from ...state.keygroups import owner_of

_WORD: Final = struct.Struct("<q")
_ENTRY_BYTES: Final = 8
"""The most bytes that a request needs for a key beside the key itself."""
_COLUMN_FROM: Final = 8
"""Fewer keys are placed faster one by one."""


@final
class KeysOfOwner(NamedTuple):
    """The keys of one call that one subtask has."""

    owner: int
    """The place of the subtask among the owners."""
    keys: ClientKeys
    number: int
    size_bytes: int
    """The most bytes of a request that they take."""
    places: Sequence[int]
    """Which keys of the call they are, ascending."""


@final
class PlacedKeys(NamedTuple):
    """The keys of one call.

    Attributes:
        groups: the key group of each key.
        parts: the keys of each subtask.
    """

    groups: Sequence[int]
    parts: Sequence[KeysOfOwner]


class KeyPlaces:
    """Places the keys of one state.

    Args:
        types: of the key columns; None: they are not declared.
        owners: the number of subtasks that have the state.
        max_parallelism: the number of key groups.
    """

    def __init__(self, types: Mapping[str, str] | None, owners: int, max_parallelism: int) -> None:
        self._types = types
        self._owners = owners
        self._max_parallelism = max_parallelism
        kinds = list((types or {}).values())
        self._kind = {"int": int, "str": str}.get(kinds[0]) if len(kinds) == 1 else None

    def of(self, keys: Sequence[Any]) -> PlacedKeys | None:
        """Return where keys are; None: only the job knows."""
        try:
            if self._kind is not None and set(map(type, keys)) == {self._kind}:
                return self._of_column(keys)
            known = [plain_key(self._types, key) for key in keys]
            if any(key is ABSENT for key in known):
                return None
            return self._divided(self._groups(known), list(map(encode_key, known)))
        except (HeadgateError, ValueError, TypeError):  # such as a text that is not UTF-8
            return None

    def _of_column(self, keys: Sequence[Any]) -> PlacedKeys:
        """Return where keys are that are all whole numbers, or all texts."""
        groups = self._groups(keys)
        if self._kind is str:
            return self._divided(groups, keys)
        try:
            if len(keys) == 1:
                return self._divided(groups, _WORD.pack(*keys))
            return self._divided(groups, np.array(keys, "<i8").tobytes())
        except (OverflowError, struct.error):
            return self._divided(groups, list(map(encode_key, keys)))

    def _groups(self, keys: Sequence[Any]) -> list[int]:
        if len(keys) < _COLUMN_FROM:
            return [key_group_of(hash_key(key), self._max_parallelism) for key in keys]
        groups: list[int] = key_groups_of(hash_keys(keys), self._max_parallelism).tolist()
        return groups

    def _divided(self, groups: list[int], keys: bytes | Sequence[bytes | str]) -> PlacedKeys:
        """Return the keys by subtask."""
        owners = [owner_of(group, self._owners, self._max_parallelism) for group in groups]
        if len(set(owners)) == 1:
            whole = keys if isinstance(keys, bytes) else tuple(keys)
            return PlacedKeys(groups, [_part(owners[0], whole, range(len(groups)))])
        by_owner: dict[int, list[int]] = {}
        for place, owner in enumerate(owners):
            by_owner.setdefault(owner, []).append(place)
        parts = [_part(owner, _taken(keys, places), places) for owner, places in by_owner.items()]
        return PlacedKeys(groups, parts)


def _taken(keys: bytes | Sequence[bytes | str], places: list[int]) -> ClientKeys:
    if isinstance(keys, bytes):
        return np.frombuffer(keys, "<i8")[places].tobytes()
    return tuple(keys[place] for place in places)


def _part(owner: int, keys: ClientKeys, places: Sequence[int]) -> KeysOfOwner:
    size_bytes = _ENTRY_BYTES * len(places)
    if isinstance(keys, bytes):
        size_bytes += len(keys)
    else:
        size_bytes += sum(map(_bytes_of, keys))
    return KeysOfOwner(owner, keys, len(places), size_bytes, places)


def _bytes_of(key: bytes | str) -> int:
    return len(key) if isinstance(key, bytes) or key.isascii() else len(key.encode())
