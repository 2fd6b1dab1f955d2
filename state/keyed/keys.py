"""Keys of state: when two of them are the same, as tokens and as bytes, and how they lie in columns.

Python says `1 == True == Decimal("1.0")`; as keys of state these are three. Two datetimes are the same
key if they are the same instant (aware) or the same wall time (naive); decimals are the same key if they
are the same number. Floats are refused, as by `state.hashing`.

A *token* stands for a key in dictionaries. Its bytes are part of the format of stored state and never
change. Each value is one tag byte and a payload that says where it ends, so that encoded keys can be put
behind each other; integers sort by value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeAlias, final, get_args, get_origin, overload
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import StateError
from ..codecs import Codec, codec_of
from ..hashing import check_key_type, not_a_key

Token: TypeAlias = Any
"""A stand-in for a key: tokens are equal only for equal keys. An int, str or bytes is its own token;
other tokens are tuples that start with a tag.
"""

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SIGN = 1 << 63
_LENGTH = struct.Struct(">I")
_WORD = struct.Struct(">Q")
_PLAIN_KEYS = frozenset({int, str, bytes})
"""The types of keys that are their own tokens."""


def token(key: Any) -> Token:
    """Return the token of a key, for use in dictionaries.

    Raises:
        StateError: the value is of a type that cannot be a key.
    """
    kind = type(key)
    if kind is str or kind is int or kind is bytes:
        return key
    return _special(key)


def tokens_of(keys: Sequence[Any]) -> Sequence[Token]:
    """Return the token of each key; the keys themselves if they are their own tokens."""
    return keys if {*map(type, keys)} <= _PLAIN_KEYS else list(map(token, keys))


def _special(key: Any) -> Token:
    if key is None or isinstance(key, bool | np.bool_):
        return ("?", None if key is None else bool(key))
    if isinstance(key, tuple):
        return ("(", *map(token, key))
    if isinstance(key, datetime):
        if key.tzinfo is None:
            return ("y", (key - _EPOCH) // _MICROSECOND)
        return ("z", (key - _EPOCH_UTC) // _MICROSECOND)
    if isinstance(key, date):
        return ("d", key.toordinal())
    if isinstance(key, Decimal):
        if not key.is_finite():
            raise StateError(f"this decimal cannot be a key value=`{key}`")
        return ("D", _plain_number(key))
    if isinstance(key, UUID):
        return ("u", key.bytes)
    # A value of a subclass, such as a str Enum, is the same key as its plain value.
    if isinstance(key, int | np.integer):
        return int(key)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    raise not_a_key(type(key).__name__)


def _plain_number(value: Decimal) -> str:
    """Return the exact number without trailing zeros; `normalize` would round to the context."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return "0"
    stripped = text.rstrip("0")
    return f"{'-' if sign else ''}{stripped}E{exponent + len(text) - len(stripped)}"


def key_of(token: Token) -> Any:
    """Return the key of a token in its canonical form: datetimes in UTC, decimals without trailing
    zeros.
    """
    if type(token) is not tuple:
        return token
    return _KEYS[token[0]](token)


_KEYS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "?": lambda t: t[1],
    "(": lambda t: tuple(map(key_of, t[1:])),
    "y": lambda t: _EPOCH + timedelta(microseconds=t[1]),
    "z": lambda t: _EPOCH_UTC + timedelta(microseconds=t[1]),
    "d": lambda t: date.fromordinal(t[1]),
    "D": lambda t: Decimal(t[1]),
    "u": lambda t: UUID(bytes=t[1]),
}


