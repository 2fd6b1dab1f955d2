"""The fields of services of HTTP in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    AnyText,
    BooleanKind,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    ListOf,
    NumberKind,
    Section,
    TextKind,
    duration,
    size,
)
from ...operators.sink import Sink
from ...operators.source import Source
from ..formats.fields import format_field, with_format
from ..formats.text import FORMATS
from ..manifest_fields import metadata_field
from .events import METADATA, sse_source
from .polling import http_source
from .sink import BODIES, METHODS, ON_REFUSED, http_sink
from .websocket import websocket_source

_URL: Final = Field(
    TextKind(), "the address: http:// or https://, without credentials", required=True
)
_HEADERS: Final = Field(
    Items(AnyText()), "further headers; `file:/path` and `env:NAME` are read on the workers"
)
_CA: Final = Field(TextKind(), "the file of the authorities to trust; absent: those of the system")
HTTP_SINK: Final = Section(
    "http",
    {
        "url": _URL,
        "method": Field(ChoiceKind(METHODS), "of the requests; POST"),
        "headers": _HEADERS,
        "body": Field(
            ChoiceKind(tuple(BODIES)),
            "the form of a request: a JSON array, an object a line, or one object; array",
        ),
        "rows": Field(IntegerKind(1), "the most records of a request; 500"),
        "within": Field(duration(), "the longest time a record waits for others; 1s"),
        "maxInFlight": Field(IntegerKind(1), "the most requests of a subtask at the same time; 4"),
        "timeout": Field(duration(), "of one request; 30s"),
        "retries": Field(IntegerKind(), "how often a request is made again; 10"),
        "longestPause": Field(duration(), "the longest pause before that; 30s"),
        "keyHeader": Field(TextKind(), "the header with the key of idempotence; Idempotency-Key"),
        "onRefused": Field(
            ChoiceKind(ON_REFUSED),
            "the service answers 400, 413 or 422; fail",
        ),
        "deadLetters": Field(
            TextKind(), "with dead_letters: a directory for refused records; local or s3://"
        ),
        "buffer": Field(
            size(),
            "with exactly_once: most bytes staged between two checkpoints; 128mb",
        ),
        "ca": _CA,
        "storageOptions": Field(
            Items(AnyText()), "`s3.*` options of deadLetters, if they differ from the job's"
        ),
    },
)

_REPEATS: Final = {
    "retries": Field(IntegerKind(), "how often a request is made again; 10"),
    "longestPause": Field(duration(), "the longest pause before that; 30s"),
}
_READ: Final = {
    "batchRows": Field(IntegerKind(1), "the most rows of a batch"),
    "ca": _CA,
    "rate": Field(NumberKind(), "rows per second; absent: no limit"),
}
HTTP_SOURCE: Final = Section(
    "http",
    {
        "url": _URL,
        "position": Field(
            TextKind(), "the column whose value says which records come after a record"
        ),
        "parameter": Field(TextKind(), "the parameter of the query with that value; after"),
        "start": Field(TextKind(), "its value in the first request; absent: no parameter"),
        "every": Field(duration(), "the pause between two requests; 10s"),
        "stop": Field(ChoiceKind(("latest",)), "where reading ends; absent: never"),
        "items": Field(TextKind(), "the field of an answer with the array, `data.items`"),
        "headers": _HEADERS,
        "timeout": Field(duration(), "of one request; 30s"),
        **_REPEATS,
        "buffer": Field(size(), "most bytes of an answer; 32mb"),
        **_READ,
    },
)
SSE_SOURCE: Final = Section(
    "sse",
    {
        "url": _URL,
        "format": format_field(FORMATS),
        "metadata": metadata_field(
            METADATA, "further columns, by what they hold, such as `{event: kind}`"
        ),
        "events": Field(ListOf(TextKind()), "the types of events that are read; absent: all"),
        "replay": Field(
            BooleanKind(), "false: events may have no ids; those of down times are lost"
        ),
        "start": Field(TextKind(), "the id after which the first run begins"),
        "bounded": Field(BooleanKind(), "true: the service is known to end, with a status 204"),
        "headers": _HEADERS,
        "silence": Field(duration(), "a connection without a byte for this long is made again; 1m"),
        **_REPEATS,
        "buffer": Field(size(), "most bytes of an event; 32mb"),
        **_READ,
    },
)
WEBSOCKET_SOURCE: Final = Section(
    "websocket",
    {
        "url": Field(
            TextKind(), "the address: ws:// or wss://, without credentials", required=True
        ),
        "format": format_field(FORMATS),
        "subscribe": Field(
            ListOf(TextKind()),
            "the texts to send first on each connection; also `file:/path` and `env:NAME`",
        ),
        "bounded": Field(
            BooleanKind(), "true: the service is known to end, with the status 1000 of a WebSocket"
        ),
        "headers": _HEADERS,
        "silence": Field(
            duration(), "a service that does not answer for this long is connected again; 1m"
        ),
        **_REPEATS,
        "buffer": Field(size(), "most bytes of a message; 4mb"),
        **_READ,
    },
)


def made_http_source(*, url: str, **arguments: Any) -> Source:
    """Return the source of a manifest with these fields, named as the arguments of `http_source`."""
    return http_source(url, **arguments)


def made_sse_source(*, url: str, **arguments: Any) -> Source:
    """Return the source of a manifest with these fields, named as the arguments of `sse_source`."""
    return sse_source(url, **with_format(arguments))


def made_websocket_source(*, url: str, **arguments: Any) -> Source:
    """Return the source of a manifest with these fields, named as the arguments of `websocket_source`."""
    return websocket_source(url, **with_format(arguments))


def made_http_sink(*, url: str, **arguments: Any) -> Sink:
    """Return the sink of a manifest with these fields, named as the arguments of `http_sink`."""
    return http_sink(url, **arguments)
