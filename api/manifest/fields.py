"""Typed fields: each kind reads a value, reporting problems, and knows its JSON schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ...errors import HeadgateError
from ...operators.durations import parse_duration
from ...operators.schema import parse_type
from ...operators.sizes import parse_size
from ...operators.suggestions import suggest
from . import document
from .document import Entry, Problems, Scalar, Value, kind_of, nearest
from .references import REFERENCE_PATTERN

ANYTHING_MAX: Final = 100_000
"""The most parts of a value of a field that accepts anything."""


class _Invalid:
    """The result of reading a bad value: the problem was reported and must not be reported again."""

    def __repr__(self) -> str:
        return "INVALID"


INVALID: Final = _Invalid()


class Kind(Protocol):
    """A kind of value."""

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        """Return the Python value, or INVALID after reporting why. `line` is that of the key."""
        ...

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of such values."""
        ...


def refuse(value: Value, line: int, problems: Problems, wanted: str, fix: str = "") -> _Invalid:
    """Report that the field does not accept `value`, unless a problem was reported for it already."""
    if not (isinstance(value, Scalar) and value.broken):
        problems.add(line, f"{problems.field} must be {wanted}, not {kind_of(value)}", fix)
    return INVALID


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of values that may also be `${NAME}`, which an editor cannot check."""
    return {"anyOf": [schema, {"type": "string", "pattern": r"\$\{"}]}


@dataclass(frozen=True, slots=True)
class TextKind:
    """A text; all of it must match `pattern`, which `meaning` explains in words."""

    pattern: str = ""
    meaning: str = "a text"
    fix: str = ""

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if not isinstance(value, Scalar) or not (
            isinstance(value.value, str) or (value.substituted and value.text)
        ):
            return refuse(value, line, problems, self.meaning, self.fix)
        if not value.text or (self.pattern and not re.fullmatch(self.pattern, value.text)):
            return refuse(value, line, problems, self.meaning, self.fix)
        return value.text

    def schema(self) -> dict[str, Any]:
        if self.pattern:
            return _or_variable({"type": "string", "pattern": f"^(?:{self.pattern})$"})
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class ChoiceKind:
    """One of several words."""

    words: tuple[str, ...]

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if isinstance(value, Scalar) and value.text in self.words and not value.broken:
            return value.text
        fix = suggest(value.text, self.words, "choices") if isinstance(value, Scalar) else ""
        return refuse(value, line, problems, f"one of {', '.join(self.words)}", fix)

    def schema(self) -> dict[str, Any]:
        return _or_variable({"enum": list(self.words)})


@dataclass(frozen=True, slots=True)
class IntegerKind:
    """An integer within bounds."""

    at_least: int = 0
    at_most: int = 2**63 - 1

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        number = value.value if isinstance(value, Scalar) else None
        if isinstance(number, bool) or not isinstance(number, int):
            return refuse(value, line, problems, "a whole number")
        if not self.at_least <= number <= self.at_most:
            bounds = f"a number in {self.at_least}..{self.at_most}"
            return refuse(value, line, problems, bounds)
        return number

    def schema(self) -> dict[str, Any]:
        return _or_variable({"type": "integer", "minimum": self.at_least, "maximum": self.at_most})


@dataclass(frozen=True, slots=True)
class NumberKind:
    """A number of at least `at_least`."""

    at_least: float = 0

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        number = value.value if isinstance(value, Scalar) else None
        if isinstance(number, bool) or not isinstance(number, int | float):
            return refuse(value, line, problems, "a number")
        if number < self.at_least:
            return refuse(value, line, problems, f"a number of at least {self.at_least}")
        return number

    def schema(self) -> dict[str, Any]:
        return _or_variable({"type": "number", "minimum": self.at_least})


@dataclass(frozen=True, slots=True)
class BooleanKind:
    """true or false."""

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if isinstance(value, Scalar) and isinstance(value.value, bool):
            return value.value
        return refuse(value, line, problems, "true or false")

    def schema(self) -> dict[str, Any]:
        return _or_variable({"type": "boolean"})


@dataclass(frozen=True, slots=True)
class Parsed:
    """A text that `parse` accepts, such as a duration; the value is the text itself."""

    parse: Callable[[str], object]
    meaning: str

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if not isinstance(value, Scalar) or value.broken or not value.text:
            return refuse(value, line, problems, self.meaning)
        try:
            self.parse(value.text)
        except HeadgateError as error:
            return refuse(value, line, problems, self.meaning, error.fix)
        return value.text

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "description": self.meaning}


def duration() -> Parsed:
    """Return the kind of durations, which have a unit."""
    return Parsed(parse_duration, "a duration with a unit such as `10s`")


def size() -> Parsed:
    """Return the kind of sizes, which have a unit."""
    return Parsed(parse_size, "a size with a unit such as `64mb`")


def column_type() -> Parsed:
    """Return the kind of column types, such as `long`."""
    return Parsed(parse_type, "a column type")


REFERENCE = TextKind(
    REFERENCE_PATTERN.pattern, "`module:name`", 'such as "jobs.enrich:add_country"'
)
"""A reference to the user's code."""


