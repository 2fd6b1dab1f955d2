"""The fields that several connectors have in a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ..api.manifest.fields import ChoiceKind, Field, Items, OneOf, Section, TextKind, size
from ..errors import UsageError
from .arguments import parse_time
from .formats.fields import format_field
from .formats.text import FORMATS

PASSWORD: Final = Field(
    TextKind(), "the password, or `file:/path` or `env:NAME`, read on each machine"
)
TLS: Final[Mapping[str, Field]] = {
    "ca": Field(TextKind(), "with TLS: the file of the authorities to trust; those of the system"),
    "certificate": Field(TextKind(), "with TLS: the file with the certificate of the client"),
    "key": Field(TextKind(), "with TLS: the file with its key"),
}
DELIMITER: Final = Field(TextKind(r"[^\n]", "one character"), "of csv")

READ_BUFFER: Final = Field(size(), "about the most bytes that wait to be processed; 32mb")
STAGED_BUFFER: Final = Field(
    size(), "with exactly_once: most bytes staged between two checkpoints; 128mb"
)


def service_fields(what: str) -> dict[str, Field]:
    """Return the fields that name a stream or a queue of AWS, and its service."""
    return {
        what: Field(TextKind(), f"the name of the {what}", required=True),
        "region": Field(TextKind(), f"the region of the {what}; that of the environment"),
        "endpoint": Field(
            TextKind(), "the address of another service with the same requests; that of AWS"
        ),
    }


def position_fields(
    start: dict[str, Field], words: tuple[str, ...], stop: dict[str, Field] | None = None
) -> dict[str, Field]:
    """Return the fields with the places where reading starts and ends.

    Args:
        start: the fields of a position to start at.
        words: those that may stand for one; the first is the default.
        stop: the fields of a position to end at; None: those of `start`.
    """
    end = start if stop is None else stop
    return {
        "start": Field(
            OneOf(Section("start", start), ChoiceKind(words)),
            f"where a run without state begins; {words[0]}",
        ),
        "stop": Field(
            OneOf(Section("stop", end), ChoiceKind(("latest",))),
            "where reading ends; absent: never",
        ),
    }


def with_positions(
    arguments: dict[str, Any],
    other: str,
    parse: Callable[[str, Any], Any] = lambda name, given: given,
) -> dict[str, Any]:
    """Return the fields of a source as arguments, with `start` and `stop` as positions.

    Args:
        arguments: the fields.
        other: the field of a position that is no time.
        parse: makes a position of that field.

    Raises:
        UsageError: a position has both fields, or a time is none.
    """
    for name in ("start", "stop"):
        given = arguments.get(name)
        if isinstance(given, Mapping):
            if len(given) != 1:
                raise UsageError(f"{name} needs either time or {other}", fix="keep one")
            at_time = "time" in given
            arguments[name] = (
                parse_time(name, given["time"]) if at_time else parse(name, given[other])
            )
    return arguments


def metadata_field(kinds: Iterable[str], meaning: str) -> Field:
    """Return the field with the columns of metadata.

    Args:
        kinds: what they may hold.
        meaning: of the field.
    """
    known = tuple(kinds)
    columns = TextKind("|".join(known), f"one of {', '.join(known)}")
    return Field(Items(TextKind(), columns), meaning)


def message_fields(
    kinds: Iterable[str], example: str, format: Field | None = None
) -> dict[str, Field]:
    """Return the fields with the columns that a source makes of messages.

    Args:
        kinds: the metadata that there is.
        example: of columns of it.
        format: the field with the format of the data; None: it may be any format.
    """
    meaning = f"further columns, by what they hold, such as `{example}`"
    return {
        "format": format_field(FORMATS) if format is None else format,
        "delimiter": DELIMITER,
        "metadata": metadata_field(kinds, meaning),
    }
