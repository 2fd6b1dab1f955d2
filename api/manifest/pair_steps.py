"""Steps with two inputs, or with a loop body: joins, `coGroup`, `connect`, `iterate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any, Final

from ...errors import HeadgateError, PlanError
from ...operators.durations import parse_duration
from ..stream import Stream
from .fields import REFERENCE, ChoiceKind, Field, ListOf, Parsed, Section, Table, TextKind, duration
from .references import is_reference, resolve_function
from .step import (
    INTO,
    KEYS,
    ROWS,
    STREAM,
    Step,
    StepBuilder,
    Verb,
    check_keys,
    function_of,
    given,
    key_has_columns,
    keyed,
    sound,
    timed,
)
from .window_steps import WINDOWED, WindowSpec

_SIGNED = Parsed(
    lambda text: parse_duration(text.removeprefix("-")),
    "a duration with a unit such as `10s` or `-10m`",
)
_OTHER = {"with": Field(STREAM, "the other source or operator", required=True), **KEYS}
_HOWS = ("inner", "left", "right", "full")
_SUFFIX = Field(TextKind(), "appended to columns of the other whose names are taken")
JOIN = Section(
    "join",
    {
        **_OTHER,
        "within": Field(
            ListOf(_SIGNED, 2), "bounds of the other's time relative to this, `[-10m, 0s]`"
        ),
        "how": Field(ChoiceKind(_HOWS), "`inner`, or also records without a match"),
        "suffix": _SUFFIX,
    },
)
JOIN_AS_OF = Section(
    "joinAsOf",
    {
        **_OTHER,
        "how": Field(ChoiceKind(_HOWS[:2]), "`inner`, or `left`: also records without a version"),
        "validFor": Field(duration(), "the longest time a version is valid, in event time"),
        "suffix": _SUFFIX,
    },
)
CO_GROUP = Section(
    "coGroup",
    {
        **_OTHER,
        "python": Field(
            REFERENCE, "a function (key, records, others) -> results, `module:function`", True
        ),
    },
)
CONNECT = Section(
    "connect",
    {
        "with": Field(STREAM, "the other source or operator, with the same keys"),
        **KEYS,
        "broadcast": Field(STREAM, "instead: a source or operator that every subtask gets"),
    },
)
ITERATE = Section(
    "iterate",
    {
        "body": Field(
            REFERENCE, "a function stream -> (feedback, output), `module:function`", required=True
        ),
        "wait": Field(duration(), "the loop ends after this long without records in it"),
        "maxRounds": Field(ROWS, "a loop in rounds; the most rounds"),
        "whileAny": Field(
            TextKind(),
            "of rounds: continue while this SQL, or `module:function`, holds for any record",
        ),
    },
)
_JOIN: Final = {"how": "how", "suffix": "suffix"}


def plan_join(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `join`: close in time if it has `within`, in the same window if the operator has `window`."""
    line, section = table.line_of("join"), table.get("join")
    if section is None or not _check_both_keys("join", name, table, section, builder):
        return None
    if section.tried("within") == table.tried("window"):
        builder.problems.add(
            line,
            f"join needs either within or a window operator=`{name}`",
            "within: [-10m, 0s], the bounds of the other's time; "
            "or window: {tumbling: 1m} beside join",
        )
        return None
    spec = WindowSpec(name, table, builder) if table.tried("window") else None
    options = given(section, **_JOIN)
    if (within := section.get("within")) is not None:
        options["within"] = tuple(within)

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        if len(flows) < 2:  # `with` does not hold a name
            return None
        left, right = _both(flows, table, section, builder)
        if spec is not None:
            left = spec.of(left, flows[0])
        elif not _both_timed("join", flows, line, builder):
            return None
        if left is None or right is None or section.bad:
            return None
        return builder.attempt(line, lambda: left.join(right, name=name, **options))

    return step


