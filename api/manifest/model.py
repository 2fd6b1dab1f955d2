"""The fields of a StreamJob, in one table per section, from which the JSON schema is made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ..resources import GROUP_NAME, GROUP_NAME_MEANING
from .event_times import EVENT_TIME
from .fields import (
    AnyText,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    Kind,
    NumberKind,
    Section,
    TextKind,
    duration,
    size,
)
from .kubernetes_model import KUBERNETES
from .registry import SinkConnector, SourceConnector
from .step import NAME, PARALLELISM, PARTITIONINGS, SCHEMA, SLOT_SHARING_GROUP, STREAM
from .steps import operator_section

Schema: TypeAlias = dict[str, Any]

CHARACTERS_MIN: Final = 240
"""A shorter part is written out wherever it is needed: a reference would hardly be shorter."""

API_VERSION = "headgate.io/v1alpha1"
KIND = "StreamJob"

JOB_NAME = TextKind(
    r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    "a name of at most 63 lower-case letters, digits and `-`",
    "it names Kubernetes objects too (DNS-1123 label)",
)
CHECKPOINT = Section(
    "checkpoint",
    {
        "every": Field(duration(), "time between the starts of two checkpoints", required=True),
        "storage": Field(TextKind(), "a directory or s3://bucket/prefix", required=True),
        "timeout": Field(duration(), "a checkpoint that takes longer is aborted"),
        "minPause": Field(duration(), "least time between two checkpoints"),
        "maxConcurrent": Field(IntegerKind(1, 1000), "most checkpoints in progress at once"),
        "tolerableFailures": Field(
            IntegerKind(0, 2**31 - 1), "number of checkpoints in a row that may fail"
        ),
        "retain": Field(IntegerKind(1, 10_000), "number of completed checkpoints that are kept"),
    },
)
RESTART = Section(
    "restart",
    {
        "strategy": Field(
            ChoiceKind(("fixed-delay", "failure-rate", "exponential-delay", "none")),
            "what to do when the job fails; fixed-delay",
        ),
        "attempts": Field(
            IntegerKind(0, 2**31 - 1),
            "restarts before the job fails; exponential-delay: before backoff is reset",
        ),
        "delay": Field(duration(), "fixed-delay, failure-rate: pause before a restart"),
        "maxFailures": Field(
            IntegerKind(1, 2**31 - 1), "failure-rate: failures within the interval"
        ),
        "interval": Field(duration(), "failure-rate: the time in which failures are counted"),
        "initialBackoff": Field(duration(), "exponential-delay: the first pause"),
        "maxBackoff": Field(duration(), "exponential-delay: the longest pause"),
        "backoffMultiplier": Field(NumberKind(1), "exponential-delay: growth of each pause"),
        "jitterFactor": Field(
            NumberKind(0), "exponential-delay: jitter, the fraction (0 to 1) added or subtracted"
        ),
        "resetBackoffThreshold": Field(
            duration(), "exponential-delay: this long without a failure resets the backoff"
        ),
    },
)
GROUP = TextKind(GROUP_NAME.pattern, GROUP_NAME_MEANING)
_AMOUNT = NumberKind(0)
RESOURCES = Section(
    "resources",
    {
        "cpu": Field(_AMOUNT, "CPUs of a slot; fractions are allowed"),
        "memory": Field(size(), "memory of a slot, such as `8gb` or `8Gi`"),
        "gpu": Field(_AMOUNT, "GPUs of a slot: a whole number, or a fraction below 1"),
        "custom": Field(Items(_AMOUNT), "amounts of other resources of Ray's nodes, by name"),
    },
)
_METADATA = Section(
    "metadata",
    {
        "name": Field(JOB_NAME, "the name of the job", required=True),
        "namespace": Field(JOB_NAME, "for Kubernetes"),
        "labels": Field(
            Items(AnyText()), "for tools; the metric `headgate_job_info` has them as labels"
        ),
        "annotations": Field(Items(AnyText()), "for Kubernetes"),
    },
)


def source_section(connectors: Mapping[str, SourceConnector]) -> Section:
    """Return the section of a source: one of the connectors, and the common fields."""
    fields = {name: Field(c.fields, f"read with {name}") for name, c in connectors.items()}
    return Section(
        "source",
        {
            **fields,
            "schema": Field(SCHEMA, "columns and types, a source with the same, or a class"),
            "eventTime": Field(EVENT_TIME, "the column with event time"),
            "onBadRecord": Field(
                ChoiceKind(("fail", "side_output", "drop")), "what to do with unreadable records"
            ),
            "parallelism": Field(PARALLELISM, "number of subtasks"),
            "slotSharingGroup": SLOT_SHARING_GROUP,
        },
    )


def sink_section(connectors: Mapping[str, SinkConnector]) -> Section:
    """Return the section of a sink: one of the connectors, its input, and the guarantee."""
    fields = {name: Field(c.fields, f"write with {name}") for name, c in connectors.items()}
    return Section(
        "sink",
        {
            "from": Field(STREAM, "the source or operator it reads", required=True),
            **fields,
            "guarantee": Field(
                ChoiceKind(("exactly_once", "at_least_once", "none")),
                "delivery guarantee under failures",
            ),
            "partition": Field(
                ChoiceKind(PARTITIONINGS), "how its input is distributed over its subtasks"
            ),
            "parallelism": Field(PARALLELISM, "number of subtasks"),
            "slotSharingGroup": SLOT_SHARING_GROUP,
        },
    )


def spec_section(
    sources: Mapping[str, SourceConnector], sinks: Mapping[str, SinkConnector]
) -> Section:
    """Return the section `spec` of a StreamJob."""
    source: Kind = source_section(sources)
    sink: Kind = sink_section(sinks)
    return Section(
        "spec",
        {
            "parallelism": Field(PARALLELISM, "of operators that do not set their own"),
            "maxParallelism": Field(PARALLELISM, "number of key groups, fixed for good"),
            "checkpoint": Field(CHECKPOINT, "when and where checkpoints are taken"),
            "restart": Field(RESTART, "what to do when the job fails"),
            "resources": Field(
                Items(RESOURCES, GROUP), "slot sharing groups, and what a slot of each takes"
            ),
            "options": Field(Items(AnyText()), "any option, see docs/options.md"),
            "kubernetes": Field(
                KUBERNETES, "how an operator runs the job; a local run only checks its form"
            ),
            "sources": Field(
                Items(source, NAME, may_be_empty=False), "the inputs of the job", required=True
            ),
            "operators": Field(Items(operator_section(sources), NAME), "the processing steps"),
            "sinks": Field(
                Items(sink, NAME, may_be_empty=False), "the outputs of the job", required=True
            ),
        },
    )


def manifest_section(
    sources: Mapping[str, SourceConnector], sinks: Mapping[str, SinkConnector]
) -> Section:
    """Return the section of a whole StreamJob."""
    spec = spec_section(sources, sinks)
    return Section(
        "the manifest",
        {
            "apiVersion": Field(ChoiceKind((API_VERSION,)), API_VERSION, required=True),
            "kind": Field(ChoiceKind((KIND,)), KIND, required=True),
            "metadata": Field(_METADATA, "name and labels", required=True),
            "spec": Field(spec, "the job", required=True),
        },
    )


def json_schema(
    sources: Mapping[str, SourceConnector], sinks: Mapping[str, SinkConnector]
) -> dict[str, Any]:
    """Return the JSON schema of a StreamJob, for editors. It covers fields and types, not the graph."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": KIND,
        **_with_definitions(manifest_section(sources, sinks).schema()),
    }


