"""Tables of state as Parquet files: whatever types states have."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headgate.runtime.task.parquet_files import encode_tables
from headgate.runtime.task.state_restore import merge_chain
from headgate.state.snapshot import DELETED_COLUMN, KEY_GROUP_COLUMN

INNER = pa.struct([pa.field("n", pa.int64(), False)])
TYPES = {
    "struct": (INNER, {"n": 1}),
    "struct in a struct": (pa.struct([pa.field("inner", INNER, False)]), {"inner": {"n": 1}}),
    "list": (pa.list_(pa.field("item", pa.int32(), False)), [1]),
    "list of structs": (pa.list_(pa.field("item", INNER, False)), [{"n": 1}]),
    "list of structs or nothing": (pa.list_(pa.field("item", INNER)), [{"n": 1}, None]),
    "map": (pa.map_(pa.string(), pa.field("value", INNER, False)), [("a", {"n": 1})]),
    "map of structs or nothing": (pa.map_(pa.string(), INNER), [("a", {"n": 1}), ("b", None)]),
    "struct or nothing in a struct": (pa.struct([pa.field("inner", INNER)]), {"inner": None}),
}


def part(kind, values, *, deleted=None):
    nullable = deleted is not None
    fields = [
        pa.field(KEY_GROUP_COLUMN, pa.int32(), False),
        pa.field("key", pa.int64(), False),
        pa.field("value", kind, nullable),
    ]
    keys = list(range(len(values)))
    # Taken, as snapshots take them: then the fields of a null struct are null too.
    there = pa.array([value for value in values if value is not None], kind)
    places = pa.array([None if value is None else 0 for value in values], pa.int64())
    columns = [pa.array(keys, pa.int32()), pa.array(keys), there.take(places)]
    if deleted is not None:
        fields.append(pa.field(DELETED_COLUMN, pa.bool_(), False))
        columns.append(pa.array(deleted))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def stored(table, tmp_path):
    encoded = encode_tables([table, table.slice(0, 0)], lambda: tmp_path / "large")
    assert isinstance(encoded.data, bytes)
    return pq.read_table(io.BytesIO(encoded.data))


@pytest.mark.parametrize("name", list(TYPES))
def test_deleted_rows_of_any_type_are_written_and_merged(name, tmp_path):
    kind, value = TYPES[name]
    base = stored(part(kind, [value, value, value]), tmp_path)
    delta = stored(part(kind, [None, value, None], deleted=[True, False, True]), tmp_path)
    merged = merge_chain([base, delta], ["key"])
    assert merged.column("key").to_pylist() == [1]
    assert merged.column("value").to_pylist() == [value]


@pytest.mark.parametrize("name", list(TYPES))
def test_nothing_is_a_value_of_any_type(name, tmp_path):
    kind, value = TYPES[name]
    table = part(kind, [value, value, None], deleted=[False, False, False])
    found = stored(table.drop_columns([DELETED_COLUMN]), tmp_path)
    assert found.column("value").to_pylist() == [value, value, None]
