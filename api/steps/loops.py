"""Loops: the methods call the user's body on the inner stream, check its result, and add both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import polars as pl
import pyarrow as pa

from ...errors import PlanError
from ...operators.durations import Duration, format_duration, parse_duration
from ...operators.elements import Batch, ColumnBatch
from ...operators.expressions.expression_steps import ExpressionSteps, FilterStep
from ...operators.expressions.expressions import ExpressionLike, check_filter, show
from ...operators.functions.checks import check_plain, check_returns
from ...operators.graph import Chaining, Node
from ...operators.loops.head import IterationHead, IterationTail
from ...operators.loops.settings import LoopSettings, Matching, Rounds
from ...operators.origin import Origin, capture_origin
from ...operators.per_record.base import UserFunction
from ...operators.per_record.operators import kept_rows
from ...operators.schema import difference, optional, same_columns
from ..required_name import named
from ..stream_base import StreamBase, check_parallelism

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")
_STATE = "records under way in the loop are stored under this name"

Body: TypeAlias = Callable[[Any], tuple[Any, Any]]
HEAD, TAIL = "iterate", "feedback"
"""Kinds of nodes."""


def add_iterate(
    stream: StreamBase[Any],
    body: Body,
    *,
    name: str,
    wait: Duration,
    parallelism: int | None,
    origin: Origin,
) -> Stream[Any]:
    """Add the loop of `stream.iterate(...)`; return the body's output."""
    wait_ms = parse_duration(wait, "wait of iterate", str(origin))
    settings = LoopSettings(name, _schema_in_loop(stream), wait_ms)
    detail = f"waits {format_duration(wait_ms)} at the end" if wait_ms else ""
    return _add(stream, body, settings, parallelism, detail, stream.has_event_time, origin)


def add_rounds(
    stream: StreamBase[Any],
    body: Body,
    *,
    name: str,
    max_rounds: int,
    while_any: Any,
    parallelism: int | None,
    origin: Origin,
) -> Stream[Any]:
    """Add the loop of `stream.iterate_rounds(...)`; return the body's output."""
    if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
        raise PlanError(
            f"max_rounds must be a whole number of at least 1 value=`{max_rounds}`",
            where=str(origin),
        )
    condition = None if while_any is None else matching(stream, while_any, name, origin)
    settings = LoopSettings(name, _schema_in_loop(stream), rounds=Rounds(max_rounds, condition))
    return _add(stream, body, settings, parallelism, f"at most {max_rounds} rounds", True, origin)


