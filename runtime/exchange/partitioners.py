"""Chooses the channel of each record, by the partitionings of `operators/partitioning.py`.

Hash partitioning goes key -> stable hash -> key group -> owner. The split is one stable sort of small
integers, one take, and slices: it costs the same for any number of receivers and keeps the order of
records between two subtasks. For two receivers the places of both parts are read off a mask instead,
which is cheaper than the sort; for three it is not.

`KeyGroupSampler` finds the key group that most of a sender's records are in. Of each second the first
batches are counted, by one `bincount` each: whether a sender sends thousands of batches per second or, held
up, one, there is a sample, and it costs next to nothing.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ...errors import BadRecordError, StateError, UsageError, UserCodeError, check
from ...operators.elements import Batch, ColumnBatch, ObjectBatch
from ...operators.functions.key_function import KeyFunction
from ...operators.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashColumns,
    HashFunction,
    Partitioning,
    Rebalance,
    Rescale,
    Shuffle,
)
from ...operators.rows import to_rows
from ...state.hashing import Hashes, hash_columns, hash_key, hash_keys, hash_numbers, key_groups_of
from ...state.keygroups import key_group_range, owner_of
from ..protocol.backpressure import HotGroup

Partitioner: TypeAlias = Callable[[Batch], Iterable[tuple[int, Batch]]]
"""Splits a batch into (channel index, part). No part is empty if the batch is not."""
Rows: TypeAlias = Callable[[Batch], Sequence[Any]]
"""The records of a batch, as user functions see them."""
BATCHES_MAX: Final = 16
"""The number of batches that are counted per window."""
RECORDS_MAX: Final = 32_768
"""After this number of records no further batch of the window is counted."""
GATHERED_ROWS: Final = 512
"""Batches by key columns are gathered until each channel gets this number of rows, on average."""
ONE_TAKE_ROWS_MAX: Final = 16_384
"""A column batch of up to this number of rows is split in two by one take and two slices.

