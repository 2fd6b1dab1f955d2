"""Which fields an operator of a StreamJob has, and the sections below it."""

from __future__ import annotations

from collections.abc import Mapping

from ..cep.after_match import PATTERN as AFTER_MATCH_PATTERN
from ..durations import parse_duration
from .fields import (
    REFERENCE,
    AnyText,
    Anything,
    Boolean,
    Choice,
    Field,
    Integer,
    Items,
    ListOf,
    Number,
    OneOf,
    Parsed,
    Section,
    Text,
    column_type,
    duration,
    size,
)
from .registry import SourceConnector

PARALLELISM_MAX = 32768
PARALLELISM = Integer(1, PARALLELISM_MAX)
PARTITIONINGS = ("rebalance", "rescale", "shuffle", "broadcast", "global")
_AGGREGATE_FUNCTION = Text(
    REFERENCE.pattern, "a mapping such as `{n: count()}`, or `module:AggregateFunction`"
)
_ROWS = Integer(1, 2**31 - 1)
_REFERENCE_TABLE = Section(
    "a reference",
    {
        "python": Field(REFERENCE, "a class, or a function that makes one", required=True),
        "arguments": Field(Items(Anything()), "with which it is called, by name"),
    },
)
_INSTANCE = OneOf(_REFERENCE_TABLE, REFERENCE)

NAME = Text(
    r"[A-Za-z0-9][A-Za-z0-9_-]*",
    "a name of letters, digits, `-` and `_`",
    "a dot would mean a side output",
)
STREAM = Text(
    r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)?",
    "the name of a source or an operator",
    "a side output is written `operator.late` or `source.rejected`",
)
_COLUMNS = Items(column_type(), may_be_empty=False)
SCHEMA = OneOf(_COLUMNS, Text())
_KEYS = {
    "keyBy": Field(ListOf(Text()), "columns whose equal values belong together"),
    "keyWith": Field(REFERENCE, "instead: a function record -> key, `module:function`"),
}

