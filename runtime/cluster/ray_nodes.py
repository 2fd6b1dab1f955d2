"""Places worker actors on the nodes of an existing Ray cluster, and reports what they wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray

from ...api.resources import Resources
from ...errors import JobError
from ...operators.durations import format_duration
from ..options.execution import SLOT_RESOURCE, WORKERS_ON_HEAD
from ..options.recovery import REGISTRATION_TIMEOUT
from ..options.registry import Options
from ..plan import JobSpec
from ..protocol.worker_nodes import (
    CPU,
    GPU,
    MEMORY,
    NO_WORKERS,
    NO_WORKERS_LABEL,
    ClusterNode,
    Demand,
    NodeRules,
    Shortage,
    demand,
    shortage,
    worker_resources,
)

_log = logging.getLogger("headgate.cluster")
LOOK_EVERY_S = 10.0
"""The time between two checks of a worker that has not started yet."""
_HEAD_RESOURCE = "node:__internal_head__"
_NODE_LABEL = "ray.io/node-id"


def rules_of(spec: JobSpec) -> NodeRules:
    """The rules for the workers of a job."""
    options = Options(spec.options)
    slot_resource = options.get(SLOT_RESOURCE)
    return NodeRules(
        resources={
            group: worker_resources(_of_slot(spec, group), spec.slots_of(group), slot_resource)
            for group in spec.plan.slots_by_group
        },
        slot_resource=slot_resource,
        on_head=options.get(WORKERS_ON_HEAD),
        patience_ms=options.get(REGISTRATION_TIMEOUT),
    )


def _of_slot(spec: JobSpec, group: str) -> Resources:
    """Return the resources that a slot of a group takes of a node of Ray."""
    if group in spec.group_resources:
        return Resources(custom={spec.group_resources[group]: 1})
    return spec.resources.get(group, Resources())


def live_nodes() -> list[ClusterNode]:
    """Return the nodes of the cluster that are alive. Blocks."""
    # Ray's public function adds up all nodes. Where a release has no other one the figure is unknown.
    of_nodes = getattr(ray._private.state, "available_resources_per_node", None)
    free = of_nodes() if of_nodes is not None else {}
    return [
        ClusterNode(
            each["NodeID"],
            is_head=_HEAD_RESOURCE in each["Resources"],
            hosts_workers=each["Labels"].get(NO_WORKERS_LABEL) != NO_WORKERS,
            resources=each["Resources"],
            free=free.get(each["NodeID"]),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]


def is_queued(asked: Demand) -> bool | None:
    """Return True if Ray looks for room for such a worker; None: unknown. Blocks."""
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
    except ImportError:  # it is no public function, and another release may have none
        return None
    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
    except Exception as error:
        _log.info("Ray does not say which workers it has no room for: %s", error)
        return None
    shapes = [
        each.bundle
        for demand in status.resource_demands.ray_task_actor_demand
        for each in demand.bundles_by_count
    ]
    return asked.resources in shapes


_OPTION_OF = {CPU: "num_cpus", GPU: "num_gpus", MEMORY: "memory"}


def actor_options(asked: Demand) -> dict[str, Any]:
    """Return the same demand as options of an actor, which Ray spreads over the nodes that fit."""
    labels = {NO_WORKERS_LABEL: f"!{NO_WORKERS}"}
    if asked.not_on:
        labels[_NODE_LABEL] = f"!{asked.not_on}"
    options: dict[str, Any] = {"scheduling_strategy": "SPREAD", "label_selector": labels}
    options |= {
        _OPTION_OF[name]: amount for name, amount in asked.resources.items() if name in _OPTION_OF
    }
    custom = {name: n for name, n in asked.resources.items() if name not in _OPTION_OF}
    if custom:
        options["resources"] = custom
    return options


async def ask(rules: NodeRules, group: str) -> Demand:
    """Return the options of Ray for a worker of a slot sharing group, as the cluster is now."""
    return demand(rules, await asyncio.to_thread(live_nodes), group)


async def until_placed(
    actor: Any, rules: NodeRules, asked: Demand, notify: Callable[[str], None]
) -> None:
    """Wait until Ray has started a worker's actor, or the actor died of it.

    Args:
        actor: of a worker.
        rules: of the job.
        asked: what was asked of Ray for this actor.
        notify: told what is missing, whenever that changes.

    Raises:
        JobError: the actor has not started in time; the message says what is missing.
    """
    started = asyncio.wrap_future(actor.wait.remote(0.0).future())
    loop = asyncio.get_running_loop()
    until = loop.time() + rules.patience_ms / 1000
    told: Shortage | None = None
    try:
        while True:
            left_s = until - loop.time()
            await asyncio.wait({started}, timeout=min(max(left_s, 0.0), LOOK_EVERY_S))
            if started.done():
                started.exception()  # the watcher of the worker gets the error
                return
            found = await asyncio.to_thread(_shortage, rules, asked)
            if loop.time() >= until:
                raise _no_room(rules, found)
            if found is not None and found != told:
                told = found
                notify(f"a worker has not started yet: {found.text}; {found.fix}")
    finally:
        started.cancel()


def _shortage(rules: NodeRules, asked: Demand) -> Shortage | None:
    return shortage(rules, asked, live_nodes(), queued=is_queued(asked))


def _no_room(rules: NodeRules, found: Shortage | None) -> JobError:
    within = f"within {format_duration(rules.patience_ms)} ({REGISTRATION_TIMEOUT.key})"
    if found is None:
        return JobError(
            f"Ray did not start a worker {within}",
            fix="look at the cluster's logs; a node may be out of memory or processes",
        )
    return JobError(f"a worker found no room {within}: {found.text}", fix=found.fix)
