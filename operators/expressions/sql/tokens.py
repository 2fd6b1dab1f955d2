"""Splits SQL text into tokens."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

TokenKind: TypeAlias = Literal["word", "quoted", "text", "bytes", "number", "sign", "end"]

TEXT_MAX: Final = 16 * 1024 * 1024
"""The longest SQL text of one expression, in characters."""

_TOKEN = re.compile(
    r"""\s+|--[^\n]*|/\*.*?\*/
    |(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<bytes>[xX]'(?:[0-9a-fA-F]{2})*')
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+"|`[^`]+`)
    |(?P<word>[^\W\d]\w*)
    |(?P<sign>->>|->|::|<=>|<>|!=|==|<=|>=|\|\||!~\*|!~|~\*|~|//|[-+*/%=<>(),.\[\]&|])""",
    re.VERBOSE | re.DOTALL,
)


def words(text: str) -> frozenset[str]:
    """Return the words of a text, as a set."""
    return frozenset(text.split())


class SqlError(Exception):
    """The text is not an expression that headgate accepts; `fix` says what to write instead."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class Token(NamedTuple):
    """A token of the text; for a quoted name, `text` is the name itself."""

    kind: TokenKind
    text: str


def tokens(text: str) -> list[Token]:
    """Return the tokens of `text`, the last of kind `end`; comments and white space are left out.

    Raises:
        SqlError: a character that belongs to no token, or a text beyond `TEXT_MAX`.
    """
    if len(text) > TEXT_MAX:
        raise SqlError(
            f"it has {len(text):,} characters, and {TEXT_MAX:,} is the most",
            "put the values into a table and join with lookup_join",
        )
    found: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SqlError(_unreadable(text[at:]))
        at = match.end()
        kind = match.lastgroup
        if kind == "quoted":
            found.append(Token("quoted", _unquoted(match[0])))
        elif kind is not None:
            found.append(Token(kind, match[0]))  # type: ignore[arg-type]
    found.append(Token("end", ""))
    return found


def arguments(text: str) -> list[str]:
    """Return the parts of a list as written, split at commas outside of brackets and quotes.

    Raises:
        SqlError: a character that belongs to no token, or brackets that do not match.
    """
    found, begin, depth, at = [], 0, 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SqlError(_unreadable(text[at:]))
        sign = match["sign"] or ""
        depth += (sign in ("(", "[")) - (sign in (")", "]"))
        if depth < 0:
            break
        if sign == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = match.end()
        at = match.end()
    if depth:
        raise SqlError("its brackets do not match")
    return [*found, text[begin:].strip()]


def canonical(text: str) -> str:
    """Return a text that is equal for texts that differ in white space and comments only.

    Raises:
        SqlError: as for `tokens`.
    """
    pieces = (quoted(each.text) if each.kind == "quoted" else each.text for each in tokens(text))
    return " ".join(pieces).strip()


def quoted(name: str) -> str:
    """Return a column's name quoted as SQL."""
    return '"' + name.replace('"', '""') + '"'


def _unquoted(text: str) -> str:
    return text[1:-1].replace('""', '"') if text[0] == '"' else text[1:-1]


def _unreadable(rest: str) -> str:
    if rest[0] in "'\"`":
        return f"the quote {rest[0]} is never closed"
    if rest[0].isdigit():
        return f"`{rest.split()[0][:20]}` is not a number"
    return f"unexpected character `{rest[0]}`"
