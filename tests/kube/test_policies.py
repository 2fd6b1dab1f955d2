"""Goal: the policies allow only connections that the job or its operator needs.

Method: a model of NetworkPolicy for ingress by TCP evaluates the policies that the chart renders together
with those that its operator makes for two jobs, with the settings that the chart gives to it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import pytest

from headgate.k8s import objects, ports
from headgate.k8s.cli import _labels
from headgate.k8s.modes import pod_makers
from headgate.k8s.objects import Deployment, Settings
from headgate.k8s.spec import Job, parse_job
from headgate.k8s.status import Run, Start
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.kube.charts import NAMESPACE, Object, of_kind, render
from headgate.tests.support.kube.programs import Programs

JOBS = "streams"
MONITORING = "monitoring"
EVERY_PORT = range(1, 65536)
INTERESTING = sorted(
    {1, 22, 443, 10250, 8080, 65535}
    | {
        edge
        for port in ports.ALL
        for edge in (port.number - 1, port.number, port.last + 1, port.last)
    }
    - {0}
)
OF_JOB = {
    number for port in ports.ALL for number in range(port.number, (port.last or port.number) + 1)
}


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod as policies see it."""

    name: str
    namespace: str
    labels: dict[str, str]
    ports: dict[str, int] = dataclasses.field(default_factory=dict)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Return True if a label selector matches these labels."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "Exists", "the model knows no other operator"
        if each["key"] not in labels:
            return False
    return True


def allowed(policies: Iterable[Object], source: Pod, target: Pod, port: int) -> bool:
    """Return True if a connection is allowed, as Kubernetes defines it for policies of Ingress."""
    isolating = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == target.namespace
        and selects(policy["spec"]["podSelector"], target.labels)
    ]
    for spec in isolating:
        assert spec["policyTypes"] == ["Ingress"]
    rules = [rule for spec in isolating for rule in spec.get("ingress", ())]
    return not isolating or any(
        _port_fits(rule.get("ports"), target, port) and _peer_fits(rule.get("from"), source, target)
        for rule in rules
    )


def _port_fits(listed: list[Object] | None, target: Pod, port: int) -> bool:
    def fits(each: Object) -> bool:
        first = each["port"]
        if isinstance(first, str):
            first = target.ports.get(first)
        return first is not None and first <= port <= each.get("endPort", first)

    return not listed or any(fits(each) for each in listed)


def _peer_fits(peers: list[Object] | None, source: Pod, target: Pod) -> bool:
    def fits(peer: Object) -> bool:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}, peer
        if "namespaceSelector" in peer:
            name = {"kubernetes.io/metadata.name": source.namespace}
            if not selects(peer["namespaceSelector"], name):
                return False
        elif source.namespace != target.namespace:
            return False
        return "podSelector" not in peer or selects(peer["podSelector"], source.labels)

    return not peers or any(fits(peer) for peer in peers)


class World:
    """The operator of a release, two jobs of it, and others in the same cluster."""

    def __init__(self, programs: Programs, *settings: str) -> None:
        made = render(programs, *(part for each in settings for part in ("--set", each)))
        self.policies = of_kind(made, "NetworkPolicy")
        (deployment,) = of_kind(made, "Deployment")
        template = deployment["spec"]["template"]
        (container,) = template["spec"]["containers"]
        named = {each["name"]: each["containerPort"] for each in container["ports"]}
        self.operator = Pod("operator", NAMESPACE, template["metadata"]["labels"], named)
        arguments = dict(each.partition("=")[::2] for each in container["args"])
        read = arguments.get("--metrics-from")
        metrics_from = None if read is None else _labels(read)
        given = Settings(operator_namespace=NAMESPACE, metrics_from=metrics_from)
        self.flights, self.clicks = (self._pods(name, given) for name in ("flights", "clicks"))
        self.others = [
            Pod("Prometheus", MONITORING, {"app": "prometheus"}),
            Pod("a neighbour of the jobs", JOBS, {"app": "shell"}),
            Pod("a neighbour of the operator", NAMESPACE, {"app": "shell"}),
            Pod("a stranger", "default", {}),
            # A user who may make pods in one namespace can give them any labels.
            Pod("a false operator", "default", self.operator.labels),
            Pod("a false worker", "default", self.flights[1].labels),
        ]

    def _pods(self, name: str, settings: Settings) -> list[Pod]:
        """The pods of a job; its policies are added."""
        resource = copy.deepcopy(RESOURCE)
        resource["metadata"] |= {"name": name, "namespace": JOBS}
        job = parse_job(resource)
        assert isinstance(job, Job)
        run = Run(1, job.revision, 1, Start("Latest"), "2026-01-01T00:00:00Z")
        of = Deployment(name, JOBS, f"u-{name}", job, run, settings)
        self.policies = [*self.policies, *of_kind(objects.supporting(of), "NetworkPolicy")]
        return [
            Pod(made["metadata"]["name"], JOBS, made["spec"]["template"]["metadata"]["labels"])
            for made in pod_makers(of)
        ]

    def open(self, source: Pod, target: Pod, numbers: Iterable[int] = INTERESTING) -> set[int]:
        """The ports of a pod that another one may connect to."""
        return {port for port in numbers if allowed(self.policies, source, target, port)}


@pytest.fixture(scope="module", params=["cluster", "namespaced"])
def world(request: pytest.FixtureRequest, programs: Programs) -> World:
    """With metrics for one namespace only."""
    metrics = r"networkPolicy.metricsFrom.kubernetes\.io/metadata\.name=" + MONITORING
    watched = ["watchNamespaces={streams}"] if request.param == "namespaced" else []
    return World(programs, metrics, *watched)


def test_nobody_connects_to_the_operator_but_for_its_metrics(world: World) -> None:
    for other in [*world.others, *world.flights, world.operator]:
        numbers = {8080} if other.namespace == MONITORING else set()
        assert world.open(other, world.operator, EVERY_PORT) == numbers, other.name


def test_pods_of_a_job_reach_each_other_and_no_other_job(world: World) -> None:
    for target in world.flights:
        for source in world.flights:
            assert world.open(source, target) == OF_JOB & set(INTERESTING)
        for source in world.clicks:
            assert world.open(source, target) == set()


def test_the_operator_reaches_the_rest_api_and_nothing_else(world: World) -> None:
    for target in world.flights:
        assert world.open(world.operator, target, EVERY_PORT) == {ports.REST.number}


def test_nobody_else_connects_to_a_job_but_for_its_metrics(world: World) -> None:
    for target in world.flights:
        for other in world.others:
            numbers = {ports.METRICS.number} if other.namespace == MONITORING else set()
            assert world.open(other, target) == numbers, other.name


def test_by_default_all_namespaces_read_metrics_and_nothing_else(programs: Programs) -> None:
    world = World(programs)
    for other in world.others:
        assert world.open(other, world.operator) == {8080}
        for target in world.flights:
            assert world.open(other, target) == {ports.METRICS.number}


def test_without_policies_of_the_chart_jobs_still_have_their_own(programs: Programs) -> None:
    world = World(programs, "networkPolicy.enabled=false")
    stranger = world.others[3]
    assert world.open(stranger, world.operator) == set(INTERESTING)
    for target in world.flights:
        assert world.open(stranger, target) == set()