def plan_join_as_of(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `joinAsOf`."""
    line, section = table.line_of("joinAsOf"), table.get("joinAsOf")
    if section is None or not _check_both_keys("joinAsOf", name, table, section, builder):
        return None
    options = given(section, **_JOIN, valid_for="validFor")

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        if len(flows) < 2:  # `with` does not hold a name
            return None
        left, right = _both(flows, table, section, builder)
        if not _both_timed("joinAsOf", flows, line, builder):
            return None
        if left is None or right is None or section.bad:
            return None
        return builder.attempt(line, lambda: left.join_as_of(right, name=name, **options))

    return step


def plan_co_group(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `coGroup`, which needs a window."""
    line, section = table.line_of("coGroup"), table.get("coGroup")
    if section is None or not _check_both_keys("coGroup", name, table, section, builder):
        return None
    if not table.tried("window"):
        builder.problems.add(
            line, f"coGroup has no window operator=`{name}`", "window: {tumbling: 1m}"
        )
        return None
    spec = WindowSpec(name, table, builder)
    function = function_of(section, "python", builder)
    into = builder.schema_of(table, "into")

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        if len(flows) < 2:  # `with` does not hold a name
            return None
        left, right = _both(flows, table, section, builder)
        left = spec.of(left, flows[0])
        if left is None or right is None or function is None or not sound(table, into=into):
            return None
        return builder.attempt(line, lambda: left.co_group(right, function, into=into, name=name))

    return step


def without_keys(table: Table) -> bool:
    """Return True if an operator with `connect` gives keys to neither stream."""
    section = table.get("connect")
    keys = ["keyBy", "keyWith"]
    return section is not None and not table.present(keys) and not section.present(keys)


def check_connect(name: str, table: Table, builder: StepBuilder) -> bool:
    """Return True if `connect` names one other stream, with keys if it needs some."""
    section = table.get("connect")
    if section is None:
        return False
    tried = section.present(["with", "broadcast"])
    if len(tried) != 1:
        builder.problems.add(
            section.line_of("broadcast"),
            f"connect needs either with or broadcast operator=`{name}`",
            "with: a stream of the same keys; broadcast: one that every subtask gets",
        )
        return False
    if tried == ["with"]:
        if without_keys(table):
            return True
        return check_keys("connect", name, section, section.line, builder)
    for field in section.present(["keyBy", "keyWith"]):
        builder.problems.add(
            section.line_of(field),
            f"{field} has no effect for a broadcast stream operator=`{name}`",
            "remove it: every subtask gets all of its records",
        )
    return not section.present(["keyBy", "keyWith"])


def connected(flows: Sequence[Stream[Any]], table: Table, builder: StepBuilder) -> Any:
    """Return both streams of `connect`, for `.process`; None if they do not fit."""
    section = table.get("connect")
    if len(flows) < 2:  # neither `with` nor `broadcast` holds a name
        return None
    keyless = without_keys(table)
    left = flows[0] if keyless else keyed(flows[0], table, builder)
    other: Any
    if section.tried("broadcast"):
        other = builder.attempt(section.line_of("broadcast"), flows[1].broadcast)
    elif keyless:
        other = flows[1]
    else:
        other = keyed(flows[1], section, builder)
    if left is None or other is None:
        return None
    return builder.attempt(table.line_of("connect"), lambda: left.connect(other))


def plan_iterate(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `iterate`, in rounds if it has `maxRounds`."""
    line, section = table.line_of("iterate"), table.get("iterate")
    if section is None:
        return None
    body = function_of(section, "body", builder)
    rounds = section.tried("maxRounds")
    wrong = "wait" if rounds else "whileAny"
    if section.tried(wrong):
        builder.problems.add(
            section.line_of(wrong),
            f"{wrong} has no effect {'with' if rounds else 'without'} maxRounds operator=`{name}`",
            "remove it" if rounds else "add maxRounds, or remove it",
        )
        return None
    options = given(section, wait="wait", max_rounds="maxRounds", while_any="whileAny")
    options |= given(table, parallelism="parallelism")
    if is_reference(condition := section.get("whileAny", "")):
        at = section.line_of("whileAny")
        options["while_any"] = builder.attempt(at, lambda: resolve_function(condition))
        if options["while_any"] is None:
            return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        if body is None or section.bad:
            return None
        loop: Any = flows[0].iterate_rounds if rounds else flows[0].iterate
        return builder.attempt(line, lambda: loop(_built(body), name=name, **options))

    return step


def _built(body: Any) -> Any:
    """Wrap the user's function: what it raises is a mistake of the manifest."""

    @wraps(body)
    def build(stream: Stream[Any]) -> Any:
        try:
            return body(stream)
        except HeadgateError:
            raise
        except Exception as error:
            raise PlanError(
                f"body of a loop raised error=`{type(error).__name__}: {error}`",
                fix="it is called with the stream, and returns (feedback, output)",
            ) from error

    return build


def _check_both_keys(
    verb: str, name: str, table: Table, section: Table, builder: StepBuilder
) -> bool:
    fits = True
    for what, keys, line in (
        (verb, table, table.line_of(verb)),
        (f"{verb}.with", section, section.line),
    ):
        fits = check_keys(what, name, keys, line, builder) and fits
        fits = key_has_columns(what, name, keys, builder) and fits
    return fits


def _both(
    flows: Sequence[Stream[Any]], table: Table, section: Table, builder: StepBuilder
) -> tuple[Any, Any]:
    return keyed(flows[0], table, builder), keyed(flows[1], section, builder)


def _both_timed(verb: str, flows: Sequence[Stream[Any]], line: int, builder: StepBuilder) -> bool:
    checked = [timed(flow, verb, line, builder) for flow in flows]  # each reports its own problem
    return all(checked)


VERBS: Final = (
    Verb(
        "join",
        Field(JOIN, "pairs with another stream, close in time or in the same window"),
        plan_join,
        {**KEYS, **WINDOWED},
        inputs=(("join", "with"),),
    ),
    Verb(
        "joinAsOf",
        Field(JOIN_AS_OF, "each record with the version valid at its time"),
        plan_join_as_of,
        KEYS,
        inputs=(("joinAsOf", "with"),),
    ),
    Verb(
        "coGroup",
        Field(CO_GROUP, "a function of all records of a key in a window, from two streams"),
        plan_co_group,
        {**KEYS, **WINDOWED, **INTO},
        inputs=(("coGroup", "with"),),
    ),
    Verb("iterate", Field(ITERATE, "a loop"), plan_iterate),
)
