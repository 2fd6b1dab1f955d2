"""Conditions of stages: functions of a record, of a record and what came before it, or expressions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ...errors import PlanError
from ..elements import ColumnBatch
from ..expressions.expressions import Column, check_filter
from ..functions.checks import check_plain, check_returns
from ..lazy_modules import is_expression, pl
from ..origin import Origin

ConditionLike: TypeAlias = "Callable[..., Any] | str | pl.Expr"
LeafKind: TypeAlias = Literal["expression", "record", "earlier"]
EXPRESSIONS_MAX: Final = 62
"""The most expressions of one pattern: their answers for a record are the bits of one integer."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """One condition as the user gave it, its origin, and what it takes to evaluate it."""

    given: ConditionLike
    kind: LeafKind
    origin: Origin


@dataclass(frozen=True, slots=True)
class Condition:
    """Conditions joined from left to right, without precedence; an empty one always holds.

    `terms` are pairs of whether the leaf is joined by *or* (else by *and*), and the leaf.
    """

    terms: tuple[tuple[bool, Leaf], ...] = ()

    def joined(self, leaf: Leaf, *, by_or: bool) -> Condition:
        """Return the condition with one more leaf at the end."""
        return Condition((*self.terms, (by_or, leaf)))

    def holds(self, judge: Callable[[Leaf], bool]) -> bool:
        """Return whether it holds, given the judge of its leaves; evaluation stops early."""
        value = True
        for by_or, leaf in self.terms:
            if value != by_or:
                value = judge(leaf)
        return value


ALWAYS: Final = Condition()


def leaf_of(given: ConditionLike, origin: Origin) -> Leaf:
    """Return the condition for a value that a user gave.

    Raises:
        PlanError: it cannot be a condition.
    """
    if isinstance(given, str) or is_expression(given):
        return Leaf(given, "expression", origin)
    if not callable(given):
        raise PlanError(
            f"a condition is a function or an expression, not `{type(given).__name__}`",
            where=str(origin),
            fix='such as .where(lambda r: r.amount > 10) or .where("amount > 10")',
        )
    check_plain(given, "a condition", origin)
    check_returns(given, "a condition", origin)
    count = _parameters(given)
    if count not in (1, 2):
        raise PlanError(
            f"a condition takes a record, or a record and what came before it, not {count} arguments",
            where=str(origin),
            fix="write lambda record: ... or lambda record, earlier: ...",
        )
    return Leaf(given, "record" if count == 1 else "earlier", origin)


def _parameters(function: Callable[..., Any]) -> int:
    """Return the number of required positional arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    optional = [p for p in parameters if p not in needed and p.kind in kinds]
    varied = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return len(needed) or (1 if optional or varied else 0)


class Expressions:
    """The expressions of a pattern, evaluated on whole batches. Picklable.

    Args:
        leaves: the conditions that are expressions; leaf *i* is answered by bit *i*.
        schema: of the stream; None: it has no columns.
        step: the name of the step, for errors.

    Raises:
        PlanError: the stream has no columns, an expression does not fit them, or there are too
            many.
    """

    def __init__(self, leaves: Sequence[Leaf], schema: pa.Schema | None, step: str) -> None:
        self._columns: list[Column] = []
        for leaf in leaves:
            where = str(leaf.origin)
            if schema is None:
                raise PlanError(
                    f"the expression `{leaf.given}` needs columns, and the stream is of Python objects",
                    where=where,
                    fix="give a function, or make columns with into= of the step before",
                )
            if len(leaves) > EXPRESSIONS_MAX:
                raise PlanError(
                    f"a pattern has at most {EXPRESSIONS_MAX} expressions, this one {len(leaves)}",
                    where=where,
                    fix="write some conditions as functions",
                )
            assert not callable(leaf.given)
            self._columns.append(check_filter(leaf.given, schema, step, where))
        reads = frozenset[str]().union(*(column.reads for column in self._columns))
        self._reads = sorted(reads)

    def answers(self, batch: Any) -> list[int]:
        """Return, for each record of a batch, the bits of the expressions that are true for it."""
        rows = len(batch)
        if not self._columns:
            return [0] * rows
        assert isinstance(batch, ColumnBatch)
        data = batch.data
        frame = pl.DataFrame([pl.Series(name, data.column(name)) for name in self._reads])
        bits = np.zeros(rows, np.int64)
        for bit, column in enumerate(self._columns):
            answer = frame.select(column.expression.fill_null(False)).to_series().to_numpy()
            bits |= answer.astype(np.int64) << bit  # a constant has one answer for all rows
        found: list[int] = bits.tolist()
        return found
