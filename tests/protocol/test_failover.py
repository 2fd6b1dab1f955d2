"""Regions and what restarts with them, against a model that tries all paths."""

from __future__ import annotations

import random

import pytest

from headgate.runtime.protocol.failover import RegionFailover, RegionId, SubtaskLink
from headgate.runtime.protocol.ids import SubtaskId


def drawn(seed: int) -> tuple[list[SubtaskId], list[SubtaskLink]]:
    """A graph of a few vertices; links are pointwise, or all to all, and some are kept."""
    rng = random.Random(seed)
    widths = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
    subtasks = [SubtaskId(v, i) for v, width in enumerate(widths) for i in range(width)]
    links = []
    for _ in range(rng.randint(0, 7)):
        source, target = sorted(rng.sample(range(len(widths)), 2)) if len(widths) > 1 else (0, 0)
        if source == target:
            continue
        kept = rng.random() < 0.5
        if rng.random() < 0.6:
            for index in range(min(widths[source], widths[target])):
                pair = (SubtaskId(source, index),), (SubtaskId(target, index),)
                links.append(SubtaskLink(*pair, kept))
        else:
            producers = tuple(SubtaskId(source, i) for i in range(widths[source]))
            consumers = tuple(SubtaskId(target, i) for i in range(widths[target]))
            links.append(SubtaskLink(producers, consumers, kept))
    return subtasks, links


def together(
    subtasks: list[SubtaskId], links: list[SubtaskLink]
) -> dict[SubtaskId, set[SubtaskId]]:
    """The model of regions: whom each subtask reaches over pipelined edges, either way."""
    pairs = [
        (p, c) for link in links if not link.kept for p in link.producers for c in link.consumers
    ]
    reached = {subtask: {subtask} for subtask in subtasks}
    for _ in subtasks:
        for a, b in pairs:
            reached[a] |= reached[b]
            reached[b] |= reached[a]
    return reached


def restarted(
    subtasks: list[SubtaskId], links: list[SubtaskLink], failed: SubtaskId, gone: set[SubtaskId]
) -> set[SubtaskId]:
    """The model of the rules, subtask by subtask, until nothing is added any more."""
    region = together(subtasks, links)
    kept = [(p, c) for link in links if link.kept for p in link.producers for c in link.consumers]
    found = set(region[failed])
    for _ in subtasks:
        for producer, consumer in kept:
            if consumer in found and producer in gone:
                found |= region[producer]
            if producer in found:
                found |= region[consumer]
    return found


@pytest.mark.parametrize("first", range(0, 2_000, 500))
def test_regions_and_restarts_are_those_of_the_model(first: int) -> None:
    several = added = 0
    for seed in range(first, first + 500):
        subtasks, links = drawn(seed)
        rng = random.Random(-seed)
        failed, gone = rng.choice(subtasks), {s for s in subtasks if rng.random() < 0.3}
        failover = RegionFailover(subtasks, links)
        model = together(subtasks, links)
        for subtask in subtasks:
            assert failover.regions[failover.region_of(subtask)] == model[subtask], seed
        assert sum(map(len, failover.regions)) == len(subtasks), seed
        needed = failover.restart([failover.region_of(failed)], gone)
        assert set(failover.subtasks_of(needed)) == restarted(subtasks, links, failed, gone), seed
        several += 1 < len(needed) < len(failover.regions)
        added += len(failover.regions) > 1
    assert several > 20, "restarts of a part with more than the failed region"
    assert added > 200


def test_a_lost_result_takes_its_producer_along_and_an_available_one_does_not() -> None:
    a, b, c = SubtaskId(0, 0), SubtaskId(1, 0), SubtaskId(2, 0)
    failover = RegionFailover(
        [a, b, c], [SubtaskLink((a,), (b,), kept=True), SubtaskLink((b,), (c,), kept=True)]
    )
    assert failover.restart([RegionId(1)]) == {1, 2}
    assert failover.restart([RegionId(1)], gone={a}) == {0, 1, 2}
    assert failover.restart([RegionId(2)]) == {2}
    assert failover.everything == {0, 1, 2}


def test_what_must_stay_together_is_one_region() -> None:
    heads = [SubtaskId(0, index) for index in range(3)]
    assert len(RegionFailover(heads, []).regions) == 3
    assert RegionFailover(heads, [], [heads[:2]]).regions == (frozenset(heads[:2]), {heads[2]})
