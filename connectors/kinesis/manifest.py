"""The fields of the connectors `kinesis` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    ChoiceKind,
    Field,
    TextKind,
    duration,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..arguments import ON_LOST
from ..formats.fields import format_field, with_format
from ..formats.text import OUTPUT_FORMATS
from ..manifest_fields import (
    READ_BUFFER,
    message_fields,
    position_fields,
    service_fields,
    with_positions,
)
from .model import METADATA
from .sink import kinesis_sink
from .source import kinesis_source

_STREAM: Final = service_fields("stream")
_POSITION: Final = {
    "time": Field(TextKind(), "a time, such as `2026-01-31T12:00:00Z`", required=True),
}
SOURCE: Final = {
    **_STREAM,
    **message_fields(METADATA.names, "{timestamp: sent_at}"),
    **position_fields(_POSITION, ("trim_horizon", "latest")),
    "every": Field(duration(), "the pause between two requests to a shard; 250ms"),
    "discoverEvery": Field(duration(), "how often it is asked which shards there are; 10s"),
    "onLost": Field(
        ChoiceKind(ON_LOST), "records may have been deleted before they were read; fail"
    ),
    "buffer": READ_BUFFER,
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
    arguments = with_positions(arguments, "time")
    return kinesis_source(stream, **with_format(arguments))


def make_sink(*, stream: str, **arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return kinesis_sink(stream, **with_format(arguments))
