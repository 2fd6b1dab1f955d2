"""The settings and splits that the source of NATS shares with its readers, and columns of metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.source import decode_split
from ..messages import Reading
from .client import Servers

REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("subject", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("data", pa.binary()),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("subject", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.string())]))),
    ]
)
"""The parts of a message beside its data; those that it may lack are nullable."""
Start: TypeAlias = Literal["earliest", "latest"] | datetime | int
Stop: TypeAlias = Literal["latest"] | datetime | int


class NatsSplit(msgspec.Struct):
    """A split: the messages of a stream, or those of some subjects, and the position in it.

    Attributes:
        stream: its name.
        subject: a filter; empty: all messages.
        after: the sequence number up to which messages were read.
        stop: the sequence number of the last message to read; None: there is no end.
    """

    stream: str
    subject: str
    after: int
    stop: int | None = None

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return f"{self.stream}/{self.subject}" if self.subject else self.stream


def decoded(split: bytes) -> NatsSplit:
    """Return a split as messages of a stream; raise StateError if it is that of another source."""
    return decode_split(split, NatsSplit, "NATS source")


def overlap(one: str, other: str) -> bool:
    """Return True if a subject can match both filters."""
    return _overlap(one.split("."), other.split("."))


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    for first, second in zip(one, other, strict=False):
        if ">" in (first, second):
            return True
        if "*" not in (first, second) and first != second:
            return False
    return len(one) == len(other)


@dataclass(frozen=True)
class NatsSettings:
    """The arguments of `nats_source`, which documents them."""

    stream: str
    subjects: tuple[str, ...]
    servers: Servers
    reading: Reading[Start, Stop]
