"""Goal: for all values the chart makes objects that clusters accept and that keep its promises.

Method: Helm without a cluster renders every file in `ci` for several versions of Kubernetes, with and
without the resources of the Prometheus operator; the objects are checked by schemas and rules.
"""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from headgate.k8s.monitoring.alerts import rules as rules_of_code
from headgate.k8s.permissions import JOBS, KUBERAY, LEASE, LEASE_CREATION, Permission
from headgate.tests.kube.charts import (
    CHART,
    CRDS,
    KUBERNETES,
    MONITORING,
    NAMESPACE,
    RELEASE,
    SCENARIOS,
    Object,
    headgate_command,
    helm,
    of_kind,
    pods,
    render,
    scenario,
)
from headgate.tests.support.commands import ended_with
from headgate.tests.support.kube.programs import Programs

NO_SCHEMA = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
"""Resources of the Prometheus operator, of which there are no schemas here."""


@pytest.fixture(scope="module")
def rendered(programs: Programs) -> dict[str, list[Object]]:
    """Each scenario, in a cluster with the Prometheus operator."""
    return {name: render(programs, *scenario(name), *MONITORING) for name in SCENARIOS}


def table(*permissions: Permission) -> dict[tuple[str, str], set[str]]:
    return rules({"rules": [each.rule() for each in permissions]})


def rules(role: Object) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def test_lint_finds_nothing(programs: Programs) -> None:
    for arguments in ([str(CRDS)], *([str(CHART), *scenario(name)] for name in SCENARIOS)):
        done = helm(programs, "lint", "--strict", *arguments)
        ended_with(done, 0)
        assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_object_fits_the_schema_of_its_kind(
    programs: Programs, name: str, version: str
) -> None:
    objects = render(programs, *scenario(name), *MONITORING, "--kube-version", version)
    for found in objects:
        if found["kind"] not in NO_SCHEMA:
            kubernetes_validate.validate(found, version.rpartition(".")[0], strict=True)
    names = [(f["kind"], f["metadata"].get("namespace"), f["metadata"]["name"]) for f in objects]
    assert len(set(names)) == len(names)


