"""Writes the tree of an expression as SQL for Polars, with the meaning documented in docs/expressions.md.

Long conditions are written as balanced trees. Polars nests `a AND b AND c` as deep as it is long,
its time grows with the square of the depth, and some thousand levels crash the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ...lazy_modules import pl
from .tokens import SqlError, quoted
from .tree import NESTING_MAX, OPERATIONS_MAX, SIMPLER, SqlNode

TypeOf: TypeAlias = "Callable[[str], pl.DataType | None]"
"""A function from SQL to its type over the stream's columns; None if it has none."""

_BRACKETS_MAX: Final = 46
"""Polars' parser accepts 50 levels."""
_REWRITTEN_MAX: Final = 100_000
"""The longest SQL of one call that is rewritten, in characters."""
_LEVELS: Final = ({"+", "-"}, {"*", "/", "%"}, {"||"})
_COMPARED: Final = frozenset(
    ["=", "<>", "<", "<=", ">", ">=", "<=>", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]
)
_BARE: Final = frozenset(["literal", "column", "field", "call", "extract", "trim", "cast", "array"])
_WHOLE: Final = re.compile(r"[1-9]\d*")
_DIGITS: Final = re.compile(r"-?\d{1,2}")
_NAN: Final = "CAST('NaN' AS DOUBLE)"


def write_sql(node: SqlNode, type_of: TypeOf) -> str:
    """Return the SQL of `node` for Polars.

    Raises:
        SqlError: too deep or too large for Polars, or a function without a required argument.
    """
    return _Writer(type_of).text(node)


