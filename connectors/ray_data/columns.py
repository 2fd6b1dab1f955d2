"""The columns of a Ray Dataset, in the types that a stream has.

large_string, string_view, large_binary, large_list    the type without `large` or `view`
dictionary                                             the type of its values
tensors, Python objects, maps, unions, null            none: they are refused by name
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ...errors import PlanError
from ..prepared.declared import check_declared

_FIX = (
    "convert the column in the dataset with map_batches, remove it with drop_columns, or declare a "
    "schema without it"
)


def dataset_schema(dataset: Any) -> pa.Schema:
    """Return the columns of a dataset. Ray may compute its first rows for that.

    Raises:
        PlanError: there is no column, or the type of one has no column form.
    """
    found = dataset.schema()
    names = list(found.names) if found is not None else []
    if not names:
        raise PlanError(
            "the Ray dataset has no columns", fix="give schema=..., which an empty dataset needs"
        )
    return pa.schema(
        [
            pa.field(name, plain_type(type_, name))
            for name, type_ in zip(names, found.types, strict=True)
        ]
    )


def plain_type(found: Any, column: str) -> pa.DataType:
    """Return the type in which a (nested) column is read; `column` is its path, for messages.

    Raises:
        PlanError: it has no column form.
    """
    kinds = pa.types
    if not isinstance(found, pa.DataType) or isinstance(found, pa.BaseExtensionType):
        raise _no_form(found, column)
    if kinds.is_dictionary(found):
        return plain_type(found.value_type, column)
    if kinds.is_large_string(found) or kinds.is_string_view(found):
        return pa.string()
    if kinds.is_large_binary(found) or kinds.is_binary_view(found):
        return pa.binary()
    if kinds.is_list(found) or kinds.is_large_list(found):
        return pa.list_(plain_type(found.value_type, f"{column}[]"))
    if kinds.is_struct(found) and found.num_fields:
        return pa.struct(
            [(field.name, plain_type(field.type, f"{column}.{field.name}")) for field in found]
        )
    if kinds.is_nested(found) or kinds.is_null(found):
        raise _no_form(found, column)
    return found


def _no_form(found: object, column: str) -> PlanError:
    return PlanError(
        f"a column of the Ray dataset has a type without a column form column=`{column}` "
        f"type=`{found}`",
        fix=_FIX,
    )


def plain_block(block: pa.Table, declared: pa.Schema) -> pa.Table:
    """Return the declared columns of a block in plain types. A column of nulls only fits every type.

    Raises:
        PlanError: a column is missing, or has a type that cannot be read as declared.
    """
    fields = []
    for field in block.schema:
        if field.name in declared.names:
            wanted = declared.field(field.name).type
            empty = pa.types.is_null(field.type)
            fields.append((field.name, wanted if empty else plain_type(field.type, field.name)))
    check_declared(declared, pa.schema(fields), "Ray", "dataset")
    found = dict(fields)
    columns = [block.column(name).cast(found[name]) for name in declared.names]
    return pa.table(columns, schema=pa.schema([(name, found[name]) for name in declared.names]))
