"""Steps with a key or a window: `aggregate`, `reduce`, `process`, `match`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...operators.aggregation.aggregates import parse_aggregate
from ...operators.patterns.match import PATTERN as AFTER_MATCH_PATTERN
from ...operators.patterns.match import parse_after_match
from ...operators.patterns.pattern import Pattern
from ...operators.process.batches import KeyedBatchProcess
from ...operators.process.functions import BroadcastProcess, CoProcess, KeyedProcess, Process
from ...operators.queries import QUERYABLE_PATTERN
from ...operators.windows.records.functions import WindowProcess
from ...state.queryable import Queryable
from ..stream import Stream
from .call_steps import on_error
from .fields import REFERENCE, BooleanKind, Field, Items, OneOf, Section, Table, TextKind, duration
from .pair_steps import CONNECT, check_connect, connected, without_keys
from .step import (
    CALLED,
    INSTANCE,
    INTO,
    KEYS,
    Step,
    StepBuilder,
    Verb,
    check_keys,
    function_of,
    given,
    instance_of,
    key_has_columns,
    keyed,
    sound,
    timed,
)
from .window_steps import WINDOWED, WindowSpec

MATCH = Section(
    "match",
    {
        "pattern": Field(
            INSTANCE, "a pattern made with `hg.cep.begin`, `module:name`", required=True
        ),
        "select": Field(REFERENCE, "a function match -> record, `module:function`"),
        "afterMatch": Field(
            TextKind(
                AFTER_MATCH_PATTERN,
                "no_skip, skip_to_next, skip_past_last_event, skip_to_first(stage) or "
                "skip_to_last(stage)",
            ),
            "which overlapping matches are dropped, such as `skip_past_last_event`",
        ),
    },
)
_NOT_FOR_COLUMNS: Final = frozenset({"name", "into"})
"""Result names that `agg` would take for its own arguments."""
_RUNNING_ONLY: Final = frozenset({"ttl", "queryable"})
"""Those that only running aggregates have."""


_KEYED: Final = "a keyed stream"
_KEYLESS: Final = "a stream without keys"
_TWO: Final = "two keyed streams"
_BROADCAST: Final = "a keyed stream and a broadcast one"
_WINDOWS: Final = "windows"
_INPUTS: Final[dict[tuple[type[Any], ...], str]] = {
    (KeyedProcess, KeyedBatchProcess): _KEYED,
    (Process,): _KEYLESS,
    (CoProcess,): _TWO,
    (BroadcastProcess,): _BROADCAST,
    (WindowProcess,): _WINDOWS,
}
_INPUT_FIXES: Final = {
    _KEYED: "remove connect or window, or derive the class from another one",
    _KEYLESS: "remove keyBy, keyWith, connect and window, or derive the class from hg.KeyedProcess",
    _TWO: "connect: {with: other, keyBy: [column]}",
    _BROADCAST: "connect: {broadcast: other}",
    _WINDOWS: "window: {tumbling: 1m}",
}


class _Groups:
    """The stream by key, by window, or both, as the operator's fields give it."""

    def __init__(self, verb: str, name: str, table: Table, builder: StepBuilder) -> None:
        self._table, self._builder = table, builder
        self._keyed = bool(table.present(["keyBy", "keyWith"]))
        self.windowed = table.tried("window")
        self.good = not self._keyed or check_keys(verb, name, table, table.line, builder)
        self._spec = WindowSpec(name, table, builder) if self.windowed else None
        if self._spec is not None and self._spec.of_records and not self._keyed:
            builder.problems.add(
                table.line_of("window"),
                f"a window with {self._spec.of_records} needs a key operator=`{name}`",
                "keyBy: [column]",
            )
            self.good = False

    def of(self, stream: Stream[Any]) -> Any:
        """Return the groups; None if something is wrong with them."""
        if not self.good:
            return None
        groups: Any = keyed(stream, self._table, self._builder) if self._keyed else stream
        return groups if self._spec is None else self._spec.of(groups, stream)


