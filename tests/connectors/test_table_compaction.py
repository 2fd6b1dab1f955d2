"""Which small files of a table are merged, and when."""

from __future__ import annotations

import random

import pytest

from headgate.connectors import delta_sink, iceberg_sink
from headgate.connectors.tables.compaction import MERGED_BYTES_MAX, due_merges, target_of
from headgate.errors import UsageError

LIMIT = 128 << 20


@pytest.mark.parametrize(
    ("sizes", "target"),
    [
        ([], None),
        ([1000] * 9, None),
        ([LIMIT] * 100, None),
        ([LIMIT // 2] * 100, None),
        ([LIMIT // 2 - 1] * 10, LIMIT),
        ([LIMIT // 20 + 5] * 10, LIMIT),
        ([LIMIT // 40] * 10, LIMIT // 10),
        ([LIMIT // 20 + 5] * 9 + [LIMIT // 40] * 9, None),
        ([0] * 10, 1),
    ],
)
def test_files_of_one_tier_are_merged(sizes: list[int], target: int | None) -> None:
    assert target_of(sizes, 10, LIMIT) == target


@pytest.mark.parametrize("files", [2, 5, 20])
def test_few_files_remain_and_rows_are_seldom_written_again(files: int) -> None:
    rng = random.Random(files)
    sizes: list[int] = []
    new = rewritten = 0
    for _ in range(2000):
        size = rng.randint(20_000, 200_000)
        sizes.append(size)
        new += size
        while (target := target_of(sizes, files, LIMIT)) is not None:
            small = [each for each in sizes if each < target / 2]
            sizes = [each for each in sizes if each >= target / 2]
            rewritten += sum(small)
            bins = [0]
            for each in small:
                if bins[-1] + each > target:
                    bins.append(0)
                bins[-1] += each
            sizes += bins
    tiers = 14 / files.bit_length() + 2
    assert len(sizes) < files * tiers
    assert rewritten / new < 2 * tiers


def test_the_partitions_with_the_most_files_come_first_and_the_rest_waits() -> None:
    most, large = MERGED_BYTES_MAX, 60 << 20
    found = [("few", 10)] * 3 + [("many", large)] * 8 + [("other", large)] * 7 + [("one", 5)]
    due = due_merges(found, 2, LIMIT)
    assert [each.partition for each in due] == ["many", "few"]
    assert due[0].merged_bytes == 8 * large <= most


def test_one_file_is_not_merged() -> None:
    for make in (
        lambda: delta_sink("x", compact_files=1),
        lambda: iceberg_sink("a.b", catalog={"uri": "x"}, compact_files=1),
    ):
        with pytest.raises(UsageError, match="at least 2 compact_files=`1`"):
            make()
