"""Codecs: how values of a Python type are kept in memory, as bytes, and in Arrow columns.

Immutable scalars are held as they are. Everything else is held encoded (msgpack of msgspec, or pickle),
so that changing a value in place changes neither the state nor a snapshot that is being written.

| type | column |
|---|---|
| int, float, bool, str, bytes | int64, double, bool, string, binary |
| datetime | timestamp(us, UTC); with `Annotated[datetime, msgspec.Meta(tz=False)]` without zone |
| date, time (without zone), timedelta | date32, time64(us), duration(us) |
| Decimal, UUID | string (exact; Arrow's decimals would need a scale) |
| Enum | that of its values |
| Struct, dataclass | struct |
| list, set, tuple[T, ...] | list |
| tuple[A, B] | struct of f0, f1 |
| dict[K, V] | map |
| T or None | as T, nullable |
| anything else, and no type | binary: pickled, which headgate cannot look into and cannot evolve |
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, get_origin
from uuid import UUID

import cloudpickle
import msgspec
import pyarrow as pa

from .evolution import PICKLE
from .forms import PLAIN, Form, enum_values, form_of, is_plain, is_record, unwrapped, without_none

INT_LIMIT = 1 << 63
_NIL = b"\xc0"
"""None as msgpack. No codec writes it whose values exclude None."""


class Codec(ABC):
    """Encodes and decodes values of one type. `type_` is the type of their column."""

    type_: pa.DataType
    nullable = False
    """True if None is a value."""
    encoding: bytes | None = None
    """The encoding of the bytes of the column, if only this codec can read them."""
    held_as_it_is = False
    """True if values are immutable, so that `release` returns its argument."""
    plain: type[Any] | None = None
    """The type whose instances, but none of its subclasses', `hold` returns without a check."""
    plain_ints = False
    """True if `hold` returns every int of 64 bits as it is."""
    adapts = False
    """True if `from_array` takes columns of an older type, to which fields were added, or in which they
    were removed or widened.
    """

    @abstractmethod
    def hold(self, value: Any) -> Any:
        """Return the immutable form that is kept in memory. Raises TypeError if the value is not of the
        type.
        """

    @abstractmethod
    def release(self, held: Any) -> Any:
        """Return the value that `hold` was given: a fresh object, unless it is immutable."""

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """Return the value as bytes. They are msgpack, unless `encoding` says otherwise, so that they can
        be read without this codec. Raises TypeError if the value is not of the type.
        """

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value that `encode` was given."""

    @abstractmethod
    def to_array(self, values: Iterable[Any]) -> pa.Array:
        """Return values as a column."""

    @abstractmethod
    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        """Return the values of a column."""


_CHECKED = (int, datetime, time)
"""The plain types of which some values are refused."""


class ScalarCodec(Codec):
    """Immutable values of one plain type; held as they are."""

    held_as_it_is = True

    def __init__(self, kind: Any, *, aware: bool = True) -> None:
        self._kind = kind
        self.plain = None if kind in _CHECKED else kind
        self.plain_ints = kind is int
        self.type_ = PLAIN[kind] if aware else pa.timestamp("us")
        hint = kind
        if kind is datetime:
            self._aware = aware
            hint = Annotated[datetime, msgspec.Meta(tz=aware)]
        self._decoder = msgspec.msgpack.Decoder(hint)

    def hold(self, value: Any) -> Any:
        kind = type(value)
        if kind is self._kind:
            if kind is int:
                if not -INT_LIMIT <= value < INT_LIMIT:
                    raise TypeError(f"an int of a state has 64 bits value=`{value}`")
            elif kind is datetime:
                return self._hold_datetime(value)
            elif kind is time:
                return self._hold_time(value)
            return value
        return self._hold_other(value)

    def _hold_other(self, value: Any) -> Any:
        """Hold a value of another type that means the same: an int for a float, numpy's scalars,
        subclasses.
        """
        kind = self._kind
        if hasattr(value, "dtype") and hasattr(value, "item"):
            item = value.item()
            if type(item) is not type(value):
                return self.hold(item)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        narrow = kind is int and isinstance(value, bool)
        narrow = narrow or (kind is date and isinstance(value, datetime))
        if isinstance(value, kind) and not narrow:
            if kind is datetime:
                return self._hold_datetime(value)
            if kind is time:
                return self._hold_time(value)
            if kind is str:
                return str.__str__(
                    value
                )  # str() of a member of a str Enum would be the member's name
            return self.hold(kind(value)) if kind in (int, float, bytes) else value
        raise _wrong(value, kind.__name__)

    @staticmethod
    def _hold_time(value: time) -> time:
        if value.tzinfo is not None:
            raise TypeError(f"the time has a zone, which no column keeps value=`{value}`")
        return value

    def _hold_datetime(self, value: datetime) -> datetime:
        zone = value.tzinfo
        if (zone is not None) != self._aware:
            fix = (
                "give it a time zone, or declare the state as Annotated[datetime, Meta(tz=False)]"
                if self._aware
                else "the state was declared without time zone"
            )
            raise TypeError(f"the datetime {'lacks' if zone is None else 'has'} a zone; {fix}")
        return value if zone is None or zone is UTC else value.astimezone(UTC)

    def release(self, held: Any) -> Any:
        return held

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(self.hold(value))

    def decode(self, data: bytes) -> Any:
        return self._decoder.decode(data)

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array(values, self.type_, from_pandas=False)

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        plain: list[Any] = array.to_pylist()
        if self._kind is datetime and self._aware:
            return [value.astimezone(UTC) for value in plain]
        return plain


class TextCodec(Codec):
    """Immutable values kept as text: Decimal, UUID."""

    type_ = pa.string()
    held_as_it_is = True

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self._kind: Any = kind

    def hold(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            raise _wrong(value, self._kind.__name__)
        return value

    def release(self, held: Any) -> Any:
        return held

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(str(self.hold(value)))

    def decode(self, data: bytes) -> Any:
        return self._kind(msgspec.msgpack.decode(data, type=str))

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array(map(str, values), self.type_)

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        return list(map(self._kind, array.to_pylist()))


class EnumCodec(Codec):
    """Members of an Enum whose values are of one plain type; held as they are."""

    held_as_it_is = True

    def __init__(self, kind: type[Enum], inner: ScalarCodec) -> None:
        self._kind = kind
        self._inner = inner
        self.type_ = inner.type_

    def hold(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            raise _wrong(value, self._kind.__name__)
        return value

    def release(self, held: Any) -> Any:
        return held

    def encode(self, value: Any) -> bytes:
        return self._inner.encode(self.hold(value).value)

    def decode(self, data: bytes) -> Any:
        return self._kind(self._inner.decode(data))

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return self._inner.to_array([value.value for value in values])

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        return list(map(self._kind, self._inner.from_array(array)))


class OptionalCodec(Codec):
    """The values of another codec, or None."""

    nullable = True

    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.type_ = inner.type_
        self.adapts = inner.adapts
        self.held_as_it_is = inner.held_as_it_is

    def hold(self, value: Any) -> Any:
        return None if value is None else self._inner.hold(value)

    def release(self, held: Any) -> Any:
        return None if held is None else self._inner.release(held)

    def encode(self, value: Any) -> bytes:
        return _NIL if value is None else self._inner.encode(value)

    def decode(self, data: bytes) -> Any:
        return None if data == _NIL else self._inner.decode(data)

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        listed = list(values)
        present = [index for index, value in enumerate(listed) if value is not None]
        inner = self._inner.to_array([listed[index] for index in present])
        places: list[int | None] = [None] * len(listed)
        for place, index in enumerate(present):
            places[index] = place
        return inner.take(pa.array(places, pa.int64()))

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        present = iter(self._inner.from_array(array.drop_null()))
        return [next(present) if valid else None for valid in array.is_valid().to_pylist()]


class _EncodedCodec(Codec):
    """Values that are held as their encoded bytes."""

    def encode(self, value: Any) -> bytes:
        data: bytes = self.hold(value)
        return data

    def decode(self, data: bytes) -> Any:
        return self.release(data)


class RecordCodec(_EncodedCodec):
    """Values that msgspec can take apart: Structs, dataclasses, containers. Held as msgpack.

    Instances of Structs and dataclasses must be of exactly that class: fields that a subclass adds would
    be lost.
    """

    adapts = True

    def __init__(self, hint: Any, form: Form) -> None:
        self._form = form
        self._kind = hint if isinstance(hint, type) else get_origin(hint)
        self._exact = is_record(self._kind)
        self.type_ = form.type_
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(hint).decode

    def hold(self, value: Any) -> bytes:
        fits = type(value) is self._kind if self._exact else isinstance(value, self._kind)
        if not fits:
            raise _wrong(value, self._kind.__name__)
        return self._encode(value)

    def release(self, held: bytes) -> Any:
        return self._decode(held)

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array([self._form.to_plain(value) for value in values], self.type_)

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        return [self._form.from_plain(value) for value in array.to_pylist()]


class PickleCodec(_EncodedCodec):
    """Values of any type, pickled."""

    type_ = pa.binary()
    nullable = True
    encoding = PICKLE

    def hold(self, value: Any) -> bytes:
        return dumps(value)

    def release(self, held: bytes) -> Any:
        return pickle.loads(held)

    def to_array(self, values: Iterable[Any]) -> pa.Array:
        return pa.array(map(dumps, values), self.type_)

    def from_array(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        return list(map(pickle.loads, array.to_pylist()))


def dumps(value: Any) -> bytes:
    """Return the value pickled; the slower cloudpickle is used only where a class travels with the job's
    code.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        data: bytes = cloudpickle.dumps(value)
        return data


def _wrong(value: Any, wanted: str) -> TypeError:
    return TypeError(f"the state holds {wanted}, not {type(value).__name__} value=`{value!r:.100}`")


# --- from types to codecs ----------------------------------------------------------------------


def codec_of(hint: Any) -> Codec:
    """Return the codec of a Python type: that of pickle for types without columns, and for Any."""
    if hint is Any:
        return PickleCodec()
    inner, optional = without_none(hint)
    if optional:
        found = codec_of(inner)
        return found if found.nullable else OptionalCodec(found)
    scalar = _scalar_codec(inner)
    if scalar is not None:
        return scalar
    form = form_of(inner)
    return PickleCodec() if form is None else RecordCodec(inner, form)


def _scalar_codec(hint: Any) -> Codec | None:
    hint, aware = unwrapped(hint)
    if hint in (Decimal, UUID):
        return TextCodec(hint)
    if (kind := enum_values(hint)) is not None:
        return EnumCodec(hint, ScalarCodec(kind))
    return ScalarCodec(hint, aware=aware) if is_plain(hint) else None
