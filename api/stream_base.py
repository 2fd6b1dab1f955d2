"""The base of all streams: a place in the job's graph, and the ways to add to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import pyarrow as pa

from ..errors import HeadgateError, PlanError
from ..operators.base import AsyncOperator, Operator, OperatorFactory
from ..operators.durations import Duration, parse_duration
from ..operators.expressions.expression_steps import (
    ExpressionFactory,
    ExpressionSteps,
    Step,
    columns_read,
)
from ..operators.functions.checks import (
    check_callable,
    check_returns,
    check_takes,
    function_name,
    is_async,
)
from ..operators.functions.dead_letters import (
    FAIL,
    OnError,
    OnErrorLike,
    checked_on_error,
    failed_sides,
)
from ..operators.functions.life import Results, with_life
from ..operators.graph import Chaining, Input, Node
from ..operators.origin import Origin, capture_origin
from ..operators.partitioning import Forward, Global, Partitioning
from ..operators.per_record.base import UserFunction
from ..operators.rows import RowReader, check_attributes
from ..operators.schema import SchemaLike, difference, record_class, same_columns, to_schema
from ..operators.sink import Sink

if TYPE_CHECKING:
    from .job_definition import JobDefinition
    from .stream import Stream

T = TypeVar("T")


class StreamBase(Generic[T]):
    """A step's output and its distribution; adds the next step to the job's graph."""

    def __init__(
        self,
        job: JobDefinition,
        node: Node,
        *,
        side: str | None = None,
        partitioning: Partitioning | None = None,
        has_event_time: bool = False,
    ) -> None:
        self._job = job
        self._node = node
        self._side = side
        self._partitioning = partitioning or Forward()
        self._has_event_time = has_event_time

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the records; None for a stream of Python objects."""
        return self._node.schema if self._side is None else self._node.sides[self._side]

    @property
    def name(self) -> str:
        """The name of the step that makes this stream."""
        return self._node.name if self._side is None else f"{self._node.name}.{self._side}"

    @property
    def has_event_time(self) -> bool:
        """True after `event_time`, where records have event times."""
        return self._has_event_time

    def __repr__(self) -> str:
        """Show the name and the columns: `Stream(clicks: url string, at timestamp[ms])`."""
        schema = self.schema
        columns = ["Python objects"] if schema is None else [f"{f.name} {f.type}" for f in schema]
        time = "; event time" if self._has_event_time else ""
        return f"{type(self).__name__}({self.name}: {', '.join(columns)}{time})"

    def show(self, n: int = 10, *, within: Duration = "10s") -> None:
        """Print the first records of this stream as a table.

        Runs the part of the job that makes the stream, in this process and with parallelism 1, until
        there are `n` records, the input ends, or the time is up. Nothing is written: the job's sinks and
        other branches do not run, and its checkpoints are neither read nor written. Functions of steps on
        the way are called. A window fires only when its time has come, so showing one may take much of the
        input.

        Args:
            n: the most records to print.
            within: how long to wait for them.

        Raises:
            UsageError: the job is wrong as written, or a source keeps its data in the job's storage.
            JobError: a step failed.
        """
        origin = capture_origin()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise PlanError(
                f"show needs a whole number of records from 1 n=`{n}`", where=str(origin)
            )
        self._job._show(self, n, parse_duration(within, "within", str(origin)), origin)

    def parallel(self, parallelism: int) -> Self:
        """Run the step that makes this stream in this many subtasks."""
        origin = capture_origin()
        node = self._own_node("parallel", origin)
        check_parallelism(parallelism, origin)
        if parallelism > 1 and any(isinstance(i.partitioning, Global) for i in node.inputs):
            raise PlanError(
                f"`{node.name}` runs in one subtask, since it gets all records", where=str(origin)
            )
        node.parallelism = parallelism
        return self

    def start_new_chain(self) -> Self:
        """Do not run the step in the same subtask as the one before it."""
        node = self._own_node("start_new_chain", capture_origin())
        if node.chaining is Chaining.ALWAYS:
            node.chaining = Chaining.HEAD
        return self

    def disable_chaining(self) -> Self:
        """Do not run the step in the same subtask as any other."""
        self._own_node("disable_chaining", capture_origin()).chaining = Chaining.NEVER
        return self

    def slot_sharing_group(self, name: str) -> Self:
        """Run the step only in slots of this group, whose resources the job declares.

        The steps behind it are in the same group, unless they name another, or read streams of several
        groups: then they are in the group `default`. Steps of different groups share no slot and no chain.

        Raises:
            PlanError: the job declares no such group.
        """
        origin = capture_origin()
        node = self._own_node("slot_sharing_group", origin)
        node.slot_sharing_group = self._job.check_group(name, origin)
        return self

    def _own_node(self, method: str, origin: Origin) -> Node:
        if self._side is not None or not isinstance(self._partitioning, Forward):
            raise PlanError(
                f"{method}() applies to a step, and must directly follow it", where=str(origin)
            )
        return self._node

    @property
    def _row_type(self) -> type[Any] | None:
        return self._node.row_type if self._side is None else None

    def _input(self, partitioning: Partitioning | None = None) -> Input:
        return Input(self._node, partitioning or self._partitioning, self._side)

    def _like(self, node: Node, has_event_time: bool | None = None) -> Stream[Any]:
        """Return the stream that `node` makes; event time is kept unless specified otherwise."""
        from .stream import Stream  # streams are made of this class

        keeps = self._has_event_time if has_event_time is None else has_event_time
        return Stream(self._job, node, has_event_time=keeps)

    def _add(
        self,
        kind: str,
        name: str,
        origin: Origin,
        factory: OperatorFactory,
        *,
        schema: pa.Schema | None,
        row_type: type[Any] | None = None,
        columns: frozenset[str] | None = None,
        detail: str = "",
        is_async: bool = False,
        has_event_time: bool | None = None,
        sides: dict[str, pa.Schema | None] | None = None,
    ) -> Stream[Any]:
        """Add a stateless step after this stream; an empty name is derived from its kind."""
        node = Node(
            id=-1,
            name=name,
            kind=kind,
            origin=origin,
            inputs=(self._input(),),
            factory=factory,
            schema=schema,
            row_type=row_type,
            chaining=Chaining.HEAD if is_async else Chaining.ALWAYS,
            columns_read=columns,
            detail=detail,
            sides=sides or {},
        )
        return self._like(self._job.add_node(node), has_event_time)

    def _expression(
        self, kind: str, name: str, origin: Origin, step: Step, schema: pa.Schema
    ) -> Stream[Any]:
        steps = ExpressionSteps([step], schema)
        reads, passes = columns_read([step])
        return self._add(
            kind,
            name,
            origin,
            ExpressionFactory(steps),
            schema=schema if passes else steps.output_schema,
            row_type=self._row_type if passes else None,
            columns=reads,
            detail=step.text,
        )

    def _per_record(
        self,
        kind: str,
        operators: tuple[Callable[..., Operator], Callable[..., AsyncOperator]],
        function: Callable[..., Any],
        into: SchemaLike | None,
        name: str,
        max_in_flight: int,
        on_error: OnErrorLike,
    ) -> Stream[Any]:
        """Add a step that calls a function for each record: the plain operator or the async one."""
        origin = capture_origin()
        if kind == "map":
            check_returns(function, kind, origin)
        policy = checked_on_error(on_error, origin)
        schema = None if into is None else into_schema(into, origin)
        user = self._user_function(kind, name, origin, function, schema, max_in_flight, policy)
        return self._add(
            kind,
            name,
            origin,
            with_life(
                partial(operators[is_async(function)], user),
                function,
                user.step,
                origin,
                Results(schema, self._has_event_time),
            ),
            schema=schema,
            row_type=record_class(into),
            columns=user.reader.columns_read,
            detail=function_name(function),
            is_async=is_async(function),
            sides=failed_sides(policy, self.schema),
        )

    def _user_function(
        self,
        kind: str,
        name: str,
        origin: Origin,
        function: Callable[..., Any],
        into: pa.Schema | None,
        max_in_flight: int,
        on_error: OnError = FAIL,
    ) -> UserFunction:
        check_callable(function, kind, origin)
        check_takes(function, ("the record",), kind, origin)
        if (
            isinstance(max_in_flight, bool)
            or not isinstance(max_in_flight, int)
            or max_in_flight < 1
        ):
            raise PlanError(
                f"max_in_flight must be a whole number of at least 1 value=`{max_in_flight}`",
                where=str(origin),
            )
        self._check_reads(function, kind, origin)
        reader = RowReader(self.schema, self._row_type, function)
        step = name or self._job.derived_name(kind)
        return UserFunction(function, step, origin, reader, into, max_in_flight, on_error)

    def _check_reads(self, function: Callable[..., Any], kind: str, origin: Origin) -> None:
        if self.schema is not None:
            check_attributes(function, self.schema, self._row_type, kind, str(origin))

    def _columns(self, what: str, origin: Origin) -> pa.Schema:
        """Return the schema, which `what` needs."""
        if self.schema is None:
            raise PlanError(
                f"{what} needs columns, but `{self.name}` is a stream of Python objects",
                where=str(origin),
                fix=f"add into= with a Struct, dataclass or schema to the step `{self.name}`",
            )
        return self.schema

    def _check_union(self, other: StreamBase[Any], origin: Origin) -> None:
        if not isinstance(other, StreamBase) or other._job is not self._job:
            raise PlanError("union needs streams of the same job", where=str(origin))
        if (self.schema is None) != (other.schema is None):
            plain = self if self.schema is None else other
            plain._columns("union with a stream of columns", origin)
        if self.schema is not None and not same_columns(self.schema, other.schema):
            problem = difference(self.schema, other.schema) or "other order of columns"
            raise PlanError(
                f"`{self.name}` and `{other.name}` have different columns: {problem}",
                where=str(origin),
                fix=f"bring them together with .select({', '.join(map(repr, self.schema.names))})",
            )
        if self._has_event_time != other._has_event_time:
            without = other if self._has_event_time else self
            raise PlanError(
                f"`{without.name}` has no event time, the stream it is united with has",
                where=str(origin),
                fix="call .event_time(...) on each stream before union, or once after it",
            )

    def _check_sink(self, sink: Sink, name: str, origin: Origin) -> None:
        if sink.guarantee not in sink.guarantees:
            able = ", ".join(sorted(guarantee.value for guarantee in sink.guarantees))
            raise PlanError(
                f"sink `{name}` cannot promise {sink.guarantee.value}: {sink.describe()}",
                where=str(origin),
                fix=f"it supports: {able}",
            )
        if sink.needs_columns:
            self._columns(f"sink `{name}`", origin)
        try:
            sink.bind(self.schema)
        except HeadgateError as error:
            if not error.where:
                error.where = str(origin)
            raise


def check_parallelism(value: object, origin: Origin, what: str = "parallelism") -> int:
    """Check a parallelism given by the user.

    Raises:
        PlanError: not a whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(
            f"{what} must be a whole number of at least 1 value=`{value!r}`", where=str(origin)
        )
    return value


def into_schema(into: SchemaLike, origin: Origin) -> pa.Schema:
    """Return the schema given with `into=`; errors name the user's line."""
    try:
        return to_schema(into)
    except PlanError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error
