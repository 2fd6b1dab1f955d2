"""The fields of the connectors `mqtt` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    BooleanKind,
    Field,
    IntegerKind,
    Items,
    ListOf,
    TextKind,
    duration,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..formats.fields import format_field, read_format
from ..formats.text import FORMATS
from . import sink
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
    "password": Field(
        TextKind(), "the password, or `file:/path` or `env:NAME`, read on each machine"
    ),
    "ca": Field(TextKind(), "with TLS: the file of the authorities to trust; those of the system"),
    "certificate": Field(TextKind(), "with TLS: the file with the certificate of the client"),
    "key": Field(TextKind(), "with TLS: the file with its key"),
}
SOURCE: Final = {
    "topics": Field(ListOf(TextKind()), "topics, or filters with `+` and `#`", required=True),
    **_BROKER,
    "format": format_field(FORMATS),
    "delimiter": Field(TextKind(r"[^\n]", "one character"), "of csv"),
    "metadata": Field(
        Items(TextKind(), TextKind("|".join(METADATA), f"one of {', '.join(METADATA)}")),
        "further columns, by what they hold, such as `{topic: device}`",
    ),
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
    "format": format_field(sink.FORMATS),
    "topicColumn": Field(TextKind(), "the column with the topic, which is not a part of the data"),
    "retain": Field(BooleanKind(), "the broker keeps the last message of a topic; false"),
}


def make_source(*, topics: Any, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    if "format" in arguments:
        arguments["format"] = read_format(arguments["format"])
    return mqtt_source(topics, **arguments)


def make_sink(**arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    if "format" in arguments:
        arguments["format"] = read_format(arguments["format"])
    return mqtt_sink(**arguments)
