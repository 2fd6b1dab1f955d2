"""Arrow's types in the form that Spark takes and returns."""

from __future__ import annotations

import pyarrow as pa

_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns in Spark's types, all nullable, since its plans must not rely on our
    declarations.
    """
    return pa.schema([pa.field(field.name, spark_type(field.type)) for field in schema])


def spark_type(type_: pa.DataType) -> pa.DataType:
    """Return Spark's type for values of `type_`: the same, or one that has room for all of them.

    Times below a microsecond are cut off.
    """
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", tz="UTC" if type_.tz else None)
    if pa.types.is_time(type_):
        return pa.time64("ns")
    if pa.types.is_duration(type_):
        return pa.duration("us")
    if pa.types.is_fixed_size_binary(type_):
        return pa.binary()
    if pa.types.is_map(type_):
        key, value = spark_type(type_.key_type), spark_type(type_.item_type)
        return pa.map_(pa.field("key", key, False), pa.field("value", value))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(field.name, spark_type(field.type)) for field in type_])
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(pa.field("element", spark_type(type_.value_type)))
    return _WIDER.get(type_, type_)


def as_spark(table: pa.Table, schema: pa.Schema) -> list[pa.RecordBatch]:
    """Return a table as batches of `schema`, which must be Spark's form of its schema."""
    columns = []
    for field in schema:
        column = table.column(field.name)
        columns.append(column if column.type == field.type else column.cast(field.type, safe=False))
    batches: list[pa.RecordBatch] = pa.Table.from_arrays(columns, schema=schema).to_batches()
    return batches
