"""The fields of the connectors `pulsar` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import ChoiceKind, Field, IntegerKind, ListOf, TextKind
from ...operators.sink import Sink
from ...operators.source import Source
from ..arguments import ON_LOST
from ..formats.fields import format_field, with_format
from ..formats.text import OUTPUT_FORMATS
from ..manifest_fields import READ_BUFFER, TLS, message_fields, position_fields, with_positions
from .model import METADATA
from .sink import COMPRESSIONS, pulsar_sink
from .source import pulsar_source

_CLUSTER: Final = {
    "url": Field(
        TextKind(),
        "the cluster: `pulsar://host:6650` or `pulsar+ssl://host:6651`, several hosts with commas; or "
        "`file:/path` or `env:NAME`, read on each machine",
        required=True,
    ),
    "token": Field(
        TextKind(), "the token of a role, or `file:/path` or `env:NAME`, read on each machine"
    ),
    **TLS,
    "ca": Field(
        TextKind(), "with TLS: the file of the authorities to trust; those of the package certifi"
    ),
}
_START: Final = {
    "time": Field(
        TextKind(),
        "the first message published at this time or later, such as `2026-01-31T12:00:00Z`",
        required=True,
    ),
}
_POSITIONS: Final = {
    **position_fields(_START, ("earliest", "latest")),
    "stop": Field(ChoiceKind(("latest",)), "where reading ends; absent: never"),
}
SOURCE: Final = {
    "topics": Field(ListOf(TextKind()), "the topics, each partition a split", required=True),
    **_CLUSTER,
    **message_fields(METADATA.names, "{publish_time: sent_at}"),
    **_POSITIONS,
    "subscription": Field(
        TextKind(),
        "a durable subscription that keeps messages until a completed checkpoint has them",
    ),
    "onLost": Field(
        ChoiceKind(ON_LOST), "messages may have been deleted before they were read; fail"
    ),
    "buffer": READ_BUFFER,
    "receiveQueue": Field(
        IntegerKind(1), "about the most messages of a partition that are sent ahead; 1000"
    ),
}
SINK: Final = {
    "topic": Field(TextKind(), "the name of the topic", required=True),
    **_CLUSTER,
    "format": format_field(OUTPUT_FORMATS),
    "partitionKey": Field(
        TextKind(), "the column that decides the partition of a record; absent: all in turn"
    ),
    "eventTime": Field(TextKind(), "the column with the event time of messages; absent: none"),
    "compression": Field(ChoiceKind(COMPRESSIONS), "of batches of messages; none"),
}


def make_source(*, topics: Any, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    arguments = with_positions(arguments, "time")
    return pulsar_source(topics, **with_format(arguments))


def make_sink(*, topic: str, **arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return pulsar_sink(topic, **with_format(arguments))
