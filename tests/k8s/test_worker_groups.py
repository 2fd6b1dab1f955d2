"""Slot sharing groups on Kubernetes: each has worker pods of its own, and nodes of Ray that are its own."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from headgate.api.manifest.groups import GroupWidth
from headgate.errors import ManifestErrors
from headgate.k8s.head import HeadRun, node_resource_of
from headgate.k8s.modes import pod_makers
from headgate.k8s.objects import GROUP, Deployment, Settings
from headgate.k8s.ray_node import start_worker
from headgate.k8s.spec import Job, parse_job, revision_of
from headgate.k8s.status import Run, Start
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job

RESOURCE: dict[str, Any] = {
    "apiVersion": "headgate.io/v1alpha1",
    "kind": "StreamJob",
    "metadata": {"name": "score", "namespace": "air", "uid": "u-1", "generation": 1},
    "spec": {
        "parallelism": 4,
        "checkpoint": {"every": "10s", "storage": "s3://bucket/x"},
        "resources": {"gpu": {"cpu": 1.5, "memory": "8Gi", "gpu": 1}},
        "sources": {"numbers": {"generator": {"fields": {"n": "sequence"}, "rows": 10}}},
        "operators": {
            "large": {"from": "numbers", "filter": "n > 1"},
            "model": {
                "from": "large",
                "filter": "n > 2",
                "slotSharingGroup": "gpu",
                "parallelism": 2,
            },
        },
        "sinks": {"out": {"from": "model", "print": {}, "slotSharingGroup": "default"}},
        "kubernetes": {
            "workers": {"slots": 2},
            "workerGroups": {"gpu": {"podTemplate": {"spec": {"nodeSelector": {"gpu": "yes"}}}}},
        },
    },
}


def resource(**spec: Any) -> dict[str, Any]:
    made = copy.deepcopy(RESOURCE)
    made["spec"] |= spec
    return made


def parsed(made: dict[str, Any]) -> Job:
    job = parse_job(made)
    assert isinstance(job, Job), job
    return job


def makers(made: dict[str, Any], parallelism: int = 4) -> list[dict[str, Any]]:
    job = parsed(made)
    run = Run(4, job.revision, parallelism, Start("Latest"), "2026-01-01T00:00:00Z")
    return pod_makers(Deployment("score", "air", "u-1", job, run, Settings()))


def test_each_group_has_a_deployment_of_its_own() -> None:
    _, default, gpu = makers(RESOURCE)
    assert [each["metadata"]["name"] for each in (default, gpu)] == [
        "score-workers",
        "score-workers-gpu",
    ]
    assert [each["spec"]["replicas"] for each in (default, gpu)] == [2, 2]
    selectors = [each["spec"]["selector"]["matchLabels"] for each in (default, gpu)]
    assert [each[GROUP] for each in selectors] == ["default", "gpu"]
    for each, selected in zip((default, gpu), selectors, strict=True):
        template = each["spec"]["template"]
        assert selected.items() <= template["metadata"]["labels"].items()
    commands = [each["spec"]["template"]["spec"]["containers"][0] for each in (default, gpu)]
    assert commands[0]["command"][-4:] == ["--group", "default", "--slots", "2"]
    assert commands[1]["command"][-4:] == ["--group", "gpu", "--slots", "1"]
    assert "nodeSelector" not in default["spec"]["template"]["spec"]
    assert gpu["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}


def test_a_job_without_groups_has_the_pods_it_had() -> None:
    """Neither a label nor an argument more: an operator that is upgraded finds what it would make."""
    made = resource(resources={"default": {"cpu": 3}})
    made["spec"]["kubernetes"].pop("workerGroups")
    del made["spec"]["operators"]["model"]["slotSharingGroup"]
    _, workers = makers(made)
    text = json.dumps(workers)
    assert GROUP not in text
    assert "--group" not in text
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "6000m", "memory": "2Gi"}


def test_pods_have_what_their_slots_take() -> None:
    def amounts(**gpu: Any) -> dict[str, Any]:
        made = resource()
        made["spec"]["kubernetes"]["workerGroups"] = {"gpu": gpu}
        container: dict[str, Any] = makers(made)[2]["spec"]["template"]["spec"]["containers"][0]
        found: dict[str, Any] = container["resources"]
        return found

    assert amounts() == {
        "requests": {"cpu": "1500m", "memory": str(8 << 30)},
        "limits": {"memory": str(8 << 30), "nvidia.com/gpu": "1"},
    }
    assert amounts(slots=2)["limits"] == {"memory": str(16 << 30), "nvidia.com/gpu": "2"}
    own = {"requests": {"cpu": "2", "memory": "9Gi"}, "limits": {"amd.com/gpu": "1"}}
    assert amounts(resources=own) == {
        "requests": {"cpu": "2", "memory": "9Gi"},
        "limits": {"memory": "9Gi", "amd.com/gpu": "1"},
    }
    (default,) = makers(RESOURCE)[1]["spec"]["template"]["spec"]["containers"]
    assert default["resources"]["requests"] == {"cpu": "1", "memory": "2Gi"}


def test_nodes_of_ray_say_whose_slots_they_have() -> None:
    command = start_worker("10.1.2.1", "10.1.2.3", 2, "gpu")
    (said,) = (each for each in command if each.startswith("--resources="))
    slots = json.loads(said.partition("=")[2])
    assert slots == {"headgate_slot": 2, "headgate_slot_of_gpu": 2}
    run = HeadRun("score", "air", "u-1-4", 4, slots={"default": 2, "gpu": 1})
    assert node_resource_of(run, "gpu") in slots
    assert node_resource_of(run, "default") == "headgate_slot_of_default"
    alone = HeadRun("score", "air", "u-1-4", 4, slots={"default": 2})
    assert node_resource_of(alone, "default") == "headgate_slot"


def test_kuberay_has_a_worker_group_for_each() -> None:
    made = resource()
    made["spec"]["kubernetes"]["ray"] = {"mode": "KubeRay"}
    cluster = makers(made)[1]
    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    assert list(groups) == ["default", "gpu"]
    for (name, each), slots in zip(groups.items(), ("2", "1"), strict=True):
        assert each["template"]["metadata"]["labels"]["headgate.io/group"] == name
        (container,) = each["template"]["spec"]["containers"]
        assert container["command"][3:] == [
            *("--head", "score-ray-head-svc", "--group", name, "--slots", slots),
        ]
    assert groups["gpu"]["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}


@pytest.mark.parametrize("parallelism", [1, 4, 7])
def test_the_operator_knows_the_slots_of_the_plan(parallelism: int) -> None:
    """It has no code of the user, and makes no plan; the head does."""
    variants = [
        {},
        {"sinks": {"out": {"from": "model", "print": {}}}},
        {
            "operators": {
                "one": {"from": "numbers", "filter": "n > 1", "slotSharingGroup": "gpu"},
                "both": {"union": ["one", "numbers"], "partition": "rebalance"},
                "model": {"from": "both", "select": "n", "parallelism": 9},
            }
        },
        {
            "operators": {
                "model": {"from": "numbers", "filter": "n > 1", "slotSharingGroup": "gpu"},
                "one": {"from": "model", "select": ["n"], "partition": "global"},
            },
            "sinks": {"out": {"from": "one", "print": {}}},
        },
    ]
    for spec in variants:
        made = resource(**spec, parallelism=parallelism)
        made["metadata"] = {"name": "score"}
        plan = runnable(load_job(json.dumps(made) + "\n", env={})).spec().plan
        groups = parsed(made).groups
        widths = {name: each.width.at(parallelism) for name, each in groups.items()}
        assert widths == plan.slots_by_group


def test_a_group_whose_steps_cannot_be_seen_is_as_wide_as_the_job() -> None:
    spec = RESOURCE["spec"]
    operators = {**spec["operators"], "model": {"from": "large", "filter": "n > 2"}}
    job = parsed(resource(operators=operators))
    assert job.groups["gpu"].width == GroupWidth(follows=True)


def test_the_number_of_pods_makes_no_new_revision() -> None:
    def revision(**gpu: Any) -> str:
        made = resource()
        made["spec"]["kubernetes"]["workerGroups"] = {"gpu": gpu}
        return revision_of(made["spec"])

    assert revision(replicas=3) == revision()
    assert revision(slots=2) != revision()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("default", "the workers of the group `default` are in `workers`"),
        ("gqu", "no such slot sharing group name=`gqu`"),
    ],
)
def test_worker_groups_belong_to_groups(name: str, text: str) -> None:
    made = resource()
    made["spec"]["kubernetes"]["workerGroups"][name] = {}
    found = parse_job(made)
    assert not isinstance(found, Job)
    assert [str(each).partition(";")[0] for each in found] == [
        f"spec.kubernetes.workerGroups.{name}: {text}"
    ]
    with pytest.raises(ManifestErrors, match="group"):
        load_job(json.dumps(made) + "\n", env={})


def test_amounts_that_make_no_sense_are_a_mistake_of_the_user() -> None:
    found = parse_job(resource(resources={"gpu": {"gpu": 1.5}}))
    assert not isinstance(found, Job)
    assert [str(each) for each in found] == [
        "spec.resources.gpu: resources: gpu must be a whole number, or below 1 value=`1.5`"
    ]


def test_a_directory_of_state_is_on_a_volume_in_all_pods() -> None:
    mounted = {
        "spec": {"containers": [{"name": "headgate", "volumeMounts": [{"mountPath": "/x"}]}]}
    }
    made = resource(checkpoint={"every": "10s", "storage": "/x/state"})
    kubernetes = made["spec"]["kubernetes"]
    for section in ("coordinator", "workers"):
        kubernetes.setdefault(section, {})["podTemplate"] = mounted
    assert "podTemplate of each of workerGroups" in str(parse_job(made))
    kubernetes["workerGroups"]["gpu"]["podTemplate"] = mounted
    parsed(made)
