"""State that clients outside the job read by key: its declaration, its keys as text, its values as JSON."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa

from ..errors import HeadgateError, PlanError, StateError, UsageError
from ..state.keyed.base import ABSENT
from ..state.keyed.keys import KeyColumn, KeyShape
from ..state.queryable import OLD_VALUES_MAX, OLD_VALUES_MAX_OPTION, Queryable
from .origin import Origin
from .sizes import parse_size

QUERYABLE_PATTERN: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""The names of queryable states, which are also part of a path."""
_EXAMPLES: Final[dict[type[Any], str]] = {
    int: "42",
    bool: "true",
    bytes: "aGk=",
    date: "2026-01-31",
    datetime: "2026-01-31T12:00:00Z",
    Decimal: "12.50",
    UUID: "12345678-1234-5678-1234-567812345678",
    str: "alice",
}


@dataclass(frozen=True)
class QueryableState:
    """A state that clients read by key. Picklable.

    Attributes:
        name: the name that clients use, unique in the job.
        state: the name of the state in its step.
        kind: `value`, `list`, `map`, `reducing`, `aggregating`, `reduce`, `running` or `window`.
        keys: the types of the keys.
        columns: the names of the key columns as the stream has them; empty: the key is one value.
        committed: it can also be read as of the newest complete checkpoint.
        values: the value as Arrow columns: one for each member of an object, or else one column `value`.
            None: its type is not known.
    """

    name: str
    state: str
    kind: str
    keys: KeyShape
    columns: tuple[str, ...] = ()
    committed: bool = False
    values: pa.Schema | None = None

    @property
    def is_one_value(self) -> bool:
        """True if the value is not an object with a member for each of `values`."""
        return self.kind not in ("running", "reduce") or self.values is None

    @property
    def key_types(self) -> dict[str, str]:
        """The type of each key column by its name; none if no type is declared."""
        columns = self.keys.columns or ()
        names = self.columns or [column.name for column in columns]
        return {name: column.kind.__name__ for name, column in zip(names, columns, strict=True)}


def queryable_state(
    given: object,
    state: str,
    kind: str,
    keys: KeyShape,
    columns: Sequence[str] | None,
    origin: Origin | str,
    values: pa.Schema | None = None,
) -> tuple[QueryableState, ...]:
    """Return the declaration of `queryable=given`; nothing for an empty name.

    The other arguments are those of `QueryableState`.

    Raises:
        PlanError: this cannot be a name.
    """
    if given == "" or given is None:
        return ()
    name: object = given.name if isinstance(given, Queryable) else given
    if not isinstance(name, str) or not re.fullmatch(QUERYABLE_PATTERN, name):
        raise PlanError(
            f"this cannot be the name of a queryable state queryable=`{name}`",
            where=str(origin),
            fix="use up to 128 letters, digits, `-`, `_` and `.`, with a letter or digit first",
        )
    committed = isinstance(given, Queryable) and given.committed is True
    return (QueryableState(name, state, kind, keys, tuple(columns or ()), committed, values),)


def old_values_max(options: Mapping[str, str]) -> int:
    """Return how many bytes of old values a state keeps that is read as of checkpoints."""
    text = options.get(OLD_VALUES_MAX_OPTION)
    return OLD_VALUES_MAX if text is None else parse_size(text, OLD_VALUES_MAX_OPTION)


def check_unique(
    added: Iterable[QueryableState], taken: Mapping[str, str], step: str, origin: Origin
) -> None:
    """Raise PlanError if a name of a step that is added is in use; `taken` has the step of each name."""
    seen = dict(taken)
    for each in added:
        if each.name in seen:
            raise PlanError(
                f"two states are queryable as `{each.name}` steps=`{seen[each.name]}`, `{step}`",
                where=str(origin),
                fix="give each state of the job its own name in queryable=",
            )
        seen[each.name] = step


# --- keys as text ----------------------------------------------------------------------------------


