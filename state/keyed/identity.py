"""When two keys are the same, as tokens for dictionaries and as bytes for files.

Python says `1 == True == Decimal("1.0")`; as keys of state these are three. Two datetimes are the same
key if they are the same instant (aware) or the same wall time (naive); decimals if they are the same
number. Floats are refused, as by `state.hashing`.

The bytes are part of the format of stored state and never change. Each value is one tag byte and a
payload that says where it ends, so that encoded keys can be put behind each other; integers sort by value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np

from ...errors import StateError
from ..hashing import not_a_key

Token: TypeAlias = Any
"""Equal for equal keys only. An int, str or bytes is its own token, all else a tuple
that starts with a tag."""

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SIGN = 1 << 63
_LENGTH = struct.Struct(">I")
_WORD = struct.Struct(">Q")


def token(key: Any) -> Token:
    """What a dictionary is keyed by.

    Raises:
        StateError: the value is of a type that cannot be a key.
    """
    kind = type(key)
    if kind is str or kind is int or kind is bytes:
        return key
    return _special(key)


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
    # A subclass, such as a str Enum: the same key as its plain value.
    if isinstance(key, int | np.integer):
        return int(key)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    raise not_a_key(type(key).__name__)


def _plain_number(value: Decimal) -> str:
    """The number without trailing zeros, exactly; `normalize` would round to the context."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return "0"
    stripped = text.rstrip("0")
    return f"{'-' if sign else ''}{stripped}E{exponent + len(text) - len(stripped)}"


def key_of(token: Token) -> Any:
    """The key of a token, in its canonical form: datetimes in UTC, decimals without trailing zeros."""
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
    """The token as bytes."""
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
    """The token whose bytes begin at `at`, and where they end.

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
    """The key as bytes: equal bytes, same key."""
    return encode_token(token(key))


def decode_key(data: bytes) -> Any:
    """The key of `encode_key`, in canonical form."""
    return key_of(decode_token(data)[0])
