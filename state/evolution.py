"""Decides whether state of one shape can be loaded as another, and how.

Columns and fields of structs may be added (they become null, or a default), removed, and widened. Types
of keys never change, because the key group of a key follows from its type. Any larger change needs a new
`version` of the state and a function `migrate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa

from ..errors import StateError
from .snapshot import KEY_GROUP_COLUMN, StateInfo

ENCODING: Final = b"headgate.encoding"
"""Metadata of a column whose bytes only its owner can read; the value says how they are encoded."""
PICKLE: Final = b"pickle"
"""The encoding of values that have no declared type."""
_VALUE: Final = "value"
_DECLARED_LATER: Final = ("value", "list", "map", "reducing", "aggregating", "reduce")
"""The kinds of state whose pickled values can be loaded as values of a type that was declared later."""
AGGREGATE: Final = b"aggregate"
"""Metadata of a state column of an aggregate: the aggregate, such as `sum(amount)`."""
MEANING: Final = b"headgate.meaning"
"""Metadata of a state's schema: the meaning of its values, as a JSON object of texts by label. Values
with another meaning can have the same types, such as the sums of two columns.
"""
LAST_USED_COLUMN: Final = "last_used"
LAST_USED_TYPE: Final = pa.timestamp("ms", tz="UTC")
_INTEGERS = {
    "int8": 8, "int16": 16, "int32": 32, "int64": 64,
    "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
}  # fmt: skip
_UNITS = ("s", "ms", "us", "ns")
_SAME_BYTES = (
    {"string", "large_string", "string_view"},
    {"binary", "large_binary", "binary_view"},
)


class Compatibility(msgspec.Struct, frozen=True):
    """The result of comparing an old state with a new one; `text` says what changes, or what is wrong."""

    verdict: Literal["same", "migration", "incompatible"]
    text: str = ""

    @property
    def ok(self) -> bool:
        """True if it can be loaded."""
        return self.verdict != "incompatible"


def compare(old: StateInfo, new: StateInfo) -> Compatibility:
    """Find out whether state declared as `old` can be loaded by an operator that declares `new`. Names do
    not matter.
    """
    problems, changes = _differences(old, new)
    if problems:
        return Compatibility("incompatible", f"state `{new.name}`: " + "; ".join(problems))
    if changes:
        return Compatibility("migration", f"state `{new.name}`: " + "; ".join(changes))
    return Compatibility("same")


def check_compatible(old: StateInfo, new: StateInfo, operator: str = "") -> None:
    """Raise StateError, with what to do, if `old` cannot be loaded as `new`.

    `operator` is named in the error, unless the caller does that.
    """
    found = compare(old, new)
    if not found.ok:
        raise StateError(
            f"{found.text} operator=`{operator}`" if operator else found.text,
            fix="declare the old type again; or raise version= and give migrate=, which turns old values "
            "into new ones; or give the state a new name and drop the old one",
        )


def _differences(old: StateInfo, new: StateInfo) -> tuple[list[str], list[str]]:
    """Return the differences that prevent loading, and those that loading takes care of."""
    if old.kind != new.kind:
        return [f"it was of kind `{old.kind}` and is now `{new.kind}`"], []
    before, after = old.arrow_schema(), new.arrow_schema()
    if before is None or after is None:
        return [], [] if old.version == new.version else [_new_version(old, new)]
    problems: list[str] = []
    changes: list[str] = []
    if old.keys != new.keys:
        problems.append(f"its keys were ({', '.join(old.keys)}), now ({', '.join(new.keys)})")
    migrates = old.version != new.version
    if migrates:
        changes.append(_new_version(old, new))
    if (old.ttl_ms is None) != (new.ttl_ms is None):
        on = "now expires: the time starts at the restore" if old.ttl_ms is None else "stays now"
        changes.append(f"what is in it {on}")
    for name in (*before.names, *(name for name in after.names if name not in before.names)):
        if name in (KEY_GROUP_COLUMN, LAST_USED_COLUMN) or (migrates and name not in new.keys):
            continue
        was = before.field(name) if name in before.names else None
        now = after.field(name) if name in after.names else None
        if name == _VALUE and is_declared_later(old, new):
            changes.append(f"it was pickled, and is now {after.field(name).type}")
            continue
        _compare_field(was, now, name in old.keys or name in new.keys, problems, changes)
    return problems, changes


def with_meaning(schema: pa.Schema, meaning: Mapping[str, str]) -> pa.Schema:
    """Return the schema of a state's table with the meaning of its values added."""
    known = {} if not schema.metadata else dict(schema.metadata)
    before = msgspec.json.decode(known.get(MEANING, b"{}"), type=dict[str, str])
    return schema.with_metadata(known | {MEANING: msgspec.json.encode(before | dict(meaning))})


