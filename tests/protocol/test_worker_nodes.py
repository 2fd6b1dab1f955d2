"""Workers stay off the head node of a Ray cluster, take what slots take, and say what is missing."""

from __future__ import annotations

import pytest

from headgate.api.resources import Resources
from headgate.runtime.protocol.worker_nodes import (
    ALLOWED,
    IF_ALONE,
    NEVER,
    ClusterNode,
    Demand,
    NodeRules,
    demand,
    shortage,
    worker_resources,
)

HEAD = ClusterNode("head", is_head=True, resources={"CPU": 4.0})
SMALL = ClusterNode("small", resources={"slot": 1.0})
LARGE = ClusterNode("large", resources={"slot": 4.0})
COORDINATOR = ClusterNode("coordinator", hosts_workers=False)


def slots(count: int) -> NodeRules:
    """The rules of a job with one group, whose workers have this number of slots."""
    return NodeRules({"default": worker_resources(Resources(), count, "slot")}, "slot")


@pytest.mark.parametrize(
    ("on_head", "nodes", "avoided"),
    [
        (IF_ALONE, [HEAD], ""),
        (IF_ALONE, [HEAD, SMALL], "head"),
        (NEVER, [HEAD], "head"),
        (NEVER, [SMALL, HEAD], "head"),
        (ALLOWED, [HEAD, SMALL], ""),
        (NEVER, [SMALL, LARGE], ""),  # the head is down, and Ray's other nodes go on
        (IF_ALONE, [], ""),
        (IF_ALONE, [HEAD, COORDINATOR], ""),  # the pod of a coordinator is no place for workers
        (IF_ALONE, [HEAD, COORDINATOR, SMALL], "head"),
    ],
)
def test_which_node_is_avoided(on_head: str, nodes: list[ClusterNode], avoided: str) -> None:
    assert demand(NodeRules(on_head=on_head), nodes) == Demand({}, avoided)


def test_a_worker_takes_one_of_the_resource_for_each_slot() -> None:
    assert demand(slots(3), [HEAD, LARGE]) == Demand({"slot": 3.0}, "head")


def test_without_a_resource_any_node_that_is_not_avoided_will_do() -> None:
    rules = NodeRules(on_head=NEVER)
    assert shortage(rules, Demand({}, "head"), [HEAD, SMALL]) is None
    for nodes in ([HEAD], [HEAD, COORDINATOR]):
        found = shortage(rules, Demand({}, "head"), nodes)
        assert found is not None
        assert found.text == "the Ray cluster has no node but its head node"
        assert "headgate.ray.workers-on-head=allowed" in found.fix


def node(name: str, slots: float, free: float | None, *, is_head: bool = False) -> ClusterNode:
    free_slots = None if free is None else {"slot": free}
    return ClusterNode(name, is_head, resources={"slot": slots}, free=free_slots)


@pytest.mark.parametrize(
    ("count", "nodes", "text"),
    [
        (1, [HEAD, node("a", 1, 1)], ""),
        (4, [HEAD, node("a", 1, 0), node("b", 4, 4)], ""),
        (1, [HEAD, node("a", 1, None)], ""),  # Ray does not say what is free
        (1, [HEAD, node("a", 1, 0), node("b", 4, 0)], "one_node=`1` free=`0` of=`5`"),
        (2, [HEAD, node("a", 2, 1), node("b", 4, 1)], "one_node=`2` free=`2` of=`6`"),
        (1, [node("h", 8, 8, is_head=True), node("a", 1, 0)], "one_node=`1` free=`0` of=`1`"),
        (2, [HEAD, SMALL, SMALL], "largest_node=`1` nodes=`2`"),
        (1, [HEAD, ClusterNode("bare")], "largest_node=`0` nodes=`1`"),
        (1, [node("h", 8, 8, is_head=True), ClusterNode("bare")], "largest_node=`0` nodes=`1`"),
    ],
)
def test_what_is_missing_is_named(count: int, nodes: list[ClusterNode], text: str) -> None:
    rules = slots(count)
    found = shortage(rules, demand(rules, nodes), nodes)
    assert (found is None) == (not text)
    if found is not None:
        assert text in found.text
        assert "resource=`slot`" in found.text
        assert "group=`default`" in found.text


