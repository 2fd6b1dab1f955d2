"""Which fields a StreamJob has. One table per section; the JSON schema comes from the same tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import (
    REFERENCE,
    AnyText,
    Choice,
    Field,
    Integer,
    Items,
    Kind,
    ListOf,
    OneOf,
    Section,
    Text,
    column_type,
    duration,
)
from .registry import SinkConnector, SourceConnector

API_VERSION = "headgate.io/v1alpha1"
KIND = "StreamJob"

PARALLELISM_MAX = 32768
_PARALLELISM = Integer(1, PARALLELISM_MAX)

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
JOB_NAME = Text(
    r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    "a name of at most 63 lower-case letters, digits and `-`",
    "it names Kubernetes objects too (DNS-1123 label)",
)
_COLUMNS = Items(column_type(), may_be_empty=False)
_SCHEMA = OneOf(_COLUMNS, Text())

PARTITIONINGS = ("rebalance", "rescale", "shuffle", "broadcast", "global")
VERBS = ("filter", "select", "python", "map", "flatMap", "aggregate", "reduce", "union")
"""Exactly one of these makes an operator."""

CHECKPOINT = Section(
    "checkpoint",
    {
        "every": Field(duration(), "time between the starts of two checkpoints", required=True),
        "storage": Field(Text(), "a directory or s3://bucket/prefix", required=True),
        "timeout": Field(duration(), "a checkpoint that takes longer is aborted"),
        "minPause": Field(duration(), "least time between two checkpoints"),
        "maxConcurrent": Field(Integer(1, 1000), "how many may be under way at once"),
        "tolerableFailures": Field(Integer(0, 2**31 - 1), "how many in a row may fail"),
        "retain": Field(Integer(1, 10_000), "how many completed checkpoints are kept"),
    },
)
RESTART = Section(
    "restart",
    {
        "strategy": Field(Choice(("fixed-delay", "none")), "what to do when the job fails"),
        "attempts": Field(Integer(0, 2**31 - 1), "restarts before the job fails"),
        "delay": Field(duration(), "pause before a restart"),
    },
)
EVENT_TIME = Section(
    "eventTime",
    {
        "column": Field(Text(), "a timestamp column, or an int64 one of ms", required=True),
        "maxOutOfOrder": Field(
            duration(), "how much later than a younger record one may come", required=True
        ),
        "idleAfter": Field(duration(), "a split silent for so long no longer holds time back"),
    },
)
WINDOW = Section(
    "window",
    {
        "tumbling": Field(duration(), "length of the windows", required=True),
        "offset": Field(duration(), "shifts their bounds"),
        "allowedLateness": Field(duration(), "how long a closed window still takes records"),
    },
)
OPERATOR = Section(
    "operator",
    {
        "from": Field(STREAM, "the source or operator it reads"),
        "union": Field(ListOf(STREAM), "the streams to merge, instead of `from`"),
        "filter": Field(Text(), "an SQL condition; rows for which it is not true are dropped"),
        "select": Field(ListOf(Text()), "columns and SQL expressions `a / 2 AS b`"),
        "python": Field(REFERENCE, "a function RecordBatch -> RecordBatch, `module:function`"),
        "map": Field(REFERENCE, "a function record -> record, `module:function`"),
        "flatMap": Field(REFERENCE, "a function record -> records, `module:function`"),
        "into": Field(_SCHEMA, "columns of the result, or a class `module:Class`"),
        "adds": Field(_COLUMNS, "columns that `python` adds to those of its input"),
        "eventTime": Field(EVENT_TIME, "which column of the result is event time"),
        "keyBy": Field(ListOf(Text()), "columns whose equal values belong together"),
        "window": Field(WINDOW, "windows of event time for `aggregate`"),
        "aggregate": Field(
            Items(Text(), may_be_empty=False),
            'results and how they are made, `total: "sum(amount)"`',
        ),
        "reduce": Field(REFERENCE, "a function (record, record) -> record, `module:function`"),
        "maxInFlight": Field(
            Integer(1, 100_000), "calls under way at once, of coroutine functions"
        ),
        "partition": Field(Choice(PARTITIONINGS), "how its input is spread over its subtasks"),
        "parallelism": Field(_PARALLELISM, "number of subtasks"),
        "chaining": Field(Choice(("head", "never")), "start a new chain here, or never chain"),
    },
)
_METADATA = Section(
    "metadata",
    {
        "name": Field(JOB_NAME, "the name of the job", required=True),
        "namespace": Field(JOB_NAME, "for Kubernetes"),
        "labels": Field(Items(AnyText()), "for Kubernetes and for metrics"),
        "annotations": Field(Items(AnyText()), "for Kubernetes"),
    },
)


def source_section(connectors: Mapping[str, SourceConnector]) -> Section:
    """A source: one of the connectors, and what all sources share."""
    fields = {name: Field(c.fields, f"read with {name}") for name, c in connectors.items()}
    return Section(
        "source",
        {
            **fields,
            "schema": Field(_SCHEMA, "columns and types, a source with the same, or a class"),
            "eventTime": Field(EVENT_TIME, "which column is event time"),
            "onBadRecord": Field(
                Choice(("fail", "side_output", "drop")), "what to do with unreadable records"
            ),
            "parallelism": Field(_PARALLELISM, "number of subtasks"),
        },
    )


def sink_section(connectors: Mapping[str, SinkConnector]) -> Section:
    """A sink: one of the connectors, its input, and the guarantee."""
    fields = {name: Field(c.fields, f"write with {name}") for name, c in connectors.items()}
    return Section(
        "sink",
        {
            "from": Field(STREAM, "the source or operator it reads", required=True),
            **fields,
            "guarantee": Field(
                Choice(("exactly_once", "at_least_once", "none")), "what failures may do"
            ),
            "partition": Field(Choice(PARTITIONINGS), "how its input is spread over its subtasks"),
            "parallelism": Field(_PARALLELISM, "number of subtasks"),
        },
    )


def manifest_section(
    sources: Mapping[str, SourceConnector], sinks: Mapping[str, SinkConnector]
) -> Section:
    """The whole StreamJob."""
    source: Kind = source_section(sources)
    sink: Kind = sink_section(sinks)
    spec = Section(
        "spec",
        {
            "parallelism": Field(_PARALLELISM, "of operators that do not set their own"),
            "maxParallelism": Field(_PARALLELISM, "number of key groups, fixed for good"),
            "checkpoint": Field(CHECKPOINT, "when and where state is saved"),
            "restart": Field(RESTART, "what to do when the job fails"),
            "options": Field(Items(AnyText()), "any option, see docs/options.md"),
            "sources": Field(
                Items(source, NAME, may_be_empty=False), "where records come from", required=True
            ),
            "operators": Field(Items(OPERATOR, NAME), "what is done with them"),
            "sinks": Field(
                Items(sink, NAME, may_be_empty=False), "where results go", required=True
            ),
        },
    )
    return Section(
        "the manifest",
        {
            "apiVersion": Field(Choice((API_VERSION,)), API_VERSION, required=True),
            "kind": Field(Choice((KIND,)), KIND, required=True),
            "metadata": Field(_METADATA, "name and labels", required=True),
            "spec": Field(spec, "the job", required=True),
        },
    )


def json_schema(
    sources: Mapping[str, SourceConnector], sinks: Mapping[str, SinkConnector]
) -> dict[str, Any]:
    """The JSON schema of a StreamJob, for editors. It knows fields and types, not the graph."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": KIND,
        **manifest_section(sources, sinks).schema(),
    }
