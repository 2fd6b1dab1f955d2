"""The objects of a run: restricted pods, fixed ports, no secret in them, and nothing of the operator's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

import headgate
from headgate.k8s import objects, ports
from headgate.k8s.modes import MODES, pod_makers
from headgate.k8s.objects import Deployment, Settings
from headgate.k8s.pods import merged, runtime_of, savepoint_cleaning_job, state_cleaning_job
from headgate.runtime.manifest import load_job

Make = Callable[..., Deployment]
MODE_FIELDS = {"Managed": {}, "External": {"address": "ray.other:6379"}, "KubeRay": {}}
EVERYTHING: dict[str, Any] = {
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "flights",
    "env": {"LEVEL": "3", "PASSWORD": {"name": "broker", "key": "password"}, "HOME": "/root"},
    "code": {"configMapRef": {"name": "steps"}},
    "storage": {"credentialsSecretRef": {"name": "bucket"}},
    "workers": {"slots": 2, "resources": {"requests": {"memory": "4Gi"}, "limits": {"cpu": 2}}},
}


def with_mode(deployment: Make, mode: str, **kubernetes: Any) -> Deployment:
    return deployment(ray={"mode": mode, **MODE_FIELDS[mode]}, **kubernetes)


def templates(made: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All pod templates of some objects."""
    for each in made:
        spec = each.get("spec", {})
        if "template" in spec:
            yield spec["template"]
        if "headGroupSpec" in spec:
            yield spec["headGroupSpec"]["template"]
            yield from (group["template"] for group in spec["workerGroupSpecs"])


def all_objects(of: Deployment) -> list[dict[str, Any]]:
    around = [objects.manifest(of), objects.token(of), *objects.supporting(of)]
    return [*around, *pod_makers(of), state_cleaning_job(of, "flights-clean")]


def not_restricted(template: dict[str, Any]) -> list[str]:
    """Return the rules of the Pod Security Standard `restricted` that a pod breaks."""
    spec, found = template["spec"], []
    security = spec.get("securityContext", {})
    found += ["host"] * any(spec.get(f"host{name}") for name in ("Network", "PID", "IPC"))
    found += ["root"] * (security.get("runAsNonRoot") is not True or security["runAsUser"] == 0)
    found += ["seccomp"] * (security.get("seccompProfile") != {"type": "RuntimeDefault"})
    kinds = {"configMap", "emptyDir", "secret", "projected", "downwardAPI", "persistentVolumeClaim"}
    found += [volume["name"] for volume in spec["volumes"] if not kinds & volume.keys()]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        found += ["privilege"] * (own.get("allowPrivilegeEscalation") is not False)
        found += ["capabilities"] * (own.get("capabilities") != {"drop": ["ALL"]})
        found += ["root file system"] * (own.get("readOnlyRootFilesystem") is not True)
        found += ["host port"] * any("hostPort" in port for port in container.get("ports", ()))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_pod_is_restricted_and_has_resources(deployment: Make, mode: str) -> None:
    for kubernetes in ({}, EVERYTHING):
        found = list(templates(all_objects(with_mode(deployment, mode, **kubernetes))))
        assert len(found) >= 2
        for template in found:
            assert not_restricted(template) == []
            assert template["spec"]["securityContext"]["runAsUser"] == 10001
            assert template["spec"]["automountServiceAccountToken"] is False
            for container in template["spec"]["containers"]:
                resources = container["resources"]
                assert {"cpu", "memory"} <= resources["requests"].keys()
                assert "memory" in resources["limits"]
                writable = [each for each in container["volumeMounts"] if not each.get("readOnly")]
                assert {each["mountPath"] for each in writable} <= {"/tmp", "/dev/shm"}
            for volume in template["spec"]["volumes"]:
                assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""})


@pytest.mark.parametrize("mode", MODES)
def test_everything_belongs_to_the_job(deployment: Make, mode: str) -> None:
    of = with_mode(deployment, mode, **EVERYTHING)
    names = set()
    for made in all_objects(of):
        metadata = made["metadata"]
        assert metadata["namespace"] == "air"
        assert [each["uid"] for each in metadata["ownerReferences"]] == ["u-1"]
        assert len(metadata["name"]) <= 63
        names.add((made["kind"], metadata["name"]))
        json.dumps(made)
    assert len(names) == len(all_objects(of))


