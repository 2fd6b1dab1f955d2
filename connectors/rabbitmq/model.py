"""The settings and splits that the source of RabbitMQ shares with its readers, and columns of metadata."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.source import decode_split
from ..messages import Reading
from .client import Broker
from .envelope import EnvelopeName

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field(
            "properties", pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))
        ),
    ]
)
"""The parts of a message beside its data; those that it may lack are nullable."""
Start: TypeAlias = Literal["earliest", "latest"] | datetime | int
Stop: TypeAlias = Literal["latest"] | datetime | int


class StreamSplit(msgspec.Struct):
    """A split: a stream, and the position in it.

    Attributes:
        stream: its name.
        next: the offset of the next message to read; 0: that of the first one there is.
        stop: the offset of the last message to read; None: there is no end.
    """

    stream: str
    next: int
    stop: int | None = None

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return self.stream


def decoded(split: bytes) -> StreamSplit:
    """Return a split as a stream; raise StateError if it is that of another source."""
    return decode_split(split, StreamSplit, "RabbitMQ source")


@dataclass(frozen=True)
class RabbitSettings:
    """The arguments of `rabbitmq_source`, which documents them."""

    streams: tuple[str, ...]
    super_stream: str | None
    broker: Broker
    envelope: EnvelopeName
    reading: Reading[Start, Stop]