def plan_aggregate(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `aggregate`: of columns, or with an AggregateFunction on windows."""
    line, written = table.line_of("aggregate"), table.get("aggregate")
    if written is None:
        return None
    if not table.present(["keyBy", "keyWith", "window"]):
        builder.problems.add(
            line, f"aggregate has neither keyBy nor window operator=`{name}`", "keyBy: [column]"
        )
        if isinstance(written, Table):
            _aggregates(written, builder)
        return None
    groups = _Groups("aggregate", name, table, builder)
    if isinstance(written, Table):
        _refuse_window_process("columns", name, table, builder)
        groups.good = key_has_columns("aggregate", name, table, builder) and groups.good
        return _plan_columns(name, table, written, groups, builder)
    if not groups.windowed:
        builder.problems.add(
            line,
            f"an AggregateFunction needs a window operator=`{name}`",
            "window: {tumbling: 1m}; without one, use process",
        )
        return None
    _running("aggregate", name, table, groups, builder)
    function = instance_of(table, "aggregate", builder)
    return _plan_combined(name, table, "aggregate", function, groups, builder)


def _plan_columns(
    name: str, table: Table, written: Table, groups: _Groups, builder: StepBuilder
) -> Step:
    taken = _NOT_FOR_COLUMNS | ({"queryable"} if groups.windowed else _RUNNING_ONLY)
    line, made = table.line_of("aggregate"), _aggregates(written, builder, taken)
    running = _running("aggregate", name, table, groups, builder)
    whole = len(made) == len(written.lines) and None not in made.values() and groups.good
    into = builder.schema_of(table, "into")
    whole = whole and sound(table, into=into)

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        stream = flows[0]
        grouped = groups.of(stream)
        fits = _check_types(made, stream, written, builder)
        if grouped is None or not fits or not whole:
            return None
        return builder.attempt(line, lambda: grouped.agg(**made, **running, into=into, name=name))

    return step


def _aggregates(
    written: Table, builder: StepBuilder, taken: frozenset[str] = _NOT_FOR_COLUMNS
) -> dict[str, Any]:
    """Return the aggregate of each result column; None for those that are wrong."""
    made: dict[str, Any] = {}
    for column, text in written.values.items():
        at = written.line_of(column)
        made[column] = builder.attempt(at, lambda text=text: parse_aggregate(text))  # type: ignore[misc]
    for column in taken & written.lines.keys():
        builder.problems.add(
            written.line_of(column), f"a result cannot be called `{column}`", "rename it"
        )
        made.pop(column, None)
    return made


def _check_types(
    made: Mapping[str, Any], stream: Stream[Any], written: Table, builder: StepBuilder
) -> bool:
    fits = True
    for column, aggregate in made.items():
        if aggregate is not None and stream.schema is not None:
            check = partial(aggregate.output_type, stream.schema)
            fits = builder.attempt(written.line_of(column), check) is not None and fits
    return fits


def plan_reduce(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `reduce`: per key, or with a window per window."""
    line = table.line_of("reduce")
    function = function_of(table, "reduce", builder)
    if table.tried("into") and not table.tried("window"):
        builder.problems.add(
            table.line_of("into"),
            f"into has no effect for reduce without a window operator=`{name}`",
            "remove it: its results are like its records",
        )
        return None
    if not table.tried("window") and not check_keys("reduce", name, table, line, builder):
        return None
    groups = _Groups("reduce", name, table, builder)
    if not groups.windowed:
        _refuse_window_process("no window", name, table, builder)
    running = _running("reduce", name, table, groups, builder)
    return _plan_combined(name, table, "reduce", function, groups, builder, **running)


def _running(
    verb: str, name: str, table: Table, groups: _Groups, builder: StepBuilder
) -> dict[str, Any]:
    """Return the arguments of a step without a window; those that a window does not take are refused."""
    of_columns = verb == "aggregate" and isinstance(table.get("aggregate"), Table)
    arguments = given(table, ttl="ttl", queryable="queryable")
    declared = arguments.get("queryable")
    if isinstance(declared, Table):
        name_, committed = declared.get("name", ""), declared.get("committed", False)
        arguments["queryable"] = Queryable(name_, committed=committed)
    if not groups.windowed:
        return arguments
    for field, why in _WITHOUT_WINDOW.items():
        if table.tried(field) and not (field == "queryable" and of_columns):
            builder.problems.add(
                table.line_of(field),
                f"{field} has no effect for {verb} with a window operator=`{name}`",
                f"remove it: {why}",
            )
    return {"queryable": arguments["queryable"]} if of_columns and declared is not None else {}


_WITHOUT_WINDOW: Final = {
    "ttl": "the state of a window ends with the window",
    "queryable": "of windows, only the state of aggregates over columns can be queried",
}


def plan_deduplicate(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `deduplicate`."""
    line, section = table.line_of("deduplicate"), table.get("deduplicate")
    if section is None or not check_keys("deduplicate", name, table, line, builder):
        return None

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        groups = keyed(flows[0], table, builder)
        if groups is None or section.bad:
            return None
        options = given(section, ttl="ttl")
        return builder.attempt(line, lambda: groups.deduplicate(name=name, **options))

    return step


def plan_process(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `process`: of a stream, keyed or not, of two, or of windows."""
    line = table.line_of("process")
    function = _process_function(name, table, builder)
    two = table.tried("connect")
    if two and table.tried("window"):
        builder.problems.add(
            table.line_of("window"),
            f"window and connect exclude each other operator=`{name}`",
            "keep one, or use coGroup",
        )
        return None
    keyless = isinstance(function, Process) or (two and without_keys(table))
    if not (keyless or table.tried("window") or check_keys("process", name, table, line, builder)):
        return None
    policy = on_error(table)
    if policy and table.tried("window"):
        builder.problems.add(
            table.line_of("onError"),
            f"onError is not for functions of windows operator=`{name}`",
            "remove it: what such a function raises fails the job",
        )
        return None
    if not two:
        groups = _Groups("process", name, table, builder)
        return _plan_function(name, table, "process", function, groups, builder, **policy)
    fits, into = check_connect(name, table, builder), builder.schema_of(table, "into")

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        if not fits:
            return None
        both = connected(flows, table, builder)
        if both is None or function is None or not sound(table, into=into):
            return None
        return builder.attempt(line, lambda: both.process(function, into=into, name=name, **policy))

    return step


def plan_match(name: str, table: Table, builder: StepBuilder) -> Step | None:
    """Plan `match`: a pattern of `hg.cep`."""
    line, section = table.line_of("match"), table.get("match")
    if section is None or not check_keys("match", name, table, line, builder):
        return None
    pattern = instance_of(section, "pattern", builder)
    select = function_of(section, "select", builder)
    if section.tried("afterMatch"):
        pattern = _with_strategy(pattern, name, section, builder)
    into = builder.schema_of(table, "into")

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        groups = keyed(flows[0], table, builder)
        if not timed(flows[0], "match", line, builder) or groups is None or pattern is None:
            return None
        if not sound(section, select=select) or not sound(table, into=into):
            return None
        return builder.attempt(
            line, lambda: groups.match(pattern, select=select, into=into, name=name)
        )

    return step


def _with_strategy(pattern: Any, name: str, section: Table, builder: StepBuilder) -> Any:
    """Return the pattern with the strategy of `afterMatch`; None if that is wrong."""
    said = section.get("afterMatch")
    if said is None or not isinstance(pattern, Pattern):
        return None if said is None else pattern
    if pattern.after.kind != "none":
        builder.problems.add(
            section.line_of("afterMatch"),
            f"the pattern says `{pattern.after}` itself operator=`{name}`",
            "remove afterMatch, or after_match in the module",
        )
        return None
    return replace(pattern, after=parse_after_match(said))


def _process_function(name: str, table: Table, builder: StepBuilder) -> Any:
    """Return the function, if its base class fits the inputs of the operator."""
    function = instance_of(table, "process", builder)
    for kinds, has in _INPUTS.items():
        found = _inputs_of(table, function)
        if isinstance(function, kinds) and has != found:
            builder.problems.add(
                table.line_of("process"),
                f"a {kinds[0].__name__} is for {has}, not for {found} operator=`{name}`",
                _INPUT_FIXES[has],
            )
            return None
    return function


def _inputs_of(table: Table, function: object) -> str:
    if table.tried("window"):
        return _WINDOWS
    if not table.tried("connect"):
        keyless = isinstance(function, Process) and not table.present(["keyBy", "keyWith"])
        return _KEYLESS if keyless else _KEYED
    connect = table.get("connect")
    return _BROADCAST if connect is not None and connect.tried("broadcast") else _TWO


def _refuse_window_process(what: str, name: str, table: Table, builder: StepBuilder) -> None:
    if table.tried("windowProcess"):
        builder.problems.add(
            table.line_of("windowProcess"),
            f"windowProcess has no effect with {what} operator=`{name}`",
            "it is for reduce, or an AggregateFunction, with a window",
        )


def _plan_combined(
    name: str,
    table: Table,
    verb: str,
    function: Any,
    groups: _Groups,
    builder: StepBuilder,
    **options: Any,
) -> Step:
    """Plan `reduce` or `aggregate` with a function, and perhaps a function of the results of windows."""
    behind = instance_of(table, "windowProcess", builder)
    fits = sound(table, windowProcess=behind)
    options |= {"process": behind} if behind is not None and groups.windowed else {}
    made = function if fits else None
    return _plan_function(name, table, verb, made, groups, builder, **options)


def _plan_function(
    name: str,
    table: Table,
    verb: str,
    function: Any,
    groups: _Groups,
    builder: StepBuilder,
    **options: Any,
) -> Step:
    """Plan the step that calls the method `verb` of the groups with a function."""
    into = builder.schema_of(table, "into")
    options |= {} if into is None else {"into": into}

    def step(flows: Sequence[Stream[Any]]) -> Stream[Any] | None:
        grouped = groups.of(flows[0])
        if grouped is None or function is None or not groups.good or not sound(table, into=into):
            return None
        method = getattr(grouped, verb)
        return builder.attempt(table.line_of(verb), lambda: method(function, name=name, **options))

    return step


_AGGREGATE_FUNCTION: Final = TextKind(
    REFERENCE.pattern, "a mapping such as `{n: count()}`, or `module:AggregateFunction`"
)
_OF_GROUPS: Final = {**INTO, **KEYS, **WINDOWED}
_COMBINED: Final = {
    **_OF_GROUPS,
    "windowProcess": Field(
        INSTANCE, "a `module:WindowProcess` that gets the results of `reduce` or `aggregate`"
    ),
}
_QUERYABLE_NAME: Final = TextKind(
    QUERYABLE_PATTERN,
    "up to 128 letters, digits, `-`, `_` and `.`, with a letter or digit first",
)
_RUNNING: Final = {
    "ttl": Field(duration(), "without a window: a key lives this long after its last record"),
    "queryable": Field(
        OneOf(
            Section(
                "queryable",
                {
                    "name": Field(_QUERYABLE_NAME, "the name that clients use", required=True),
                    "committed": Field(
                        BooleanKind(), "clients may also read as of the newest complete checkpoint"
                    ),
                },
            ),
            _QUERYABLE_NAME,
        ),
        "without a window, or for an `aggregate` of columns: clients outside the job read the value of a "
        "key under this name",
    ),
}
VERBS: Final = (
    Verb(
        "aggregate",
        Field(
            OneOf(Items(TextKind(), may_be_empty=False), _AGGREGATE_FUNCTION),
            'results and their aggregates, `total: "sum(amount * 2)"`; '
            "or a `module:AggregateFunction`",
        ),
        plan_aggregate,
        {**_COMBINED, **_RUNNING},
    ),
    Verb(
        "reduce",
        Field(REFERENCE, "a function (record, record) -> record, `module:function`"),
        plan_reduce,
        {**_COMBINED, **_RUNNING},
    ),
    Verb(
        "deduplicate",
        Field(
            Section("deduplicate", {"ttl": Field(duration(), "how long a key is remembered")}),
            "the first record of each key; `{}`, or with a time after which a key is forgotten",
        ),
        plan_deduplicate,
        KEYS,
    ),
    Verb(
        "process",
        Field(INSTANCE, "a class with state, such as a `module:KeyedProcess`"),
        plan_process,
        {
            **_OF_GROUPS,
            "connect": Field(CONNECT, "a second input of `process`"),
            **CALLED,
        },
        inputs=(("connect", "with"), ("connect", "broadcast")),
    ),
    Verb(
        "match", Field(MATCH, "a pattern in the records of each key"), plan_match, {**KEYS, **INTO}
    ),
)
