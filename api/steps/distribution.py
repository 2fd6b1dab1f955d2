"""Keys and other distributions of records that the user gives: the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pyarrow as pa

from ...errors import PlanError, StateError
from ...operators.functions.checks import check_plain, check_takes
from ...operators.origin import Origin
from ...operators.partitioning import Custom, HashColumns, HashFunction
from ...operators.schema import unknown_column
from ...state.hashing import check_key_type
from ..node_output import NodeOutput
from .per_record import check_reads


def keyed_by_columns(output: NodeOutput, columns: tuple[str, ...], origin: Origin) -> NodeOutput:
    """Return the output of `key_by`."""
    schema = output.columns("key_by", origin)
    if not columns:
        raise PlanError("key_by needs a column", where=str(origin), fix='such as key_by("user_id")')
    for column in columns:
        if not isinstance(column, str):
            raise PlanError(
                f"key_by takes the names of columns, got `{type(column).__name__}`",
                where=str(origin),
                fix='such as key_by("user_id", "day"); key_with takes a function of the record',
            )
    if len(set(columns)) < len(columns):
        raise PlanError("key_by names a column twice", where=str(origin))
    for column in columns:
        if column not in schema.names:
            raise unknown_column(column, schema, "key_by", str(origin))
        _check_key(column, schema.field(column).type, origin)
    return output.distributed(HashColumns(columns))


def _check_key(column: str, kind: pa.DataType, origin: Origin) -> None:
    if pa.types.is_floating(kind):
        raise PlanError(
            f"column `{column}` is a float, and floats are no keys type=`{kind}`",
            where=str(origin),
            fix=f"equal amounts may differ in the last bit; convert it to whole numbers, such as "
            f'.select("*", "CAST(round({column} * 100) AS BIGINT) AS {column}_100")',
        )
    try:
        check_key_type(kind)
    except StateError as error:
        raise PlanError(
            f"{error.message} column=`{column}`", where=str(origin), fix=error.fix
        ) from None


def keyed_by_function(
    output: NodeOutput, function: Callable[[Any], Hashable], origin: Origin
) -> NodeOutput:
    """Return the output of `key_with`."""
    check_plain(function, "key_with", origin)
    check_takes(function, ("the record",), "key_with", origin)
    check_reads(output, function, "key_with", origin)
    return output.distributed(HashFunction(function))


def distributed_by_function(
    output: NodeOutput, function: Callable[[Any, int], int], origin: Origin
) -> NodeOutput:
    """Return the output of `partition_with`."""
    check_plain(function, "partition_with", origin)
    check_takes(function, ("the record", "the parallelism"), "partition_with", origin)
    return output.distributed(Custom(function))