def encode_token(token: Token) -> bytes:
    """Return the token as bytes."""
    kind = type(token)
    if kind is int:
        if -_SIGN <= token < _SIGN:
            return b"i" + _WORD.pack(token + _SIGN)
        return b"I" + _sized(token.to_bytes(token.bit_length() // 8 + 1, "big", signed=True))
    if kind is str:
        return b"s" + _sized(token.encode())
    if kind is bytes:
        return b"b" + _sized(token)
    tag = token[0]
    if tag == "(":
        return b"(" + _LENGTH.pack(len(token) - 1) + b"".join(map(encode_token, token[1:]))
    if tag == "?":
        return {None: b"n", False: b"f", True: b"t"}[token[1]]
    if tag == "u":
        return b"u" + bytes(token[1])
    if tag == "D":
        return b"D" + _sized(token[1].encode())
    encoded: bytes = tag.encode() + _WORD.pack(token[1] + _SIGN)
    return encoded


def _sized(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def decode_token(data: bytes, at: int = 0) -> tuple[Token, int]:
    """Return the token whose bytes begin at `at`, and the end of these bytes.

    Raises:
        StateError: the bytes are not those of a token.
    """
    tag, at = data[at : at + 1], at + 1
    if tag in (b"i", b"y", b"z", b"d"):
        number = _WORD.unpack_from(data, at)[0] - _SIGN
        return (number if tag == b"i" else (tag.decode(), number)), at + 8
    if tag in (b"s", b"b", b"I", b"D"):
        size = _LENGTH.unpack_from(data, at)[0]
        at += 4
        return _SIZED[tag](data[at : at + size]), at + size
    if tag == b"(":
        count = _LENGTH.unpack_from(data, at)[0]
        at += 4
        elements = []
        for _ in range(count):
            element, at = decode_token(data, at)
            elements.append(element)
        return ("(", *elements), at
    if tag == b"u":
        return ("u", data[at : at + 16]), at + 16
    if tag in _SINGLE:
        return ("?", _SINGLE[tag]), at
    raise StateError(f"not the bytes of a key tag=`{tag!r}`")


_SINGLE = {b"n": None, b"f": False, b"t": True}
_SIZED: dict[bytes, Callable[[bytes], Token]] = {
    b"s": lambda data: data.decode(),
    b"b": bytes,
    b"I": lambda data: int.from_bytes(data, "big", signed=True),
    b"D": lambda data: ("D", data.decode()),
}


def encode_key(key: Any) -> bytes:
    """Return the key as bytes. Equal bytes mean the same key."""
    return encode_token(token(key))


def decode_key(data: bytes) -> Any:
    """Return the key that `encode_key` was given, in canonical form."""
    return key_of(decode_token(data)[0])


ClientKeys: TypeAlias = bytes | tuple[bytes | str, ...]
"""Keys as clients send them: whole numbers of 64 bits as little-endian words, one behind the other; or
texts as they are, and other keys by `encode_key`.
"""


def key_count(keys: ClientKeys) -> int:
    """Return the number of these keys.

    Raises:
        StateError: they are not whole words, or neither texts nor bytes.
    """
    if not isinstance(keys, bytes):
        if not set(map(type, keys)) <= {bytes, str}:
            raise StateError("keys are neither texts nor bytes")
        return len(keys)
    count, rest = divmod(len(keys), _WORD.size)
    if rest:
        raise StateError(f"keys are not whole words bytes=`{len(keys)}`")
    return count


def joined_keys(parts: Sequence[ClientKeys]) -> ClientKeys:
    """Return the keys of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, bytes) for part in parts):
        return b"".join(parts)  # type: ignore[arg-type]
    return tuple(key for part in parts for key in _one_by_one(part))


@final
class EncodedKeys(Sequence[Any]):
    """Keys that clients have sent, each of which becomes a Python value when it is asked for."""

    def __init__(self, keys: ClientKeys) -> None:
        self.words: npt.NDArray[np.int64] | None = None
        """The keys, if all of them were sent as whole numbers."""
        self._keys: Sequence[bytes | str] = ()
        if isinstance(keys, bytes):
            self.words = np.frombuffer(keys, "<i8")
        else:
            self._keys = keys

    def __len__(self) -> int:
        return len(self._keys if self.words is None else self.words)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if self.words is not None:
            return int(self.words[at])
        key = self._keys[at]
        return key if isinstance(key, str) else decode_key(key)

    def column(self, column: KeyColumn) -> pa.Array | None:
        """Return the keys as a column of this type; None: they have to be looked at one by one.

        Raises:
            pyarrow.ArrowException: a key does not fit the type.
        """
        if self.words is not None and column.kind is int:
            return _int_array(self.words, column.type)
        if column.kind is str and set(map(type, self._keys)) == {str}:
            return pa.array(self._keys, column.type)
        return None


def _one_by_one(keys: ClientKeys) -> Iterable[bytes | str]:
    if not isinstance(keys, bytes):
        return keys
    return map(encode_key, np.frombuffer(keys, "<i8").tolist())


def _int_array(words: npt.NDArray[np.int64], type_: pa.DataType) -> pa.Array:
    """Return whole numbers as a column. The cast of Arrow takes long, unless it has just been used."""
    dtype = type_.to_pandas_dtype()
    narrow = words.astype(dtype, copy=False)
    if dtype is not np.int64 and (narrow != words).any():
        return pa.array(words).cast(type_)  # which says what is wrong
    return pa.array(narrow)


# --- keys as columns -------------------------------------------------------------------------------


_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us", tz="UTC"),
    UUID: pa.binary(16),
}
_PYTHON = {
    "int": int,
    "bool": bool,
    "string": str,
    "large_string": str,
    "string_view": str,
    "binary": bytes,
    "large_binary": bytes,
    "binary_view": bytes,
    "fixed_size_binary": bytes,
    "date32[day]": date,
    "date64[ms]": date,
}
RESERVED = {"key_group", "namespace", "map_key", "position", "value", "last_used", "deleted"}
"""The columns of tables of keyed state. A key column with one of these names gets an underscore
appended.
"""
_INT_LIMIT = 1 << 63
TEXT_MAX = 200
"""This many characters of an opaque key are kept beside it as readable text."""


class KeyColumn(msgspec.Struct, frozen=True):
    """One typed column of keys; `kind` is the Python type of its values."""

    name: str
    type: pa.DataType
    kind: type[Any]


class KeyShape(msgspec.Struct, frozen=True):
    """The key columns of an operator's tables.

    `columns` are typed columns: one for a single key, several for a tuple (`is_tuple`). None: the type of
    the keys is not known, and they are kept as bytes (column `key`) beside their text (`key_text`).
    """

    columns: tuple[KeyColumn, ...] | None
    is_tuple: bool = False

    @property
    def fields(self) -> list[pa.Field]:
        """The columns of the keys, with the readable text of opaque ones."""
        if self.columns is None:
            return [pa.field("key", pa.binary(), False), pa.field("key_text", pa.string())]
        return [pa.field(column.name, column.type) for column in self.columns]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that identify a key."""
        return ("key",) if self.columns is None else tuple(c.name for c in self.columns)

    def check(self, keys: Sequence[Any]) -> None:
        """Raise StateError if a key is not of the declared type. It is cheap, as it compares the set of
        their types.

        A key that its column would change, or not take, is refused here and not only by a checkpoint:
        after a restore a datetime without zone would be another key.
        """
        if self.columns is None:
            return
        if not self.is_tuple:
            self._check_column(self.columns[0], keys)
            return
        width = len(self.columns)
        for key in keys:
            if not isinstance(key, tuple) or len(key) != width:
                raise self._mismatch(key, f"tuple of {width}")
        for index, column in enumerate(self.columns):
            self._check_column(column, [key[index] for key in keys])

    def _check_column(self, column: KeyColumn, values: Sequence[Any]) -> None:
        if not set(map(type, values)) <= {column.kind, type(None)}:
            self._check_each(column, values)
        present = [value for value in values if value is not None]
        if column.kind is int and present:
            for value in (min(present), max(present)):
                if not -_INT_LIMIT <= value < _INT_LIMIT:
                    raise self._misfit(value, "has more than 64 bits", "make it a str")
        if column.kind is datetime:
            for value in present:
                if value.tzinfo is None:
                    raise self._misfit(value, "lacks a zone", "give it a time zone, such as UTC")

    def _check_each(self, column: KeyColumn, values: Sequence[Any]) -> None:
        for value in values:
            fits = value is None or isinstance(value, column.kind)
            confused = isinstance(value, bool) != (column.kind is bool) or (
                isinstance(value, datetime) and column.kind is date
            )
            if value is not None and (not fits or confused):
                raise self._mismatch(value, column.kind.__name__)

    @staticmethod
    def _mismatch(key: Any, wanted: str) -> StateError:
        return StateError(
            f"a key is not of the declared type key=`{key!r}` type=`{type(key).__name__}` "
            f"declared=`{wanted}`",
            fix="let the key function return what the first type parameter of KeyedProcess says",
        )

    @staticmethod
    def _misfit(key: Any, what: str, fix: str) -> StateError:
        return StateError(
            f"a key does not fit its type: it {what} key=`{key!r}`",
            fix=f"{fix}; or leave the type of the key open in KeyedProcess",
        )

    def to_arrays(self, keys: Sequence[Any]) -> list[pa.Array]:
        """Return the keys as columns, in the order of `fields`."""
        if self.columns is None:
            texts = [repr(key)[:TEXT_MAX] for key in keys]
            return [pa.array(map(encode_key, keys), pa.binary()), pa.array(texts, pa.string())]
        if not self.is_tuple:
            (column,) = self.columns
            if isinstance(keys, EncodedKeys):
                found = keys.column(column)
                if found is not None:
                    return [found]
            return [_to_array(keys, column)]
        lists = zip(*keys, strict=True) if keys else [()] * len(self.columns)
        return [_to_array(list(v), c) for v, c in zip(lists, self.columns, strict=True)]

    def from_table(self, table: pa.Table) -> list[Any]:
        """Return the keys of the rows of a table."""
        if self.columns is None:
            return [decode_key(data) for data in table.column("key").to_pylist()]
        lists = [_from_column(table.column(column.name), column) for column in self.columns]
        return list(zip(*lists, strict=True)) if self.is_tuple else lists[0]


OPAQUE_KEYS = KeyShape(None)


def keys_of_columns(fields: Sequence[pa.Field]) -> KeyShape:
    """Return the shape of keys that consist of columns of a stream; without columns `()` is the one key.

    Raises:
        StateError: a column is of a type that cannot be a key.
    """
    columns = []
    for field in fields:
        check_key_type(field.type)
        type_ = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        name = f"{field.name}_" if field.name in RESERVED else field.name
        columns.append(KeyColumn(name, type_, _python_of(type_)))
    return KeyShape(tuple(columns), len(columns) != 1)


def keys_of_type(hint: Any) -> KeyShape:
    """Return the shape of keys of a Python type; opaque where the type does not determine columns.

    Raises:
        StateError: a type that cannot be a key, such as float.
    """
    if get_origin(hint) is tuple and (args := get_args(hint)) and args[-1] is not Ellipsis:
        if all(arg in _TYPES for arg in args):
            fields = [(f"key_{index}", arg) for index, arg in enumerate(args, 1)]
            return KeyShape(tuple(KeyColumn(n, _TYPES[a], a) for n, a in fields), True)
        for arg in args:
            keys_of_type(arg)
        return OPAQUE_KEYS
    if hint in _TYPES:
        return KeyShape((KeyColumn("key", _TYPES[hint], hint),))
    if isinstance(hint, type) and issubclass(hint, float | complex | list | dict | set):
        raise not_a_key(hint.__name__)
    return OPAQUE_KEYS


def _python_of(type_: pa.DataType) -> type[Any]:
    if pa.types.is_integer(type_):
        return int
    if pa.types.is_timestamp(type_):
        return datetime
    if pa.types.is_decimal(type_):
        return Decimal
    if pa.types.is_fixed_size_binary(type_):
        return bytes
    return _PYTHON.get(str(type_), object)


def _to_array(values: Sequence[Any], column: KeyColumn) -> pa.Array:
    if column.kind is UUID:
        values = [None if value is None else value.bytes for value in values]
    return pa.array(values, column.type)


def _from_column(values: pa.ChunkedArray, column: KeyColumn) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        # Records have aware datetimes whatever the type of the column. Nanoseconds never get this far.
        values = values.cast(pa.timestamp("us", tz="UTC"))
    plain: list[Any] = values.to_pylist()
    if column.kind is UUID:
        return [None if value is None else UUID(bytes=value) for value in plain]
    if column.kind is datetime:
        return [None if value is None else value.astimezone(UTC) for value in plain]
    return plain


class KeyCodec(Codec):
    """Keys of entries that have no column type of their own, as bytes (`encode_key`)."""

    type_ = pa.binary()
    encoding = b"headgate-key"

    def hold(self, value: Any) -> Any:
        return key_of(token(value))

    def release(self, held: Any) -> Any:
        return held

    def encode(self, value: Any) -> bytes:
        return encode_key(value)

    def decode(self, data: bytes) -> Any:
        return decode_key(data)

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array(map(encode_key, values), self.type_)

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        return list(map(decode_key, array.to_pylist()))


def entry_codec(hint: Any) -> Codec:
    """Return the codec for the keys of a map's entries.

    Raises:
        StateError: a type that cannot be a key, such as float.
    """
    shape = keys_of_type(hint)
    return KeyCodec() if shape.columns is None or shape.is_tuple else codec_of(hint)
