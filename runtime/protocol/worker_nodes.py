"""On which nodes of a Ray cluster a worker may run, and what is missing if it finds none. Pure.

Ray places the worker; this only says what to ask of Ray, and explains why Ray does not do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

NEVER: Final = "never"
IF_ALONE: Final = "if-alone"
ALLOWED: Final = "allowed"
ON_HEAD_KEY: Final = "headgate.ray.workers-on-head"


@dataclass(frozen=True, slots=True)
class NodeRules:
    """What a job asks of the nodes of its workers.

    Attributes:
        slot_resource: the custom resource that a slot takes one of; None: slots take nothing.
        slots: of one worker.
        on_head: `NEVER`, `IF_ALONE` or `ALLOWED`.
        patience_ms: how long a worker may wait for room.
    """

    slot_resource: str | None = None
    slots: int = 1
    on_head: str = IF_ALONE
    patience_ms: int = 120_000


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive.

    Attributes:
        node_id: as Ray calls it.
        is_head: Ray's control store is there.
        resources: all that it has, used or not.
        free: of these what is not in use; None: unknown.
    """

    node_id: str
    is_head: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What to ask of Ray for one worker.

    Attributes:
        resources: custom resources that the worker takes.
        not_on: the id of the node that it must not run on; empty: any node will do.
    """

    resources: dict[str, float]
    not_on: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why no node takes a worker, and what to do."""

    text: str
    fix: str


def demand(rules: NodeRules, nodes: Sequence[Node]) -> Demand:
    """What to ask of Ray for a worker of a job, on a cluster of these nodes."""
    resources = {rules.slot_resource: float(rules.slots)} if rules.slot_resource else {}
    head = next((node.node_id for node in nodes if node.is_head), "")
    avoided = rules.on_head == NEVER or (rules.on_head == IF_ALONE and len(nodes) > 1)
    return Demand(resources, head if avoided else "")


def shortage(rules: NodeRules, asked: Demand, nodes: Sequence[Node]) -> Shortage | None:
    """Why a worker that was asked for so does not start; None: the cluster has room, as far as is known.

    Args:
        rules: of the job.
        asked: what was asked of Ray.
        nodes: all that are alive.
    """
    usable = [node for node in nodes if node.node_id != asked.not_on]
    if not usable:
        return Shortage(
            "the Ray cluster has no node but its head node",
            f"add nodes, or allow the head node with {ON_HEAD_KEY}={ALLOWED}",
        )
    name, needed = rules.slot_resource, rules.slots
    if name is None:
        return None
    there = [node.resources.get(name, 0.0) for node in usable]
    if max(there) < needed:
        return Shortage(
            f"no node has enough of the resource that slots take resource=`{name}` "
            f"needed_on_one_node=`{needed}` largest_node=`{max(there):g}` nodes=`{len(usable)}`",
            f"start nodes with `ray start --resources='{{\"{name}\": {needed}}}'`, or correct "
            "headgate.ray.slot-resource",
        )
    free = [node.free.get(name, 0.0) for node in usable if node.free is not None]
    if len(free) == len(usable) and max(free) < needed:
        return Shortage(
            f"the resource that slots take is used up resource=`{name}` needed_on_one_node=`{needed}` "
            f"free=`{sum(free):g}` of=`{sum(there):g}`",
            "if this lasts, add nodes, lower the parallelism, or stop another job",
        )
    return None