class _Writer:
    def __init__(self, type_of: TypeOf) -> None:
        self._type_of = type_of
        self._operations = 0
        self._brackets = 0

    def text(self, node: SqlNode) -> str:
        """Write the node, without brackets around it."""
        self._operations += 1
        if self._operations > 2 * OPERATIONS_MAX + len(node.parts):
            raise SqlError("it is too large", SIMPLER)
        self._brackets += 1
        if self._brackets > _BRACKETS_MAX:
            raise SqlError(f"it is nested deeper than {NESTING_MAX} levels", SIMPLER)
        written: str = getattr(self, f"_{node.kind}")(node)
        self._brackets -= 1
        return written

    def _part(self, node: SqlNode) -> str:
        """Write the node as an operand."""
        if node.kind == "literal":
            return f"({node.text})" if node.text.startswith("-") else node.text
        return self.text(node) if node.kind in _BARE else f"({self.text(node)})"

    def _list_of(self, nodes: Sequence[SqlNode]) -> str:
        return ", ".join(node.text if node.is_literal else self.text(node) for node in nodes)

    # One method for each kind of node

    def _literal(self, node: SqlNode) -> str:
        return node.text

    def _column(self, node: SqlNode) -> str:
        return quoted(node.text)

    def _field(self, node: SqlNode) -> str:
        return f"{self._part(node.parts[0])}.{quoted(node.text)}"

    def _item(self, node: SqlNode) -> str:
        return f"{self._part(node.parts[0])}[{self.text(node.parts[1])}]"

    def _array(self, node: SqlNode) -> str:
        return f"ARRAY[{self._list_of(node.parts)}]"

    def _extract(self, node: SqlNode) -> str:
        return f"EXTRACT({node.text} FROM {self.text(node.parts[0])})"

    def _trim(self, node: SqlNode) -> str:
        characters, whole = node.parts
        return f"TRIM({node.text} {self.text(characters)} FROM {self.text(whole)})"

    def _cast(self, node: SqlNode) -> str:
        name, kind = node.text.split(" ", 1)
        return f"{name}({self.text(node.parts[0])} AS {kind})"

    def _zone(self, node: SqlNode) -> str:
        return f"{self._part(node.parts[0])} AT TIME ZONE {node.text}"

    def _sign(self, node: SqlNode) -> str:
        inner = node.parts[0]
        if node.text == "+":
            return self._part(inner)
        if inner.kind == "sign" and inner.text == "-":
            return self._part(inner.parts[0])
        return f"-{self._part(inner)}"

    def _not(self, node: SqlNode) -> str:
        inner = node.parts[0]
        if inner.kind == "not":
            return self.text(inner.parts[0])
        return f"NOT {self._part(inner)}"

    def _is(self, node: SqlNode) -> str:
        what = self._part(node.parts[0])
        if node.text.endswith("NULL"):
            return f"{what} {node.text}"
        wanted = what if node.text.endswith("TRUE") else f"NOT {what}"
        answer = f"COALESCE({wanted}, FALSE)"  # never null, unlike Polars' own IS NOT TRUE
        return f"NOT {answer}" if "NOT " in node.text else answer

    def _all(self, node: SqlNode) -> str:
        return self._balanced("AND", [self._part(part) for part in node.parts])

    def _any(self, node: SqlNode) -> str:
        return self._balanced("OR", [self._part(part) for part in node.parts])

    def _balanced(self, word: str, texts: list[str]) -> str:
        while len(texts) > 2:
            pairs = zip(texts[::2], texts[1::2], strict=False)
            joined = [f"({left} {word} {right})" for left, right in pairs]
            texts = joined + ([texts[-1]] if len(texts) % 2 else [])
        return f" {word} ".join(texts)

    def _in(self, node: SqlNode) -> str:
        subject, *values = node.parts
        return f"{self._part(subject)} {node.text} ({self._list_of(values)})"

    def _between(self, node: SqlNode) -> str:
        what, low, high = self._same_zone([self._part(part) for part in node.parts])
        return f"{what} {node.text} {low} AND {high}"

    def _case(self, node: SqlNode) -> str:
        texts = [self.text(part) for part in node.parts]
        whens = "".join(
            f" WHEN {condition} THEN {result}"
            for condition, result in zip(texts[::2], texts[1::2], strict=False)
        )
        other = f" ELSE {texts[-1]}" if len(texts) % 2 else ""
        return f"CASE{whens}{other} END"

    def _binary(self, node: SqlNode) -> str:
        if node.text in _COMPARED:
            left, right = self._same_zone([self._part(part) for part in node.parts])
            return f"{left} {node.text} {right}"
        level = next((level for level in _LEVELS if node.text in level), {""})
        links: list[str] = []
        first = node
        while first.kind == "binary" and first.text in level:
            links.append(f" {first.text} {self._part(first.parts[1])}")
            first = first.parts[0]
        if not links:
            return f"{self._part(node.parts[0])} {node.text} {self._part(node.parts[1])}"
        return self._part(first) + "".join(reversed(links))

    def _same_zone(self, texts: list[str]) -> list[str]:
        """Make points in time comparable: those without a zone are UTC, as everywhere in headgate."""
        types = [self._type_of(text) for text in texts]
        zoned = {kind.time_zone for kind in types if isinstance(kind, pl.Datetime)}
        if len(zoned) < 2:
            return texts
        return [
            f"CAST({text} AS TIMESTAMPTZ)" if isinstance(kind, pl.Datetime) else text
            for text, kind in zip(texts, types, strict=True)
        ]

    def _call(self, node: SqlNode) -> str:
        special = getattr(self, f"_call_{node.text.lower()}", None)
        texts = [self.text(part) for part in node.parts]
        if special is not None:
            written: str = special(*texts)
            if len(written) > _REWRITTEN_MAX:  # arguments are repeated in it, and theirs in them
                raise SqlError(f"the arguments of {node.text} are too large", SIMPLER)
            return written
        return f"{node.text}({', '.join(texts)})"

    # Functions that Polars computes differently from SQL

    def _call_date(self, text: str, form: str = "") -> str:
        return self._read_time("DATE", text, form)

    def _call_timestamp(self, text: str, form: str = "") -> str:
        return self._read_time("TIMESTAMP", text, form)

    def _read_time(self, name: str, text: str, form: str) -> str:
        if not form and not text.startswith(
            "'"
        ):  # Polars would guess it from the batch's first value
            example = "%Y-%m-%d" if name == "DATE" else "%Y-%m-%d %H:%M:%S"
            raise SqlError(f"{name} needs a format", f"write {name}(text, '{example}')")
        return f"{name}({text}, {form})" if form else f"{name}({text})"

    def _call_log(self, base: str, number: str = "") -> str:
        return f"LOG({number}, {base})" if number else f"LOG10({base})"

    def _call_greatest(self, *texts: str) -> str:
        """Write GREATEST so that NaN is greater than any number, as in comparisons; Polars ignores it."""
        plain = f"GREATEST({', '.join(texts)})"
        types = [self._type_of(text) for text in texts]
        floats = [t for t, kind in zip(texts, types, strict=True) if _is_float(kind)]
        if not floats:
            return plain
        nan = " OR ".join(f"({text}) = {_NAN}" for text in floats)
        return f"CASE WHEN {nan} THEN {_NAN} ELSE {plain} END"

    def _call_round(self, number: str, digits: str = "0") -> str:
        """Write ROUND so that halves round away from zero; Polars rounds those of floats to even."""
        if not _is_float(self._type_of(number)) or not _DIGITS.fullmatch(digits):
            return f"ROUND({number}, {digits})"
        if int(digits) == 0:
            return (
                f"CASE WHEN ABS(({number}) - TRUNC({number})) = 0.5 "
                f"THEN TRUNC({number}) + SIGN({number}) ELSE ROUND({number}, 0) END"
            )
        there, back = ("/", "*") if int(digits) < 0 else ("*", "/")
        power = f"1e{abs(int(digits))}"
        scaled = self._call_round(f"({number}) {there} {power}")
        return f"CASE WHEN ABS({number}) < 1e15 THEN ({scaled}) {back} {power} ELSE {number} END"

    def _call_strpos(self, whole: str, part: str) -> str:
        """Write STRPOS in characters; Polars counts bytes, and takes null for not found."""
        return (
            f"CASE WHEN ({whole}) IS NULL OR ({part}) IS NULL THEN NULL "
            f"WHEN STARTS_WITH({whole}, {part}) THEN 1 WHEN STRPOS({whole}, {part}) = 0 THEN 0 "
            f"ELSE LENGTH(SPLIT_PART({whole}, {part}, 1)) + 1 END"
        )

    def _call_left(self, text: str, count: str) -> str:
        if _WHOLE.fullmatch(count):
            return f"LEFT({text}, {count})"
        return f"CASE WHEN ({count}) IS NULL THEN NULL ELSE LEFT({text}, {count}) END"

    def _call_substr(self, text: str, start: str, count: str = "") -> str:
        """Write SUBSTR so that a start before 1 counts as in the standard; Polars counts it from
        the end."""
        plain = f"SUBSTR({text}, {start}, {count})" if count else f"SUBSTR({text}, {start})"
        if _WHOLE.fullmatch(start):
            return plain
        before = f"LEFT({text}, GREATEST(({start}) + ({count}) - 1, 0))" if count else text
        return f"CASE WHEN ({start}) < 1 THEN {before} ELSE {plain} END"


def _is_float(kind: pl.DataType | None) -> bool:
    return kind in (pl.Float32, pl.Float64)
