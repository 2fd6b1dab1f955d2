"""The fields of the connectors `kinesis` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    ChoiceKind,
    Field,
    OneOf,
    Section,
    TextKind,
    duration,
    size,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..arguments import ON_LOST, parse_time
from ..formats.fields import format_field, with_format
from ..formats.text import FORMATS, OUTPUT_FORMATS
from ..manifest_fields import DELIMITER, metadata_field
from .model import METADATA
from .sink import kinesis_sink
from .source import kinesis_source

_STREAM: Final = {
    "stream": Field(TextKind(), "the name of the stream", required=True),
    "region": Field(TextKind(), "the region of the stream; that of the environment"),
    "endpoint": Field(
        TextKind(), "the address of another service with the same requests; that of AWS"
    ),
}
_POSITION: Final = {
    "time": Field(TextKind(), "a time, such as `2026-01-31T12:00:00Z`", required=True),
}
SOURCE: Final = {
    **_STREAM,
    "format": format_field(FORMATS),
    "delimiter": DELIMITER,
    "metadata": metadata_field(
        METADATA.names, "further columns, by what they hold, such as `{timestamp: sent_at}`"
    ),
    "start": Field(
        OneOf(Section("start", _POSITION), ChoiceKind(("trim_horizon", "latest"))),
        "where a run without state begins; trim_horizon",
    ),
    "stop": Field(
        OneOf(Section("stop", _POSITION), ChoiceKind(("latest",))),
        "where reading ends; absent: never",
    ),
    "every": Field(duration(), "the pause between two requests to a shard; 250ms"),
    "discoverEvery": Field(duration(), "how often it is asked which shards there are; 10s"),
    "onLost": Field(
        ChoiceKind(ON_LOST), "records may have been deleted before they were read; fail"
    ),
    "buffer": Field(size(), "about the most bytes that wait to be processed; 32mb"),
}
SINK: Final = {
    **_STREAM,
    "format": format_field(OUTPUT_FORMATS),
    "partitionKey": Field(
        TextKind(), "the column that decides the shard of a record; absent: a random key"
    ),
}


def make_source(*, stream: str, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    for name in ("start", "stop"):
        if isinstance(arguments.get(name), dict):
            arguments[name] = parse_time(name, arguments[name]["time"])
    return kinesis_source(stream, **with_format(arguments))


def make_sink(*, stream: str, **arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return kinesis_sink(stream, **with_format(arguments))
