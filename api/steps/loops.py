"""Loops: the checks of their arguments, and the nodes of both ends.

The streams call the user's function, which adds the steps inside, after the head is in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import PlanError
from ...operators.durations import Duration, format_duration, parse_duration
from ...operators.elements import Batch, ColumnBatch
from ...operators.expressions.expression_steps import ExpressionSteps, FilterStep
from ...operators.expressions.expressions import ExpressionLike, check_filter, show
from ...operators.functions.checks import check_plain, check_returns
from ...operators.graph import Chaining, Node
from ...operators.lazy_modules import is_expression
from ...operators.loops.head import IterationHead, IterationTail, LoopSettings, Matching, Rounds
from ...operators.origin import Origin
from ...operators.per_record.base import UserFunction
from ...operators.per_record.operators import kept_rows
from ...operators.schema import difference, optional, same_columns
from ...operators.whole_numbers import check_whole_number
from ..node_output import NodeOutput
from .per_record import user_function

HEAD: Final = "iterate"
TAIL: Final = "feedback"
"""Kinds of nodes."""


class OpenLoop(msgspec.Struct, frozen=True):
    """A loop whose head is in the graph, and whose feedback is still missing."""

    inside: NodeOutput
    """The records in the loop, of which its steps are made."""
    settings: LoopSettings
    origin: Origin


def begin_loop(
    output: NodeOutput,
    body: object,
    *,
    name: str,
    wait: Duration,
    parallelism: int | None,
    origin: Origin,
) -> OpenLoop:
    """Add the head of the loop of `stream.iterate(...)`."""
    wait_ms = parse_duration(wait, "wait of iterate", str(origin))
    settings = LoopSettings(name, _schema_in_loop(output), wait_ms)
    detail = f"waits {format_duration(wait_ms)} at the end" if wait_ms else ""
    return _begin(output, body, settings, parallelism, detail, output.has_event_time, origin)


def begin_rounds(
    output: NodeOutput,
    body: object,
    *,
    name: str,
    max_rounds: int,
    while_any: ExpressionLike | Callable[[Any], Any] | None,
    parallelism: int | None,
    origin: Origin,
) -> OpenLoop:
    """Add the head of the loop of `stream.iterate_rounds(...)`."""
    check_whole_number("max_rounds", max_rounds, origin)
    condition = None if while_any is None else _matching(output, while_any, name, origin)
    settings = LoopSettings(name, _schema_in_loop(output), rounds=Rounds(max_rounds, condition))
    detail = f"at most {max_rounds} rounds"
    return _begin(output, body, settings, parallelism, detail, True, origin)


def _begin(
    output: NodeOutput,
    body: object,
    settings: LoopSettings,
    parallelism: int | None,
    detail: str,
    has_event_time: bool,
    origin: Origin,
) -> OpenLoop:
    check_plain(body, "the body of an iteration", origin)
    if parallelism is not None:
        check_whole_number("parallelism", parallelism, origin)
    head = Node(
        name=settings.name,
        kind=HEAD,
        origin=origin,
        inputs=(output.as_input(),),
        factory=partial(IterationHead, settings),
        schema=settings.schema,
        row_type=output.row_type,
        parallelism=parallelism,
        # Barriers leave it at once and come back later, so no other operator may be cut with
        # it.
        chaining=Chaining.NEVER,
        stateful=True,
        detail=detail,
    )
    return OpenLoop(output.add(head, has_event_time), settings, origin)


def end_loop(loop: OpenLoop, feedback: NodeOutput, output: NodeOutput) -> None:
    """Add the tail of a loop, which takes the feedback that the user's function has returned.

    Raises:
        PlanError: the feedback cannot go back to the head, or `output` is of another job.
    """
    inside, origin = loop.inside, loop.origin
    if feedback.job is not inside.job or output.job is not inside.job:
        raise PlanError(
            f"the body of `{inside.name}` returns streams of another job", where=str(origin)
        )
    head = inside.node
    _check_feedback(feedback, inside, origin)
    _check_not_nested(head, feedback.node, origin)
    if loop.settings.rounds is not None:
        _check_bounded(feedback, origin)
    tail = inside.job.add_node(
        Node(
            name="",
            kind=TAIL,
            origin=origin,
            inputs=(feedback.as_input(),),
            factory=IterationTail,
            schema=loop.settings.schema,
            parallelism=head.parallelism,
            feeds=head.id,
        )
    )
    if tail.parallelism != head.parallelism:
        raise PlanError(
            f"all feedback of `{head.name}` would go to one subtask, and the loop has more",
            where=str(origin),
            fix="leave out the partitioning of the feedback stream, or give iterate parallelism=1",
        )


def _schema_in_loop(output: NodeOutput) -> pa.Schema | None:
    """Return the schema in the loop: feedback may be null where the input is not."""
    return None if output.schema is None else optional(output.schema)


def _check_feedback(feedback: NodeOutput, inside: NodeOutput, origin: Origin) -> None:
    before, after = inside.schema, feedback.schema
    if (before is None) != (after is None):
        kind = "Python objects" if after is None else "columns"
        raise PlanError(
            f"the feedback of `{inside.name}` is of {kind}, and its input is not", where=str(origin)
        )
    if before is not None and not same_columns(before, after):
        problem = difference(before, after) or "other order of columns"
        raise PlanError(
            f"what `{feedback.name}` feeds back has other columns than the input of "
            f"`{inside.name}`: {problem}",
            where=str(origin),
            fix=f"bring them together with .select({', '.join(map(repr, before.names))})",
        )
    if inside.has_event_time and not feedback.has_event_time:
        raise PlanError(
            f"what `{feedback.name}` feeds back has no event time, the input of `{inside.name}` has",
            where=str(origin),
        )


def _check_not_nested(head: Node, last: Node, origin: Origin) -> None:
    """Check that the feedback comes from the head, and passes through no other loop."""
    inside = [node for node in ancestors(last) if head in ancestors(node)]
    if head not in inside:
        raise PlanError(
            f"the feedback of `{head.name}` does not come from the stream in the loop",
            where=str(origin),
            fix="derive it from the argument of the body",
        )
    for node in inside:
        if node.kind == HEAD and node is not head:
            raise PlanError(
                f"`{node.name}` is a loop inside the loop `{head.name}`",
                where=str(origin),
                fix="put one after the other, or make one loop with a field that says where a "
                "record is",
            )


def ancestors(node: Node) -> list[Node]:
    """Return a node and all that it reads, directly or not."""
    found: dict[int, Node] = {}
    front = [node]
    while front:
        each = front.pop()
        if each.id not in found:
            found[each.id] = each
            front.extend(input_.node for input_ in each.inputs)
    return list(found.values())


def _check_bounded(feedback: NodeOutput, origin: Origin) -> None:
    """Check that all input of the loop ends, from outside or by a step within: a round waits for it."""
    endless = [node.name for node in _sources(ancestors(feedback.node)) if not _ends(node)]
    if endless:
        raise PlanError(
            f"the first round ends when the input ends, and source `{endless[0]}` has no end",
            where=str(origin),
            fix="use iterate, which has no rounds",
        )


def _sources(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.source is not None]


def _ends(node: Node) -> bool:
    return node.source is not None and node.source.bounded


class MatchingRows:
    """Counts by an expression on columns."""

    def __init__(self, steps: ExpressionSteps) -> None:
        self._steps = steps

    def __call__(self, batch: Batch) -> int:
        assert isinstance(batch, ColumnBatch)  # the plan has checked that the stream has columns
        kept = self._steps.apply(batch)
        return 0 if kept is None else len(kept)


class MatchingRecords:
    """Counts by a function of a record."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def __call__(self, batch: Batch) -> int:
        return len(kept_rows(self._user.apply(self._user.reader(batch))))


def _matching(
    output: NodeOutput,
    condition: ExpressionLike | Callable[[Any], Any],
    name: str,
    origin: Origin,
) -> Matching:
    """Return the condition over the records of an output.

    Raises:
        PlanError: it is no condition, or it reads what they do not have.
    """
    if not (isinstance(condition, str) or is_expression(condition)):
        check_plain(condition, "while_any", origin)
        check_returns(condition, "while_any", origin)
        return MatchingRecords(
            user_function(output, "while_any", name, origin, condition, None, max_in_flight=1)
        )
    schema = output.columns("while_any by expression", origin)
    column = check_filter(condition, schema, "while_any", str(origin))
    return MatchingRows(ExpressionSteps([FilterStep(column, show(condition))], schema))
