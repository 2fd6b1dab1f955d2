"""The nodes of a Ray cluster that a worker may run on, and what is missing if there is none. Pure.

Ray places the worker; this only decides what to ask of Ray, and explains why Ray cannot do it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ...api.resources import DEFAULT_GROUP, Resources
from ...operators.sizes import format_size

NEVER: Final = "never"
IF_ALONE: Final = "if-alone"
ALLOWED: Final = "allowed"
ON_HEAD_KEY: Final = "headgate.ray.workers-on-head"
NO_WORKERS_LABEL: Final = "headgate.io/hosts-workers"
"""A label of Ray's nodes: no worker of any job runs on one where it is `NO_WORKERS`."""
NO_WORKERS: Final = "never"
CPU: Final = "CPU"
GPU: Final = "GPU"
MEMORY: Final = "memory"
"""Ray's own names of resources; all others are custom ones."""


class NodeRules(msgspec.Struct, frozen=True):
    """A job's requirements on the nodes of its workers.

    Attributes:
        resources: Ray's resources that a worker takes, by slot sharing group.
        slot_resource: the custom resource among them of which a slot takes one; None: there is none.
        on_head: `NEVER`, `IF_ALONE` or `ALLOWED`.
        patience_ms: how long a worker may wait for room.
    """

    resources: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    slot_resource: str | None = None
    on_head: str = IF_ALONE
    patience_ms: int = 120_000


class ClusterNode(msgspec.Struct, frozen=True):
    """A live node.

    Attributes:
        node_id: Ray's id.
        is_head: Ray's control store runs there.
        hosts_workers: False for a node that only joined to talk to the others, such as a coordinator's pod.
        resources: its total resources.
        free: its unused resources; None: unknown.
    """

    node_id: str
    is_head: bool = False
    hosts_workers: bool = True
    resources: Mapping[str, float] = msgspec.field(default_factory=dict)
    free: Mapping[str, float] | None = None


class Demand(msgspec.Struct, frozen=True):
    """The request to Ray for one worker.

    Attributes:
        resources: the resources that the worker takes, its own names for CPU, GPU and memory included.
        not_on: the id of the node that it must not run on; empty: any node.
        group: the slot sharing group that the worker is for.
    """

    resources: dict[str, float]
    not_on: str
    group: str = DEFAULT_GROUP


class Shortage(msgspec.Struct, frozen=True):
    """The reason why no node takes a worker, and the remedy."""

    text: str
    fix: str


def worker_resources(
    of_slot: Resources, slots: int, slot_resource: str | None = None
) -> dict[str, float]:
    """Return Ray's resources that a worker takes.

    Args:
        of_slot: the resources of one slot.
        slots: of the worker.
        slot_resource: a custom resource of which each slot takes one more.
    """
    wanted = {CPU: of_slot.cpu, MEMORY: of_slot.memory_bytes, GPU: of_slot.gpu, **of_slot.custom}
    if slot_resource is not None:
        wanted[slot_resource] = 1.0
    # Ray refuses fractions above 1 of a GPU or another indivisible resource.
    return {
        name: float(total if total <= 1 or name == CPU else math.ceil(total))
        for name, amount in wanted.items()
        if (total := slots * amount)
    }


def demand(rules: NodeRules, nodes: Sequence[ClusterNode], group: str = DEFAULT_GROUP) -> Demand:
    """Return the request to Ray for a worker of a slot sharing group, on a cluster of these nodes."""
    head = next((node.node_id for node in nodes if node.is_head), "")
    others = [node for node in nodes if node.hosts_workers and not node.is_head]
    avoided = rules.on_head == NEVER or (rules.on_head == IF_ALONE and bool(others))
    return Demand(dict(rules.resources.get(group, {})), head if avoided else "", group)


def shortage(
    rules: NodeRules, asked: Demand, nodes: Sequence[ClusterNode], *, queued: bool | None = None
) -> Shortage | None:
    """Return why a requested worker does not start; None: the cluster has room, as far as is known.

    Args:
        rules: of the job.
        asked: the request to Ray.
        nodes: all live nodes.
        queued: True while Ray looks for room for such a worker; False once it has found some, and starts
            a process there; None: unknown.
    """
    usable = [node for node in nodes if node.hosts_workers and node.node_id != asked.not_on]
    if not usable:
        return Shortage(
            "the Ray cluster has no node but its head node",
            f"add nodes, or allow the head node with {ON_HEAD_KEY}={ALLOWED}",
        )
    if queued is False:
        return None  # what is used up is used by this very worker
    whole = [node.resources for node in usable]
    if short := _short(asked, whole):
        at_once = "" if _beyond(asked, whole) else "at once "
        largest = (
            f"{each} largest_node=`{_amount(name, max(node.get(name, 0.0) for node in whole))}`"
            for name, each in short.items()
        )
        return Shortage(
            f"no node has enough {at_once}for a worker of the slot sharing group group=`{asked.group}` "
            f"{' '.join(largest)} nodes=`{len(usable)}`",
            _fix(rules, asked, list(short)),
        )
    free = [node.free for node in usable if node.free is not None]
    if len(free) == len(usable) and (short := _short(asked, free)):
        totals = (
            f"{each} free=`{_total(name, free)}` of=`{_total(name, whole)}`"
            for name, each in short.items()
        )
        return Shortage(
            "what a worker of the slot sharing group takes is used up "
            f"group=`{asked.group}` {' '.join(totals)}",
            "if this lasts, add nodes, lower the parallelism, or stop another job",
        )
    return None


def _short(asked: Demand, nodes: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The resources that keep all nodes from taking the worker, each with what is asked of it."""
    if any(not _beyond(asked, [node]) for node in nodes):
        return {}
    return {
        name: f"resource=`{name}` needed_on_one_node=`{_amount(name, asked.resources[name])}`"
        for name in _beyond(asked, nodes) or asked.resources
    }


def _beyond(asked: Demand, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """The resources that no node has enough of."""
    return [
        name
        for name, needed in asked.resources.items()
        if not any(node.get(name, 0.0) >= needed for node in nodes)
    ]


def _fix(rules: NodeRules, asked: Demand, short: Sequence[str]) -> str:
    """How to start nodes that are large enough."""
    custom = {name: asked.resources[name] for name in short if name not in (CPU, GPU, MEMORY)}
    less = "or ask for less in the resources of the group"
    if not custom:
        return f"add nodes with more {' and '.join(short)}, {less}"
    shown = ", ".join(f'"{name}": {amount:g}' for name, amount in custom.items())
    if rules.slot_resource in custom:
        less = "or correct headgate.ray.slot-resource"
    return f"start nodes with `ray start --resources='{{{shown}}}'`, {less}"


def _total(name: str, nodes: Sequence[Mapping[str, float]]) -> str:
    return _amount(name, sum(node.get(name, 0.0) for node in nodes))


def _amount(name: str, amount: float) -> str:
    return format_size(int(amount)) if name == MEMORY else f"{amount:g}"