def test_every_pod_is_restricted_and_bounded(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        assert len(pods(objects)) == 2
        for pod in pods(objects):
            security = pod["securityContext"]
            assert security["runAsNonRoot"]
            # In `available` the cluster chooses the user, as OpenShift does.
            assert security.get("runAsUser") == (None if name == "available" else 10001)
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
            assert not any("hostPath" in volume for volume in pod["volumes"])
            for one in pod["containers"]:
                assert one["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert one["resources"]["requests"].keys() >= {"cpu", "memory"}
                assert "memory" in one["resources"]["limits"]


def test_the_operator_has_the_rights_of_the_table_and_no_more(
    rendered: dict[str, list[Object]],
) -> None:
    name = f"{RELEASE}-headgate"
    cluster = of_kind(rendered["defaults"], "ClusterRole")
    assert [
        rules(role) for role in cluster if role["metadata"]["name"] == f"{name}-{NAMESPACE}"
    ] == [table(*JOBS)]
    roles = of_kind(rendered["namespaced"], "Role")
    own = {r["metadata"]["namespace"]: rules(r) for r in roles if r["metadata"]["name"] == name}
    assert own == {"streams": table(*JOBS), "streams-test": table(*JOBS)}
    assert of_kind(rendered["namespaced"], "ClusterRoleBinding") == []
    (leader,) = (r for r in roles if r["metadata"]["name"] == f"{name}-leader")
    assert leader["metadata"]["namespace"] == NAMESPACE
    assert leader["rules"] == [
        {**LEASE[0].rule(), "resourceNames": [name]},
        *(each.rule() for each in LEASE_CREATION),
    ]
    kuberay = [rules(role) for role in of_kind(rendered["available"], "ClusterRole")]
    assert table(*JOBS, *KUBERAY) in kuberay


def test_no_role_has_a_wildcard_or_sees_secrets_that_it_cannot_name(
    rendered: dict[str, list[Object]],
) -> None:
    for objects in rendered.values():
        for role in of_kind(objects, "Role", "ClusterRole"):
            for (group, resource), verbs in rules(role).items():
                assert "*" not in (group, resource, *verbs)
                assert resource != "secrets" or not verbs & {"list", "watch"}
                assert not verbs & {"escalate", "bind", "impersonate", "deletecollection"}


def test_labels_are_complete_and_selectors_never_change(
    rendered: dict[str, list[Object]],
) -> None:
    selector = {
        "app.kubernetes.io/name": "headgate-operator",
        "app.kubernetes.io/instance": RELEASE,
        "app.kubernetes.io/component": "operator",
    }
    for objects in rendered.values():
        for found in objects:
            if found["kind"] != "CustomResourceDefinition":
                labels = found["metadata"]["labels"]
                assert labels.keys() >= {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
        (deployment,) = of_kind(objects, "Deployment")
        # A changed selector would make every upgrade of a release fail.
        assert deployment["spec"]["selector"]["matchLabels"] == selector
        assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        (service,) = of_kind(objects, "Service")
        assert service["spec"]["selector"] == selector


def test_what_connects_is_denied_but_for_metrics(rendered: dict[str, list[Object]]) -> None:
    policies = {
        (p["metadata"]["namespace"], p["metadata"]["name"]): p["spec"]
        for p in of_kind(rendered["namespaced"], "NetworkPolicy")
    }
    operator = policies[NAMESPACE, f"{RELEASE}-headgate"]
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    assert operator["ingress"] == [
        {
            "ports": [{"port": "metrics"}],
            "from": [{"namespaceSelector": {"matchLabels": monitoring}}],
        }
    ]
    for namespace in ("streams", "streams-test"):
        jobs = policies[namespace, f"{RELEASE}-headgate-jobs"]
        assert jobs["policyTypes"] == ["Ingress"]
        assert "ingress" not in jobs
        assert jobs["podSelector"]["matchExpressions"] == [
            {"key": "headgate.io/job", "operator": "Exists"}
        ]
    assert of_kind(rendered["minimal"], "NetworkPolicy") == []


def test_monitors_and_alerts_wait_for_the_prometheus_operator(
    programs: Programs, rendered: dict[str, list[Object]]
) -> None:
    kinds = {found["kind"] for found in render(programs, *scenario("monitoring"))}
    assert kinds.isdisjoint(NO_SCHEMA)
    (service,) = of_kind(rendered["monitoring"], "ServiceMonitor")
    (pod,) = of_kind(rendered["monitoring"], "PodMonitor")
    assert service["spec"]["endpoints"][0]["honorLabels"]
    assert pod["spec"]["namespaceSelector"] == {"any": True}
    assert service["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (namespaced,) = of_kind(rendered["namespaced"], "PodMonitor")
    assert namespaced["spec"]["namespaceSelector"] == {"matchNames": ["streams", "streams-test"]}


def test_rules_and_dashboards_are_taken_as_they_are(programs: Programs, tmp_path: Path) -> None:
    chart = tmp_path / "headgate"
    shutil.copytree(CHART, chart)
    board = {"title": "A board", "panels": [{"legendFormat": "{{operator}}"}]}
    one = {
        "alert": "HeadgateOne",
        "expr": "up == 0",
        "annotations": {"summary": "{{ $labels.pod }}"},
    }
    groups = [
        {"name": "kept", "interval": "30s", "rules": [one, {**one, "alert": "HeadgateSkew"}]},
        {"name": "empty", "rules": [{**one, "alert": "HeadgateSkew"}]},
    ]
    for name in ("dashboards", "rules"):
        (chart / name).mkdir(exist_ok=True)
    (chart / "dashboards" / "headgate-made.json").write_text(json.dumps(board))
    (chart / "rules" / "made.yaml").write_text(yaml.safe_dump({"groups": groups}))
    objects = render(programs, *scenario("monitoring"), *MONITORING, chart=chart)
    boards = {
        name: (found, text)
        for found in of_kind(objects, "ConfigMap")
        for name, text in found["data"].items()
    }
    found, text = boards["headgate-made.json"]
    assert json.loads(text) == board
    assert found["metadata"]["namespace"] == "monitoring"
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    made = [
        r for r in of_kind(objects, "PrometheusRule") if r["metadata"]["name"].endswith("-made")
    ]
    assert [rule["spec"]["groups"] for rule in made] == [[{**groups[0], "rules": [one]}]]


def test_what_users_say_of_pods_reaches_the_operator(rendered: dict[str, list[Object]]) -> None:
    values = yaml.safe_load((CHART / "ci" / "available.yaml").read_text())
    said = values["operator"]
    (deployment,) = of_kind(rendered["available"], "Deployment")
    template = deployment["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    same = (
        "priorityClassName",
        "nodeSelector",
        "tolerations",
        "affinity",
        "dnsConfig",
        "hostAliases",
    )
    assert {name: pod[name] for name in same} == {name: said[name] for name in same}
    (spread,) = pod["topologySpreadConstraints"]
    assert spread.items() >= said["topologySpread"]["constraints"][0].items()
    assert spread["labelSelector"] == deployment["spec"]["selector"]
    assert container["envFrom"] == said["envFrom"]
    assert all(each in container["env"] for each in said["env"])
    assert all(each in pod["volumes"] for each in said["volumes"])
    assert all(each in container["volumeMounts"] for each in said["volumeMounts"])
    assert template["metadata"]["annotations"] == said["podAnnotations"]
    assert template["metadata"]["labels"].items() >= said["podLabels"].items()
    assert deployment["metadata"]["annotations"] == said["annotations"]
    assert deployment["spec"]["revisionHistoryLimit"] == 1
    (budget,) = of_kind(rendered["available"], "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == "50%"
    (test,) = of_kind(rendered["available"], "Pod")
    assert test["spec"]["tolerations"] == said["tolerations"]
    assert test["metadata"]["annotations"].items() >= values["test"]["podAnnotations"].items()
    policy = next(
        p for p in of_kind(rendered["available"], "NetworkPolicy") if "egress" in p["spec"]
    )
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == values["networkPolicy"]["operatorEgress"]
    for found in rendered["available"]:
        if found["kind"] != "CustomResourceDefinition":
            assert found["metadata"]["labels"].items() >= values["commonLabels"].items()


def alert_rules(programs: Programs, *settings: str) -> list[Object]:
    """The rules of the chart with these values."""
    arguments = [
        part for setting in settings for part in ("--set-json", f"metrics.prometheusRule.{setting}")
    ]
    objects = render(programs, *MONITORING, *arguments)
    (found,) = of_kind(objects, "PrometheusRule")
    return list(found["spec"]["groups"][0]["rules"])


def test_the_alerts_are_those_of_the_code_with_the_thresholds_of_the_values(
    programs: Programs,
) -> None:
    assert alert_rules(programs) == rules_of_code()["groups"][0]["rules"]
    changed = alert_rules(
        programs,
        "thresholds.lagRecords=2000000",
        "thresholds.memory=0.5",
        "thresholds.droppedRecords=0",
        'runbookUrl="https://wiki.example/runbooks"',
        'alerts.HeadgateSkew={"for": "1h", "severity": "warning"}',
    )
    thresholds = {"lagRecords": 2e6, "memory": 0.5}
    expected = rules_of_code(thresholds, "https://wiki.example/runbooks")["groups"][0]["rules"]
    (skew,) = (rule for rule in expected if rule["alert"] == "HeadgateSkew")
    skew |= {"for": "1h", "labels": {"severity": "warning"}}
    assert changed == expected


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("watchNamespace={a}", "watchNamespace"),
        ("operator.replicas=many", "operator"),
        ("image.digest=latest", "digest"),
        ("ports.health=80", "health"),
        ("operator.podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("operator.topologySpread.constraints[0].maxSkew=1", "topologyKey"),
        (r"commonLabels.app\.kubernetes\.io/name=mine", "app.kubernetes.io/name"),
        ("podSecurityContext.privileged=true", "privileged"),
        ("metrics.prometheusRule.thresholds.memory=90", "memory"),
        ("metrics.prometheusRule.thresholds.skw=9", "skw"),
        ("metrics.prometheusRule.disabled={HeadgateSkw}", "disabled"),
        ("metrics.prometheusRule.alerts.HeadgateSkw.for=1h", "HeadgateSkw"),
    ],
)
def test_a_wrong_value_is_refused(programs: Programs, setting: str, complaint: str) -> None:
    done = helm(programs, "template", RELEASE, str(CHART), "--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_several_operators_without_a_leader_are_refused(programs: Programs) -> None:
    settings = ("--set", "operator.replicas=2,operator.leaderElection=false")
    done = helm(programs, "template", RELEASE, str(CHART), *settings)
    assert "operator.replicas above 1 needs operator.leaderElection" in done.stderr


def test_the_job_of_helm_test_is_a_streamjob(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    made = runpy.run_path(str(CHART / "files" / "run_test_job.py"))["job"]("smoke", 1000)
    path.write_text(yaml.safe_dump(made))
    assert "kubernetes" in made["spec"]
    ran = headgate_command("run", "--cluster", "in-process", str(path))
    ended_with(ran, 0)