class Listed(tuple[Any, ...]):
    """The value of a list; `lines` are those of its items."""

    lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ListOf:
    """A non-empty list; a single value stands for a list of one. Reads to a `Listed`.

    `length`, if it is not 0, is the required number of entries.
    """

    item: Kind
    length: int = 0

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        items = value.items if isinstance(value, document.Sequence) else (value,)
        if not items:
            return refuse(value, line, problems, "a list with at least one entry")
        if self.length and len(items) != self.length:
            return refuse(value, line, problems, f"a list of {self.length} entries")
        read = Listed(self.item.read(item, item.line, problems) for item in items)
        read.lines = tuple(item.line for item in items)
        return INVALID if any(item is INVALID for item in read) else read

    def schema(self) -> dict[str, Any]:
        item = self.item.schema()
        if self.length:
            bounds = {"minItems": self.length, "maxItems": self.length}
            return {"type": "array", "items": item, **bounds}
        return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]}


@dataclass(frozen=True, slots=True)
class Items:
    """Names with values of one kind. Reads to a `Table`; bad entries are left out."""

    item: Kind
    key: TextKind = field(default_factory=TextKind)
    may_be_empty: bool = True

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if not isinstance(value, document.Mapping):
            return refuse(value, line, problems, "a mapping")
        if not value.entries and not self.may_be_empty:
            return refuse(value, line, problems, "at least one entry")
        table = Table(line)
        for name, entry in value.entries.items():
            key = Scalar(entry.line, name, name)
            problems.field = "a key"
            known = self.key.read(key, entry.line, problems) is not INVALID
            problems.field = name
            read = self.item.read(entry.value, entry.line, problems)
            if not known or read is INVALID:
                table.bad.add(name)
            else:
                table.values[name] = read
            table.lines[name] = entry.line
        return table

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "additionalProperties": self.item.schema()}
        if self.key.pattern:
            schema["propertyNames"] = self.key.schema()
        if not self.may_be_empty:
            schema["minProperties"] = 1
        return schema


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any single value, as text: options and annotations are texts whatever they look like."""

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if not isinstance(value, Scalar) or value.broken or value.value is None:
            return refuse(value, line, problems, "a single value")
        return value.text

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "number", "boolean"]}


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value as plain dicts, lists and scalars; its user checks it.

    Aliases are expanded here, so a few bytes could stand for more than fits in memory; hence the
    limit.
    """

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if document.size_of(value) > ANYTHING_MAX:
            wanted = f"a value of at most {ANYTHING_MAX} parts"
            problems.add(line, f"{problems.field} must be {wanted}, its aliases written out")
            return INVALID
        return self._plain(value)

    def _plain(self, value: Value) -> Any:
        match value:
            case document.Mapping():
                read = {name: self._plain(entry.value) for name, entry in value.entries.items()}
                return INVALID if any(item is INVALID for item in read.values()) else read
            case document.Sequence():
                items = [self._plain(item) for item in value.items]
                return INVALID if any(item is INVALID for item in items) else items
            case Scalar():
                return INVALID if value.broken else value.value

    def schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class OneOf:
    """A value of one kind if it is a mapping, of the other if it is not."""

    mapping: Kind
    other: Kind

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        kind = self.mapping if isinstance(value, document.Mapping) else self.other
        return kind.read(value, line, problems)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.mapping.schema(), self.other.schema()]}


