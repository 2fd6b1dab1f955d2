"""The fields of the connectors `mqtt` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    BooleanKind,
    Field,
    IntegerKind,
    ListOf,
    TextKind,
    duration,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..formats.fields import format_field, with_format
from ..formats.text import OUTPUT_FORMATS
from ..manifest_fields import PASSWORD, TLS, message_fields
from .model import METADATA
from .sink import mqtt_sink
from .source import mqtt_source

_BROKER: Final = {
    "url": Field(
        TextKind(),
        "the broker: `mqtt://host:1883` or `mqtts://host:8883`; or `file:/path` or `env:NAME`, read on "
        "each machine",
        required=True,
    ),
    "user": Field(TextKind(), "the name of the user"),
    "password": PASSWORD,
    **TLS,
}
SOURCE: Final = {
    "topics": Field(ListOf(TextKind()), "topics, or filters with `+` and `#`", required=True),
    **_BROKER,
    **message_fields(METADATA.names, "{topic: device}"),
    "clientId": Field(
        TextKind(), "the name of the session; made of those of the job and the source"
    ),
    "session": Field(
        duration(), "for how long the broker keeps messages for a job that is down; 7d"
    ),
    "maxUnacknowledged": Field(
        IntegerKind(1, 65535), "most messages that are given before some are acknowledged; 10000"
    ),
}
SINK: Final = {
    "topic": Field(TextKind(), "the topic of all messages; or a column has it"),
    **_BROKER,
    "format": format_field(OUTPUT_FORMATS),
    "topicColumn": Field(TextKind(), "the column with the topic, which is not a part of the data"),
    "retain": Field(BooleanKind(), "the broker keeps the last message of a topic; false"),
}


def make_source(*, topics: Any, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    return mqtt_source(topics, **with_format(arguments))


def make_sink(**arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return mqtt_sink(**with_format(arguments))
