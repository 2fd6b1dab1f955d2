"""The fields of the connectors `rabbitmq` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    ChoiceKind,
    Field,
    IntegerKind,
    ListOf,
    TextKind,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..arguments import ON_LOST
from ..formats.fields import format_field, with_format
from ..formats.text import OUTPUT_FORMATS
from ..manifest_fields import (
    PASSWORD,
    READ_BUFFER,
    STAGED_BUFFER,
    TLS,
    message_fields,
    position_fields,
    with_positions,
)
from .envelope import ENVELOPES
from .model import METADATA
from .sink import rabbitmq_sink
from .source import rabbitmq_source

_BROKER: Final = {
    "url": Field(
        TextKind(),
        "brokers to ask first: `rabbitmq-stream://host:5552`, `rabbitmq-stream+tls://host:5551`, several "
        "with commas; or `file:/path` or `env:NAME`, read on each machine",
        required=True,
    ),
    "user": Field(TextKind(), "the name of the user; guest"),
    "password": PASSWORD,
    **TLS,
    "virtualHost": Field(TextKind(), "the virtual host of the streams; /"),
    "envelope": Field(
        ChoiceKind(ENVELOPES), "messages are those of AMQP 1.0, or just their data; amqp"
    ),
}
_START: Final = {
    "time": Field(
        TextKind(), "the first chunk of this time or later, such as `2026-01-31T12:00:00Z`"
    ),
    "offset": Field(IntegerKind(), "the offset of the first message"),
}
_STOP: Final = {
    "time": Field(
        TextKind(), "before the first chunk of this time or later, such as `2026-01-31T12:00:00Z`"
    ),
    "offset": Field(IntegerKind(), "the offset of the last message"),
}
SOURCE: Final = {
    "streams": Field(ListOf(TextKind()), "the streams, each of them a split; or `superStream`"),
    "superStream": Field(TextKind(), "a super stream, whose partitions are splits"),
    **_BROKER,
    **message_fields(METADATA.names, "{timestamp: sent_at}"),
    **position_fields(_START, ("earliest", "latest"), _STOP),
    "onLost": Field(ChoiceKind(ON_LOST), "messages were deleted before they were read; fail"),
    "buffer": READ_BUFFER,
}
SINK: Final = {
    "stream": Field(TextKind(), "the name of the stream; or `superStream`"),
    "superStream": Field(TextKind(), "a super stream, with `routingKey`"),
    "routingKey": Field(
        TextKind(), "the column of texts whose hash chooses the partition of a super stream"
    ),
    **_BROKER,
    "format": format_field(OUTPUT_FORMATS),
    "buffer": STAGED_BUFFER,
}


def make_source(*, streams: Any = (), **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    arguments = with_positions(arguments, "offset")
    return rabbitmq_source(streams, **with_format(arguments))


def make_sink(*, stream: str | None = None, **arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return rabbitmq_sink(stream, **with_format(arguments))