def test_a_worker_that_ray_starts_has_used_up_nothing_of_others() -> None:
    """Room is no longer free as soon as Ray has chosen a worker's node, long before the worker runs."""
    rules, nodes = slots(1), [HEAD, node("a", 1, 0)]
    asked = demand(rules, nodes)
    assert shortage(rules, asked, nodes, queued=False) is None
    assert shortage(rules, asked, nodes, queued=True) is not None
    assert shortage(rules, asked, nodes) is not None, "unknown"


def test_a_worker_takes_what_all_of_its_slots_take() -> None:
    of_slot = Resources(cpu=0.75, memory="2gb", gpu=0.5, custom={"disk": 1})
    assert worker_resources(of_slot, 1) == {"CPU": 0.75, "memory": 2 << 30, "GPU": 0.5, "disk": 1}
    assert worker_resources(of_slot, 3, "slot") == {
        "CPU": 2.25,
        "memory": 6 << 30,
        "GPU": 2,  # Ray has no one and a half
        "disk": 3,
        "slot": 3,
    }
    assert worker_resources(Resources(), 2) == {}


GPU_RULES = NodeRules({"gpu": {"CPU": 2.0, "GPU": 1.0, "memory": float(8 << 30)}})
CPUS = {"CPU": 8.0, "memory": float(64 << 30)}
CARDS = {"CPU": 1.0, "GPU": 4.0, "memory": float(8 << 30)}


def test_groups_ask_for_resources_of_their_own() -> None:
    assert demand(GPU_RULES, [HEAD], "default") == Demand({}, "")
    assert demand(GPU_RULES, [HEAD], "gpu").resources == GPU_RULES.resources["gpu"]
    bare = [ClusterNode("a")]
    assert shortage(GPU_RULES, demand(GPU_RULES, bare, "default"), bare) is None


@pytest.mark.parametrize(
    ("nodes", "text", "fix"),
    [
        ([CPUS, CPUS | CARDS | {"CPU": 2.0}], "", ""),
        (
            [CPUS, CPUS],
            "no node has enough for a worker of the slot sharing group group=`gpu` resource=`GPU` "
            "needed_on_one_node=`1` largest_node=`0` nodes=`2`",
            "add nodes with more GPU, or ask for less in the resources of the group",
        ),
        (
            [{"CPU": 1.0, "GPU": 1.0, "memory": float(4 << 30)}],
            "resource=`CPU` needed_on_one_node=`2` largest_node=`1` resource=`memory` "
            "needed_on_one_node=`8gb` largest_node=`4gb` nodes=`1`",
            "add nodes with more CPU and memory, or ask for less in the resources of the group",
        ),
        ([CPUS, CARDS], "no node has enough at once for a worker", "more CPU and GPU and memory"),
    ],
)
def test_no_node_is_large_enough(nodes: list[dict[str, float]], text: str, fix: str) -> None:
    there = [ClusterNode(str(number), resources=each) for number, each in enumerate(nodes)]
    found = shortage(GPU_RULES, demand(GPU_RULES, there, "gpu"), there)
    assert (found is None) == (not text)
    if found is not None:
        assert text in found.text
        assert fix in found.fix


def test_what_is_free_must_be_free_on_one_node() -> None:
    large = CPUS | {"GPU": 1.0}
    without_cards, without_cpus = large | {"GPU": 0.0}, large | {"CPU": 1.0}
    nodes = [
        ClusterNode(name, resources=large, free=free)
        for name, free in (("a", without_cards), ("b", without_cpus))
    ]
    found = shortage(GPU_RULES, demand(GPU_RULES, nodes, "gpu"), nodes)
    assert found is not None
    assert (
        "used up group=`gpu` resource=`CPU` needed_on_one_node=`2` free=`9` of=`16`" in found.text
    )
    assert "resource=`GPU` needed_on_one_node=`1` free=`1` of=`2`" in found.text
