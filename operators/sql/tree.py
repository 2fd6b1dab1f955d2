"""The tree of an expression: operations on the columns of one record, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

NESTING_MAX: Final = 40
"""How many brackets, calls, CASE and NOT may stand inside each other, in levels."""
DEPTH_MAX: Final = 250
"""How many operations may depend on each other in a row (the links of `a + b + c`), in operations."""
OPERATIONS_MAX: Final = 10_000
"""Operators, calls and branches of one expression, in operations; values of an `IN` list are none."""
SIMPLER: Final = "split it into several select steps, each making a column that the next one reads"

Kind: TypeAlias = Literal[
    "literal",  # text: as it is written
    "column",  # text: the name; parts: none
    "field",  # text: a field of the struct in parts[0]
    "item",  # parts: a list and a place
    "call",  # text: the function's name in capitals; parts: its arguments
    "extract",  # text: the unit; parts: of what
    "trim",  # text: BOTH, LEADING or TRAILING; parts: the characters, of what
    "cast",  # text: `CAST` or `TRY_CAST` and the type, such as `CAST INT`; parts: of what
    "zone",  # text: a time zone as SQL text; parts: the timestamp
    "sign",  # text: + or -
    "not",
    "is",  # text: what stands behind, such as `IS NOT NULL`
    "binary",  # text: the operator
    "all",  # parts joined by AND
    "any",  # parts joined by OR
    "in",  # text: IN or NOT IN; parts: what is looked for, then the values
    "between",  # text: BETWEEN or NOT BETWEEN; parts: what, from, to
    "case",  # parts: condition and result by turns; then perhaps the result else
    "array",
]


@dataclass(frozen=True, slots=True)
class Node:
    """An operation. `depth` is how many depend on each other in a row, itself included."""

    kind: Kind
    text: str = ""
    parts: tuple[Node, ...] = ()
    depth: int = 0

    @property
    def is_literal(self) -> bool:
        """Whether it is a value as written."""
        return self.kind == "literal"


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read: the expression, and the name that stands behind AS."""

    node: Node
    alias: str | None


def columns_of(node: Node) -> frozenset[str]:
    """The names of all columns in the tree."""
    found: set[str] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one.kind == "column":
            found.add(one.text)
        todo += one.parts
    return frozenset(found)
