"""Workers stay off the head node of a Ray cluster, take what slots take, and say what is missing."""

from __future__ import annotations

import pytest

from headgate.runtime.protocol.worker_nodes import (
    ALLOWED,
    IF_ALONE,
    NEVER,
    Demand,
    Node,
    NodeRules,
    demand,
    shortage,
)

HEAD = Node("head", is_head=True, resources={"CPU": 4.0})
SMALL = Node("small", resources={"slot": 1.0})
LARGE = Node("large", resources={"slot": 4.0})


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
    ],
)
def test_which_node_is_avoided(on_head: str, nodes: list[Node], avoided: str) -> None:
    assert demand(NodeRules(on_head=on_head), nodes) == Demand({}, avoided)


def test_a_worker_takes_one_of_the_resource_for_each_slot() -> None:
    rules = NodeRules(slot_resource="slot", slots=3)
    assert demand(rules, [HEAD, LARGE]) == Demand({"slot": 3.0}, "head")


def test_without_a_resource_any_node_that_is_not_avoided_will_do() -> None:
    rules = NodeRules(on_head=NEVER)
    assert shortage(rules, Demand({}, "head"), [HEAD, SMALL]) is None
    found = shortage(rules, Demand({}, "head"), [HEAD])
    assert found is not None
    assert found.text == "the Ray cluster has no node but its head node"
    assert "headgate.ray.workers-on-head=allowed" in found.fix


def node(name: str, slots: float, free: float | None, *, is_head: bool = False) -> Node:
    return Node(name, is_head, {"slot": slots}, None if free is None else {"slot": free})


@pytest.mark.parametrize(
    ("slots", "nodes", "text"),
    [
        (1, [HEAD, node("a", 1, 1)], ""),
        (4, [HEAD, node("a", 1, 0), node("b", 4, 4)], ""),
        (1, [HEAD, node("a", 1, None)], ""),  # Ray does not say what is free
        (1, [HEAD, node("a", 1, 0), node("b", 4, 0)], "one_node=`1` free=`0` of=`5`"),
        (2, [HEAD, node("a", 2, 1), node("b", 4, 1)], "one_node=`2` free=`2` of=`6`"),
        (1, [node("h", 8, 8, is_head=True), node("a", 1, 0)], "one_node=`1` free=`0` of=`1`"),
        (2, [HEAD, SMALL, SMALL], "largest_node=`1` nodes=`2`"),
        (1, [HEAD, Node("bare")], "largest_node=`0` nodes=`1`"),
        (1, [node("h", 8, 8, is_head=True), Node("bare")], "largest_node=`0` nodes=`1`"),
    ],
)
def test_what_is_missing_is_named(slots: int, nodes: list[Node], text: str) -> None:
    rules = NodeRules(slot_resource="slot", slots=slots)
    found = shortage(rules, demand(rules, nodes), nodes)
    assert (found is None) == (not text)
    if found is not None:
        assert text in found.text
        assert "resource=`slot`" in found.text
