"""The fields of the connectors `redis` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    BooleanKind,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    ListOf,
    TextKind,
    size,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..arguments import ON_LOST
from ..formats.fields import format_field, with_format
from ..manifest_fields import (
    PASSWORD,
    READ_BUFFER,
    TLS,
    message_fields,
    position_fields,
    with_positions,
)
from . import sink, source
from .model import METADATA
from .sink import redis_sink
from .source import ON_MISSING, redis_source

_SERVER: Final = {
    "url": Field(
        TextKind(),
        "the server, `redis://user@host:6379/0`, `rediss://` with TLS; or `file:/path` or `env:NAME`, read "
        "on each machine",
        required=True,
    ),
    "password": PASSWORD,
    **TLS,
    "cluster": Field(BooleanKind(), "true: the server is a node of a Redis cluster"),
    "field": Field(TextKind(), "the field of the payload, unless the format is fields; value"),
}
_POSITION: Final = {
    "time": Field(
        TextKind(), "the first entry of this time or later, such as `2026-01-31T12:00:00Z`"
    ),
    "ids": Field(Items(TextKind()), "ids of entries by stream, `{orders: 1767225600000-0}`"),
}
SOURCE: Final = {
    "streams": Field(ListOf(TextKind()), "the streams", required=True),
    **_SERVER,
    **message_fields(
        METADATA.names, "{timestamp: sent_at}", format_field(source.FORMATS, default="fields")
    ),
    **position_fields(_POSITION, ("earliest", "latest")),
    "group": Field(
        TextKind(), "consumer group to which positions of completed checkpoints are written"
    ),
    "onLost": Field(ChoiceKind(ON_LOST), "entries were trimmed before they were read; fail"),
    "onMissing": Field(ChoiceKind(ON_MISSING), "a stream does not exist; fail"),
    "buffer": READ_BUFFER,
}
SINK: Final = {
    "stream": Field(TextKind(), "the key of the stream", required=True),
    **_SERVER,
    "format": format_field(sink.FORMATS, default="fields"),
    "maxLength": Field(IntegerKind(1), "about the most entries that the stream keeps; all"),
    "onLost": Field(
        ChoiceKind(ON_LOST), "staged entries of a checkpoint are missing in the server; fail"
    ),
    "buffer": Field(size(), "most bytes of a subtask that wait to be sent; 32mb"),
}


def make_source(*, streams: Any, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    arguments = with_positions(arguments, "ids", lambda _, given: dict(given.values))
    return redis_source(streams, **with_format(arguments))


def make_sink(*, stream: str, **arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return redis_sink(stream, **with_format(arguments))
