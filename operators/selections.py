"""Which keys a scan is for: all, those of a range, or those with a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import msgspec

from ..errors import UsageError
from ..state.keyed.keys import decode_key, encode_key
from .queries import QueryableState, parse_columns, parse_key


@final
class Selection(msgspec.Struct, frozen=True):
    """The keys of a scan. Without any of these it is for all keys.

    Attributes:
        prefix: a text with which keys begin, or the values of their first columns.
        first: the least key.
        stop: the least key that is too great.
    """

    prefix: Any = None
    first: Any = None
    stop: Any = None

    def has(self, key: Any) -> bool:
        """Return True if a key belongs to it."""
        prefix = self.prefix
        if isinstance(prefix, tuple):
            if key[: len(prefix)] != prefix:
                return False
        elif prefix is not None and not (isinstance(key, str) and key.startswith(prefix)):
            return False
        if self.first is not None and _order(key) < _order(self.first):
            return False
        return self.stop is None or _order(key) < _order(self.stop)

    def encode(self) -> tuple[bytes, bytes, bytes]:
        """Return its parts as bytes; empty: it has no such part."""
        parts = (self.prefix, self.first, self.stop)
        first, second, third = (b"" if part is None else encode_key(part) for part in parts)
        return first, second, third

    @classmethod
    def decode(cls, parts: tuple[bytes, bytes, bytes]) -> Selection:
        """Return what `encode` made bytes of."""
        return cls(*(decode_key(part) if part else None for part in parts))


def _order(key: Any) -> tuple[Any, ...]:
    """Return a key as what can be compared; a column that is null comes first."""
    columns = key if isinstance(key, tuple) else (key,)
    return tuple((False, 0) if each is None else (True, each) for each in columns)


def parse_selection(state: QueryableState, given: Mapping[str, Any]) -> Selection:
    """Return the keys that a client asks for, with `prefix`, `from` and `to` as texts of keys.

    `to` itself does not belong to them. A prefix of a key of several columns is a JSON array of the first
    ones.

    Raises:
        UsageError: a text is not what it has to be, or the keys have no order.
    """
    texts = {name: given[name] for name in ("prefix", "from", "to") if given.get(name) is not None}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"this is not a text {name}=`{text!s:.200}` state=`{state.name}`")
    columns = state.keys.columns
    if columns is None and texts:
        raise UsageError(
            f"keys of no declared type have no order state=`{state.name}`",
            fix="declare the type of the key, as in KeyedProcess[str, ...], or scan all keys",
        )
    ends = [parse_key(state, texts[name]) if name in texts else None for name in ("from", "to")]
    return Selection(_prefix(state, texts["prefix"]) if "prefix" in texts else None, *ends)


def _prefix(state: QueryableState, text: str) -> Any:
    columns = state.keys.columns
    assert columns is not None
    if state.keys.is_tuple:
        try:
            values = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            values = None
        if not isinstance(values, list) or not 0 < len(values) <= len(columns):
            raise UsageError(
                f"the prefix is not a JSON array of the first columns prefix=`{text:.200}` "
                f"state=`{state.name}`",
                fix=f"give the first of {', '.join(state.key_types)}",
            )
        return parse_columns(state, values)
    if columns[0].kind is not str:
        raise UsageError(
            f"only texts have prefixes, and the key is of type {columns[0].kind.__name__} "
            f"state=`{state.name}`",
            fix="give `from` and `to`",
        )
    return text
