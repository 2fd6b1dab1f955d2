"""The parts of a table that were read at different times, in the order of its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Parts(Generic[C]):
    """Tells which changes are contained in the part of the table with a key. C is a change.

    Reading a table may be interrupted, and the rest is then read later. So the rows up to a key are those
    of one moment, and those that follow it are those of a later one.
    """

    def __init__(
        self,
        orders: Sequence[Callable[[Any], Any]],
        parts: Sequence[tuple[Sequence[Any] | None, Callable[[C], bool]]],
    ) -> None:
        """Take the parts.

        Args:
            orders: for each column of the key: makes values that Python orders as the server does.
            parts: the key of the last row of each part, None: it has all rows that follow; and a function
                that says whether it contains a change.
        """
        self._orders = orders
        self._parts = [
            (None if upto is None else self._ordered(upto), contains) for upto, contains in parts
        ]

    def _ordered(self, key: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(order(value) for order, value in zip(self._orders, key, strict=True))

    def contain(self, key: Sequence[Any], change: C) -> bool:
        """Return True if the row with this key was read with this change."""
        ordered = self._ordered(key)
        for upto, contains in self._parts:
            if upto is None or ordered <= upto:
                return contains(change)
        return False

    def contain_everywhere(self, change: C) -> bool | None:
        """Return whether all parts contain a change; None: some do."""
        found = {contains(change) for _, contains in self._parts}
        return found.pop() if len(found) == 1 else None