def test_pods_carry_run_and_revision_and_no_version_of_the_operator(deployment: Make) -> None:
    of = deployment(**EVERYTHING)
    for made in pod_makers(of):
        assert made["metadata"]["annotations"][objects.RUN] == "u-1-4"
        template = made["spec"]["template"]
        assert template["metadata"]["labels"][objects.REVISION] == of.job.revision
        selected = made["spec"]["selector"]["matchLabels"]
        assert selected.items() <= template["metadata"]["labels"].items()
        assert headgate.__version__ not in json.dumps(made)
        assert pod_makers(of) == pod_makers(deployment(**EVERYTHING))


def test_the_head_is_told_which_run_it_is(deployment: Make) -> None:
    head, workers = pod_makers(deployment(workers={"slots": 2}))
    command = head["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == [
        "headgate", "k8s", "head", "--job", "/etc/headgate/job.yaml", "--run-id", "u-1-4",
        "--parallelism", "3", "--start", "path", "--path", "s3://bucket/sp",
    ]  # fmt: skip
    assert head["spec"]["replicas"] == 1
    assert workers["spec"]["replicas"] == 2
    command = workers["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == ["headgate", "k8s", "worker", "--head", "flights-head", "--slots", "2"]
    spread = workers["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname"]


def test_the_manifest_in_the_config_map_is_the_file_that_runs(deployment: Make) -> None:
    of = deployment(**EVERYTHING)
    made = objects.manifest(of)
    assert made["immutable"] is True
    text = made["data"][objects.MANIFEST_KEY]
    assert load_job(text).name == "flights"
    assert yaml.safe_load(text)["spec"] == of.job.spec


def test_secrets_are_only_referred_to(deployment: Make) -> None:
    of = deployment(**EVERYTHING)
    assert "data" not in objects.token(of)
    assert "stringData" not in objects.token(of)
    container = pod_makers(of)[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    by_name = {each["name"]: each for each in container["env"]}
    assert len(by_name) == len(container["env"])
    assert by_name["PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "broker", "key": "password"}
    assert by_name["RAY_AUTH_TOKEN_PATH"]["value"] == "/run/headgate/auth_token"
    assert by_name["HOME"]["value"] == "/tmp"
    own = deployment(ray={"tokenSecretRef": {"name": "mine"}})
    volumes = pod_makers(own)[0]["spec"]["template"]["spec"]["volumes"]
    assert (
        next(each for each in volumes if each["name"] == "token")["secret"]["secretName"] == "mine"
    )


@pytest.mark.parametrize("mode", MODES)
def test_code_of_a_config_map_is_on_the_module_path(deployment: Make, mode: str) -> None:
    of = with_mode(deployment, mode, code={"configMapRef": {"name": "steps"}})
    for template in templates(pod_makers(of)):
        (container,) = template["spec"]["containers"]
        assert {"name": "PYTHONPATH", "value": "/opt/headgate/code"} in container["env"]
        mount = {"name": "code", "mountPath": "/opt/headgate/code", "readOnly": True}
        assert mount in container["volumeMounts"]
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert volumes["code"]["configMap"] == {"name": "steps"}
        assert "initContainers" not in template["spec"]


@pytest.mark.parametrize("mode", MODES)
def test_an_archive_is_unpacked_before_the_code_is_needed(deployment: Make, mode: str) -> None:
    """In every pod that imports it: also in those whose command is KubeRay's."""
    login = {"name": "login", "image": "login"}
    mounted = {"name": "headgate", "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}
    own = {"podTemplate": {"spec": {"initContainers": [login], "containers": [mounted]}}}
    of = with_mode(
        deployment,
        mode,
        code={"archive": "s3://bucket/code.zip"},
        env={"PYTHONPATH": "/more", "S3_HOST": "minio"},
        storage={"credentialsSecretRef": {"name": "bucket"}},
        workers=own,
        coordinator=own,
    )
    for template in templates(pod_makers(of)):
        before, init = template["spec"]["initContainers"]
        (container,) = template["spec"]["containers"]
        assert before == login
        assert init["command"] == [
            *("headgate", "k8s", "fetch-code", "s3://bucket/code.zip"),
            *("--to", "/opt/headgate/code", "--job", "/etc/headgate/job.yaml"),
        ]
        assert init["image"] == container["image"]
        assert init["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        assert {"name": "S3_HOST", "value": "minio"} in init["env"]
        paths = {each["mountPath"] for each in init["volumeMounts"]}
        assert paths >= {"/opt/headgate/code", "/etc/headgate", "/ca", "/tmp"}
        by_name = {each["name"]: each.get("value") for each in container["env"]}
        assert by_name["PYTHONPATH"] == "/opt/headgate/code:/more"
        assert not any(each["name"] == "PYTHONPATH" for each in init["env"])
        template["spec"]["initContainers"] = [init]
        assert not_restricted(template) == []


def test_ports_come_from_one_table(deployment: Make) -> None:
    numbers = [port.number for port in ports.ALL]
    assert len(set(numbers)) == len(numbers)
    assert all(len(port.name) <= 15 for port in ports.ALL)
    of = deployment()
    service = objects.supporting(of)[0]
    assert {each["port"] for each in service["spec"]["ports"]} == {p.number for p in ports.NAMED}
    for template in templates(pod_makers(of)):
        (container,) = template["spec"]["containers"]
        listed = {(each["name"], each["containerPort"]) for each in container["ports"]}
        assert listed == {(port.name, port.number) for port in ports.NAMED}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "rest"}
        assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "rest"}


def test_nobody_gets_in_but_the_job_and_the_operator(deployment: Make) -> None:
    policy = objects.supporting(deployment())[1]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own, operator = policy["spec"]["ingress"]
    assert own["from"] == [{"podSelector": {"matchLabels": {"headgate.io/job": "flights"}}}]
    assert own["ports"][-1] == {"protocol": "TCP", "port": 10100, "endPort": 10199}
    assert [port["port"] for port in operator["ports"]] == [ports.REST.number]
    assert set(operator["from"][0]) == {"namespaceSelector", "podSelector"}
    open_ = Settings(metrics_from={"kubernetes.io/metadata.name": "monitoring"})
    *_, metrics = objects.supporting(deployment(open_))[1]["spec"]["ingress"]
    assert [port["port"] for port in metrics["ports"]] == [ports.METRICS.number]


def test_external_has_one_pod_that_joins(deployment: Make) -> None:
    (head,) = pod_makers(with_mode(deployment, "External"))
    command = head["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--ray-address", "ray.other:6379"]
    service, policy = objects.supporting(with_mode(deployment, "External"))
    assert (service["kind"], policy["kind"]) == ("Service", "NetworkPolicy")
    # The nodes of that cluster may be anywhere. They reach what asks for the token.
    (rule,) = (each for each in policy["spec"]["ingress"] if "from" not in each)
    assert [port["port"] for port in rule["ports"]] == [6070, 6380, 6381, 10100]


def test_kuberay_runs_our_commands_in_its_pods(deployment: Make) -> None:
    head, cluster = pod_makers(with_mode(deployment, "KubeRay", workers={"slots": 2}))
    command = head["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--ray-address", "flights-ray-head-svc:6379"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "disabled"}
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    ray_head, worker = (each["spec"]["containers"][0] for each in templates([cluster]))
    assert ray_head["command"][:3] == ["ray", "start", "--block"]
    assert "--node-ip-address=$(HEADGATE_POD_IP)" in ray_head["command"]
    assert ray_head["livenessProbe"]["tcpSocket"] == {"port": 6379}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert "httpGet" not in ray_head[probe]
    assert worker["command"] == [
        *("headgate", "k8s", "worker", "--head", "flights-ray-head-svc", "--slots", "2"),
    ]
    for template, role in zip(templates([cluster]), (None, "worker"), strict=True):
        labels = template["metadata"]["labels"]
        assert (labels.get("headgate.io/role"), labels["headgate.io/job"]) == (role, "flights")
        env = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert env["RAY_AUTH_MODE"] == "token"
        assert env["RAY_AUTH_TOKEN_PATH"] == "/run/headgate/auth_token"


def test_a_pod_template_is_laid_upon_ours(deployment: Make) -> None:
    template = {
        "metadata": {"labels": {"team": "air", "headgate.io/job": "other"}},
        "spec": {
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"key": "stream"}],
            "volumes": [
                {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}},
                {"name": "more", "emptyDir": {}},
            ],
            "containers": [
                {
                    "name": "headgate",
                    "env": [{"name": "X", "value": "1"}],
                    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
                },
                {"name": "proxy", "image": "proxy"},
            ],
        },
    }
    _, workers = pod_makers(deployment(workers={"podTemplate": template}))
    made = workers["spec"]["template"]
    assert made["metadata"]["labels"]["team"] == "air"
    assert made["metadata"]["labels"]["headgate.io/job"] == "flights"
    ours, proxy = made["spec"]["containers"]
    assert proxy["name"] == "proxy"
    assert ours["command"][:3] == ["headgate", "k8s", "worker"]
    assert {"X", "HOME"} <= {each["name"] for each in ours["env"]}
    assert {"/more", "/tmp"} <= {each["mountPath"] for each in ours["volumeMounts"]}
    sizes = {
        each["name"]: each.get("emptyDir", {}).get("sizeLimit") for each in made["spec"]["volumes"]
    }
    assert sizes["tmp"] == "9Gi"
    assert "shm" in sizes
    assert made["spec"]["nodeSelector"] == {"disk": "fast"}
    assert made["spec"]["tolerations"][0] == {"key": "stream"}


