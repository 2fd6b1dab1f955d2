"""Streams of Redis as the source, its readers and the sink see them: ids, positions, and descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.source import decode_split
from ..messages import Reading
from .client import Address

FIRST: Final = "0-0"
"""The id before all entries."""
UNKNOWN: Final = -1
SEQUENCE_MAX: Final = (1 << 64) - 1
_ID: Final = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")
REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("fields", pa.list_(pa.struct([("name", pa.binary()), ("value", pa.binary())]))),
    ]
)
"""The columns of the side output `rejected`."""
METADATA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
    ]
)
"""The parts of an entry beside its fields, with the types of their columns."""
OnMissing: TypeAlias = Literal["fail", "wait"]
Start: TypeAlias = Literal["earliest", "latest"] | datetime | int | Mapping[str, str]
Stop: TypeAlias = Literal["latest"] | datetime | int | Mapping[str, str]


def parse_id(text: str) -> tuple[int, int] | None:
    """Return the two numbers of the id of an entry, by which ids are ordered; None: it is no id."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    numbers = int(found[1]), int(found[2] or 0)
    return numbers if max(numbers) <= SEQUENCE_MAX else None


def order_of(known: str) -> tuple[int, int]:
    """Return the place of an id that is known to be one."""
    time_ms, _, sequence = known.partition("-")
    return int(time_ms), int(sequence)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream at one moment.

    Attributes:
        first: the id of the first entry; None: it has none.
        last: the greatest id that an entry has ever had.
        added: the number of all entries that were ever added.
        removed: the number of those that are no longer there.
        deleted: the greatest id that was deleted by itself, and not by trimming.
    """

    first: str | None
    last: str
    added: int
    removed: int
    deleted: str


NO_STREAM: Final = StreamInfo(None, FIRST, 0, 0, FIRST)


def in_pairs(answer: Any) -> dict[Any, Any]:
    """Return names and values, which the client leaves in a list in transactions of a cluster."""
    if isinstance(answer, list):
        return dict(zip(answer[::2], answer[1::2], strict=True))
    return dict(answer or {})


def info_of(answer: Any) -> StreamInfo | None:
    """Return the answer of XINFO STREAM; None: the server is too old, and does not count entries."""
    told = {
        name.decode() if isinstance(name, bytes) else name: value
        for name, value in in_pairs(answer).items()
    }
    if "entries-added" not in told:
        return None
    first, added = told["first-entry"], int(told["entries-added"])
    return StreamInfo(
        None if first is None else first[0].decode(),
        told["last-generated-id"].decode(),
        added,
        added - int(told["length"]),
        told["max-deleted-entry-id"].decode(),
    )


class StreamSplit(msgspec.Struct):
    """A split: a stream, and the position in it.

    Attributes:
        stream: its name.
        after: the id of the last entry that was read, or one before the first.
        seen: the number of entries that were ever added up to `after`; UNKNOWN after somebody has deleted
            single entries, until the end of the stream was reached once.
        stop: the id of the last entry to read; None: there is no end.
        stop_seen: the number of entries up to `stop`, or UNKNOWN.
    """

    stream: str
    after: str
    seen: int = UNKNOWN
    stop: str | None = None
    stop_seen: int = UNKNOWN

    @property
    def name(self) -> str:
        """The name of the split in event time and in metrics."""
        return self.stream


def decoded(split: bytes) -> StreamSplit:
    """Return a split as a stream; raise StateError if it is that of another source."""
    return decode_split(split, StreamSplit, "Redis source")


def seen_at(info: StreamInfo, after: str) -> int:
    """Return the number of entries that were ever added up to an id, as far as the description tells."""
    if order_of(after) >= order_of(info.last):
        return info.added
    if info.first is None or order_of(after) < order_of(info.first):
        # Of the removed entries, those that were deleted by themselves may lie behind the first one.
        holes = info.first is not None and order_of(info.deleted) > order_of(info.first)
        return UNKNOWN if holes else info.removed
    return UNKNOWN


@dataclass(frozen=True)
class RedisSettings:
    """The arguments of `redis_source`, which documents them."""

    streams: tuple[str, ...]
    address: Address
    field: str
    group: str | None
    on_missing: OnMissing
    reading: Reading[Start, Stop]