_ACTIONS = Choice(("fail", "drop", "side_output"))
ON_ERROR = Section(
    "onError",
    {
        "then": Field(_ACTIONS, "fail, drop, or side_output", required=True),
        "retries": Field(Integer(0, 1000), "so many times the function is called again before"),
    },
)
EVENT_TIME = Section(
    "eventTime",
    {
        "column": Field(Text(), "a timestamp column, or an int64 one of ms"),
        "python": Field(REFERENCE, "instead: a function record -> time, `module:function`"),
        "maxOutOfOrder": Field(duration(), "how much later than a younger record one may come"),
        "strategy": Field(
            _INSTANCE, "instead: a rule for watermarks, a class `module:WatermarkGenerator`"
        ),
        "idleAfter": Field(duration(), "a split silent for so long no longer holds time back"),
        "closeAfter": Field(duration(), "after so long a silence time goes on with the clock"),
        "perSplit": Field(Boolean(), "false: the splits of a source share their watermarks"),
        "waitForQueued": Field(
            Boolean(),
            "splits not yet being read hold time back, too; true by default where the source ends",
        ),
        "align": Field(NAME, "sources that name the same group wait for each other"),
        "maxDrift": Field(duration(), "how far one may be ahead of the slowest of its group"),
        "alignEvery": Field(duration(), "how often they tell each other how far they are"),
        "onError": Field(
            OneOf(ON_ERROR, _ACTIONS),
            "what becomes of records without a time, or with one out of range",
        ),
        "name": Field(NAME, "where `closeAfter` remembers how far time is; also for metrics"),
    },
)
_SIGNED = Parsed(
    lambda text: parse_duration(text.removeprefix("-")),
    "a duration with a unit such as `10s` or `-10m`",
)
WINDOW = Section(
    "window",
    {
        "tumbling": Field(duration(), "windows of this length, one behind the other"),
        "sliding": Field(duration(), "windows of this length that begin `every` so often"),
        "cumulative": Field(duration(), "windows that grow by `step` up to this length"),
        "session": Field(
            Text(meaning="a duration with a unit such as `30m`, SQL, or `module:function`"),
            "windows that end after this gap; also SQL, or `module:function` of a record",
        ),
        "count": Field(_ROWS, "the last so many records of a key, `every` so many"),
        "global": Field(Choice(("all",)), "`all` records of a key in one window"),
        "python": Field(_INSTANCE, "a `module:WindowAssigner` of your own"),
        "every": Field(AnyText(), "of `sliding` a duration, of `count` a number of records"),
        "step": Field(duration(), "of `cumulative`"),
        "offset": Field(duration(), "shifts their bounds"),
        "allowedLateness": Field(duration(), "how long a closed window still takes records"),
        "zone": Field(Text(), "windows of whole days begin at midnight in this time zone"),
        "emitEvery": Field(duration(), "show the results so far after so much processing time"),
        "emitRows": Field(_ROWS, "the same after so many rows of a subtask"),
        "time": Field(Choice(("event", "processing")), "`processing`: by the machine's clock"),
        "trigger": Field(_INSTANCE, "a `module:Trigger`: when windows fire"),
        "evictor": Field(_INSTANCE, "a `module:Evictor`: which records are left out then"),
    },
)
_OTHER = {"with": Field(STREAM, "the other source or operator", required=True), **_KEYS}
_HOWS = ("inner", "left", "right", "full")
_SUFFIX = Field(Text(), "appended to columns of the other whose names are taken")
JOIN = Section(
    "join",
    {
        **_OTHER,
        "within": Field(
            ListOf(_SIGNED, 2), "from where to where the other's time may lie, `[-10m, 0s]`"
        ),
        "how": Field(Choice(_HOWS), "`inner`, or also records that met none"),
        "suffix": _SUFFIX,
    },
)
JOIN_AS_OF = Section(
    "joinAsOf",
    {
        **_OTHER,
        "how": Field(Choice(_HOWS[:2]), "`inner`, or `left`: also records without a version"),
        "validFor": Field(duration(), "how long a version is valid at most, in event time"),
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
        **_KEYS,
        "broadcast": Field(STREAM, "instead: a source or operator that every subtask gets"),
    },
)
RETRY = Section(
    "retry",
    {
        "attempts": Field(Integer(1, 1000), "calls of a record at most, the first one included"),
        "delay": Field(duration(), "between the first call and the second"),
        "factor": Field(Number(1), "each further delay is so many times the one before"),
        "longest": Field(duration(), "no delay is longer"),
        "onException": Field(
            ListOf(REFERENCE), "which exceptions: `builtins:OSError`, or one function of them"
        ),
        "onResult": Field(REFERENCE, "a function result -> bool: call again? `module:function`"),
    },
)
ITERATE = Section(
    "iterate",
    {
        "body": Field(
            REFERENCE, "a function stream -> (feedback, output), `module:function`", required=True
        ),
        "wait": Field(duration(), "at the end nothing must have been under way for so long"),
        "maxRounds": Field(_ROWS, "a loop in rounds, at most so many"),
        "whileAny": Field(
            Text(), "of rounds: go on only while this SQL, or `module:function`, holds for a record"
        ),
    },
)
MATCH = Section(
    "match",
    {
        "pattern": Field(_INSTANCE, "what `hg.cep.begin` began, `module:name`", required=True),
        "select": Field(REFERENCE, "a function match -> record, `module:function`"),
        "afterMatch": Field(
            Text(
                AFTER_MATCH_PATTERN,
                "no_skip, skip_to_next, skip_past_last_event, skip_to_first(stage) or "
                "skip_to_last(stage)",
            ),
            "which overlapping matches are dropped, such as `skip_past_last_event`",
        ),
    },
)
VERBS = (
    "filter",
    "select",
    "python",
    "map",
    "flatMap",
    "mapAsync",
    "lookup",
    "aggregate",
    "reduce",
    "process",
    "join",
    "joinAsOf",
    "coGroup",
    "match",
    "iterate",
    "union",
)
"""Exactly one of these makes an operator."""


