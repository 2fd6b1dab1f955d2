"""Windows with functions of records: the checks of their arguments, and the nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa

from ...errors import PlanError
from ...operators.expressions.expressions import show
from ...operators.functions.checks import check_plain, check_returns, check_takes, is_async
from ...operators.graph import ByClock, Node
from ...operators.lazy_modules import is_expression
from ...operators.origin import Origin
from ...operators.partitioning import HashFunction
from ...operators.per_record.base import UserFunction
from ...operators.process.declared import declared_states
from ...operators.process.functions import ProcessFunction
from ...operators.process.operator import ProcessInput, ProcessStep
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, into_schema, record_class
from ...operators.windows.kinds import (
    CountWindow,
    CumulativeWindow,
    GlobalWindow,
    SlidingWindow,
    TimeWindow,
    TumblingWindow,
)
from ...operators.windows.late import late_sides
from ...operators.windows.records import evictors, triggers
from ...operators.windows.records.assigners import (
    Cumulative,
    Global,
    Session,
    Sliding,
    Tumbling,
    WindowAssigner,
    not_an_assigner,
)
from ...operators.windows.records.evictors import Evictor
from ...operators.windows.records.functions import AggregateFunction, WindowProcess
from ...operators.windows.records.operator import EmitResult, Windowing, WindowOperator
from ...operators.windows.records.store import TABLES, Reduced, window_states
from ...operators.windows.records.triggers import Trigger
from ...operators.windows.records.window import WindowTime
from ...operators.windows.sessions.window import SessionWindow
from ..node_output import NodeOutput
from .process import side_names

AnyWindow: TypeAlias = TimeWindow | SessionWindow | CountWindow | GlobalWindow
_AGGREGATE: Final = ("create", "add", "result")


def one_key(record: object) -> int:
    """Return the one key that all records of a stream without keys share."""
    return 0


class Windows:
    """Record-at-a-time windows over a keyed stream, checked; its methods add the step.

    Args:
        output: the records; without keys they all have the same one.
        window: a window of `hg.tumbling` and so on, or a `hg.WindowAssigner`.
        trigger: replaces the trigger of the window.
        evictor: leaves records out.
        origin: the user's line.

    Raises:
        PlanError: the arguments do not fit each other, or the stream.
    """

    def __init__(
        self,
        output: NodeOutput,
        window: AnyWindow | WindowAssigner[Any],
        trigger: Trigger[Any] | None,
        evictor: Evictor[Any] | None,
        origin: Origin,
    ) -> None:
        keyed = output.keyed_by is not None
        self._output = output if keyed else output.distributed(HashFunction(one_key))
        self._origin = origin
        self._lateness_ms = getattr(window, "allowed_lateness_ms", 0)
        self._window = window
        self._check(trigger, Trigger, "trigger")
        self._check(evictor, Evictor, "evictor")
        self._given, self._evictor = implied(window, trigger, evictor, str(origin))

    def _check(self, given: object, kind: type, what: str) -> None:
        if given is None or isinstance(given, kind):
            return
        instead = f"the class `{given.__name__}`" if isinstance(given, type) else repr(given)
        raise PlanError(
            f"{what}= needs an instance of hg.{kind.__name__}, got {instead}",
            where=str(self._origin),
            fix=f"such as {what}=hg.{what}s.Count(100)",
        )

    # --- steps ---------------------------------------------------------------------------------

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        process: WindowProcess[Any, Any, Any] | None,
        name: str,
        into: SchemaLike | None,
        origin: Origin,
    ) -> NodeOutput:
        """Add the step of `.reduce(...)`; without `process` its results have the stream's record type."""
        check_plain(function, "reduce", origin)
        check_returns(function, "reduce", origin)
        check_takes(function, ("the value so far", "the record"), "reduce", origin)
        result = self._add(Reduced(function), process, name, into, origin)
        if process is None and into is None and self._output.schema is not None:
            node = result.node
            node.schema, node.row_type = self._output.schema, self._output.row_type
        return result

    def aggregate(
        self,
        function: AggregateFunction[Any, Any, Any],
        process: WindowProcess[Any, Any, Any] | None,
        name: str,
        into: SchemaLike | None,
        origin: Origin,
    ) -> NodeOutput:
        """Add the step of `.aggregate(...)`."""
        if isinstance(function, type):
            raise PlanError(
                f"aggregate needs an instance, got the class `{function.__name__}`",
                where=str(origin),
                fix=f"write aggregate({function.__name__}(), name=...)",
            )
        for method in _AGGREGATE:
            if not callable(getattr(function, method, None)):
                raise PlanError(
                    f"an aggregate needs the method `{method}` type=`{type(function).__name__}`",
                    where=str(origin),
                    fix="derive a class from hg.AggregateFunction: create, add, result and, for "
                    "sessions, merge",
                )
        return self._add(function, process, name, into, origin)

    def process(
        self,
        function: WindowProcess[Any, Any, Any],
        name: str,
        into: SchemaLike | None,
        origin: Origin,
    ) -> NodeOutput:
        """Add the step of `.process(...)`."""
        return self._add(None, function, name, into, origin)

    def _add(
        self,
        combined: AggregateFunction[Any, Any, Any] | None,
        process: WindowProcess[Any, Any, Any] | None,
        name: str,
        into: SchemaLike | None,
        origin: Origin,
    ) -> NodeOutput:
        function = EmitResult() if process is None else self._function(process, origin)
        assigner = self._assigner(name)
        trigger = self._trigger(assigner)
        self._check_merging(assigner, trigger, combined, function, origin)
        windowing = Windowing(assigner, trigger, self._evictor, self._lateness_ms, combined)
        output, schema = self._output, None if into is None else into_schema(into, origin)
        if process is None and isinstance(combined, Reduced) and into is None:
            schema = output.schema
        step = self._step(function, windowing, name, schema, origin)
        node = Node(
            name=name,
            kind="window",
            origin=origin,
            inputs=(output.as_input(),),
            factory=partial(WindowOperator, step, windowing),
            schema=schema,
            row_type=record_class(into),
            stateful=True,
            sides={**late_sides(output.schema), **dict.fromkeys(step.sides)},
            detail=self._describe(trigger),
            by_clock=_by_clock(assigner, trigger),
            window_ends_ms=getattr(self._window, "ends_every_ms", 0),
        )
        return output.add(node)

    def _step(
        self,
        function: WindowProcess[Any, Any, Any],
        windowing: Windowing,
        name: str,
        schema: pa.Schema | None,
        origin: Origin,
    ) -> ProcessStep:
        output = self._output
        # Triggers, evictors and assigners see the records too, so all columns are read, not only
        # those that one function uses.
        reader = RowReader(output.schema, output.row_type, repr)
        reader.columns, reader.record_class = None, output.row_type
        declared = declared_states(
            function,
            output.key_fields(origin),
            str(origin),
            event_time=output.has_event_time,
        )
        for state in declared.keyed.values():
            if state.queryable:
                raise PlanError(
                    f"states of functions of windows cannot be queried state=`{state.name}` "
                    f"queryable=`{state.queryable}`",
                    where=str(origin),
                    fix="keep it in a KeyedProcess, or leave out queryable=",
                )
        if taken := TABLES.intersection([*declared.keyed, *declared.lists, *declared.broadcast]):
            raise PlanError(
                f"this is the name of a table of windows state=`{min(taken)}`",
                where=str(origin),
                fix="give the state another name",
            )
        incremental = windowing.combined is not None and windowing.evictor is None
        states = window_states(
            declared, incremental=incremental, merging=windowing.assigner.merging
        )
        user = UserFunction(function.on_window, name, origin, reader, schema)  # type: ignore[arg-type]
        given = (ProcessInput(reader, output.key),)
        sides = side_names(function, origin)
        return ProcessStep(function, user, given, states, sides, output.has_event_time)

    # --- checks --------------------------------------------------------------------------------

    def _function(self, function: object, origin: Origin) -> WindowProcess[Any, Any, Any]:
        if not isinstance(function, WindowProcess):
            what = (
                f"the class `{function.__name__}`" if isinstance(function, type) else repr(function)
            )
            raise PlanError(
                f"a window needs an instance of hg.WindowProcess, got {what}",
                where=str(origin),
                fix="derive a class from hg.WindowProcess[key, record, result] and give an instance",
            )
        kind = type(function).__name__
        if type(function).on_window is WindowProcess.on_window:
            raise PlanError(
                f"`{kind}` has no method on_window",
                where=str(origin),
                fix="write def on_window(self, key, window, records, ctx): ...",
            )
        for method in (function.on_window, function.clear):
            if is_async(method) or inspect.isasyncgenfunction(method):
                raise PlanError(
                    f"`{method.__name__}` of `{kind}` is async, and windows call plain functions",
                    where=str(origin),
                    fix="await in an async map after it",
                )
        if type(function).on_timer is not ProcessFunction.on_timer:
            raise PlanError(
                f"`{kind}` has on_timer, and a WindowProcess has no timers",
                where=str(origin),
                fix="let a trigger fire the window at that time, or use a hg.KeyedProcess",
            )
        return function

    def _assigner(self, step: str) -> WindowAssigner[Any]:
        assigner = assigner_of(self._window, step, str(self._origin))
        if assigner.time not in ("event", "processing"):
            raise PlanError(
                f"the time of windows is event or processing, not `{assigner.time}`",
                where=str(self._origin),
            )
        if assigner.time == "event" and not self._output.has_event_time:
            raise PlanError(
                f"a window needs event time, and `{self._output.name}` has none",
                where=str(self._origin),
                fix='call .event_time("column", max_out_of_order="10s") before, or let the windows be in '
                'processing time: time="processing"',
            )
        return assigner

    def _trigger(self, assigner: WindowAssigner[Any]) -> Trigger[Any]:
        trigger: Trigger[Any] | None = self._given or assigner.default_trigger()
        if trigger is None:
            raise PlanError(
                f"{assigner.describe()} needs a trigger: it never ends",
                where=str(self._origin),
                fix="such as .window(..., trigger=hg.triggers.Count(100))",
            )
        if triggers.needs_event_time(trigger) and not self._output.has_event_time:
            raise PlanError(
                f"the trigger of a window fires by event time, and `{self._output.name}` has none",
                where=str(self._origin),
                fix='call .event_time("column", max_out_of_order="10s") before, or take a trigger by the '
                "machine's clock such as hg.triggers.ContinuousProcessingTime(...)",
            )
        return trigger

    def _check_merging(
        self,
        assigner: WindowAssigner[Any],
        trigger: Trigger[Any],
        combined: AggregateFunction[Any, Any, Any] | None,
        function: WindowProcess[Any, Any, Any],
        origin: Origin,
    ) -> None:
        if not assigner.merging:
            return
        if not trigger.can_merge:
            raise PlanError(
                f"windows merge here, and `{type(trigger).__name__}` has no on_merge",
                where=str(self._origin),
                fix="write on_merge and say can_merge = True, or take another trigger",
            )
        merge = getattr(type(combined), "merge", None)
        if combined is not None and merge in (None, AggregateFunction.merge):
            raise PlanError(
                f"windows merge here, and `{type(combined).__name__}` has no method merge",
                where=str(origin),
                fix="write def merge(self, first, second): ..., which makes one accumulator of two",
            )
        for name, state in declared_states(
            function, None, str(origin), event_time=self._output.has_event_time
        ).keyed.items():
            if state.per_window:
                raise PlanError(
                    f"windows merge here, and nothing says how state `{name}` of two windows is one",
                    where=str(origin),
                    fix="keep it per key, without hg.per_window",
                )

    def _describe(self, trigger: Trigger[Any]) -> str:
        text = describe(self._window)
        if self._given is not None:
            text += f", trigger {type(trigger).__name__}"
        if self._evictor is not None:
            text += f", evictor {type(self._evictor).__name__}"
        return text


