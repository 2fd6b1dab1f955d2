"""The settings and splits that the source of Pulsar shares with its readers, and columns of metadata."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.source import decode_split
from ..messages import Reading
from .client import Cluster

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("publish_time", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("event_time", pa.timestamp("ms", tz="UTC")),
        pa.field("key", pa.string()),
        pa.field(
            "properties", pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))
        ),
    ]
)
"""The parts of a message beside its data; those that it may lack are nullable."""
Start: TypeAlias = Literal["earliest", "latest"] | datetime
Stop: TypeAlias = Literal["latest"]
Place: TypeAlias = tuple[int, int, int]
"""The place of a message in its topic: ledger, entry, and the index in the batch of the entry or -1."""
NOWHERE: Final[Place] = (-1, -1, -1)
"""The place in front of all messages."""


class TopicSplit(msgspec.Struct, omit_defaults=True):
    """A split: a partition or a topic without partitions, and the position in it.

    Attributes:
        topic: the full name, such as `persistent://public/default/orders-partition-0`.
        after: the place of the last message that was read.
        since_ms: if none was read: the time of publishing from which messages are read; 0: from the first.
        stop: the place of the last message to read; None: there is no end.
    """

    topic: str
    after: Place = NOWHERE
    since_ms: int = 0
    stop: Place | None = None

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return self.topic


def decoded(split: bytes) -> TopicSplit:
    """Return a split as a topic; raise StateError if it is that of another source."""
    return decode_split(split, TopicSplit, "Pulsar source")


def place_of(message: Any) -> Place:
    """Return the place of a message of the client."""
    found = message.message_id()
    return found.ledger_id(), found.entry_id(), found.batch_index()


def text_of(place: Place) -> str:
    """Return a place as Pulsar's tools write it."""
    ledger, entry, index = place
    return f"{ledger}:{entry}" if index < 0 else f"{ledger}:{entry}:{index}"


@dataclass(frozen=True)
class PulsarSettings:
    """The arguments of `pulsar_source`, which documents them."""

    topics: tuple[str, ...]
    cluster: Cluster
    subscription: str | None
    receive_queue: int
    reading: Reading[Start, Stop]
