"""Merges a base and its deltas into one table: of each key the newest row, unless it is deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ...state.snapshot import DELETED_COLUMN, KEY_GROUP_COLUMN

BLOCK_ROWS: Final = 1 << 20
"""The number of rows merged at a time: rows of different key groups never interact."""


def merge_chain(parts: Sequence[pa.Table], keys: Sequence[str]) -> pa.Table:
    """Merge a chain, base first; every part is sorted by key group, and so is the result.

    Columns go by name: what a part lacks (an aggregate added later) is null in its rows. Blocking.
    """
    if len(parts) == 1 and DELETED_COLUMN not in parts[0].column_names:
        return parts[0]
    # The newest part defines the columns and their order.
    schema = parts[-1].schema
    if DELETED_COLUMN in schema.names:
        schema = schema.remove(schema.get_field_index(DELETED_COLUMN))
    blocks = [_merge_block(block, keys, schema) for block in _blocks(parts)]
    return pa.concat_tables([schema.empty_table(), *blocks], promote_options="permissive")


def _blocks(parts: Sequence[pa.Table]) -> Iterator[list[pa.Table]]:
    """Yield the rows of all parts, some key groups at a time."""
    groups = [part.column(KEY_GROUP_COLUMN).to_numpy() for part in parts]
    everything = np.concatenate(groups)
    present, counts = np.unique(everything, return_counts=True)
    block_of = np.cumsum(counts) // BLOCK_ROWS
    starts = present[np.flatnonzero(np.diff(block_of, prepend=-1))]
    cuts = [np.append(np.searchsorted(own, starts), len(own)) for own in groups]
    for block in range(len(starts)):
        yield [
            part.slice(cut[block], cut[block + 1] - cut[block])
            for part, cut in zip(parts, cuts, strict=True)
        ]


def _merge_block(parts: Sequence[pa.Table], keys: Sequence[str], schema: pa.Schema) -> pa.Table:
    table = pa.concat_tables([schema.empty_table(), *parts], promote_options="permissive")
    row = "row_" + "".join(keys)  # no key has this name
    frame = pl.from_arrow(table.select(list(keys)))
    assert isinstance(frame, pl.DataFrame)  # a table, never a Series
    newest = frame.with_row_index(row).unique(keys, keep="last").get_column(row).to_numpy()
    kept = np.sort(newest)
    if DELETED_COLUMN in table.column_names:
        gone = pc.fill_null(table.column(DELETED_COLUMN), False).to_numpy()
        kept = kept[~gone[kept]]
        table = table.drop_columns([DELETED_COLUMN])
    groups = table.column(KEY_GROUP_COLUMN).to_numpy()[kept]
    return table.take(pa.array(kept[np.argsort(groups, kind="stable")]))