def _by_clock(assigner: WindowAssigner[Any], trigger: Trigger[Any]) -> ByClock | None:
    """Return which parts of the windows follow the machine's clock."""
    if assigner.time == "processing" and not isinstance(assigner, Global):
        return ByClock.WINDOWS
    return ByClock.TRIGGER if triggers.goes_by_clock(trigger) else None


def assigner_of(window: object, step: str, where: str) -> WindowAssigner[Any]:
    """Return the assigner of a window as users write it.

    Raises:
        PlanError: not a window, or one that exists for columns only.
    """
    if isinstance(window, WindowAssigner):
        return window
    if isinstance(window, SessionWindow):
        time: WindowTime = "processing" if window.processing else "event"
        gap = window.gap_ms if window.gap is None else window.gap
        if gap is None or isinstance(gap, str) or is_expression(gap):
            raise PlanError(
                f"the gap of a session is the expression `{show(gap or '')}`, and records have no columns",
                where=where,
                fix="give a function of the record: hg.session(lambda record: record.gap_ms)",
            )
        return Session(gap, time, step)
    if isinstance(window, CountWindow | GlobalWindow):
        return Global()
    if isinstance(window, TumblingWindow | SlidingWindow | CumulativeWindow):
        return _pane_assigner(window, where)
    raise not_an_assigner(window, where)


