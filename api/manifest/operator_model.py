"""The fields of an operator of a StreamJob, and the sections below it."""

from __future__ import annotations

from collections.abc import Mapping

from ...operators.durations import parse_duration
from ...operators.patterns.match import PATTERN as AFTER_MATCH_PATTERN
from ..resources import GROUP_NAME, GROUP_NAME_MEANING
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
SLOT_SHARING_GROUP = Field(
    Text(GROUP_NAME.pattern, GROUP_NAME_MEANING),
    "the group of `resources` whose slots it runs in; default: that of its inputs",
)
PARTITIONINGS = ("rebalance", "rescale", "shuffle", "broadcast", "global")
_AGGREGATE_FUNCTION = Text(
    REFERENCE.pattern, "a mapping such as `{n: count()}`, or `module:AggregateFunction`"
)
_ROWS = Integer(1, 2**31 - 1)
_REFERENCE_TABLE = Section(
    "a reference",
    {
        "python": Field(REFERENCE, "a class, or a function that makes one", required=True),
        "arguments": Field(Items(Anything()), "its arguments, by name"),
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
    "keyBy": Field(ListOf(Text()), "the key columns"),
    "keyWith": Field(REFERENCE, "instead: a function record -> key, `module:function`"),
}

_ACTIONS = Choice(("fail", "drop", "side_output"))
ON_ERROR = Section(
    "onError",
    {
        "then": Field(_ACTIONS, "fail, drop, or side_output", required=True),
        "retries": Field(Integer(0, 1000), "number of times the function is retried first"),
    },
)
EVENT_TIME = Section(
    "eventTime",
    {
        "column": Field(Text(), "a timestamp column, or an int64 one of ms"),
        "python": Field(REFERENCE, "instead: a function record -> time, `module:function`"),
        "maxOutOfOrder": Field(duration(), "how far records may be out of order in event time"),
        "strategy": Field(
            _INSTANCE, "instead: a rule for watermarks, a class `module:WatermarkGenerator`"
        ),
        "idleAfter": Field(duration(), "a split without records for this long is idle"),
        "closeAfter": Field(duration(), "after this long without records time follows the clock"),
        "perSplit": Field(Boolean(), "false: the splits of a source share their watermarks"),
        "waitForQueued": Field(
            Boolean(),
            "splits not yet read hold the watermark back, too; true by default where the source ends",
        ),
        "align": Field(NAME, "watermark alignment: the name of a group of sources"),
        "maxDrift": Field(duration(), "how far one may be ahead of the slowest of its group"),
        "alignEvery": Field(duration(), "how often the group exchanges watermarks"),
        "onError": Field(
            OneOf(ON_ERROR, _ACTIONS),
            "handling of records without a time, or with one out of range",
        ),
        "name": Field(NAME, "address of the state of `closeAfter`; also for metrics"),
    },
)
_SIGNED = Parsed(
    lambda text: parse_duration(text.removeprefix("-")),
    "a duration with a unit such as `10s` or `-10m`",
)
WINDOW = Section(
    "window",
    {
        "tumbling": Field(duration(), "consecutive windows of this length"),
        "sliding": Field(duration(), "windows of this length, one starting at each `every`"),
        "cumulative": Field(duration(), "windows that grow by `step` up to this length"),
        "session": Field(
            Text(meaning="a duration with a unit such as `30m`, SQL, or `module:function`"),
            "windows that end after this gap; also SQL, or `module:function` of a record",
        ),
        "count": Field(_ROWS, "windows of the last N records of a key, at every `every` records"),
        "global": Field(Choice(("all",)), "`all`: one window for all records of a key"),
        "python": Field(_INSTANCE, "a `module:WindowAssigner` of your own"),
        "every": Field(AnyText(), "of `sliding` a duration, of `count` a number of records"),
        "step": Field(duration(), "of `cumulative`"),
        "offset": Field(duration(), "shifts their bounds"),
        "allowedLateness": Field(duration(), "how long a closed window still takes records"),
        "zone": Field(Text(), "windows of whole days begin at midnight in this time zone"),
        "emitEvery": Field(duration(), "emit early results at this processing-time interval"),
        "emitRows": Field(_ROWS, "emit early results after this many rows of a subtask"),
        "time": Field(Choice(("event", "processing")), "`processing`: by the machine's clock"),
        "trigger": Field(_INSTANCE, "a `module:Trigger`: when windows fire"),
        "evictor": Field(_INSTANCE, "a `module:Evictor`: which records are left out"),
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
            ListOf(_SIGNED, 2), "bounds of the other's time relative to this, `[-10m, 0s]`"
        ),
        "how": Field(Choice(_HOWS), "`inner`, or also records without a match"),
        "suffix": _SUFFIX,
    },
)
JOIN_AS_OF = Section(
    "joinAsOf",
    {
        **_OTHER,
        "how": Field(Choice(_HOWS[:2]), "`inner`, or `left`: also records without a version"),
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
        **_KEYS,
        "broadcast": Field(STREAM, "instead: a source or operator that every subtask gets"),
    },
)
RETRY = Section(
    "retry",
    {
        "attempts": Field(Integer(1, 1000), "calls of a record at most, the first one included"),
        "delay": Field(duration(), "between the first call and the second"),
        "factor": Field(Number(1), "growth of each further delay"),
        "longest": Field(duration(), "the longest delay"),
        "onException": Field(
            ListOf(REFERENCE), "exceptions to retry: `builtins:OSError`, or one function of them"
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
        "wait": Field(duration(), "the loop ends after this long without records in it"),
        "maxRounds": Field(_ROWS, "a loop in rounds; the most rounds"),
        "whileAny": Field(
            Text(), "of rounds: continue while this SQL, or `module:function`, holds for any record"
        ),
    },
)
MATCH = Section(
    "match",
    {
        "pattern": Field(
            _INSTANCE, "a pattern made with `hg.cep.begin`, `module:name`", required=True
        ),
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
"""The verbs: an operator has exactly one of them."""


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
            "columns": Field(ListOf(Text()), "columns added to the records; all but the key"),
            "maxBytes": Field(size(), "the most that its columns may take in memory; 64mb"),
            "duplicates": Field(
                Choice(("fail", "first", "last")), "which of several rows with equal keys counts"
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
            "how": Field(
                Choice(_HOWS[:2]), "of a table: `left`, or `inner`: only records it has a row for"
            ),
            "suffix": Field(Text(), "appended to found columns whose names are taken"),
            "cacheRows": Field(Integer(0, 2**31 - 1), "answers of `python` kept; 0: none"),
            "cacheFor": Field(duration(), "how long an answer of `python` is valid"),
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
    "eventTime": Field(EVENT_TIME, "event time of the result"),
    **_KEYS,
    "window": Field(WINDOW, "the windows of the records"),
    "aggregate": Field(
        OneOf(Items(Text(), may_be_empty=False), _AGGREGATE_FUNCTION),
        'results and their aggregates, `total: "sum(amount * 2)"`; or a `module:AggregateFunction`',
    ),
    "reduce": Field(REFERENCE, "a function (record, record) -> record, `module:function`"),
    "process": Field(_INSTANCE, "a class with state, such as a `module:KeyedProcess`"),
    "windowProcess": Field(
        _INSTANCE, "a `module:WindowProcess` that gets the results of `reduce` or `aggregate`"
    ),
    "connect": Field(CONNECT, "a second input of `process`"),
    "join": Field(JOIN, "pairs with another stream, close in time or in the same window"),
    "joinAsOf": Field(JOIN_AS_OF, "each record with the version valid at its time"),
    "coGroup": Field(CO_GROUP, "a function of all records of a key in a window, from two streams"),
    "match": Field(MATCH, "a pattern in the records of each key"),
    "iterate": Field(ITERATE, "a loop"),
    "maxInFlight": Field(Integer(1, 100_000), "most concurrent calls of a coroutine function"),
    "rows": Field(_ROWS, "call `python` with this many rows at a time"),
    "within": Field(duration(), "how long a row waits for that many to arrive"),
    "timeout": Field(duration(), "of a record in `mapAsync` or `lookup`, all attempts included"),
    "ordered": Field(Boolean(), "false: results are emitted as calls finish"),
    "retry": Field(RETRY, "when `mapAsync` or `lookup` calls its function again"),
    "onTimeout": Field(
        Text(), "fail, side_output, or a function record -> record, `module:function`"
    ),
    "onError": Field(
        OneOf(ON_ERROR, _ACTIONS), "handling of records for which the function raises"
    ),
    "partition": Field(Choice(PARTITIONINGS), "how its input is distributed over its subtasks"),
    "parallelism": Field(PARALLELISM, "number of subtasks"),
    "slotSharingGroup": SLOT_SHARING_GROUP,
    "chaining": Field(Choice(("head", "never")), "start a new chain here, or never chain"),
}


def operator_section(connectors: Mapping[str, SourceConnector]) -> Section:
    """Return the section of an operator; its `lookup` has those connectors that make tables."""
    lookup = Field(_lookup_section(connectors), "join each record with the entry for its key")
    return Section("operator", {**_FIELDS, "lookup": lookup})
