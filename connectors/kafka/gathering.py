"""Takes the messages of the client apart, and puts the records of each partition together.

The client makes an object of each message. Some thousand of them fill the caches of a processor, so they
are taken in small groups, and each group is let go as soon as its parts are in lists. Columns are then made
of all groups at once, as large batches cost less per record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.taken_values import TakenValues

Offsets = npt.NDArray[np.int64]

AT_ONCE: Final = 512
"""The most messages to ask the client for at once, so that their objects stay in the caches of a core.

Measured without decoding, each of 2,048 messages of 100 bytes took half as long again."""

BYTES_MAX: Final = 4 << 20
"""No more messages are asked for once about this many bytes of values are gathered."""
_SAMPLE: Final = 64
"""One value out of this number is measured: to measure all costs more than an exact sum is worth."""


class BadMessage(NamedTuple):
    """A record that cannot be read. `key` is None as well if nobody asked for keys."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class PartitionRecords:
    """The records of one partition, by their parts.

    Attributes:
        topic: of the partition.
        partition: its number.
        values: of all records.
        metadata: the parts beside the value that were asked for, by their names.
        first_ms: the time of the first record, in ms since 1970.
    """

    def __init__(
        self, topic: str, partition: int, first_ms: int, kinds: Collection[str], *, lines: bool
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.first_ms = first_ms
        self.values = TakenValues(lines=lines)
        self.metadata: dict[str, list[Any]] = {kind: [] for kind in kinds}
        self._offsets: list[Offsets] = []

    @property
    def offsets(self) -> Offsets:
        """The offsets of all records, which are in order."""
        if len(self._offsets) > 1:
            self._offsets = [np.concatenate(self._offsets)]
        return self._offsets[0]

    def add(self, messages: Sequence[Any], getters: Mapping[str, Callable[[Any], Any]]) -> None:
        """Take the parts of further messages."""
        self.values.add(map(type(messages[0]).value, messages))
        self._offsets.append(_offsets_of(messages))
        for kind, values in self.metadata.items():
            values += map(getters[kind], messages)

    def cut(self, stop: int) -> None:
        """Forget the records from an offset on."""
        count = int(np.searchsorted(self.offsets, stop))
        self.values.cut(count)
        self._offsets = [self.offsets[:count]]
        for values in self.metadata.values():
            del values[count:]


class Gathered:
    """Messages that were taken from the client, most of which are records.

    Attributes:
        events: those that are no records, such as errors.
        rows: the number of records.
        size_bytes: about the bytes of their values.
        partitions: their records, by the names of the partitions.
    """

    def __init__(self, kinds: Collection[str], *, one_topic: bool, lines: bool) -> None:
        """Nothing is gathered yet.

        Args:
            kinds: the parts beside the value to take from each message.
            one_topic: all messages are of the same topic.
            lines: the values are for a decoder that reads lines.
        """
        self._lines = lines
        self._kinds = kinds
        self._one_topic = one_topic
        self.events: list[Any] = []
        self.rows = 0
        self.size_bytes = 0
        self.partitions: dict[str, PartitionRecords] = {}

    def add(self, messages: list[Any]) -> None:
        """Take messages apart."""
        if not messages:
            return
        kind = type(messages[0])
        if any(map(kind.error, messages)):
            self.events += [message for message in messages if message.error() is not None]
            messages = [message for message in messages if message.error() is None]
        self.rows += len(messages)
        self.size_bytes += _SAMPLE * sum(map(len, messages[::_SAMPLE]))
        getters = _getters(kind)
        begin = 0
        for end in self._ends_of_runs(messages):
            run = messages if end - begin == len(messages) else messages[begin:end]
            begin = end
            first = run[0]
            name = name_of(first)
            records = self.partitions.get(name)
            if records is None:
                records = PartitionRecords(
                    first.topic(),
                    first.partition(),
                    first.timestamp()[1],
                    self._kinds,
                    lines=self._lines,
                )
                self.partitions[name] = records
            records.add(run, getters)

    def _ends_of_runs(self, messages: list[Any]) -> list[int]:
        """Return the ends of the runs of messages of one partition."""
        if not messages:
            return []
        kind = type(messages[0])
        numbers = np.fromiter(map(kind.partition, messages), np.int32, len(messages))
        changes = numbers[1:] != numbers[:-1]
        if not self._one_topic:
            topics = np.array(list(map(kind.topic, messages)), object)
            changes |= topics[1:] != topics[:-1]
        return [*(np.flatnonzero(changes) + 1).tolist(), len(messages)]


class Joined:
    """The records of several partitions behind each other, so that they are decoded at once.

    Attributes:
        values: of all records.
        starts: the number of the first record of each partition.
    """

    def __init__(self, partitions: Sequence[PartitionRecords]) -> None:
        self._partitions = partitions
        sizes = [len(each.values) for each in partitions]
        self.starts = [0, *accumulate(sizes[:-1])]
        self.values = TakenValues.of_all([each.values for each in partitions])

    def metadata(self, kind: str) -> Callable[[int], Any]:
        """Return the function that returns a part of a record beside its value, by its number."""
        parts = [part for each in self._partitions for part in each.metadata[kind]]
        return parts.__getitem__

    def bad(self, index: int) -> BadMessage:
        """Return a record by its number."""
        number = bisect_right(self.starts, index) - 1
        found, place = self._partitions[number], index - self.starts[number]
        keys = found.metadata.get("key")
        return BadMessage(
            found.topic,
            found.partition,
            int(found.offsets[place]),
            None if keys is None else keys[place],
            found.values[place],
        )


def name_of(message: Any) -> str:
    """Return the name of the partition of a message."""
    return f"{message.topic()}/{message.partition()}"


def place_of(message: BadMessage) -> str:
    """Return where a record is, for errors."""
    return f"{message.topic}/{message.partition} offset {message.offset}"


def _offsets_of(messages: Sequence[Any]) -> Offsets:
    """Return the offsets of records of one partition, which are in order."""
    first, last = messages[0].offset(), messages[-1].offset()
    if last - first == len(messages) - 1:  # none is missing
        return np.arange(first, last + 1)
    return np.fromiter(map(type(messages[0]).offset, messages), np.int64, len(messages))


def _getters(kind: type[Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Return the parts of a message beside its value; methods of the class cost least per message."""
    return {
        "topic": kind.topic,
        "partition": kind.partition,
        "offset": kind.offset,
        "timestamp": _time_of,
        "key": kind.key,
        "headers": _headers_of,
    }


def _time_of(message: Any) -> int | None:
    kind, time_ms = message.timestamp()
    return int(time_ms) if kind else None


def _headers_of(message: Any) -> list[dict[str, Any]] | None:
    headers = message.headers()
    if headers is None:
        return None
    return [{"name": name, "value": value} for name, value in headers]