@dataclass(slots=True)
class Table:
    """The value of a mapping.

    Attributes:
        line: of the key that the mapping belongs to.
        values: the values that could be read.
        lines: of each key, also of the bad ones.
        bad: fields with a problem: unreadable, or required and missing.
        meant: known fields that a misspelled key was probably meant to be.
        strange: there are unknown keys.
    """

    line: int
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    meant: set[str] = field(default_factory=set)
    strange: bool = False

    @property
    def wrong(self) -> bool:
        """True if this mapping, or one below it, has bad or unknown fields."""
        below = (value for value in self.values.values() if isinstance(value, Table))
        return bool(self.bad) or any(table.strange or table.wrong for table in below)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field; `default` if it is absent or bad."""
        return self.values.get(name, default)

    def line_of(self, name: str) -> int:
        """Return the line of a field, or of the mapping if it is absent."""
        return self.lines.get(name, self.line)

    def tried(self, name: str) -> bool:
        """Return True if the field is given, right or misspelled, or already reported."""
        return name in self.values or name in self.bad or name in self.meant

    def present(self, names: Sequence[str]) -> list[str]:
        """Return which of `names` were tried."""
        return [name for name in names if self.tried(name)]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a section."""

    kind: Kind
    doc: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping with known fields; messages call it `what`. Reads to a `Table`."""

    what: str
    fields: dict[str, Field]

    def read(self, value: Value, line: int, problems: Problems) -> Any:
        if isinstance(value, Scalar) and value.value is None and not value.broken:
            value = document.Mapping(line, {})  # `blackhole:` without a value
        if not isinstance(value, document.Mapping):
            return refuse(value, line, problems, "a mapping")
        table = Table(line)
        strangers: dict[str, Entry] = {}
        for name, entry in value.entries.items():
            if name in self.fields:
                self._read_field(name, entry, table, problems)
            else:
                strangers[name] = entry
        for name, entry in strangers.items():
            self._read_stranger(name, entry, table, problems)
        for name, known in self.fields.items():
            if known.required and not table.tried(name):
                problems.add(line, f"{self.what} has no {name}", f"{name}: {known.doc}")
                table.bad.add(name)
        return table

    def _read_field(self, name: str, entry: Entry, table: Table, problems: Problems) -> None:
        problems.field = name
        read = self.fields[name].kind.read(entry.value, entry.line, problems)
        table.lines[name] = entry.line
        if read is INVALID:
            table.bad.add(name)
        else:
            table.values[name] = read

    def _read_stranger(self, name: str, entry: Entry, table: Table, problems: Problems) -> None:
        """Report an unknown field; read it as the field probably meant, to find further problems."""
        message = f"unknown field in {self.what} field=`{name}`"
        problems.add(entry.line, message, suggest(name, self.fields, "fields"))
        table.strange = True
        meant = nearest(name, self.fields)
        if meant is not None and not table.tried(meant):
            self._read_field(meant, entry, table, problems)
            table.meant.add(meant)

    def schema(self) -> dict[str, Any]:
        properties = {
            name: {**known.kind.schema(), "description": known.doc}
            for name, known in self.fields.items()
        }
        schema: dict[str, Any] = {
            "type": "object"
            if any(known.required for known in self.fields.values())
            else ["object", "null"],
            "properties": properties,
            "additionalProperties": False,
        }
        required = [name for name, known in self.fields.items() if known.required]
        if required:
            schema["required"] = required
        return schema
