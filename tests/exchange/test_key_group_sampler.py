"""The sample of key groups: exact where it counts, and bounded."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.partitioning import HashColumns, HashFunction, Partitioning
from headgate.runtime.control.messages import Statistics, SubtaskStatistics, decode, encode
from headgate.runtime.exchange import partitioners
from headgate.runtime.exchange.partitioners import (
    BATCHES_MAX,
    KEPT,
    KeyGroupSampler,
    make_partitioner,
)
from headgate.runtime.protocol.backpressure import HotGroup, WaitsFor
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keygroups import owner_of

KEYS = [f"k{number % 40}" if number % 3 else "hot" for number in range(300)]


def groups(*counts: tuple[int, int]) -> Any:
    """Key groups of a batch, from (group, records)."""
    return np.repeat([group for group, _ in counts], [records for _, records in counts])


def of_columns() -> tuple[Partitioning, Batch]:
    return HashColumns(("k",)), ColumnBatch(pa.record_batch({"k": KEYS}))


def of_objects() -> tuple[Partitioning, Batch]:
    return HashFunction(lambda key: key), ObjectBatch(KEYS)


@pytest.mark.parametrize("made", [of_columns, of_objects])
def test_a_partitioner_counts_what_it_sends(made: Any) -> None:
    partitioning, batch = made()
    sampler = KeyGroupSampler(3, 4, 128)

    def sent(with_sampler: KeyGroupSampler | None) -> list[tuple[int, int]]:
        split = make_partitioner(
            partitioning,
            4,
            sender=0,
            max_parallelism=128,
            rng=random.Random(0),
            sampler=with_sampler,
        )
        return [(receiver, len(part)) for receiver, part in split(batch)]

    receivers = dict(sent(sampler))
    assert receivers == dict(sent(None))
    group, records = Counter(key_group_of(hash_key(key), 128) for key in KEYS).most_common(1)[0]
    owner = owner_of(group, 4, 128)
    assert sampler.hottest() == HotGroup(3, owner, group, records, receivers[owner], len(KEYS))


def test_nothing_was_sent() -> None:
    assert KeyGroupSampler(0, 2, 128).hottest() is None


def test_of_each_window_only_the_first_batches_are_counted() -> None:
    sampler = KeyGroupSampler(0, 2, 128)
    for _ in range(10 * BATCHES_MAX):
        sampler.count(groups((5, 10)))
    assert sampler.hottest() == HotGroup(0, 0, 5, *3 * [10 * BATCHES_MAX])


def test_large_batches_use_a_window_up_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "RECORDS_MAX", 25)
    sampler = KeyGroupSampler(0, 2, 128)
    for _ in range(5):
        sampler.count(groups((5, 10)))
    assert sampler.hottest() == HotGroup(0, 0, 5, 30, 30, 30)


def test_older_windows_count_less_once_there_is_something_new() -> None:
    sampler = KeyGroupSampler(0, 2, 128)
    sampler.count(groups((5, 1000), (6, 100), (127, 900)))
    for _ in range(50):
        sampler.next_window()  # held up: nothing was sent
    assert sampler.hottest() == HotGroup(0, 0, 5, 1000, 1100, 2000)
    sampler.count(groups((127, 10)))
    sampler.count(groups((127, 10)))
    assert sampler.hottest() == HotGroup(0, 0, 5, 900, 990, 1820)
    for _ in range(20):
        sampler.next_window()
        sampler.count(groups((6, 50)))
    hot = sampler.hottest()
    assert hot is not None
    assert hot.group == 6
    assert hot.records == round(50 * sum(KEPT**age for age in range(20)) + 100 * KEPT**21)


def test_a_sample_travels() -> None:
    sent = SubtaskStatistics(
        0, 0, 0, 0, 0, 0, 0, 0, waits_for=WaitsFor.CALLS, hot_groups=(HotGroup(1, 2, 3, 4, 5, 6),)
    )
    message = Statistics(attempt=1, subtasks=(sent,))
    decoded = decode(encode(message))
    assert decoded == message
    assert isinstance(decoded, Statistics)
    (hot,) = decoded.subtasks[0].hot_groups
    assert (hot.group, hot.of_all) == (3, 6)
