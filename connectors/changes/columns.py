"""The columns of a table that are known, and what happens when the table gets others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ...errors import SourceError


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
