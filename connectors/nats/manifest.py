"""The fields of the connectors `nats` in a manifest."""

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
    metadata_field,
    position_fields,
    with_positions,
)
from . import sink
from .model import METADATA
from .sink import nats_sink
from .source import nats_source

_SERVERS: Final = {
    "url": Field(
        TextKind(),
        "servers to ask first: `nats://host:4222`, several with commas; or `file:/path` or `env:NAME`, "
        "read on each machine",
        required=True,
    ),
    "user": Field(TextKind(), "the name of the user"),
    "password": PASSWORD,
    "token": Field(TextKind(), "the token, in the same forms"),
    "credentials": Field(TextKind(), "a file with a JWT and its key, on each machine"),
    **TLS,
}
_POSITION: Final = {
    "time": Field(
        TextKind(), "the first message of this time or later, such as `2026-01-31T12:00:00Z`"
    ),
    "sequence": Field(IntegerKind(), "the sequence number of the first message; or of the last"),
}
SOURCE: Final = {
    "stream": Field(TextKind(), "the name of the stream", required=True),
    **_SERVERS,
    "subjects": Field(ListOf(TextKind()), "only messages of these subjects, each of them a split"),
    **message_fields(METADATA.names, "{timestamp: sent_at}"),
    **position_fields(_POSITION, ("earliest", "latest")),
    "onLost": Field(ChoiceKind(ON_LOST), "messages were deleted before they were read; fail"),
    "buffer": READ_BUFFER,
}
SINK: Final = {
    "subject": Field(TextKind(), "the subject of all messages; or a column has it"),
    **_SERVERS,
    "format": format_field(OUTPUT_FORMATS),
    "metadata": metadata_field(
        sink.WRITABLE, "columns that become a part of the message beside its data, `{id: order_id}`"
    ),
    "buffer": STAGED_BUFFER,
}


def make_source(*, stream: str, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    arguments = with_positions(arguments, "sequence")
    return nats_source(stream, **with_format(arguments))


def make_sink(**arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return nats_sink(**with_format(arguments))