def _pane_assigner(window: TimeWindow, where: str) -> WindowAssigner[Any]:
    if window.zone:
        raise PlanError(
            f"windows of days in a time zone exist for columns only window=`{window.describe()}`",
            where=where,
            fix="use .agg(...), or write a hg.WindowAssigner",
        )
    if isinstance(window, CumulativeWindow):
        return Cumulative(window.size_ms, window.step_ms, window.offset_ms)
    time: WindowTime = "processing" if window.processing else "event"
    if isinstance(window, TumblingWindow):
        return Tumbling(window.size_ms, window.offset_ms, time)
    return Sliding(window.size_ms, window.every_ms, window.offset_ms, time)


def implied(
    window: object, trigger: Trigger[Any] | None, evictor: Evictor[Any] | None, where: str
) -> tuple[Trigger[Any] | None, Evictor[Any] | None]:
    """Return the trigger and evictor of a window: those given, or those that the window implies.

    Raises:
        PlanError: the window implies one and another was given, or only `agg` supports it.
    """
    early = getattr(window, "early", None)
    if early:
        raise PlanError(
            f"early results need a trigger here window=`{describe(window)}`",
            where=where,
            fix="such as trigger=hg.triggers.ContinuousEventTime(...), without emit_every= and emit_rows=",
        )
    if not isinstance(window, CountWindow):
        return trigger, evictor
    if trigger is not None or evictor is not None:
        raise PlanError(
            "a count window has its trigger and evictor",
            where=where,
            fix="take hg.global_window() with others",
        )
    if window.every == window.size:
        return triggers.Purging(triggers.Count(window.size)), None
    return triggers.Count(window.every), evictors.Count(window.size)


def describe(window: object) -> str:
    """Describe a window for messages and `explain`."""
    text: str = getattr(window, "describe", lambda: type(window).__name__)()
    return text


def why_records(
    columns: bool,
    window: object,
    trigger: object,
    evictor: object,
    *,
    keyed_by_columns: bool,
    known: bool,
) -> str:
    """Return why these windows need functions of records; empty if they do not.

    Args:
        columns: whether the stream has columns.
        window: the value that the user gave.
        trigger: None if none was given.
        evictor: None if none was given.
        keyed_by_columns: False if a function gives the keys.
        known: whether `agg` supports this kind of window.
    """
    if not keyed_by_columns:
        return (
            "key_with gives a function, not columns; make the key a column and name it: "
            '.select("*", "lower(url) AS key").key_by("key")'
        )
    if trigger is not None or evictor is not None:
        return "a trigger or an evictor is called for each record"
    if not columns:
        return "these are Python objects"
    if isinstance(window, SessionWindow) and window.processing:
        return "these are sessions in processing time"
    if callable(getattr(window, "gap", None)):
        return "the gap of the session is a function of a record"
    return "" if known else f"{describe(window)} is called for each record"
