"""Compaction: small files of a table are merged after a commit, so that readers have few files to open.

A table format replaces files by others with the same rows in one atomic change, which no reader sees as a
change of rows. So compaction needs nothing of the job: it may fail, or be killed, at any point, and is then
tried again after a later commit. It removes only files that the table has, so it never touches a file that
waits for its commit, and the marks of commits stay as they are.

The files of a partition are divided into tiers by their size, and those of one tier are merged when there
are enough of them. So a row is written again once for each tier, and not at each compaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ...operators.clock import Clock, SystemClock

MERGED_BYTES_MAX: Final = 512 << 20
"""The most bytes that are merged after one commit, as the next checkpoint waits meanwhile.

The partition with the most small files is due even if they are more.
"""
PAUSE_S: Final = 600.0
"""The time after a failure for which nothing is merged."""
_log = logging.getLogger("headgate.connectors")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Merge(Generic[K]):
    """Small files of one partition that are to be merged.

    Attributes:
        partition: the values of the partition.
        target_bytes: the size of the files to make. Smaller files of the partition are merged.
        merged_bytes: the size of the files to merge.
    """

    partition: K
    target_bytes: int
    merged_bytes: int


def target_of(sizes: Sequence[int], files: int, limit: int) -> int | None:
    """Return the size of the files that the small files of a partition are merged into now.

    The largest tier has the files between half of `limit` and half of `limit / files`, and each further
    tier begins where the one before ends. Files that are larger than half of `limit` are not small.

    Args:
        sizes: the sizes of all files of the partition.
        files: the number of files of one tier from which on they are merged; at least 2.
        limit: the size that files should have in the end.

    Returns:
        Twice the upper end of the largest tier that has enough files; None: no tier has.
    """
    target = limit
    while target > 0:
        small = [size for size in sizes if size < target / 2]
        if len(small) < files:
            return None
        next_target = target // files
        if sum(size >= next_target / 2 for size in small) >= files:
            return target
        target, sizes = next_target, small
    return None


def due_merges(found: Iterable[tuple[K, int]], files: int, limit: int) -> list[Merge[K]]:
    """Return what is to be merged after a commit: the partitions with the most small files come first.

    Args:
        found: the partition and the size of each file of the table.
        files: the number of small files from which on they are merged.
        limit: the size that files should have in the end.
    """
    sizes: dict[K, list[int]] = {}
    for partition, size in found:
        sizes.setdefault(partition, []).append(size)
    due: list[Merge[K]] = []
    left = MERGED_BYTES_MAX
    for partition, each in sorted(sizes.items(), key=lambda item: -len(item[1])):
        target = target_of(each, files, limit)
        if target is None:
            continue
        merged_bytes = sum(size for size in each if size <= target)
        if due and merged_bytes > left:
            continue
        left -= merged_bytes
        due.append(Merge(partition, target, merged_bytes))
    return due


class Compaction:
    """Merges the small files of one table after commits. Its failures are warnings, and fail no commit."""

    def __init__(self, table: str, clock: Clock | None = None) -> None:
        """Begin.

        Args:
            table: the name of the table, for the log.
            clock: the time.
        """
        self._table = table
        self._clock = clock or SystemClock()
        self._not_before_s = 0.0

    def run(self, merge_all: Callable[[], None]) -> None:
        """Merge what is due, unless it has failed a short time ago.

        Args:
            merge_all: finds out what is due, and merges it.
        """
        if self._clock.monotonic() < self._not_before_s:
            return
        try:
            merge_all()
        except Exception as error:
            self._not_before_s = self._clock.monotonic() + PAUSE_S
            first = str(error).strip().partition("\n")[0]
            _log.warning(
                "small files of a table were not merged, which will be tried again in %g min "
                "table=`%s`: %s",
                PAUSE_S / 60,
                self._table,
                first,
            )
