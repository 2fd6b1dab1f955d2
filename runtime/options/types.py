"""The types of options: each parses a text to a value, and formats a value as text."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ...errors import OptionError
from ...operators.durations import format_duration, parse_duration
from ...operators.sizes import format_size, parse_size

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ValueType(Protocol[T_co]):
    """Parses the text of an option to a value, and formats it again."""

    @property
    def name(self) -> str:
        """Its name in the documentation."""
        ...

    @property
    def unit(self) -> str:
        """The unit of parsed values; empty: they have none."""
        ...

    def parse(self, text: str) -> T_co:
        """The value; raises UsageError (without the key) for a text that is none."""
        ...

    def format(self, value: Any) -> str:
        """A text that parses to `value` again."""
        ...


class _Plain:
    """The part of types whose values are formatted by `str`."""

    __slots__ = ()

    def format(self, value: Any) -> str:
        return str(value)


class Duration(msgspec.Struct, frozen=True):
    """Milliseconds, written with a unit: `10 s`."""

    at_least_ms: int = 0
    name: str = "duration"
    unit: str = "ms"

    def parse(self, text: str) -> int:
        value = parse_duration(text, longest_ms=None)
        if value < self.at_least_ms:
            raise OptionError(f"must be at least {format_duration(self.at_least_ms)}")
        return value

    def format(self, value: Any) -> str:
        return format_duration(value)


class Size(msgspec.Struct, frozen=True):
    """Bytes, written with a unit: `32 kb`."""

    at_least: int = 1
    at_most: int | None = None
    name: str = "size"
    unit: str = "bytes"

    def parse(self, text: str) -> int:
        value = parse_size(text)
        if value < self.at_least:
            raise OptionError(f"must be at least {format_size(self.at_least)}")
        if self.at_most is not None and value > self.at_most:
            raise OptionError(f"must be at most {format_size(self.at_most)}")
        return value

    def format(self, value: Any) -> str:
        return format_size(value)


class Integer(_Plain, msgspec.Struct, frozen=True):
    """A whole number within bounds."""

    at_least: int = 0
    at_most: int = 2**31 - 1
    name: str = "integer"
    unit: str = ""

    def parse(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise OptionError("must be a whole number") from None
        if not self.at_least <= value <= self.at_most:
            raise OptionError(f"must lie in {self.at_least}..{self.at_most}")
        return value


class Ports(msgspec.Struct, frozen=True):
    """A TCP port, or a range of them with both ends: `6121`, `6121-6140`. 0 alone: any free port."""

    name: str = "port or range"
    unit: str = ""

    def parse(self, text: str) -> range:
        first, dash, last = (part.strip() for part in text.partition("-"))
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise OptionError("must be a port or a range of ports, such as 6121 or 6121-6140")
        ports = range(int(first), int(last or first) + 1)
        if ports[-1:] and ports[-1] > 65_535:
            raise OptionError("must lie in 0..65535")
        if not ports or (dash and ports[0] == 0):
            raise OptionError("the first port of a range is at least 1 and not above the last")
        return ports

    def format(self, value: Any) -> str:
        return str(value[0]) if len(value) == 1 else f"{value[0]}-{value[-1]}"


class Ratio(_Plain, msgspec.Struct, frozen=True):
    """A part of a whole: above 0, below 1."""

    name: str = "ratio"
    unit: str = ""

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise OptionError("must be a number, such as 0.5") from None
        if not 0 < value < 1:
            raise OptionError("must be above 0 and below 1")
        return value


class Number(_Plain, msgspec.Struct, frozen=True):
    """A number within bounds."""

    at_least: float
    at_most: float
    name: str = "number"
    unit: str = ""

    def parse(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise OptionError("must be a number, such as 1.5") from None
        if not self.at_least <= value <= self.at_most:
            raise OptionError(f"must lie in {self.at_least:g}..{self.at_most:g}")
        return value


class Boolean(msgspec.Struct, frozen=True):
    """`true` or `false`."""

    name: str = "boolean"
    unit: str = ""

    def parse(self, text: str) -> bool:
        try:
            return {"true": True, "false": False}[text.strip().lower()]
        except KeyError:
            raise OptionError("must be true or false") from None

    def format(self, value: Any) -> str:
        return "true" if value else "false"


class Text(_Plain, msgspec.Struct, frozen=True):
    """Any text but an empty one."""

    name: str = "text"
    unit: str = ""

    def parse(self, text: str) -> str:
        if not text.strip():
            raise OptionError("must not be empty")
        return text.strip()


class Choice(_Plain, msgspec.Struct, frozen=True):
    """One of some words; `others` are Flink's other spellings of them."""

    words: tuple[str, ...]
    others: tuple[tuple[str, str], ...] = ()
    unit: str = ""

    @property
    def name(self) -> str:
        return " \\| ".join(f"`{word}`" for word in self.words)

    def parse(self, text: str) -> str:
        wanted = text.strip().lower()
        for word in self.words:
            if wanted == word.lower():
                return word
        for other, word in self.others:
            if wanted == other:
                return word
        raise OptionError(f"must be one of {', '.join(self.words)}")


class Option(msgspec.Struct, Generic[T], frozen=True):
    """One option.

    Attributes:
        default: the value when it is not set; None means what `doc` says.
        aliases: older names of the key, accepted as well.
    """

    key: str
    type: ValueType[Any]
    default: T
    doc: str
    aliases: tuple[str, ...] = ()

    def default_text(self) -> str:
        """The default as a user would write it; `unset` if there is none."""
        return "unset" if self.default is None else self.type.format(self.default)