The fixed price of a second take matters there. In larger batches the copy of all places costs more.
"""
KEPT: Final = 0.9
"""The factor by which older counts lose weight with each window in which anything was counted."""


@final
class Connections:
    """The channels of an exchange: the (sender, receiver) pairs of subtasks that need one, in order.

    Rescale connects pointwise, as Flink's `EdgeManagerBuildUtil` does; all others but Forward connect
    everyone with everyone, since watermarks and barriers go everywhere. A formula gives the partners of
    one subtask, because a table of all pairs of a large job would fill the memory of each worker.
    """

    def __init__(self, partitioning: Partitioning, senders: int, receivers: int) -> None:
        if isinstance(partitioning, Forward):
            check(senders == receivers, "forward needs equal parallelism", senders=senders)
        self._pointwise = isinstance(partitioning, Forward | Rescale)
        self._senders = senders
        self._receivers = receivers

    def receivers_of(self, sender: int) -> range:
        """Return the receivers of one sender."""
        senders, receivers = self._senders, self._receivers
        if not self._pointwise:
            return range(receivers)
        if senders >= receivers:
            only = ((sender + 1) * receivers - 1) // senders
            return range(only, only + 1)
        ends = [(s * receivers + senders - 1) // senders for s in (sender, sender + 1)]
        return range(*ends)

    def senders_of(self, receiver: int) -> range:
        """Return the senders of one receiver."""
        senders, receivers = self._senders, self._receivers
        if not self._pointwise:
            return range(senders)
        if senders >= receivers:
            return range(receiver * senders // receivers, (receiver + 1) * senders // receivers)
        only = receiver * senders // receivers
        return range(only, only + 1)

    def number(self, sender: int, receiver: int) -> int:
        """Return the position of a pair among all pairs."""
        if not self._pointwise:
            return sender * self._receivers + receiver
        return sender if self._senders >= self._receivers else receiver

    def __len__(self) -> int:
        if self._pointwise:
            return max(self._senders, self._receivers)
        return self._senders * self._receivers

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for sender in range(self._senders):
            for receiver in self.receivers_of(sender):
                yield sender, receiver


def records_of(batch: Batch) -> Sequence[Any]:
    """The records of an object batch as they are, rows of a column batch as generated records."""
    return batch.records if isinstance(batch, ObjectBatch) else to_rows(batch.data)


def make_partitioner(
    partitioning: Partitioning,
    targets: int,
    *,
    sender: int,
    max_parallelism: int,
    rng: random.Random,
    rows: Rows = records_of,
    sampler: KeyGroupSampler | None = None,
) -> Partitioner:
    """The partitioner of sender subtask `sender` over its `targets` channels.

    Args:
        partitioning: what the user asked for.
        targets: how many receivers this sender is connected with, see `connections`.
        sender: index of the sending subtask; round robin starts there, so that load spreads.
        max_parallelism: number of key groups.
        rng: used by Shuffle only.
        rows: turns a batch into the records that user functions (HashFunction, Custom) get.
        sampler: counts records by key group, where the partitioner makes out key groups.
    """
    match partitioning:
        case Broadcast():
            return lambda batch: [(index, batch) for index in range(targets)]
        case Custom(function) if targets > 1:
            return _Custom(function, targets, rows)
        case _ if targets == 1 or isinstance(partitioning, Global):
            return _to_first
        case HashColumns(columns):
            return _HashColumns(columns, targets, max_parallelism, sampler)
        case HashFunction(function):
            return _HashFunction(function, targets, max_parallelism, rows, sampler)
        case Rebalance() | Rescale():
            return _RoundRobin(targets, sender)
        case Shuffle():
            return lambda batch: [(rng.randrange(targets), batch)]
        case _:
            check(False, "forward has one channel", targets=targets)
            raise AssertionError


def gather_rows(partitioning: Partitioning, targets: int) -> int:
    """Return the rows that are worth a split over `targets` channels; 0: batches are not gathered.

    They are not gathered where functions of the user choose the channel, so that an error of such a
    function is that of the step that has emitted the record, at once.
    """
    return GATHERED_ROWS * targets if isinstance(partitioning, HashColumns) and targets > 1 else 0


def _to_first(batch: Batch) -> list[tuple[int, Batch]]:
    return [(0, batch)]


class _RoundRobin:
    def __init__(self, channels: int, sender: int) -> None:
        self._channels = channels
        self._next = sender % channels

    def __call__(self, batch: Batch) -> list[tuple[int, Batch]]:
        index = self._next
        self._next = (index + 1) % self._channels
        return [(index, batch)]


def split(batch: Batch, targets: npt.NDArray[Any], channels: int) -> list[tuple[int, Batch]]:
    """Split by `targets`, the channel of each record; the order within a part is kept."""
    if channels == 2:
        return _split_in_two(batch, targets.astype(np.bool_, copy=False))
    counts = np.bincount(targets, minlength=channels)
    used = np.flatnonzero(counts).tolist()
    if len(used) == 1:
        return [(used[0], batch)]
    # On 8 and 16 bit integers the stable sort is a radix sort.
    taken = batch.take(np.argsort(targets, kind="stable"))
    ends = np.cumsum(counts)
    return [(i, taken.slice(int(ends[i] - counts[i]), int(counts[i]))) for i in used]


def _split_in_two(batch: Batch, is_second: npt.NDArray[np.bool_]) -> list[tuple[int, Batch]]:
    """Split into the records of channel 0 and those of channel 1, which `is_second` names."""
    count = np.count_nonzero(is_second)
    if count in (0, len(is_second)):
        return [(1 if count else 0, batch)]
    if isinstance(batch, ObjectBatch):
        return [(0, batch.where(~is_second)), (1, batch.where(is_second))]
    first, second = np.flatnonzero(~is_second), np.flatnonzero(is_second)
    if len(batch) > ONE_TAKE_ROWS_MAX:
        return [(0, batch.take(first)), (1, batch.take(second))]
    taken = batch.take(np.concatenate((first, second)))
    return [(0, taken.slice(0, len(first))), (1, taken.slice(len(first), len(second)))]


def _owner_table(channels: int, max_parallelism: int) -> npt.NDArray[Any]:
    """Key group -> channel."""
    owners = [owner_of(group, channels, max_parallelism) for group in range(max_parallelism)]
    return np.array(owners, dtype=np.uint8 if channels <= 256 else np.uint16)


class _ByKeyGroup:
    """Key hash -> key group -> owner."""

    def __init__(
        self, channels: int, max_parallelism: int, sampler: KeyGroupSampler | None
    ) -> None:
        self._channels = channels
        self._max_parallelism = max_parallelism
        self._owners = _owner_table(channels, max_parallelism)
        self._second_from = int(np.searchsorted(self._owners, 1))
        """The first key group of channel 1: each channel owns a range of them."""
        self._sampler = sampler

    def split(self, batch: Batch, hashes: Hashes) -> list[tuple[int, Batch]]:
        """Split by the owners of the keys with these hashes."""
        groups = key_groups_of(hashes, self._max_parallelism)
        if self._sampler is not None:
            self._sampler.count(groups)
        if self._channels == 2:
            return _split_in_two(batch, groups >= self._second_from)
        return split(batch, self._owners[groups], self._channels)


class _HashColumns:
    def __init__(
        self,
        columns: tuple[str, ...],
        channels: int,
        max_parallelism: int,
        sampler: KeyGroupSampler | None,
    ) -> None:
        self._columns = columns
        self._by_key_group = _ByKeyGroup(channels, max_parallelism, sampler)

    def __call__(self, batch: Batch) -> list[tuple[int, Batch]]:
        if not isinstance(batch, ColumnBatch):
            raise UsageError(
                f"a stream of Python objects has no columns key_by=`{', '.join(self._columns)}`",
                fix="use key_with(function), or give the stream a schema with into=",
            )
        hashes = hash_columns([batch.data.column(name) for name in self._columns])
        return self._by_key_group.split(batch, hashes)


class _HashFunction:
    def __init__(
        self,
        function: Callable[[Any], Any],
        channels: int,
        max_parallelism: int,
        rows: Rows,
        sampler: KeyGroupSampler | None,
    ) -> None:
        self._function = KeyFunction(function)
        self._by_key_group = _ByKeyGroup(channels, max_parallelism, sampler)
        self._rows = rows

    def __call__(self, batch: Batch) -> list[tuple[int, Batch]]:
        hashes = self._hashes_of_place(batch)
        if hashes is not None:
            return self._by_key_group.split(batch, hashes)
        records = self._rows(batch)
        keys: list[Any] = []
        try:
            self._function.extend(keys, records)
        except Exception as error:
            raise _failed("key function", records[len(keys)], error) from error
        try:
            hashes = hash_keys(keys)
        except StateError:
            _refuse_bad_key(keys, records)
            raise
        return self._by_key_group.split(batch, hashes)

    def _hashes_of_place(self, batch: Batch) -> Hashes | None:
        """Return the hashes of keys that are in an array of numbers; None if they are not."""
        if not isinstance(batch, ObjectBatch):
            return None
        keys = batch.numbers_at(self._function.place)
        return None if keys is None else hash_numbers(keys)


def _refuse_bad_key(keys: Sequence[Any], records: Sequence[Any]) -> None:
    """Name the record whose key cannot be one: no snapshot is to blame, and it would be bad again."""
    for key, record in zip(keys, records, strict=True):
        try:
            hash_key(key)
        except StateError as error:
            raise BadRecordError(
                f"{error.message} key=`{key!r:.200}` record=`{record!r:.200}`", fix=error.fix
            ) from error


class _Custom:
    def __init__(self, function: Callable[[Any, int], int], channels: int, rows: Rows) -> None:
        self._function = function
        self._channels = channels
        self._rows = rows

    def __call__(self, batch: Batch) -> list[tuple[int, Batch]]:
        channels = self._channels
        records = self._rows(batch)
        targets = _call_each("partition function", lambda r: self._function(r, channels), records)
        for record, target in zip(records, targets, strict=True):
            if not isinstance(target, int | np.integer) or not 0 <= target < channels:
                raise UserCodeError(
                    f"the partition function must return an integer in 0..{channels - 1} "
                    f"returned=`{target!r}` record=`{record!r:.200}`"
                )
        dtype = np.uint8 if channels <= 256 else np.uint16
        return split(batch, np.array(targets, dtype=dtype), channels)


def _call_each(role: str, function: Callable[[Any], Any], records: Sequence[Any]) -> list[Any]:
    """Apply a user's function to each record, naming the record it fails on."""
    results: list[Any] = []
    try:
        for record in records:
            results.append(function(record))
    except Exception as error:
        raise _failed(role, records[len(results)], error) from error
    return results