def parse_key(state: QueryableState, text: str) -> Any:
    """Return the key that a client writes as `text`.

    A key of one declared type is written as it is. One of several columns is a JSON object with a member
    for each column, or a JSON array. A key of no declared type is any JSON value that can be a key.

    Raises:
        UsageError: the text is not a key of this state.
    """
    columns = state.keys.columns
    if columns is None:
        return _untyped(state, _from_json(state, text))
    if not state.keys.is_tuple:
        (name,) = state.key_types
        key = _from_text(state, name, columns[0], text)
    else:
        key = _row(state, columns, _from_json(state, text))
    try:
        state.keys.check([key])
        state.keys.to_arrays([key])
    except (HeadgateError, pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        reason = error.message if isinstance(error, HeadgateError) else str(error)
        raise _wrong(state, f"{reason} key=`{text:.200}`") from None
    return key


def _from_json(state: QueryableState, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise _wrong(state, f"the key is not JSON key=`{text:.200}`") from None


def _row(state: QueryableState, columns: Sequence[KeyColumn], given: Any) -> tuple[Any, ...]:
    names = list(state.key_types)
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing:
            raise _wrong(state, f"the key lacks the column `{missing[0]}`")
        unknown = [name for name in given if name not in names]
        if unknown:
            raise _wrong(state, f"the key has no column `{unknown[0]:.200}`")
        values = [given[name] for name in names]
    elif isinstance(given, list):
        if len(given) != len(names):
            raise _wrong(
                state, f"the key has {len(names)} columns, and {len(given)} values were given"
            )
        values = given
    else:
        raise _wrong(state, "the key has several columns")
    return parse_columns(state, values)


def parse_columns(state: QueryableState, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the first columns of a key from their JSON values.

    Raises:
        UsageError: a value is not of the type of its column.
    """
    return tuple(
        _from_value(state, name, column, value)
        for name, column, value in zip(
            state.key_types, state.keys.columns or (), values, strict=False
        )
    )


def _from_value(state: QueryableState, name: str, column: KeyColumn, value: Any) -> Any:
    """Return the value of a column from its JSON value."""
    kind = column.kind
    if value is None or (type(value) is kind and kind in (str, int, bool)):
        return value
    if isinstance(value, str) and kind not in (int, bool):
        return _from_text(state, name, column, value)
    if kind is Decimal and type(value) is int:
        return Decimal(value)
    raise _mismatch(state, name, column, value)


def _from_text(state: QueryableState, name: str, column: KeyColumn, text: str) -> Any:
    """Return the value of a column from its text."""
    try:
        return _READERS[column.kind](text)
    except (ValueError, InvalidOperation, binascii.Error, KeyError, OverflowError):
        raise _mismatch(state, name, column, text) from None


def _int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
        raise ValueError(text)
    return int(text)


def _instant(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(text)
    return found.astimezone(UTC)


_READERS: Final[dict[type[Any], Any]] = {
    str: str,
    int: _int,
    bool: {"true": True, "false": False}.__getitem__,
    bytes: lambda text: base64.b64decode(text, validate=True),
    date: date.fromisoformat,
    datetime: _instant,
    Decimal: Decimal,
    UUID: UUID,
}


def _untyped(state: QueryableState, value: Any) -> Any:
    """Return a key of no declared type from a JSON value."""
    if isinstance(value, list):
        return tuple(_untyped(state, each) for each in value)
    if isinstance(value, float | dict):
        kind = "number with a fraction" if isinstance(value, float) else "map"
        raise _wrong(state, f"a {kind} cannot be a key")
    return value


def write_key(name: str, types: Mapping[str, str] | None, key: Any) -> str:
    """Return the text of a key for `parse_key`.

    Args:
        name: the name of the state.
        types: its `key_types`; None: no type is declared.
        key: a value, or a tuple or dict of several columns.

    Raises:
        UsageError: the key is not of these types.
    """
    key = key.item() if isinstance(key, np.generic) else key
    if types is None:
        if not isinstance(key, str | int | tuple | None):
            raise _cannot_write(name, key, "text, whole number, bool, None or tuple of these")
        return _json_of(name, key)
    if len(types) == 1:
        (kind,) = types.values()
        if type(key).__name__ != kind or (isinstance(key, datetime) and key.tzinfo is None):
            raise _cannot_write(name, key, kind)
        text = _json_of(name, key)
        return key if isinstance(key, str) else text.strip('"')
    if isinstance(key, Mapping | tuple | list):
        return _json_of(name, key)
    raise _cannot_write(name, key, f"tuple or dict of {', '.join(types)}")


def plain_key(types: Mapping[str, str] | None, key: Any) -> Any:
    """Return a key as the job has it, if that is certain without the job; else `ABSENT`.

    The types are those of `write_key`. Whether the key fits its column, only the job knows.
    """
    if types is None:
        return key if isinstance(key, str | int | tuple | None) else ABSENT
    if len(types) == 1:
        (kind,) = types.values()
        return key if _is_plain(key, kind) else ABSENT
    if isinstance(key, Mapping):
        key = tuple(key[name] for name in types if name in key) if len(key) == len(types) else ()
    if not isinstance(key, tuple) or len(key) != len(types):
        return ABSENT
    kinds = zip(key, types.values(), strict=True)
    plain = (each is None or _is_plain(each, kind) for each, kind in kinds)
    return key if all(plain) else ABSENT


def _is_plain(value: Any, kind: str) -> bool:
    return type(value).__name__ == kind and not (
        isinstance(value, datetime) and value.tzinfo is None
    )


def _json_of(name: str, key: Any) -> str:
    try:
        return _encode(key).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _cannot_write(name, key, "value that can be a key") from None


def _cannot_write(name: str, key: Any, wanted: str) -> UsageError:
    return UsageError(
        f"this is not a key of the state state=`{name}` key=`{repr(key)[:200]}` "
        f"type=`{type(key).__name__}`",
        fix=f"give a {wanted}",
    )


def _mismatch(state: QueryableState, name: str, column: KeyColumn, value: Any) -> UsageError:
    kind = column.kind.__name__
    return _wrong(state, f"column `{name}` of the key is of type {kind} value=`{value!s:.200}`")


def _wrong(state: QueryableState, message: str) -> UsageError:
    return UsageError(f"{message} state=`{state.name}`", fix=f"write the key as {_written(state)}")


def _written(state: QueryableState) -> str:
    """Return how a key of this state is written, with an example."""
    columns = state.keys.columns
    if columns is None:
        return 'JSON, since its type is not declared: "alice" with the quotes, or 42'
    if not state.keys.is_tuple:
        return f"{columns[0].kind.__name__}, such as {_EXAMPLES.get(columns[0].kind, '?')}"
    examples = [_EXAMPLES.get(column.kind, "?") for column in columns]
    shown = ", ".join(
        f'"{name}": {text}' if column.kind in (int, bool) else f'"{name}": "{text}"'
        for name, column, text in zip(state.key_types, columns, examples, strict=True)
    )
    return f"a JSON object: {{{shown}}}"


# --- values as JSON --------------------------------------------------------------------------------


class TooLarge(Exception):
    """The answer has more bytes than one may have."""


@final
class QueriedEntries(msgspec.Struct, frozen=True):
    """The entries of a list or map state, in the order of the state."""

    entries: Iterator[tuple[Any, Any]]
    is_map: bool


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as one that it knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, pa.Scalar):
        return value.as_py()
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


_encode: Final = msgspec.json.Encoder(enc_hook=_plain).encode


def to_json(value: Any, bytes_max: int) -> bytes:
    """Return the value of a state as JSON; b"" for `ABSENT`.

    A list is an array. A map is an array of objects with `key` and `value`, since its keys need not be
    texts.

    Raises:
        TooLarge: the JSON has more than `bytes_max` bytes.
        StateError: a value has no form in JSON.
    """
    if value is ABSENT:
        return b""
    try:
        if not isinstance(value, QueriedEntries):
            return _bounded(_encode(value), bytes_max)
        parts: list[bytes] = []
        size = 2
        for key, each in value.entries:
            parts.append(_encode({"key": key, "value": each} if value.is_map else each))
            size += len(parts[-1]) + 1
            if size > bytes_max:
                raise TooLarge
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StateError(
            f"the value cannot be written as JSON: {error}",
            fix="keep dataclasses, msgspec Structs, or plain data in queryable states",
        ) from None
    return b"[" + b",".join(parts) + b"]" if parts else b""


def to_json_array(values: Iterable[Any], bytes_max: int) -> tuple[bytes, tuple[int, ...]]:
    """Return the values of a state as one JSON array, and the places of keys that have none.

    `null` stands in their places. A list of values is written at once. Of others each is written before
    the next one is taken, as `to_json` does.

    Raises:
        TooLarge: the JSON has more than `bytes_max` bytes.
        StateError: a value has no form in JSON.
    """
    found: list[Any] = []
    absent: list[int] = []
    left = bytes_max
    at_once = isinstance(values, list)
    for value in values:
        text = b"" if at_once else to_json(value, left)
        left -= len(text)
        if value is ABSENT or not (at_once or text):
            absent.append(len(found))
            found.append(None)
        else:
            found.append(value if at_once else msgspec.Raw(text))
    return to_json(found, bytes_max), tuple(absent)


def _bounded(data: bytes, bytes_max: int) -> bytes:
    if len(data) > bytes_max:
        raise TooLarge
    return data


def key_as_json(state: QueryableState, key: Any) -> Any:
    """Return a key as plain data, as answers show it."""
    types = None if state.keys.columns is None else state.key_types
    return key_as_plain(types, key)


def key_as_plain(types: Mapping[str, str] | None, key: Any) -> Any:
    """Return a key as `key_as_json` does; the types are those of `write_key`."""
    if types is not None and len(types) > 1 and not isinstance(key, Mapping):
        key = dict(zip(types, key, strict=True))
    return key if isinstance(key, str) else msgspec.json.decode(_encode(key))
