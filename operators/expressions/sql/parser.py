"""Parses SQL text into a tree by recursive descent; operators have the precedence of PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .functions import (
    ACROSS_FIX,
    UNITS,
    AcrossError,
    check_call,
    refuse_clock,
)
from .tokens import SqlError, Token, tokens, words
from .tree import DEPTH_MAX, NESTING_MAX, OPERATIONS_MAX, SIMPLER, Kind, Reading, SqlNode

_COMPARISONS: Final = {sign: sign for sign in ("=", "<>", "<", "<=", ">", ">=", "<=>")} | {
    "==": "=",
    "!=": "<>",
}
_PATTERNS: Final = {"LIKE": "LIKE", "ILIKE": "ILIKE", "RLIKE": "~", "REGEXP": "~"}
_OTHERS: Final = frozenset(["||", "&", "|", "~", "~*", "!~", "!~*"])
_RESERVED: Final = words(
    """AND OR XOR NOT IN IS LIKE ILIKE RLIKE REGEXP BETWEEN CASE WHEN THEN ELSE END AS NULL TRUE FALSE FROM
    DISTINCT SELECT WHERE OVER"""
)
_QUERIES: Final = frozenset(["SELECT", "WITH", "VALUES", "EXISTS", "TABLE"])
_TYPED: Final = frozenset(["DATE", "TIMESTAMP", "TIMESTAMPTZ", "DATETIME", "TIME", "INTERVAL"])
_TYPES: Final = re.compile(
    r"""BOOL|BOOLEAN|U?TINYINT|U?SMALLINT|U?INT|U?INTEGER|U?BIGINT|U?HUGEINT|U?INT[1248]|U?INT(?:16|32|64|128)
    |FLOAT[48]?|REAL|DOUBLE|DECIMAL|NUMERIC|DEC|TEXT|STRING|VARCHAR|CHAR|BLOB|BYTEA|BINARY|VARBINARY
    |DATE|TIME|TIMESTAMP|TIMESTAMPTZ|DATETIME|INTERVAL""",
    re.VERBOSE,
)
_LISTS: Final = "for many values write `x IN (...)`, or join with a table by lookup_join"


_DECIMALS: Final = ("DECIMAL", "NUMERIC", "DEC")
_DIGITS_MAX: Final = 38


def _check_decimal(name: str, numbers: list[int]) -> None:
    """Check precision and scale: Polars accepts any, and fails when the type is used."""
    digits, behind_point = (*numbers, 0)[:2]
    if len(numbers) > 2 or not 1 <= digits <= _DIGITS_MAX or behind_point > digits:
        shown = ", ".join(map(str, numbers))
        raise SqlError(
            f"there is no type `{name}({shown})`",
            f"a decimal has 1 to {_DIGITS_MAX} digits, of which any number may follow the point, as in "
            "DECIMAL(10, 2)",
        )


def read_sql(text: str) -> Reading:
    """Parse an expression, optionally with `AS name` after it.

    Raises:
        SqlError: it is none, it has what expressions must not have, or it is too large.
    """
    try:
        return _Parser(tokens(text)).whole()
    except RecursionError:  # the caller is deep in the stack already
        raise SqlError("it is nested too deep", SIMPLER) from None


class _Parser:
    def __init__(self, given: list[Token]) -> None:
        self._tokens = given
        self._at = 0
        self._nesting = 0
        self._operations = 0

    # Looking at tokens

    def whole(self) -> Reading:
        node = self._expression()
        alias = None
        if self._word("AS"):
            token = self._next()
            if token.kind not in ("word", "quoted"):
                raise self._unexpected(token)
            alias = token.text
        rest = self._peek()
        if rest.kind in ("word", "quoted") and alias is None:
            raise SqlError(f"unexpected `{rest.text}`", "AS is followed by a name for the result")
        if rest.kind != "end":
            raise self._unexpected(rest)
        return Reading(node, alias)

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _next(self) -> Token:
        token = self._peek()
        self._at += 1
        return token

    def _is(self, *words: str, ahead: int = 0) -> bool:
        token = self._peek(ahead)
        return token.kind == "word" and token.text.upper() in words

    def _word(self, *words: str) -> str:
        """Consume and return the next token if it is one of the words; otherwise return an empty text."""
        return self._next().text.upper() if self._is(*words) else ""

    def _sign(self, *signs: str) -> str:
        token = self._peek()
        return self._next().text if token.kind == "sign" and token.text in signs else ""

    def _need(self, wanted: str) -> None:
        token = self._next()
        if token.kind not in ("word", "sign") or token.text.upper() != wanted:
            raise self._unexpected(token, f"`{wanted}`")

    def _unexpected(self, token: Token, wanted: str = "") -> SqlError:
        before = "" if not wanted else f" where {wanted} should stand"
        if token.kind == "end":
            return SqlError("it ends too early" + (f": {wanted} is missing" if wanted else ""))
        fix = ""
        if token.kind == "word" and token.text.upper() in _RESERVED:
            fix = f'if `{token.text}` is a column, write "{token.text}" in double quotes'
        return SqlError(f"unexpected `{token.text}`{before}", fix)

    # Making nodes

    @contextmanager
    def _nested(self) -> Iterator[None]:
        self._nesting += 1
        if self._nesting > NESTING_MAX:
            raise SqlError(f"it is nested deeper than {NESTING_MAX} levels", SIMPLER)
        yield
        self._nesting -= 1

    def _node(self, kind: Kind, text: str = "", parts: tuple[SqlNode, ...] = ()) -> SqlNode:
        links = len(parts).bit_length() if kind in ("all", "any") else 1
        if kind == "case":
            links = len(parts) // 2  # Polars nests the branches
        elif kind == "in" and not all(map(_is_literal, parts[1:])):
            links = len(parts)  # likewise with computed values
        depth = max((part.depth for part in parts), default=0) + links
        if depth > DEPTH_MAX:
            raise SqlError(
                f"more than {DEPTH_MAX} operations depend on each other", f"{SIMPLER}; {_LISTS}"
            )
        self._operations += max(1, len(parts) - 1) if kind in ("all", "any", "case") else 1
        if self._operations > OPERATIONS_MAX:
            raise SqlError(f"it has more than {OPERATIONS_MAX:,} operations", _LISTS)
        return SqlNode(kind, text, parts, depth)

    # The grammar, weakest operators first

    def _expression(self) -> SqlNode:
        parts = [self._either()]
        while self._word("OR"):
            parts.append(self._either())
        return parts[0] if len(parts) == 1 else self._node("any", "", tuple(parts))

    def _either(self) -> SqlNode:
        left = self._both()
        while self._word("XOR"):
            left = self._node("binary", "XOR", (left, self._both()))
        return left

    def _both(self) -> SqlNode:
        parts = [self._not()]
        while self._word("AND"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else self._node("all", "", tuple(parts))

    def _not(self) -> SqlNode:
        if not self._word("NOT"):
            return self._predicate()
        with self._nested():
            return self._node("not", "", (self._not(),))

    def _predicate(self) -> SqlNode:
        left = self._operand()
        compared = False
        while True:
            token = self._peek()
            if token.kind == "sign" and token.text in _COMPARISONS:
                if compared:
                    raise SqlError(
                        f"unexpected `{token.text}`: comparisons cannot be chained",
                        "join two of them: a < b AND b < c",
                    )
                left, compared = self._comparison(left), True
            elif self._word("IS"):
                left = self._is_what(left)
            elif self._is("IN", "BETWEEN", *_PATTERNS) or (
                self._is("NOT") and self._is("IN", "BETWEEN", *_PATTERNS, ahead=1)
            ):
                left = self._test(left, negated=bool(self._word("NOT")))
            else:
                return left

    def _comparison(self, left: SqlNode) -> SqlNode:
        sign = _COMPARISONS[self._next().text]
        if self._is("ANY", "SOME") and self._peek(1).text == "(":
            self._next()
            if sign != "=":
                raise SqlError("ANY is only allowed after =", "write ARRAY_CONTAINS(list, value)")
            return self._node("call", "ARRAY_CONTAINS", (self._bracketed(), left))
        return self._node("binary", sign, (left, self._operand()))

    def _is_what(self, left: SqlNode) -> SqlNode:
        no = "NOT " if self._word("NOT") else ""
        if self._word("DISTINCT"):
            self._need("FROM")
            text = f"IS {no}DISTINCT FROM"
            return self._node("binary", text, (left, self._operand()))
        word = self._word("NULL", "TRUE", "FALSE")
        if not word:
            raise self._unexpected(self._next(), "NULL, TRUE, FALSE or DISTINCT FROM")
        return self._node("is", f"IS {no}{word}", (left,))

    def _test(self, left: SqlNode, *, negated: bool) -> SqlNode:
        no = "NOT " if negated else ""
        word = self._next().text.upper()
        if word == "BETWEEN":
            low = self._operand()
            self._need("AND")
            return self._node("between", f"{no}BETWEEN", (left, low, self._operand()))
        if word == "IN":
            return self._node("in", f"{no}IN", (left, *self._list("(", ")")))
        operator = _PATTERNS[word]
        pattern = self._operand()
        if self._is("ESCAPE"):
            raise SqlError("ESCAPE is not supported", "write REGEXP_LIKE(text, 'pattern')")
        if operator == "~":
            node = self._node("binary", "~", (left, pattern))
            return self._node("not", "", (node,)) if negated else node
        return self._node("binary", f"{no}{operator}", (left, pattern))

    def _operand(self) -> SqlNode:
        left = self._sum()
        while sign := self._sign(*_OTHERS):
            left = self._node("binary", sign, (left, self._sum()))
        return left

    def _sum(self) -> SqlNode:
        left = self._product()
        while sign := self._sign("+", "-"):
            left = self._node("binary", sign, (left, self._product()))
        return left

    def _product(self) -> SqlNode:
        left = self._signed()
        while sign := self._sign("*", "/", "%", "//"):
            left = self._node("binary", sign, (left, self._signed()))
        return left

    def _signed(self) -> SqlNode:
        sign = self._sign("-", "+")
        if not sign:
            return self._suffixed()
        with self._nested():
            node = self._signed()
        if node.is_literal and node.text[0].isdigit() and sign == "-":
            return self._node("literal", f"-{node.text}")
        return self._node("sign", sign, (node,))

    def _suffixed(self) -> SqlNode:
        node = self._primary()
        while True:
            if self._sign("::"):
                node = self._node("cast", f"CAST {self._type()}", (node,))
            elif self._sign("["):
                place = self._expression()
                self._need("]")
                node = self._node("item", "", (node, place))
            elif self._sign("."):
                token = self._next()
                if token.kind not in ("word", "quoted") or node.kind not in ("column", "field"):
                    raise self._unexpected(token)
                node = self._node("field", token.text, (node,))
            elif self._is("AT") and self._is("TIME", ahead=1):
                self._at += 2
                self._need("ZONE")
                zone = self._next()
                if zone.kind != "text":
                    raise self._unexpected(zone, "a time zone in single quotes")
                node = self._node("zone", zone.text, (node,))
            else:
                return node

    def _primary(self) -> SqlNode:
        token = self._next()
        if token.kind in ("number", "text", "bytes"):
            return SqlNode("literal", token.text)
        if token.kind == "quoted":
            return SqlNode("column", token.text)
        if token.kind == "sign" and token.text == "(":
            with self._nested():
                node = self._expression()
            self._need(")")
            return node
        if token.kind == "sign" and token.text == "[":
            self._at -= 1
            return self._node("array", "", self._list("[", "]"))
        if token.kind == "word":
            return self._named(token)
        raise self._unexpected(token)

    def _named(self, token: Token) -> SqlNode:
        """Parse what begins with a word: a constant, a call, a column."""
        word, behind = token.text.upper(), self._peek()
        if word in _QUERIES and (word == "SELECT" or behind.kind != "end"):
            raise SqlError(
                f"a query (`{token.text}`) cannot stand in an expression",
                "an expression has the columns of one record only; to use another table join with it",
            )
        if word in ("NULL", "TRUE", "FALSE"):
            return SqlNode("literal", word)
        if word in _TYPED and behind.kind == "text":
            return SqlNode("literal", f"{word} {self._next().text}")
        if word == "CASE":
            with self._nested():
                return self._case()
        if word == "ARRAY" and behind.text == "[":
            return self._node("array", "", self._list("[", "]"))
        if word in _RESERVED:
            raise self._unexpected(token)
        if behind.kind == "sign" and behind.text == "(":
            with self._nested():
                return self._call(token.text)
        refuse_clock(token.text)
        return SqlNode("column", token.text)

    def _case(self) -> SqlNode:
        subject = None if self._is("WHEN") else self._expression()
        parts: list[SqlNode] = []
        while self._word("WHEN"):
            condition = self._expression()
            if subject is not None:
                condition = self._node("binary", "=", (subject, condition))
            self._need("THEN")
            parts += [condition, self._expression()]
        if not parts:
            raise self._unexpected(self._next(), "WHEN")
        if self._word("ELSE"):
            parts.append(self._expression())
        self._need("END")
        return self._node("case", "", tuple(parts))

    def _bracketed(self) -> SqlNode:
        self._need("(")
        with self._nested():
            node = self._expression()
        self._need(")")
        return node

    def _list(self, opens: str, closes: str) -> tuple[SqlNode, ...]:
        self._need(opens)
        found: list[SqlNode] = []
        with self._nested():
            if not self._sign(closes):
                found.append(self._value(closes))
                while self._sign(","):
                    found.append(self._value(closes))
                self._need(closes)
        if not found and opens == "(":
            raise SqlError("an empty list", "IN needs at least one value")
        return tuple(found)

    def _value(self, closes: str) -> SqlNode:
        """Parse an element of a list; those of long lists are mostly single tokens."""
        kind, text = self._tokens[self._at]
        if kind in ("number", "text") and self._peek(1).text in (",", closes):
            self._at += 1
            return SqlNode("literal", text)
        return self._expression()

    # Calls

    def _call(self, written: str) -> SqlNode:
        name = written.upper()
        if name in ("CAST", "TRY_CAST"):
            return self._cast(name)
        if name == "EXTRACT":
            return self._extract()
        if name == "TRIM":
            return self._trim()
        if name == "POSITION":
            return self._position()
        self._need("(")
        if self._sign("*"):  # only aggregates take it
            check_call(written, 1)
            raise self._unexpected(Token("sign", "*"))
        if self._word("DISTINCT"):
            check_call(written, 1)
            raise SqlError("unexpected `DISTINCT`")
        found: list[SqlNode] = []
        if not self._sign(")"):
            found.append(self._expression())
            while self._sign(",") or (name == "SUBSTRING" and self._word("FROM", "FOR")):
                found.append(self._expression())
            self._need(")")
        if self._is("OVER", "FILTER", "WITHIN"):
            raise AcrossError("it is a window function", ACROSS_FIX)
        name = check_call("SUBSTR" if name == "SUBSTRING" else written, len(found))
        return self._node("call", name, tuple(found))

    def _cast(self, name: str) -> SqlNode:
        self._need("(")
        node = self._expression()
        self._need("AS")
        kind = self._type()
        self._need(")")
        return self._node("cast", f"{name} {kind}", (node,))

    def _type(self) -> str:
        token = self._next()
        name = token.text.upper()
        if token.kind != "word" or not _TYPES.fullmatch(name):
            raise SqlError(
                f"unknown type `{token.text}`",
                "such as BIGINT, DOUBLE, DECIMAL(10, 2), TEXT, BOOLEAN, DATE, TIMESTAMP",
            )
        if name == "DOUBLE":
            self._word("PRECISION")
        if name == "TIMESTAMP" and (has := self._word("WITH", "WITHOUT")):
            self._need("TIME")
            self._need("ZONE")
            name = "TIMESTAMPTZ" if has == "WITH" else name
        if self._sign("("):
            numbers = [self._digits()]
            while self._sign(","):
                numbers.append(self._digits())
            self._need(")")
            if name in _DECIMALS:
                _check_decimal(name, [int(number) for number in numbers])
            name += f"({', '.join(numbers)})"
        while self._sign("["):
            self._need("]")
            name += "[]"
        return name

    def _digits(self) -> str:
        token = self._next()
        if token.kind != "number" or not token.text.isdigit():
            raise self._unexpected(token, "a whole number")
        return token.text

    def _extract(self) -> SqlNode:
        self._need("(")
        token = self._next()
        unit = token.text.strip("'").upper()
        if unit not in UNITS and unit.rstrip("S") not in UNITS:
            raise SqlError(f"unknown unit `{token.text}`", f"units: {', '.join(sorted(UNITS))}")
        self._need("FROM")
        node = self._expression()
        self._need(")")
        return self._node("extract", unit, (node,))

    def _trim(self) -> SqlNode:
        self._need("(")
        side = self._word("BOTH", "LEADING", "TRAILING")
        parts = [] if self._is("FROM") else [self._expression()]
        if self._word("FROM"):
            parts.append(self._expression())
        elif self._sign(","):
            parts.insert(0, self._expression())
        self._need(")")
        if len(parts) == 1:
            parts.insert(0, SqlNode("literal", "' '"))
        return self._node("trim", side or "BOTH", tuple(parts))

    def _position(self) -> SqlNode:
        self._need("(")
        part = self._operand()
        self._need("IN")
        whole = self._expression()
        self._need(")")
        return self._node("call", "STRPOS", (whole, part))


def _is_literal(node: SqlNode) -> bool:
    return node.is_literal
