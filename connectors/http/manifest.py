"""The fields of services of HTTP in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import (
    AnyText,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    Section,
    TextKind,
    duration,
    size,
)
from ...operators.sink import Sink
from .sink import BODIES, METHODS, ON_REFUSED, http_sink

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


def made_http_sink(*, url: str, **arguments: Any) -> Sink:
    """Return the sink of a manifest with these fields, named as the arguments of `http_sink`."""
    return http_sink(url, **arguments)
