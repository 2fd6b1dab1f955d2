"""The step of `keyed.match(...)`: checks its arguments, naming the user's line, and adds the node."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import PlanError
from ...operators.async_calls.map_async import TIMED_OUT
from ...operators.functions.checks import check_plain, check_returns
from ...operators.graph import Node
from ...operators.origin import Origin
from ...operators.patterns.automaton import compiled
from ...operators.patterns.conditions import Expressions
from ...operators.patterns.match import Match
from ...operators.patterns.matcher import Rules
from ...operators.patterns.operator import MatchOperator
from ...operators.patterns.pattern import Pattern
from ...operators.patterns.store import match_states
from ...operators.per_record.base import UserFunction
from ...operators.process.declared import declared_states
from ...operators.process.functions import ProcessFunction
from ...operators.process.operator import ProcessInput, ProcessStep
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, into_schema, record_class
from ...operators.suggestions import suggest
from ...operators.windows.late import late_sides
from ..node_output import NodeOutput


class Matching(ProcessFunction[Any, Any]):
    """A placeholder for the user's function of other steps with timers; a pattern has none."""


def add_match(
    output: NodeOutput,
    pattern: object,
    select: Callable[[Match[Any]], Any] | None,
    name: str,
    into: SchemaLike | None,
    origin: Origin,
) -> NodeOutput:
    """Add the step of `keyed.match(...)`.

    Raises:
        PlanError: not a pattern, one that cannot be matched, or one that does not fit the stream.
    """
    checked = _checked(output, pattern, select, into, origin)
    automaton = compiled(checked)
    leaves = [leaf for leaf in automaton.leaves if leaf.kind == "expression"]
    expressions = Expressions(leaves, output.schema, name)
    bits = {leaf: bit for bit, leaf in enumerate(leaves)}
    rules = Rules(automaton, checked.after, checked.within_ms, checked.gap_ms, bits, name)
    reader = RowReader(output.schema, output.row_type, repr)
    # Conditions and select see the records too, so all columns are read, not only those that one
    # function uses.
    reader.columns, reader.record_class = None, output.row_type
    schema = None if into is None else into_schema(into, origin)
    fields = output.key_fields(origin)
    declared = declared_states(Matching(), fields, str(origin), event_time=True)
    shape = zlib.crc32(automaton.shape().encode()) >> 1
    step = ProcessStep(
        Matching(),
        UserFunction(select or repr, name, origin, reader, schema),
        (ProcessInput(reader, output.key),),
        match_states(declared, shape),
        (TIMED_OUT,),
        True,
    )
    node = Node(
        name=name,
        kind="match",
        origin=origin,
        inputs=(output.as_input(),),
        factory=partial(MatchOperator, step, rules, expressions, select),
        schema=schema,
        row_type=record_class(into),
        stateful=True,
        sides={**late_sides(output.schema), TIMED_OUT: None},
        detail=checked.describe(),
    )
    return output.add(node)


def _checked(
    output: NodeOutput,
    pattern: object,
    select: Callable[[Match[Any]], Any] | None,
    into: SchemaLike | None,
    origin: Origin,
) -> Pattern[Any]:
    where = str(origin)
    if not isinstance(pattern, Pattern):
        raise PlanError(
            f"match needs a pattern, got `{type(pattern).__name__}`",
            where=where,
            fix='such as hg.cep.begin("a").where(...).next("b")',
        )
    if not output.has_event_time:
        raise PlanError(
            f"a pattern needs event time, and `{output.name}` has none",
            where=where,
            fix='call .event_time("column", max_out_of_order="10s") before',
        )
    if select is not None:
        check_plain(select, "match", origin)
        check_returns(select, "match", origin)
    elif into is not None:
        raise PlanError(
            "a match has no columns of its own",
            where=where,
            fix='give select= a function of the match: select=lambda m: {"user": m.key}, into=...',
        )
    _check_after(pattern, where)
    return pattern


def _check_after(pattern: Pattern[Any], where: str) -> None:
    after = pattern.after
    names = [stage.name for stage in pattern.taking]
    if after.stage and after.stage not in names:
        raise PlanError(
            f"{after} names no stage that takes records stage=`{after.stage}`",
            where=where,
            fix=suggest(after.stage, names, "stages"),
        )