def _with_definitions(schema: Schema) -> Schema:
    """Return an equivalent schema, in which the parts that it has several times are in `$defs`.

    A connector may stand in several places, such as the two sources of a hybrid one, and some fields, such
    as the credentials of Kafka, belong to several connectors. Written out each time they would make the
    schema more than twice as long.

    A definition has the name of the field in which its part is first met, with a number if that is taken.
    The descriptions of fields stand beside the references.
    """
    uses: Counter[str] = Counter()
    names: dict[str, str] = {}
    definitions: dict[str, Schema] = {}

    def counted(part: Schema, field: str) -> Schema:
        text = _text(part)
        uses[text] += 1
        # The parts of equal parts are written only once, too, so they count once.
        return _mapped(part, field, counted) if uses[text] == 1 else part

    def written(part: Schema, field: str) -> Schema:
        text = _text(part)
        if uses[text] < 2 or len(text) < CHARACTERS_MIN:
            return _mapped(part, field, written)
        if text not in names:
            names[text] = _free(field, definitions)
            definitions[names[text]] = {}  # the name is taken, also while the parts are written
            definitions[names[text]] = _mapped(part, field, written)
        return {"$ref": f"#/$defs/{names[text]}"}

    _mapped(schema, "", counted)
    made = _mapped(schema, "", written)
    return {**made, "$defs": dict(sorted(definitions.items()))}


def _mapped(schema: Schema, field: str, change: Callable[[Schema, str], Schema]) -> Schema:
    """Return a schema with its parts changed, each without its description, which stays.

    Args:
        schema: has the parts.
        field: the name of the field that it describes.
        change: gets a part and the name of its field.
    """

    def changed(part: Schema, name: str) -> Schema:
        rest = {key: value for key, value in part.items() if key != "description"}
        kept = {key: value for key, value in part.items() if key == "description"}
        return {**change(rest, name), **kept}

    made = dict(schema)
    for key, value in schema.items():
        if key == "properties":
            made[key] = {name: changed(part, name) for name, part in value.items()}
        elif key == "anyOf":
            made[key] = [changed(part, field) for part in value]
        elif key in ("additionalProperties", "propertyNames", "items") and isinstance(value, dict):
            made[key] = changed(value, field)
    return made


def _text(schema: Schema) -> str:
    return json.dumps(schema, sort_keys=True)


def _free(field: str, taken: dict[str, Schema]) -> str:
    """Return the name of a field, with a number if it is taken."""
    name, number = field, 1
    while name in taken:
        number += 1
        name = f"{field}{number}"
    return name
