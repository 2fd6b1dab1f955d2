"""Lists and maps put together: one row per key instead of one per element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...state.snapshot import KEY_GROUP_COLUMN


def collected_type(entry: pa.Field, value: pa.Field) -> pa.DataType:
    """The type of a collected column: a list in the order of `position`, or a map."""
    if entry.name == "position":
        return pa.list_(value.type)
    return pa.map_(entry.type, value.type)


def whole_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The rows of sorted tables, cut so that no key group goes over two of them."""
    held: list[pa.Table] = []
    for table in tables:
        groups = table.column(KEY_GROUP_COLUMN).to_numpy()
        cut = int(np.searchsorted(groups, groups[-1]))
        if held and held[-1].column(KEY_GROUP_COLUMN)[-1].as_py() != groups[0]:
            yield pa.concat_tables(held)
            held = []
        if cut:
            yield pa.concat_tables([*held, table.slice(0, cut)])
            held = []
        held.append(table.slice(cut))
    if held:
        yield pa.concat_tables(held)


def collect(table: pa.Table, keys: Sequence[str], entry: str, value: str) -> pa.Table:
    """One row per key: the key columns, and `value` as a list or a map of its entries.

    Args:
        table: rows of whole keys, in any order.
        keys: the columns to group by, the key group first.
        entry: `position`, by which a list is ordered, or the column of map keys.
        value: the column to collect.
    """
    import polars as pl  # takes a while, and few reads need it

    frame = pl.from_arrow(table.select([*keys, entry]))
    assert isinstance(frame, pl.DataFrame)
    order = frame.with_row_index("row_").sort([*keys, entry]).get_column("row_").to_numpy()
    rows = table.take(pa.array(order))
    sorted_keys = pl.from_arrow(rows.select(list(keys)))
    assert isinstance(sorted_keys, pl.DataFrame)
    runs = sorted_keys.select(pl.struct(pl.all()).rle_id()).to_series().to_numpy()
    starts = np.flatnonzero(np.diff(runs, prepend=np.int64(-1)))
    offsets = pa.array(np.append(starts, table.num_rows), pa.int32())
    entries = rows.column(entry).combine_chunks()
    values = rows.column(value).combine_chunks()
    if entry == "position":
        joined = pa.ListArray.from_arrays(offsets, values)
    else:
        joined = pa.MapArray.from_arrays(offsets, entries, values)
    firsts = rows.select(list(keys)).take(pa.array(starts))
    kind = collected_type(table.schema.field(entry), table.schema.field(value))
    return firsts.append_column(value, pc.cast(joined, kind))
