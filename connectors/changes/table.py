"""The table whose changes are read: its columns, and its parts that were read at different times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

from ...errors import SourceError

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


def check_columns(
    there: Collection[str],
    *,
    known: Collection[str],
    rows: Collection[str],
    wanted: Collection[str],
    key: Sequence[str],
    new_columns: str,
    columns_now: Callable[[], Collection[str]],
    where: str,
) -> None:
    """Check the columns that changes have against those that are read.

    Args:
        there: the columns of the changes.
        known: the columns that the table is known to have.
        rows: all columns of the table that the user wants.
        wanted: those of them that are read.
        key: the columns of the primary key.
        new_columns: what happens if there is a new one: `fail` or `ignore`.
        columns_now: returns the columns that the table has now.
        where: the table and the position, for errors.

    Raises:
        SourceError: a column was added, dropped or renamed, or the key was.
    """

    def changed(what: str, fix: str) -> SourceError:
        return SourceError(
            f"the columns of the table have changed while changes are read {where}: {what}",
            fix=f"nothing is lost: {fix}, and resume the job",
        )

    missing = set(wanted) - set(there)
    # A column that was added later is null in rows from before.
    dropped = sorted(missing - set(columns_now())) if missing else []
    if dropped:
        raise changed(f"column `{dropped[0]}` was dropped or renamed", "leave it out of schema=")
    new = sorted(set(there) - set(known) - set(rows))
    if new and new_columns == "fail":
        raise changed(
            f"column `{new[0]}` was added",
            "add it to schema=, which then is null in rows from before; or say new_columns=`ignore`, which "
            "reads the columns of the schema only",
        )
    if not set(key) <= set(there):
        raise changed(f"the key ({', '.join(key)}) was changed", "run the job once with --fresh")