def meaning(info: StateInfo, what: Mapping[str, str]) -> StateInfo:
    """Return the state with the meaning of its values added; unchanged if it has no table."""
    schema = info.arrow_schema()
    if schema is None:
        return info
    encoded = with_meaning(schema, what).serialize().to_pybytes()
    return msgspec.structs.replace(info, schema=encoded)


def changed_meaning(old: StateInfo, new: StateInfo) -> list[str]:
    """Describe where the meaning of a state's values has changed, as far as both declarations state it."""
    before, after = _meaning(old), _meaning(new)
    return [
        f"{label} was {before[label]}, now {after[label]}"
        for label in before
        if label in after and before[label] != after[label]
    ]


def _meaning(info: StateInfo) -> dict[str, str]:
    schema = info.arrow_schema()
    metadata = {} if schema is None else schema.metadata or {}
    return msgspec.json.decode(metadata.get(MEANING, b"{}"), type=dict[str, str])


def is_pickled(info: StateInfo) -> bool:
    """Return True if the values of a state are pickled, because no type with a column form was declared."""
    schema = info.arrow_schema()
    return schema is not None and any(_encoding(field) == PICKLE for field in schema)


def is_declared_later(old: StateInfo, new: StateInfo) -> bool:
    """Return True if the values of a state were pickled and now have a declared type: each value is
    checked.
    """
    known = old.schema is not None and new.schema is not None
    return known and new.kind in _DECLARED_LATER and is_pickled(old) and not is_pickled(new)


def _new_version(old: StateInfo, new: StateInfo) -> str:
    return f"migrate= turns version {old.version} into {new.version}"


def _compare_field(
    was: pa.Field | None,
    now: pa.Field | None,
    is_key: bool,
    problems: list[str],
    changes: list[str],
) -> None:
    if was is None or now is None:
        if is_key:
            return  # reported once, for all keys
        if now is None:
            assert was is not None
            changes.append(f"`{was.name}` ({was.type}) is gone")
        elif aggregate_of(now):
            changes.append(f"`{now.name}` ({aggregate_of(now)}) is new and starts empty")
        elif now.nullable:
            changes.append(f"`{now.name}` ({now.type}) is new")
        else:
            problems.append(f"`{now.name}` ({now.type}) is new and has no default")
        return
    if _encoding(was) != _encoding(now):
        problems.append(f"`{was.name}` was {_shown(was)}, now {_shown(now)}")
    elif is_other_aggregate(was, now):
        problems.append(f"`{was.name}` was {aggregate_of(was)}, now {aggregate_of(now)}")
    elif was.type != now.type:
        if is_key and keeps_hash(was.type, now.type):
            changes.append(f"the key `{was.name}` widens from {was.type} to {now.type}")
        elif is_key:
            problems.append(f"the key `{was.name}` was {was.type}, now {now.type}")
        else:
            _compare_type(was.name, was.type, now.type, problems, changes)


def aggregate_of(field: pa.Field) -> str:
    """Return the aggregate whose state a column holds; empty if there is none."""
    return ((field.metadata or {}).get(AGGREGATE) or b"").decode()


def is_other_aggregate(was: pa.Field, now: pa.Field) -> bool:
    """Return True if both aggregates are known and of different kinds. The input column may have been
    renamed.
    """
    before, after = aggregate_of(was), aggregate_of(now)
    return bool(before and after) and before.partition("(")[0] != after.partition("(")[0]


def keeps_hash(was: pa.DataType, now: pa.DataType) -> bool:
    """Return True if every key of type `was` has an equal in `now` with the same hash."""
    old, new = str(was), str(now)
    if old in _INTEGERS and new in _INTEGERS:
        return is_widening(was, now)
    if pa.types.is_decimal(was) and pa.types.is_decimal(now):
        return bool(was.scale == now.scale and now.precision >= was.precision)
    return any(old in names and new in names for names in _SAME_BYTES)


def _encoding(field: pa.Field) -> bytes | None:
    found: bytes | None = (field.metadata or {}).get(ENCODING)
    return found


def _shown(field: pa.Field) -> str:
    encoding = _encoding(field)
    return str(field.type) if encoding is None else f"of no declared type ({encoding.decode()})"