def _failed(role: str, record: Any, error: Exception) -> UserCodeError:
    return UserCodeError(
        f"the {role} failed error=`{error!r}` record=`{record!r:.200}`",
        detail="".join(traceback.format_exception(error)),
    )


@final
class KeyGroupSampler:
    """The counts of one sender on one exchange."""

    def __init__(self, edge: int, receivers: int, max_parallelism: int) -> None:
        """Nothing is counted yet; the first window is open.

        Args:
            edge: id of the exchange.
            receivers: parallelism of who receives.
            max_parallelism: number of key groups.
        """
        self._edge = edge
        self._receivers = receivers
        self._max_parallelism = max_parallelism
        self._counts = np.zeros(max_parallelism)
        self._batches = self._records = 0

    def count(self, groups: npt.NDArray[Any]) -> None:
        """Take in the key groups of a batch, or, mostly, do nothing."""
        if self._batches >= BATCHES_MAX or self._records >= RECORDS_MAX:
            return
        if not self._batches:
            self._counts *= KEPT
        self._batches += 1
        self._records += len(groups)
        self._counts += np.bincount(groups, minlength=self._max_parallelism)

    def next_window(self) -> None:
        """A second is over. What was counted before counts less once there is something new."""
        self._batches = self._records = 0

    def hottest(self, *, only_hot: bool = False) -> HotGroup | None:
        """The key group with the most records; None: there were none, or it is not hot (`only_hot`)."""
        group = int(self._counts.argmax())
        if self._counts[group] < 1:
            return None
        subtask = owner_of(group, self._receivers, self._max_parallelism)
        own = key_group_range(subtask, self._receivers, self._max_parallelism)
        of_subtask = self._counts[own.first : own.last + 1].sum()
        found = HotGroup(
            edge=self._edge,
            subtask=subtask,
            group=group,
            records=round(self._counts[group]),
            of_subtask=round(of_subtask),
            of_all=round(self._counts.sum()),
        )
        hot = not only_hot or found.is_hot(self._receivers, self._max_parallelism)
        return found if hot else None
