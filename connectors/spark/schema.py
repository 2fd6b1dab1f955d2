"""Converts Spark's types to Arrow's, from the JSON form of a schema, for which Spark is not needed.

    boolean byte short integer long float double    bool int8 int16 int32 int64 float32 float64
    decimal(p,s)                                    decimal128(p, s)
    string, char(n), varchar(n)                     string
    binary, date                                    binary, date32
    timestamp, timestamp_ltz                        timestamp[us, UTC]
    timestamp_ntz                                   timestamp[us], without zone
    interval of days to seconds                     duration[us]
    time                                            time64[us]
    array, struct                                   list, struct
    map                                             list of struct<key, value>, in the order of the map

A column that has no nulls in Spark has none here. Values within a column may be null.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pyarrow as pa

from ...errors import PlanError

_PLAIN: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_TEXT: Final = re.compile(r"(?:char|varchar)\(\d+\)|string collate .+")
_DAYS: Final = re.compile(r"interval (?:day|hour|minute|second)(?: to (?:hour|minute|second))?")
_TIME: Final = re.compile(r"time\([0-6]\)")


def arrow_schema(spark: str) -> pa.Schema:
    """Return the Arrow schema of a Spark schema, given as JSON (`DataFrame.schema.json()`).

    Raises:
        PlanError: there is no column, a column appears twice, or its type has no column form.
    """
    fields = json.loads(spark)["fields"]
    names = [field["name"] for field in fields]
    if not names:
        raise PlanError("the Spark query has no columns")
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f"the Spark query has a column twice column=`{name}`",
                fix="give one of them another name, or select the columns that are wanted",
            )
    return pa.schema(
        [
            pa.field(field["name"], _arrow(field["type"], field["name"]), field["nullable"])
            for field in fields
        ]
    )


def _arrow(spark: Any, column: str) -> pa.DataType:
    """Return the type of a (nested) column; `column` is its path, for messages."""
    if isinstance(spark, str):
        return _arrow_plain(spark, column)
    match spark["type"]:
        case "array":
            return pa.list_(_arrow(spark["elementType"], f"{column}[]"))
        case "map":
            # This is not Arrow's map, which expressions do not support. In memory the two are the same.
            entry = {
                "key": _arrow(spark["keyType"], f"{column}.key"),
                "value": _arrow(spark["valueType"], f"{column}.value"),
            }
            return pa.list_(pa.struct(list(entry.items())))
        case "struct" if spark["fields"]:
            return pa.struct(
                [
                    (field["name"], _arrow(field["type"], f"{column}.{field['name']}"))
                    for field in spark["fields"]
                ]
            )
    raise _no_form(spark["type"], column)


def _arrow_plain(spark: str, column: str) -> pa.DataType:
    if spark in _PLAIN:
        return _PLAIN[spark]
    if found := _DECIMAL.fullmatch(spark):
        return pa.decimal128(int(found[1]), int(found[2]))
    if _TEXT.fullmatch(spark):
        return pa.string()
    if _DAYS.fullmatch(spark):
        return pa.duration("us")
    if _TIME.fullmatch(spark):
        return pa.time64("us")
    raise _no_form(spark, column)


def _no_form(spark: str, column: str) -> PlanError:
    return PlanError(
        f"a type of Spark has no column form here column=`{column}` type=`{spark}`",
        fix="leave the column out of the query, or cast it in the query, say to string",
    )