def test_merging_leaves_its_arguments_alone() -> None:
    base = {"a": {"b": 1}, "list": [{"name": "x", "v": 1}], "plain": [1]}
    over = {"a": {"c": 2}, "list": [{"name": "x", "w": 2}, {"name": "y"}], "plain": [2]}
    before = json.dumps([base, over])
    assert merged(base, over) == {
        "a": {"b": 1, "c": 2},
        "list": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}],
        "plain": [2],
    }
    assert json.dumps([base, over]) == before


VOLUME: dict[str, Any] = {
    "metadata": {
        "labels": {"azure.workload.identity/use": "true", "headgate.io/job": "flights"},
        "annotations": {"vault.example/inject": "true"},
    },
    "spec": {
        "nodeSelector": {"disk": "fast"},
        "initContainers": [{"name": "login", "image": "login"}],
        "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": "flights"}}],
        "containers": [
            {
                "name": "headgate",
                "args": ["--more"],
                "command": ["sh"],
                "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
                "env": [{"name": "REGION", "value": "eu"}],
                "volumeMounts": [{"name": "state", "mountPath": "/state"}],
                "resources": {"requests": {"memory": "2Gi"}},
            },
            {"name": "proxy", "image": "proxy"},
        ],
    },
}
"""A coordinator's pod template with which it reaches its storage, and with what ends no pod of a Job."""


