"""The slots that each worker gets after a failure."""

from __future__ import annotations

from headgate.runtime.coordinator.placement import SlotAffinity


def order(affinity: SlotAffinity, workers: dict[str, str], count: int) -> list[str]:
    """The order of workers that are all of one group."""
    return affinity.order(workers, dict.fromkeys(workers, "default"), ["default"] * count)


def test_everybody_sits_where_it_sat() -> None:
    affinity = SlotAffinity()
    assert order(affinity, {"a": "h", "b": "h", "c": "h"}, 3) == ["a", "b", "c"]
    assert order(affinity, {"b": "h", "c": "h", "d": "h"}, 3) == ["d", "b", "c"], "d for a"
    assert order(affinity, {"b": "h", "c": "h", "d": "h"}, 3) == ["d", "b", "c"]
    assert order(affinity, {"d": "h", "e": "h", "f": "h"}, 2) == ["d", "e"]


def test_the_machine_of_the_dead_comes_before_others() -> None:
    affinity = SlotAffinity()
    assert order(affinity, {"a": "one", "b": "two"}, 2) == ["a", "b"]
    assert order(affinity, {"c": "one", "d": "two", "a": "one"}, 2) == ["a", "d"]
    assert order(affinity, {"c": "one", "e": "three", "d": "two"}, 2) == ["c", "d"]
    assert order(affinity, {"e": "three", "f": "three"}, 2) == ["e", "f"]


def test_another_number_of_seats() -> None:
    affinity = SlotAffinity()
    assert order(affinity, {"a": "h", "b": "h"}, 1) == ["a"]
    assert order(affinity, {"a": "h", "b": "h"}, 2) == ["a", "b"]
    assert order(affinity, {"b": "h", "c": "h"}, 1) == ["b"]


def test_nobody_sits_on_a_seat_of_another_group() -> None:
    affinity, groups = SlotAffinity(), ["default", "default", "gpu"]
    own = {"a": "default", "b": "gpu", "c": "default", "d": "gpu", "e": "gpu"}
    hosts = {"a": "one", "b": "two", "c": "two", "d": "one"}
    assert affinity.order(hosts, own, groups) == ["a", "c", "b"]
    # `b` is gone: `d` takes its seat, on another machine than the free `c` of the other group.
    hosts = {"a": "one", "c": "two", "d": "one"}
    assert affinity.order(hosts, own, groups) == ["a", "c", "d"]
    hosts = {"a": "one", "c": "two", "e": "one"}
    assert affinity.order(hosts, own, groups) == ["a", "c", "e"]
