"""The tree of an expression: operations on the columns of one record, and nothing else."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

NESTING_MAX: Final = 40
"""The deepest nesting of brackets, calls, CASE and NOT, in levels."""
DEPTH_MAX: Final = 250
"""The longest chain of dependent operations (the links of `a + b + c`), in operations."""
OPERATIONS_MAX: Final = 10_000
"""The most operators, calls and branches of one expression; values of an `IN` list do not count."""
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
    "is",  # text: what follows, such as `IS NOT NULL`
    "binary",  # text: the operator
    "all",  # parts joined by AND
    "any",  # parts joined by OR
    "in",  # text: IN or NOT IN; parts: the operand, then the values
    "between",  # text: BETWEEN or NOT BETWEEN; parts: operand, from, to
    "case",  # parts: condition and result in turn, then optionally the ELSE result
    "array",
]


class SqlNode(msgspec.Struct, frozen=True):
    """An operation. `depth` is the length of its chain of dependent operations, itself included."""

    kind: Kind
    text: str = ""
    parts: tuple[SqlNode, ...] = ()
    depth: int = 0

    @property
    def is_literal(self) -> bool:
        """True for a literal value."""
        return self.kind == "literal"


class Reading(msgspec.Struct, frozen=True):
    """A parsed text: the expression, and the name after AS."""

    node: SqlNode
    alias: str | None


def columns_of(node: SqlNode) -> frozenset[str]:
    """Return the names of all columns in the tree."""
    found: set[str] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one.kind == "column":
            found.add(one.text)
        todo += one.parts
    return frozenset(found)
