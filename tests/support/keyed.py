"""Visits of keys in a backend of keyed state, as loops over records make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headgate.state.keyed.base import KeyedBackend


def visits(
    backend: KeyedBackend, keys: Sequence[Any], key_groups: Sequence[int] = ()
) -> Iterator[Any]:
    """Yield keys, each of which is the current one until the next is asked for."""
    cursor, places = backend.cursor, backend.places(keys, key_groups or [-1] * len(keys))
    for key, cursor.token, cursor.place in zip(keys, *places, strict=True):
        yield key