def _lookup_section(connectors: Mapping[str, SourceConnector]) -> Section:
    files = {
        name: Field(connector.fields, f"read with {name}")
        for name, connector in connectors.items()
        if connector.tables
    }
    table = Section(
        "table",
        {
            **files,
            "schema": Field(SCHEMA, "columns and types, a source with the same, or a class"),
            "key": Field(ListOf(Text()), "columns that records are looked up by", required=True),
            "columns": Field(ListOf(Text()), "what is brought to the records; all but the key"),
            "maxBytes": Field(size(), "the most that its columns may take in memory; 64mb"),
            "duplicates": Field(
                Choice(("fail", "first", "last")), "which of rows with equal keys counts"
            ),
        },
    )
    return Section(
        "lookup",
        {
            "key": Field(ListOf(Text()), "columns of the record that are looked up", required=True),
            "python": Field(
                REFERENCE, "a coroutine function key -> record or None, `module:function`"
            ),
            "table": Field(table, "instead: a table in files, read as a whole at the start"),
            "how": Field(Choice(_HOWS[:2]), "of a table: `left`, or `inner`: only what it has"),
            "suffix": Field(Text(), "appended to columns that are found whose names are taken"),
            "cacheRows": Field(Integer(0, 2**31 - 1), "answers of `python` kept; 0: none"),
            "cacheFor": Field(duration(), "how long an answer of `python` counts"),
        },
    )


_FIELDS = {
    "from": Field(STREAM, "the source or operator it reads"),
    "union": Field(ListOf(STREAM), "the streams to merge, instead of `from`"),
    "filter": Field(Text(), "an SQL condition, or `module:function`; other rows are dropped"),
    "select": Field(ListOf(Text()), "columns and SQL expressions `a / 2 AS b`"),
    "python": Field(REFERENCE, "a function RecordBatch -> RecordBatch, `module:function`"),
    "map": Field(REFERENCE, "a function record -> record, `module:function`"),
    "flatMap": Field(REFERENCE, "a function record -> records, `module:function`"),
    "mapAsync": Field(REFERENCE, "a coroutine function record -> record, `module:function`"),
    "into": Field(SCHEMA, "columns of the result, or a class `module:Class`"),
    "adds": Field(_COLUMNS, "columns that `python` adds to those of its input"),
    "eventTime": Field(EVENT_TIME, "which column of the result is event time"),
    **_KEYS,
    "window": Field(WINDOW, "how the records are cut into windows"),
    "aggregate": Field(
        OneOf(Items(Text(), may_be_empty=False), _AGGREGATE_FUNCTION),
        'results and how they are made, `total: "sum(amount * 2)"`; or a `module:AggregateFunction`',
    ),
    "reduce": Field(REFERENCE, "a function (record, record) -> record, `module:function`"),
    "process": Field(_INSTANCE, "a class with state, such as a `module:KeyedProcess`"),
    "windowProcess": Field(
        _INSTANCE, "a `module:WindowProcess` that gets what `reduce` or `aggregate` has made"
    ),
    "connect": Field(CONNECT, "a second input of `process`"),
    "join": Field(JOIN, "pairs with another stream, near in time or in the same window"),
    "joinAsOf": Field(JOIN_AS_OF, "each record with the version valid at its time"),
    "coGroup": Field(CO_GROUP, "a function of all records of a key in a window, of two streams"),
    "match": Field(MATCH, "a pattern in the records of each key"),
    "iterate": Field(ITERATE, "a loop"),
    "maxInFlight": Field(Integer(1, 100_000), "calls under way at once, of coroutine functions"),
    "rows": Field(_ROWS, "call `python` for so many rows at a time"),
    "within": Field(duration(), "how long a row waits for so many to come together"),
    "timeout": Field(duration(), "of a record in `mapAsync` or `lookup`, all attempts included"),
    "ordered": Field(Boolean(), "false: results of calls leave as they come"),
    "retry": Field(RETRY, "when `mapAsync` or `lookup` calls its function again"),
    "onTimeout": Field(
        Text(), "fail, side_output, or a function record -> record, `module:function`"
    ),
    "onError": Field(
        OneOf(ON_ERROR, _ACTIONS), "what becomes of records for which the function raises"
    ),
    "partition": Field(Choice(PARTITIONINGS), "how its input is spread over its subtasks"),
    "parallelism": Field(PARALLELISM, "number of subtasks"),
    "chaining": Field(Choice(("head", "never")), "start a new chain here, or never chain"),
}


def operator_section(connectors: Mapping[str, SourceConnector]) -> Section:
    """An operator; of the connectors those that make tables are in its `lookup`."""
    lookup = Field(_lookup_section(connectors), "each record with what is known of its key")
    return Section("operator", {**_FIELDS, "lookup": lookup})
