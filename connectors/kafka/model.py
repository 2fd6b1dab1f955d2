"""The settings and splits that the source of Kafka shares with its readers, and columns of metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.source import decode_split
from ..arguments import OnLost
from ..bad_records import OnBadRecord
from ..messages import MessageColumns
from .security import without_secrets

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""The columns of the side output `rejected`; `value` is null for a tombstone."""
METADATA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
    ]
)
"""The parts of a record beside its value; those that it may lack are nullable."""

Start: TypeAlias = (
    Literal["earliest", "latest", "committed"] | datetime | int | Mapping[str, Mapping[int, int]]
)
Stop: TypeAlias = Literal["latest"] | datetime | int | Mapping[str, Mapping[int, int]]


class PartitionSplit(msgspec.Struct):
    """A split: a partition, the offset of the next record, and the offset at which it ends."""

    topic: str
    partition: int
    offset: int
    stop: int | None = None

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics, and the key by which it is known."""
        return f"{self.topic}/{self.partition}"


def decoded(split: bytes) -> PartitionSplit:
    """Return a split as a partition; raise StateError if it is that of another source."""
    return decode_split(split, PartitionSplit, "Kafka source")


@dataclass(frozen=True)
class KafkaSettings:
    """The arguments of `kafka_source`, which documents them."""

    topics: tuple[str, ...]
    pattern: str | None
    bootstrap: str
    columns: MessageColumns
    start: Start
    stop: Stop | None
    group: str | None
    on_bad_record: OnBadRecord
    on_lost: OnLost
    read_uncommitted: bool
    batch_rows: int
    buffer_bytes: int
    properties: Mapping[str, str]

    @property
    def bounded(self) -> bool:
        """True if reading ends."""
        return self.stop is not None

    @property
    def read(self) -> str:
        """The topics, or the pattern of their names."""
        return ", ".join(self.topics) if self.pattern is None else f"pattern {self.pattern}"

    def __repr__(self) -> str:
        """Return the settings without secrets."""
        return f"KafkaSettings({self.read} of {self.bootstrap}, {without_secrets(self.properties)})"