def cleaning_jobs(of: Deployment) -> list[dict[str, Any]]:
    """Return the Jobs that delete the state of a job, and a savepoint."""
    savepoint = savepoint_cleaning_job(
        "x", "air", "flights", {}, runtime_of(of.job, of.settings), "s3://b/s"
    )
    return [state_cleaning_job(of, "flights-clean"), savepoint]


def test_a_cleaning_job_has_the_identity_of_the_job(deployment: Make) -> None:
    for made in cleaning_jobs(deployment(**EVERYTHING)):
        labels = made["spec"]["template"]["metadata"]["labels"]
        assert not any(key.startswith("headgate.io/") for key in labels)
        spec = made["spec"]["template"]["spec"]
        assert spec["serviceAccountName"] == "flights"
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        (container,) = spec["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
        password = {"secretKeyRef": {"name": "broker", "key": "password"}}
        assert {"name": "PASSWORD", "valueFrom": password} in container["env"]
        assert not_restricted(made["spec"]["template"]) == []


def test_a_cleaning_job_reaches_the_storage_as_the_coordinator_does(deployment: Make) -> None:
    of = deployment(coordinator={"podTemplate": VOLUME})
    for made in cleaning_jobs(of):
        template = made["spec"]["template"]
        spec = template["spec"]
        (container,) = spec["containers"]  # a second one would keep the pod from ending
        assert VOLUME["spec"]["volumes"][0] in spec["volumes"]
        assert {"name": "state", "mountPath": "/state"} in container["volumeMounts"]
        assert {"name": "REGION", "value": "eu"} in container["env"]
        assert container["resources"]["requests"]["memory"] == "2Gi"
        assert container["command"][0] == "headgate"
        assert not {"args", "lifecycle", "livenessProbe", "ports"} & container.keys()
        assert spec["restartPolicy"] == "Never"
        assert spec["nodeSelector"] == {"disk": "fast"}
        assert [each["name"] for each in spec["initContainers"]] == ["login"]
        assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"
        assert template["metadata"]["annotations"] == {"vault.example/inject": "true"}


def test_a_savepoint_is_deleted_in_the_storage_of_the_job(deployment: Make) -> None:
    of = deployment(env={"HOST": "minio", "PORT": "9000"})
    of.job.spec["options"] = {
        "s3.endpoint": "http://${HOST}:${PORT:-1}",
        "s3.region": "${REGION:-eu}",
        "pipeline.name": "x",
    }
    _, made = cleaning_jobs(of)
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == [
        *("headgate", "savepoint", "dispose", "s3://b/s"),
        *("-D", "s3.endpoint=http://$(HOST):$(PORT)", "-D", "s3.region=eu"),
    ]
