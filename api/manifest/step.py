"""Shared parts of manifest steps: the builder, keys, functions, and item-by-item checks of lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from ...operators.source import Source
from ..job_definition import NAME_LENGTH_MAX
from ..resources import GROUP_NAME, GROUP_NAME_MEANING
from ..stream import Stream
from .document import Problems
from .fields import (
    REFERENCE,
    Anything,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    ListOf,
    OneOf,
    Section,
    Table,
    TextKind,
    column_type,
)
from .references import resolve_function, resolve_instance
from .registry import LookupConnector

PARALLELISM_MAX = 32768
PARALLELISM = IntegerKind(1, PARALLELISM_MAX)
SLOT_SHARING_GROUP = Field(
    TextKind(GROUP_NAME.pattern, GROUP_NAME_MEANING),
    "the group of `resources` whose slots it runs in; default: that of its inputs",
)
PARTITIONINGS = ("rebalance", "rescale", "shuffle", "broadcast", "global")
ROWS = IntegerKind(1, 2**31 - 1)
NAME = TextKind(
    r"[A-Za-z0-9][A-Za-z0-9_-]*",
    "a name of letters, digits, `-` and `_`",
    "a dot would mean a side output",
)
STREAM = TextKind(
    r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)?",
    "the name of a source or an operator",
    "a side output is written `operator.late` or `source.rejected`",
)
COLUMNS = Items(column_type(), may_be_empty=False)
SCHEMA = OneOf(COLUMNS, TextKind())
_REFERENCE_TABLE = Section(
    "a reference",
    {
        "python": Field(REFERENCE, "a class, or a function that makes one", required=True),
        "arguments": Field(Items(Anything()), "its arguments, by name"),
    },
)
INSTANCE = OneOf(_REFERENCE_TABLE, REFERENCE)
"""A reference to an object, or to a class with the arguments of its instance."""
ACTIONS = ChoiceKind(("fail", "drop", "side_output"))
ON_ERROR = Section(
    "onError",
    {
        "then": Field(ACTIONS, "fail, drop, or side_output", required=True),
        "retries": Field(IntegerKind(0, 1000), "number of times the function is retried first"),
    },
)
KEYS = {
    "keyBy": Field(ListOf(TextKind()), "the key columns"),
    "keyWith": Field(REFERENCE, "instead: a function record -> key, `module:function`"),
}
INTO = {"into": Field(SCHEMA, "columns of the result, or a class `module:Class`")}
MAX_IN_FLIGHT = {
    "maxInFlight": Field(IntegerKind(1, 100_000), "most concurrent calls of a coroutine function")
}
CALLED = {
    "onError": Field(OneOf(ON_ERROR, ACTIONS), "handling of records for which the function raises")
}
"""Fields that several verbs have, by what they are about."""

R = TypeVar("R")
Step: TypeAlias = Callable[[Sequence[Stream[Any]]], "Stream[Any] | None"]
"""Applies a verb to its input streams; None if that fails and nothing is known of the result."""


class StepBuilder(Protocol):
    """The builder as steps see it."""

    problems: Problems

    def attempt(self, line: int, action: Callable[[], R]) -> R | None: ...

    def schema_of(self, table: Table, name: str) -> pa.Schema | type[Any] | None: ...

    def lookup_connectors(self) -> Mapping[str, LookupConnector]:
        """Return the places in which a `lookup` can look rows up by key."""
        ...

    def files_of(self, table: Table, name: str) -> Source | None:
        """Return the source of the table of operator `name`; None if it is wrong and reported."""
        ...


Planner: TypeAlias = Callable[[str, Table, StepBuilder], "Step | None"]
"""Checks an operator as far as possible without its input; returns None if its verb is unusable."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of operators, such as `map`: everything that the YAML form knows of it.

    The fields of operators, the JSON schema, the tables of the documentation and the checks of fields
    that have no effect are derived from it.

    Attributes:
        name: the field that says it; an operator has exactly one verb.
        value: the kind of its value, and its meaning.
        plan: makes the step.
        fields: the other fields of an operator that have an effect for it. A field that several verbs
            have is the same for all of them.
        inputs: the fields that name further streams besides `from`, each as the name of a section of
            the operator and that of the field in it.
    """

    name: str
    value: Field
    plan: Planner
    fields: Mapping[str, Field] = field(default_factory=dict)
    inputs: tuple[tuple[str, str], ...] = ()

    @property
    def keyed(self) -> bool:
        """True if its input is distributed by `keyBy` or `keyWith`, where they are given."""
        return "keyBy" in self.fields


def function_of(table: Table, field: str, builder: StepBuilder) -> Any:
    """Return the function that a field names; None if the field is absent, or wrong and reported."""
    return _resolved(table, field, builder, resolve_function)


def instance_of(table: Table, field: str, builder: StepBuilder) -> Any:
    """Return the object that a field names, or an instance of the class; None as for `function_of`."""
    return _resolved(table, field, builder, instance)


def _resolved(table: Table, field: str, builder: StepBuilder, how: Callable[[Any], Any]) -> Any:
    said = table.get(field)
    if said is None or (isinstance(said, Table) and not readable(said)):
        return None
    return builder.attempt(table.line_of(field), lambda: how(said))


def instance(said: Any) -> Any:
    """Return the object for a text `module:name`, or for a table with arguments."""
    arguments = arguments_of(said) if isinstance(said, Table) else None
    return resolve_instance(reference_of(said), arguments)


def reference_of(said: Any) -> str:
    """Return the `module:name` of a text, or of a table with arguments."""
    return str(said.get("python") if isinstance(said, Table) else said)


def arguments_of(said: Table) -> dict[str, Any]:
    """Return the arguments of a table, by name."""
    arguments = said.get("arguments")
    return {} if arguments is None else dict(arguments.values)


def readable(said: Table) -> bool:
    """Return False if a reference or its arguments are wrong, which has been reported."""
    arguments = said.get("arguments")
    return not said.bad and (arguments is None or not arguments.bad)


def sound(table: Table, **read: Any) -> bool:
    """Return False if a field was tried although its value, passed here, is None."""
    return not any(table.tried(field) and made is None for field, made in read.items())


def given(table: Table, **arguments: str) -> dict[str, Any]:
    """Return method arguments for the fields that are present: `given(table, max_rows="maxRows")`."""
    return {
        argument: table.get(field) for argument, field in arguments.items() if field in table.values
    }


def check_keys(what: str, name: str, table: Table, line: int, builder: StepBuilder) -> bool:
    """Return True if a table has one of `keyBy` and `keyWith`, even a wrong one; else report a problem."""
    tried = table.present(["keyBy", "keyWith"])
    if len(tried) == 2:
        builder.problems.add(
            table.line_of("keyWith"),
            f"keyBy and keyWith exclude each other operator=`{name}`",
            "keep one",
        )
        return False
    if not tried:
        builder.problems.add(line, f"{what} has no keyBy operator=`{name}`", "keyBy: [column]")
    function_of(table, "keyWith", builder)  # reports its problems even without an input
    return bool(tried)


def key_has_columns(what: str, name: str, table: Table, builder: StepBuilder) -> bool:
    """Return False and report a problem if the key is a function, for steps on whole columns."""
    if table.tried("keyWith"):
        builder.problems.add(
            table.line_of("keyWith"),
            f"{what} needs a key made of columns, and keyWith is a function operator=`{name}`",
            'make the key a column in a step before, select: ["*", "lower(url) AS key"], '
            "and set keyBy: key",
        )
    return not table.tried("keyWith")


def keyed(stream: Stream[Any], table: Table, builder: StepBuilder) -> Any:
    """Return the stream keyed by the keys of a table; None if they are wrong."""
    if table.tried("keyWith"):
        function = function_of(table, "keyWith", builder)
        if function is None:
            return None
        return builder.attempt(table.line_of("keyWith"), lambda: stream.key_with(function))
    keys = table.get("keyBy")
    if keys is None:
        return None
    pairs = list(zip(keys, keys.lines, strict=True))
    return each(builder, table.line_of("keyBy"), pairs, lambda some, _: stream.key_by(*some))


def timed(stream: Stream[Any], what: str, line: int, builder: StepBuilder) -> bool:
    """Return True if a stream has event time; else report a problem."""
    if not stream.has_event_time:
        builder.problems.add(
            line,
            f"{what} needs event time, and `{stream.name}` has none",
            "eventTime: {column: ..., maxOutOfOrder: ...} in the source, or in a step before",
        )
    return stream.has_event_time


def each(
    builder: StepBuilder,
    line: int,
    items: Sequence[tuple[Any, int]],
    action: Callable[[Sequence[Any], str], R],
    name: str = "",
) -> R | None:
    """Call `action` with all items; if it refuses, report each item that is refused on its own."""
    before = len(builder.problems.found)
    made = builder.attempt(line, lambda: action([item for item, _ in items], name))
    if made is not None:
        return made
    joint = builder.problems.found[before:]
    del builder.problems.found[before:]
    for number, (item, at) in enumerate(items):
        # Names in a manifest have no spaces, so this one is unused.
        trial = f"trial {number} of {name}"[:NAME_LENGTH_MAX]
        builder.attempt(at, lambda item=item, trial=trial: action([item], trial))  # type: ignore[misc]
    if len(builder.problems.found) == before:
        builder.problems.found.extend(joint)
    return None
