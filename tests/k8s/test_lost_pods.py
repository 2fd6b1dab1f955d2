"""Pods on nodes that do not answer: when they are given up, and what becomes of their job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.k8s import actions as act
from headgate.k8s.lost_pods import OVERDUE_MS
from headgate.k8s.modes import pod_makers
from headgate.k8s.objects import FENCED, Deployment
from headgate.k8s.pods import GRACE_S, LOST_S
from headgate.tests.k8s.test_reconcile import World

Make = Callable[..., Deployment]
HEAD = ("Pod", "flights-head-0")
KEYS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def lose(world: World, name: str) -> str:
    """The node of a pod does not answer any more; returns the uid of the pod."""
    uid = world.cluster.objects["Pod", name]["metadata"]["uid"]
    world.cluster.lost.add(uid)
    world.cluster.processes.pop(uid, None)
    world.cluster.delete("Pod", name)
    return str(uid)


def forced(world: World) -> list[str]:
    return [each.name for each in world.done(act.Delete) if each.force]


def test_a_head_on_a_lost_node_is_replaced_and_the_run_goes_on() -> None:
    world = World().stable()
    lost = lose(world, HEAD[1])
    waited_ms = GRACE_S * 1000 + OVERDUE_MS
    while waited_ms > 0:
        world.step(10_000)
        waited_ms -= 10_000
    assert forced(world) == []
    assert world.cluster.objects[HEAD]["metadata"]["uid"] == lost
    world.until(lambda: forced(world) == [HEAD[1]], steps_max=5)
    assert "PodLost" in world.events()
    world.until(
        lambda: world.cluster.objects.get(HEAD, {}).get("status", {}).get("phase") == "Running"
    )
    world.running()
    assert world.status["run"]["number"] == 1


@pytest.mark.parametrize("role", ["head", "workers"])
def test_a_job_with_a_pod_on_a_lost_node_can_be_suspended(role: str) -> None:
    world = World().stable()
    (name, *_) = (name for kind, name in world.cluster.objects if kind == "Pod" and role in name)
    lose(world, name)
    world.change({"state": "Suspended"})
    world.until(lambda: world.status["phase"] == "Suspended" and not world.cluster.pods())
    assert forced(world) == [name]


def test_pods_without_a_job_log_are_waited_for(deployment: Make) -> None:
    world = World().stable()
    pod = world.cluster.objects[HEAD]
    assert pod["metadata"]["annotations"][FENCED] == "true"
    del pod["metadata"]["annotations"][FENCED]
    lose(world, HEAD[1])
    for _ in range(30):
        world.step(10_000)
    assert forced(world) == []

    plain = deployment()
    del plain.job.spec["checkpoint"]
    for maker in pod_makers(plain):
        assert FENCED not in maker["spec"]["template"]["metadata"].get("annotations", {})


def test_a_pod_that_only_a_finalizer_keeps_is_not_lost() -> None:
    world = World().stable()
    lose(world, HEAD[1])
    world.cluster.objects[HEAD]["metadata"]["deletionGracePeriodSeconds"] = 0
    for _ in range(30):
        world.step(10_000)
    assert forced(world) == []


def test_kubernetes_gives_up_pods_soon_after_their_node(deployment: Make) -> None:
    for maker in pod_makers(deployment()):
        found = maker["spec"]["template"]["spec"]["tolerations"]
        assert {each["key"]: each["tolerationSeconds"] for each in found} == dict.fromkeys(
            KEYS, LOST_S
        )


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"key": "gpu", "operator": "Exists"}, set(KEYS)),
        ({"key": KEYS[0], "operator": "Exists", "tolerationSeconds": 600}, {KEYS[1]}),
        ({"operator": "Exists"}, set()),
    ],
)
def test_the_user_may_say_when(deployment: Make, given: dict[str, Any], own: set[str]) -> None:
    template = {"spec": {"tolerations": [given]}}
    head, _ = pod_makers(deployment(coordinator={"podTemplate": template}))
    found = head["spec"]["template"]["spec"]["tolerations"]
    assert found[0] == given
    assert {each["key"] for each in found[1:]} == own