def _add(
    stream: StreamBase[Any],
    body: Body,
    settings: LoopSettings,
    parallelism: int | None,
    detail: str,
    has_event_time: bool,
    origin: Origin,
) -> Stream[Any]:
    check_plain(body, "the body of an iteration", origin)
    if parallelism is not None:
        check_parallelism(parallelism, origin)
    job = stream._job
    head = job.add_node(
        Node(
            id=-1,
            name=settings.name,
            kind=HEAD,
            origin=origin,
            inputs=(stream._input(),),
            factory=partial(IterationHead, settings),
            schema=settings.schema,
            row_type=stream._row_type,
            parallelism=parallelism,
            # Barriers leave it at once and come back later, so no other operator may be cut with
            # it.
            chaining=Chaining.NEVER,
            stateful=True,
            detail=detail,
        )
    )
    inside = stream._like(head, has_event_time)
    feedback, output = _returned(body(inside), inside, origin)
    _check_feedback(feedback, inside, origin)
    _check_not_nested(head, feedback._node, origin)
    if settings.rounds is not None:
        _check_bounded(feedback, origin)
    tail = job.add_node(
        Node(
            id=-1,
            name="",
            kind=TAIL,
            origin=origin,
            inputs=(feedback._input(),),
            factory=IterationTail,
            schema=settings.schema,
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
    return output


def _schema_in_loop(stream: StreamBase[Any]) -> pa.Schema | None:
    """Return the schema in the loop: feedback may be null where the input is not."""
    return None if stream.schema is None else optional(stream.schema)


def _returned(
    result: Any, inside: Stream[Any], origin: Origin
) -> tuple[StreamBase[Any], Stream[Any]]:
    from ..stream import Stream  # streams are made with this module

    pair = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    feedback, output = pair
    if not isinstance(feedback, StreamBase) or not isinstance(output, Stream):
        raise PlanError(
            f"the body of `{inside.name}` must return two streams, the feedback and the output, and "
            f"returned `{type(result).__name__}`",
            where=str(origin),
            fix="return feedback, output; add a step to a keyed stream first",
        )
    if feedback._job is not inside._job or output._job is not inside._job:
        raise PlanError(
            f"the body of `{inside.name}` returns streams of another job", where=str(origin)
        )
    return feedback, output


def _check_feedback(feedback: StreamBase[Any], inside: Stream[Any], origin: Origin) -> None:
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


def _check_bounded(feedback: StreamBase[Any], origin: Origin) -> None:
    """Check that all input of the loop ends, from outside or by a step within: a round waits for it."""
    endless = [node.name for node in _sources(ancestors(feedback._node)) if not _ends(node)]
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


def matching(stream: StreamBase[Any], condition: Any, name: str, origin: Origin) -> Matching:
    """Return the condition over the records of a stream.

    Raises:
        PlanError: it is no condition, or it reads what the stream does not have.
    """
    if not isinstance(condition, str | pl.Expr):
        check_plain(condition, "while_any", origin)
        check_returns(condition, "while_any", origin)
        return MatchingRecords(
            stream._user_function("while_any", name, origin, condition, None, max_in_flight=1)
        )
    schema = stream._columns("while_any by expression", origin)
    column = check_filter(condition, schema, "while_any", str(origin))
    return MatchingRows(ExpressionSteps([FilterStep(column, show(condition))], schema))


class Loops(StreamBase[T], Generic[T]):
    """Steps that feed records back."""

    @named("iteration", _STATE)
    def iterate(
        self,
        body: Callable[[Stream[T]], tuple[StreamBase[T], Stream[U]]],
        *,
        name: str,
        wait: Duration = "0s",
        parallelism: int | None = None,
    ) -> Stream[U]:
        """Add a loop: `body(stream) -> (feedback, output)`; records of `feedback` go back into `stream`.

        It ends when the inputs have ended and no records are in flight in it any more.

        Args:
            body: called once, now, to build the steps of the loop.
            name: the address of the state.
            wait: the loop ends only after it was empty for this long.
            parallelism: of both ends of the loop.
        """
        from .loops import add_iterate

        origin = capture_origin()
        return add_iterate(self, body, name=name, wait=wait, parallelism=parallelism, origin=origin)

    @named("iteration", _STATE)
    def iterate_rounds(
        self,
        body: Callable[[Stream[T]], tuple[StreamBase[T], Stream[U]]],
        *,
        name: str,
        max_rounds: int,
        while_any: ExpressionLike | Callable[[T], Any] | None = None,
        parallelism: int | None = None,
    ) -> Stream[U]:
        """Add a loop in rounds, for input that ends: the feedback of one round is the input of the next.

        Event time in the loop is the number of the round, from 0; when a round is over in all
        subtasks, it is the watermark. The loop ends after a round without feedback, or as
        `while_any` or `max_rounds` say; then the feedback of the last round is dropped.

        Args:
            body: called once, now, to build the steps of the loop.
            name: the address of the state.
            max_rounds: the most rounds.
            while_any: there is another round only if this holds for some record of the feedback.
            parallelism: of both ends of the loop.
        """
        from .loops import add_rounds

        origin = capture_origin()
        return add_rounds(
            self,
            body,
            name=name,
            max_rounds=max_rounds,
            while_any=while_any,
            parallelism=parallelism,
            origin=origin,
        )
