"""The settings and splits that the source of Kinesis shares with its readers, and columns of metadata."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.source import decode_split
from ..aws import AwsService
from ..messages import Reading

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("sequence_number", pa.string(), nullable=False),
        pa.field("partition_key", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("partition_key", pa.string(), nullable=False),
        pa.field("sequence_number", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The parts of a record beside its data, with the types of their columns."""
Start: TypeAlias = Literal["trim_horizon", "latest"] | datetime
Stop: TypeAlias = Literal["latest"] | datetime


class ShardSplit(msgspec.Struct, omit_defaults=True):
    """A split: a shard, and the position in it.

    Attributes:
        stream: the name of the stream.
        shard: the id of the shard.
        after: the sequence number of the last record that was read; empty: none was.
        since_ms: without `after`: the time from which records are read; 0: from the first one.
        read_to_ms: all records that arrived before this time have been read; 0: that is not known.
        stop_ms: the time from which records are not read any more; None: there is no end.
        ended: there is nothing to read: the shard was closed before the source began.
        parents: the ids of the shards that it came of.
    """

    stream: str
    shard: str
    after: str = ""
    since_ms: int = 0
    read_to_ms: int = 0
    stop_ms: int | None = None
    ended: bool = False
    parents: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return self.shard


def decoded(split: bytes) -> ShardSplit:
    """Return a split as a shard; raise StateError if it is that of another source."""
    return decode_split(split, ShardSplit, "Kinesis source")


@dataclass(frozen=True)
class KinesisSettings:
    """The arguments of `kinesis_source`, which documents them."""

    stream: str
    service: AwsService
    every_ms: int
    reading: Reading[Start, Stop]
