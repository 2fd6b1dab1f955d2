"""The field `eventTime` of a source or an operator."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...errors import HeadgateError, PlanError
from ...operators.watermarks.generators import WatermarkGenerator
from ...operators.watermarks.strategy import WatermarkStrategy
from ..stream import Stream
from .call_steps import on_error
from .fields import REFERENCE, BooleanKind, Field, OneOf, Section, Table, TextKind, duration
from .references import resolve
from .step import (
    ACTIONS,
    INSTANCE,
    NAME,
    ON_ERROR,
    StepBuilder,
    arguments_of,
    function_of,
    given,
    instance,
    readable,
    reference_of,
)

EVENT_TIME = Section(
    "eventTime",
    {
        "column": Field(TextKind(), "a timestamp column, or an int64 one of ms"),
        "python": Field(REFERENCE, "instead: a function record -> time, `module:function`"),
        "maxOutOfOrder": Field(duration(), "how far records may be out of order in event time"),
        "strategy": Field(
            INSTANCE, "instead: a rule for watermarks, a class `module:WatermarkGenerator`"
        ),
        "idleAfter": Field(duration(), "a split without records for this long is idle"),
        "closeAfter": Field(duration(), "after this long without records time follows the clock"),
        "perSplit": Field(BooleanKind(), "false: the splits of a source share their watermarks"),
        "waitForQueued": Field(
            BooleanKind(),
            "splits not yet read hold the watermark back, too; true by default where the source ends",
        ),
        "align": Field(NAME, "watermark alignment: the name of a group of sources"),
        "maxDrift": Field(duration(), "how far one may be ahead of the slowest of its group"),
        "alignEvery": Field(duration(), "how often the group exchanges watermarks"),
        "onError": Field(
            OneOf(ON_ERROR, ACTIONS),
            "handling of records without a time, or with one out of range",
        ),
        "name": Field(NAME, "address of the state of `closeAfter`; also for metrics"),
    },
)


def with_event_time(
    stream: Stream[Any], table: Table, step: str, builder: StepBuilder
) -> Stream[Any] | None:
    """Return the stream with the event time of table `eventTime`; None if nothing is known.

    If the table is wrong, the problem is reported and the result has some event time, so that steps
    that need one can be checked.
    """
    before = len(builder.problems.found)
    when = _when(table, step, builder)
    arguments = given(
        table,
        max_out_of_order="maxOutOfOrder",
        idle_after="idleAfter",
        close_after="closeAfter",
        per_split="perSplit",
        wait_for_queued="waitForQueued",
        align="align",
        max_drift="maxDrift",
        align_every="alignEvery",
        name="name",
    )
    if (strategy := _strategy(table, step, builder)) is not None:
        arguments["strategy"] = strategy
    arguments |= on_error(table)
    _check_name(table, step, builder)
    _check_alignment(table, step, builder)
    if len(builder.problems.found) > before:
        # the remaining fields may contradict each other; the column is checked all the same
        arguments = {}
    if when is not None:
        line = table.line_of("column") if table.tried("column") else table.line_of("python")
        timed = builder.attempt(line, lambda: stream.event_time(when, **arguments))
        if timed is not None:
            return timed
    return _some_event_time(stream)


def _when(table: Table, step: str, builder: StepBuilder) -> Any:
    tried = table.present(["column", "python"])
    if not tried and not table.bad:
        builder.problems.add(
            table.line,
            f"eventTime has no column step=`{step}`",
            "column: a timestamp column, or python: a function of the record",
        )
    if len(tried) == 2:
        builder.problems.add(
            table.line_of("python"),
            f"column and python exclude each other step=`{step}`",
            "keep one",
        )
        return None
    return table.get("column") or function_of(table, "python", builder)


def _strategy(table: Table, step: str, builder: StepBuilder) -> WatermarkStrategy | None:
    tried = table.present(["maxOutOfOrder", "strategy"])
    if not tried:
        builder.problems.add(
            table.line,
            f"eventTime has no maxOutOfOrder step=`{step}`",
            "maxOutOfOrder: how much later than a younger record one may come; or a strategy",
        )
    if len(tried) == 2:
        builder.problems.add(
            table.line_of("strategy"),
            f"maxOutOfOrder and strategy exclude each other step=`{step}`",
            "keep one: the strategy says how far records may be out of order",
        )
        return None
    said = table.get("strategy")
    if said is None or (isinstance(said, Table) and not readable(said)):
        return None
    return builder.attempt(table.line_of("strategy"), lambda: _resolved_strategy(said))


def _resolved_strategy(said: Any) -> WatermarkStrategy:
    found = resolve(reference_of(said))
    if isinstance(said, Table):
        made = instance(said)  # wrong arguments are reported here rather than when the job runs
        is_generator = isinstance(made, WatermarkGenerator)
        found = partial(found, **arguments_of(said)) if is_generator else made
    if isinstance(found, WatermarkStrategy):
        return found
    if isinstance(found, WatermarkGenerator) or not callable(found):
        raise PlanError(
            f"not a strategy reference=`{reference_of(said)}` type=`{type(found).__name__}`",
            fix="name a class derived from hg.WatermarkGenerator, or a hg.WatermarkStrategy",
        )
    return WatermarkStrategy.custom(found)


def _check_name(table: Table, step: str, builder: StepBuilder) -> None:
    if table.tried("closeAfter") and not table.tried("name"):
        builder.problems.add(
            table.line_of("closeAfter"),
            f"eventTime with closeAfter has no name step=`{step}`",
            f"the progress of event time is stored under this name; such as name: {step}-time",
        )


def _check_alignment(table: Table, step: str, builder: StepBuilder) -> None:
    if not table.tried("align"):
        for field in table.present(["maxDrift", "alignEvery"]):
            builder.problems.add(
                table.line_of(field),
                f"{field} has no effect without align step=`{step}`",
                "add align: the name of a group",
            )
        return
    needed = {
        "maxDrift": "maxDrift: 30s, how far it may be ahead of the slowest of its group",
        "idleAfter": "idleAfter: 1m, or one split without records holds up all of its group",
    }
    for field, fix in needed.items():
        if not table.tried(field):
            builder.problems.add(
                table.line_of("align"), f"eventTime with align has no {field} step=`{step}`", fix
            )


def _some_event_time(stream: Stream[Any]) -> Stream[Any] | None:
    """Use any column that could be event time, so that steps that need one can be checked."""
    for column in stream.schema.names if stream.schema is not None else ():
        try:
            return stream.event_time(column)
        except HeadgateError:
            continue
    return None