def _compare_type(
    path: str, was: pa.DataType, now: pa.DataType, problems: list[str], changes: list[str]
) -> None:
    if was == now:
        return
    if pa.types.is_struct(was) and pa.types.is_struct(now):
        names = [field.name for field in was]
        for name in [*names, *(field.name for field in now if field.name not in names)]:
            before = was.field(name) if was.get_field_index(name) >= 0 else None
            after = now.field(name) if now.get_field_index(name) >= 0 else None
            renamed = [field and field.with_name(f"{path}.{name}") for field in (before, after)]
            _compare_field(renamed[0], renamed[1], False, problems, changes)
        return
    if pa.types.is_map(was) and pa.types.is_map(now):
        _compare_type(f"{path}.key", was.key_type, now.key_type, problems, changes)
        _compare_type(f"{path}.value", was.item_type, now.item_type, problems, changes)
        return
    if pa.types.is_list(was) and pa.types.is_list(now):
        _compare_type(f"{path}.item", was.value_type, now.value_type, problems, changes)
        return
    if is_widening(was, now):
        changes.append(f"`{path}` widens from {was} to {now}")
    else:
        problems.append(f"`{path}` was {was}, now {now}")


def is_widening(was: pa.DataType, now: pa.DataType) -> bool:
    """Return True if every value of the scalar type `was` is also a value of `now` (int64 as double is
    rounded).
    """
    old, new = str(was), str(now)
    if old in _INTEGERS:
        if new in ("float", "double"):
            return new == "double" or _INTEGERS[old] <= 16
        if new in _INTEGERS:
            wider = _INTEGERS[new] > _INTEGERS[old]
            return wider and (old.startswith("u") or not new.startswith("u"))
    if old == "float" and new == "double":
        return True
    if pa.types.is_decimal(was) and pa.types.is_decimal(now):
        return bool(
            now.scale >= was.scale and now.precision - now.scale >= was.precision - was.scale
        )
    if pa.types.is_timestamp(was) and pa.types.is_timestamp(now) and was.tz == now.tz:
        return _UNITS.index(was.unit) <= _UNITS.index(now.unit)
    return any(old in names and new in names for names in _SAME_BYTES)


def adapt(
    table: pa.Table, schema: pa.Schema, defaults: Mapping[str, Any] | None = None
) -> pa.Table:
    """Return the table with exactly the columns of `schema`: new ones are null or have their default,
    others are cast.

    Raises:
        StateError: a column cannot be cast, or a column is missing that allows no nulls and has no default.
    """
    columns = []
    for field in schema:
        default = (defaults or {}).get(field.name)
        if field.name in table.column_names:
            column = table.column(field.name).combine_chunks()
            array = _adapted(column, field.type, field.name)
            if default is not None and not field.nullable:
                array = array.fill_null(default)
        elif default is not None:
            array = pa.array(np.zeros(table.num_rows, np.int64))
            array = pa.array([default], field.type).take(array)
        else:
            array = pa.nulls(table.num_rows, field.type)
        if array.null_count and not field.nullable:
            raise StateError(
                f"column `{field.name}` ({field.type}) must not be null, and the restored state has "
                f"no value for it rows=`{array.null_count}`",
                fix="make it optional, or give it a default",
            )
        columns.append(array)
    return pa.Table.from_arrays(columns, schema=schema)


def _adapted(array: pa.Array, type_: pa.DataType, path: str) -> pa.Array:
    was = array.type
    if was == type_:
        return array
    if pa.types.is_struct(was) and pa.types.is_struct(type_):
        children = []
        for field in type_:
            index = was.get_field_index(field.name)
            if index < 0:
                children.append(pa.nulls(len(array), field.type))
            else:
                children.append(_adapted(array.field(index), field.type, f"{path}.{field.name}"))
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)
    if pa.types.is_list(was) and pa.types.is_list(type_):
        values = _adapted(array.values, type_.value_type, f"{path}.item")
        return pa.Array.from_buffers(
            type_, len(array), array.buffers()[:2], array.null_count, array.offset, [values]
        )
    if is_widening(was, type_):
        return array.cast(type_, safe=not pa.types.is_integer(was))
    try:
        return array.cast(type_)
    except pa.ArrowException as error:
        raise StateError(
            f"column `{path}` of the restored state cannot become what it is now declared as "
            f"old=`{was}` new=`{type_}`: {error}"
        ) from error
