"""The fields of the connectors `sqs` in a manifest."""

from __future__ import annotations

from typing import Any, Final

from ...api.manifest.fields import ChoiceKind, Field, IntegerKind, TextKind, duration
from ...operators.sink import Sink
from ...operators.source import Source
from ..formats.text import FORMATS, OUTPUT_FORMATS
from ..manifest_fields import message_fields, service_fields
from .model import METADATA
from .sink import sqs_sink
from .source import sqs_source

_QUEUE: Final = service_fields("queue")
SOURCE: Final = {
    **_QUEUE,
    **message_fields(
        METADATA.names, "{timestamp: sent_at}", Field(ChoiceKind(FORMATS), "of the data; json")
    ),
    "consumers": Field(IntegerKind(1), "the splits, each with one request at a time; 4"),
    "visibility": Field(
        duration(), "for how long a message is hidden from others if the job dies; 2m"
    ),
    "maxUnacknowledged": Field(
        IntegerKind(1), "most messages that a subtask receives before some are deleted; 10000"
    ),
}
SINK: Final = {
    **_QUEUE,
    "format": Field(ChoiceKind(OUTPUT_FORMATS), "of the data; json"),
    "group": Field(TextKind(), "FIFO queues: the column with the message group"),
    "deduplicationId": Field(
        TextKind(), "FIFO queues: the column with the id by which repeats are dropped"
    ),
}


def make_source(*, queue: str, **arguments: Any) -> Source:
    """Return the source with these fields of a manifest as arguments."""
    return sqs_source(queue, **arguments)


def make_sink(*, queue: str, **arguments: Any) -> Sink:
    """Return the sink with these fields of a manifest as arguments."""
    return sqs_sink(queue, **arguments)
