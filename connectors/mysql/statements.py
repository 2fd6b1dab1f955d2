"""Statements in the log: what they do to a table whose changes are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Final

_COMMENTS: Final = re.compile(r"\s*(?:/\*(?!M?!).*?\*/|--[^\n]*\n|#[^\n]*\n)", re.DOTALL)
_NAME: Final = r"(?:`(?:[^`]|``)+`|[\w$]+)"
_FULL_NAME: Final = re.compile(rf"({_NAME})(?:\s*\.\s*({_NAME}))?")
_TRUNCATE: Final = re.compile(r"TRUNCATE\s+(?:TABLE\s+)?", re.IGNORECASE)
_LOSES: Final = re.compile(
    r"(?:DROP|RENAME|CREATE\s+OR\s+REPLACE)\s+TABLES?\b"
    r"|ALTER\s+(?:\w+\s+)?TABLE\b.*\b(?:RENAME\s+(?!COLUMN|INDEX|KEY)"
    r"|(?:DROP|TRUNCATE|EXCHANGE|DISCARD|IMPORT)\s+(?:PARTITION|TABLESPACE))",
    re.IGNORECASE | re.DOTALL,
)
_DROPS_ALL: Final = re.compile(r"DROP\s+(?:DATABASE|SCHEMA)\s+(?:IF\s+EXISTS\s+)?", re.IGNORECASE)
_WRITES: Final = re.compile(
    r"(?:INSERT|UPDATE|DELETE|REPLACE|LOAD|WITH|CALL|SET\s+STATEMENT)\b", re.IGNORECASE
)


class Effect(Enum):
    """The effect of a statement on a table."""

    NONE = "none"
    TRUNCATED = "truncated"
    """All rows were deleted."""
    REPLACED = "dropped, renamed or replaced"
    """The table, or a part of it, is another one."""
    WRITTEN = "written by a statement"
    """Rows were changed, and the log does not have them."""


def first_words(statement: str) -> str:
    """Return a statement without comments before it."""
    text = statement
    while found := _COMMENTS.match(text):
        text = text[found.end() :]
    return text.strip()


def effect_of(statement: str, schema: str, table: tuple[str, str]) -> Effect:
    """Return what a statement does to a table.

    Args:
        statement: from the log.
        schema: of names without one.
        table: schema and name.
    """
    text = first_words(statement)
    ours = (table[0].casefold(), table[1].casefold())
    if dropped := _DROPS_ALL.match(text):
        _, name = next(_names(text[dropped.end() :], schema), ("", ""))
        return Effect.REPLACED if name == ours[0] else Effect.NONE
    if ours not in _names(text, schema):
        return Effect.NONE
    if _TRUNCATE.match(text):
        return Effect.TRUNCATED
    if _LOSES.match(text):
        return Effect.REPLACED
    return Effect.WRITTEN if _WRITES.match(text) else Effect.NONE


def _names(text: str, schema: str) -> Iterator[tuple[str, str]]:
    """Yield all that may be names of tables, without their case, which some servers ignore."""
    for first, second in _FULL_NAME.findall(text):
        yield (_plain(first), _plain(second)) if second else (schema.casefold(), _plain(first))


def _plain(name: str) -> str:
    return (name[1:-1].replace("``", "`") if name.startswith("`") else name).casefold()
