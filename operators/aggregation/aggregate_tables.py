"""The tables of aggregates: their cuts, and which restored columns fit the step of today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from ...errors import StateError
from ...state.evolution import aggregate_of, is_other_aggregate, is_widening, keeps_hash
from ...state.hashing import Hashes, hash_columns, key_groups_of
from ...state.slots.key_index import too_much_text
from ...state.snapshot import StateInfo, TableCut, state_info
from ...state.values import Array
from .aggregates import AggregatePlan
from .keyed_aggregate import Rows, row_count

_HASH = pa.field("hash", pa.uint64(), False)
AddedColumns = Callable[[Rows], list[Array]]
"""A function that returns the values of a plan's added columns, as numbers, for some slots."""


class RowsCut(Protocol):
    """A cut of keys with state, such as a `GroupCut`: call `slots`, then `columns`, in any one thread."""

    def slots(self, since: int | None) -> Rows: ...

    def columns(self, which: Rows) -> tuple[list[pa.ChunkedArray], list[pa.Array]]: ...

    def close(self) -> None: ...


class CutPart:
    """One group's share in a cut of a table.

    Args:
        cut: of the group.
        added: the added columns, read while the cut is open; None if the plan has none.
        alive: leaves out slots that no longer count.
    """

    __slots__ = ("_added", "_alive", "cut")

    def __init__(
        self,
        cut: RowsCut,
        added: AddedColumns | None = None,
        alive: Callable[[Rows], Rows] | None = None,
    ) -> None:
        self.cut = cut
        self._added, self._alive = added, alive

    def rows(self, plan: AggregatePlan, since: int | None) -> pa.Table:
        """Return the changed rows, or all; the first column holds the hashes. Closes the cut."""
        which = self.cut.slots(since)
        if self._alive is not None:
            which = self._alive(which)
        count = row_count(which)
        # First, because the memory may be reused for other windows once the cut is closed.
        added = [] if self._added is None else self._added(which)
        all_keys, state = self.cut.columns(which)
        schema = plan.state_schema
        if not count:
            return schema.set(0, _HASH).empty_table()
        keys = all_keys[: len(plan.keys)]
        columns = [
            pa.array(_hashes(keys, count)),
            *keys,
            *(pa.array(edge).view(f.type) for edge, f in zip(added, plan.added, strict=True)),
            *state,
        ]
        return pa.Table.from_arrays(columns, names=[_HASH.name, *schema.names[1:]])


def table_cut(
    plan: AggregatePlan,
    epoch: int,
    parts: Sequence[CutPart],
    max_parallelism: int,
) -> TableCut:
    """Return the cut of a table that consists of these parts."""

    def close() -> None:
        for part in parts:
            part.cut.close()

    def make(since: int | None) -> pa.Table:
        try:
            tables = [part.rows(plan, since) for part in parts]
        finally:
            close()
        return _by_key_group(plan, [table for table in tables if table.num_rows], max_parallelism)

    keys = (*plan.keys, *(field.name for field in plan.added))
    return TableCut(make, keys=keys, epoch=epoch, discard=close)


def _hashes(keys: list[pa.ChunkedArray], rows: int) -> Hashes:
    """Return the hash of each key, a chunk at a time; all columns are cut into the same chunks."""
    if not keys:
        return np.zeros(rows, np.uint64)
    chunks = zip(*(column.chunks for column in keys), strict=True)
    return np.concatenate([hash_columns(list(columns)) for columns in chunks])


def _by_key_group(
    plan: AggregatePlan, tables: Sequence[pa.Table], max_parallelism: int
) -> pa.Table:
    """Return the rows of `CutPart.rows` together, with key groups, sorted by them."""
    schema: pa.Schema = plan.state_schema
    if not tables:
        return schema.empty_table()
    table = pa.concat_tables(tables)
    groups = key_groups_of(table.column(0).to_numpy(), max_parallelism)
    # uint16 sorts by radix; there are at most 32,768 key groups
    order = np.argsort(groups.astype(np.uint16), kind="stable")
    table = table.set_column(0, schema.field(0), pa.array(groups)).cast(schema)
    try:
        return table.take(pa.array(order))
    except pa.ArrowInvalid as error:
        raise too_much_text(error) from error


# --- declarations ----------------------------------------------------------------------------


def aggregate_info(plan: AggregatePlan, name: str, kind: str) -> StateInfo:
    """Return the declaration of a table of aggregates; its state columns name their aggregates."""
    keys = (*plan.keys, *(field.name for field in plan.added))
    return state_info(name, kind, plan.described_state_schema, keys, ttl_ms=plan.ttl_ms)


def restored_rows(
    plan: AggregatePlan, table: pa.Table, info: StateInfo | None, step: str
) -> pa.Table:
    """Return a restored table as this plan reads it: keys, added columns, and known aggregates.

    Widened columns are cast. Columns of removed aggregates are left out, and those of new ones are
    missing: their aggregates start empty.

    Raises:
        StateError: the keys differ, or a column has another type or aggregate.
    """
    _check_keys(plan, table, info, step)
    names, columns = [], []
    before = info.arrow_schema() if info is not None else None
    for field in plan.described_state_schema:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        was = (
            before.field(field.name) if before is not None and field.name in before.names else None
        )
        if was is not None and is_other_aggregate(was, field):
            raise StateError(
                f"the snapshot holds another aggregate under this name column=`{field.name}` "
                f"old=`{aggregate_of(was)}` new=`{aggregate_of(field)}`",
                where=step,
                fix="give the new aggregate another name: it then starts empty",
            )
        if column.type != field.type:
            widens = is_widening if aggregate_of(field) else keeps_hash
            if not widens(column.type, field.type):
                raise StateError(
                    f"the type of a state column changed column=`{field.name}` "
                    f"old=`{column.type}` new=`{field.type}`",
                    where=step,
                    fix="keep the type, or give the aggregate or the step another name",
                )
            column = column.cast(field.type, safe=not pa.types.is_integer(column.type))
        names.append(field.name)
        columns.append(column)
    return pa.Table.from_arrays(columns, names=names)


def files_of_another_backend(state: str, step: str) -> StateError:
    """Return the error for run files restored into a backend in memory."""
    return StateError(
        f"the snapshot consists of files of another state backend state=`{state}` "
        "found=`rocksdb` expected=`hashmap`",
        where=step,
        fix="keep state.backend.type, or change it with a savepoint in canonical format",
    )


def _check_keys(plan: AggregatePlan, table: pa.Table, info: StateInfo | None, step: str) -> None:
    """Raise StateError unless a snapshot's rows have the same key columns as this plan."""
    expected = [field.name for field in [*plan.key_fields, *plan.added]]
    found = [name for name in table.column_names if name in expected]
    if info is not None and info.keys:
        found = list(info.keys)
    if found != expected:
        raise StateError(
            f"the snapshot has other keys expected=`{', '.join(expected)}` "
            f"found=`{', '.join(found)}`",
            where=step,
            fix="keep the keys as they were, or start the step under a new name",
        )
