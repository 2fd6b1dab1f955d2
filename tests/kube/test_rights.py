"""Goal: the operator has exactly the rights that it uses.

Method: the chart installs the real operator, and the API server's audit log has its requests while
jobs are deployed, changed, rescaled and deleted. Their pods do nothing (tests/kube/stub_job).
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headgate.k8s.objects import CONTENT
from headgate.k8s.permissions import JOBS, KUBERAY, LEASE, LEASE_CREATION, Permission
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.kube.charts import CHART
from headgate.tests.kube.stream_jobs import POLLED
from headgate.tests.kube.test_install import WAIT, definitions
from headgate.tests.support.kube.cluster import Cluster, CommandError
from headgate.tests.support.kube.control_plane import Connection
from headgate.tests.support.kube.programs import KubeRay

Object = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""
VERBS = (
    *("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"),
    *("bind", "escalate", "impersonate"),
)
FINALIZERS = {
    ("headgate.io", "streamjobs/finalizers", "update"),
    ("headgate.io", "streamsnapshots/finalizers", "update"),
}
NOT_LOGGED = FINALIZERS | {
    ("", "services", "create"),
    ("networking.k8s.io", "networkpolicies", "create"),
    ("policy", "poddisruptionbudgets", "create"),
}
"""Rights that the API server asks for within another request: for an object that gets an owner, and for one
that an apply makes. The last two tests show that it does."""
WAIT_S_MAX = 300.0
__all__ = ["definitions"]


def rights(*permissions: Permission) -> set[Right]:
    return {
        (each.group, resource, verb)
        for each in permissions
        for resource in each.resources
        for verb in each.verbs
    }


def until(what: str, seen: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not seen():
        assert time.monotonic() < deadline, f"{what} did not come: {why()}"
        time.sleep(0.2)


class Installed:
    """The operator of a release for its own namespace only."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.account = f"system:serviceaccount:{namespace}:streams-headgate"

    def job(self, name: str, **kubernetes: Any) -> None:
        """Apply a StreamJob."""
        made = copy.deepcopy(RESOURCE)
        made["metadata"] = {"name": name}
        made["spec"]["kubernetes"] = kubernetes
        self.cluster.apply(made, namespace=self.namespace)

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        def why() -> str:
            inside = ("-n", self.namespace)
            state = self.cluster.kubectl("get", "sj,ss,pods", *inside, "-o", "wide")
            log = self.cluster.kubectl("logs", "deployment/streams-headgate", *inside)
            return f"{state}\n{log[-6000:]}"

        until(what, seen, why)

    def asked(self) -> set[Right]:
        """Return the requests of the operator that were allowed."""
        found = set()
        for event in self.cluster.plane.requests(self.account):
            at = event["objectRef"]
            resource = "/".join(part for part in (at["resource"], at.get("subresource")) if part)
            decision = event["annotations"]["authorization.k8s.io/decision"]
            assert decision == "allow", event
            found.add((at.get("apiGroup", ""), resource, event["verb"]))
        return found

    def did(self, group: str, resource: str, verb: str) -> bool:
        return (group, resource, verb) in self.asked()


@pytest.fixture(scope="module")
def installed(
    cluster: Cluster, definitions: str, request: pytest.FixtureRequest
) -> Iterator[Installed]:
    """An operator for one namespace, for all tests of a file; the next file has another namespace."""
    name = request.module.__name__.rpartition(".")[2].replace("_", "-")
    with cluster.namespace(name) as namespace, operating(cluster, namespace, [namespace]):
        yield Installed(cluster, namespace)


@pytest.fixture
def installed_for_all(cluster: Cluster, namespace: str, definitions: str) -> Iterator[Installed]:
    """An operator for the whole cluster."""
    with operating(cluster, namespace, []):
        yield Installed(cluster, namespace)


@contextlib.contextmanager
def operating(cluster: Cluster, namespace: str, watched: list[str]) -> Iterator[None]:
    """Install the operator for the time of the block."""
    settings = (
        "crds.install=false,rbac.kubeRay=true,image.repository=headgate,jobs.image=stub/job:1"
        f",{POLLED}"
    )
    watched_json = ("--set-json", f"watchNamespaces={json.dumps(watched)}")
    arguments = ("-n", namespace, "--set", settings, *watched_json, *WAIT)
    cluster.helm("install", "streams", str(CHART), *arguments)
    yield
    cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)


def test_it_asks_for_all_that_it_may_and_for_nothing_else(
    kuberay: KubeRay, installed: Installed
) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    inside = ("-n", namespace)
    short = {"upgrade": {"rollback": {"stabilizationPeriod": "1s"}}}
    short |= {"deletion": {"policy": "Stop", "stateRetention": "Delete"}}
    short |= {"savepoints": {"every": "1s", "retain": 1}}
    installed.job("flights", **short)
    installed.job(
        "rays", ray={"mode": "KubeRay", "version": "2.50.0"}, deletion={"policy": "Abort"}
    )
    cluster.wait(namespace, "condition=Ready", "sj/flights")
    installed.until("a RayCluster", lambda: installed.did("ray.io", "rayclusters", "create"))
    cluster.kubectl("scale", "sj/rays", "--replicas=9", *inside)
    installed.until("more workers", lambda: installed.did("ray.io", "rayclusters", "patch"))
    # Somebody changes objects that may be changed while the pods run: they are put right.
    for what in ("service/flights-head", "networkpolicy/flights", "pdb/flights-workers"):
        cluster.kubectl("annotate", what, f"{CONTENT}=x", "--overwrite", *inside)
    cluster.kubectl("scale", "sj/flights", "--replicas=4", *inside)
    ready = "jsonpath={.status.parallelism.current}=4"
    cluster.wait(namespace, ready, "sj/flights")
    # The node of a pod has never answered: only the operator lets go of the pod.
    silent = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "silent"}}
    cluster.apply(silent, namespace=namespace)
    there = {"podTemplate": {"spec": {"nodeName": "silent"}}}
    installed.job("lost", coordinator=there, deletion={"policy": "Abort"})
    installed.until("a pod on that node", lambda: "lost-head-0" in pods(installed))
    cluster.kubectl("delete", "pod", "lost-head-0", "--grace-period=1", "--wait=false", *inside)
    installed.until("the end of the pod", lambda: installed.did("", "pods", "delete"))
    # Another revision: pods go and come, and the manifest of the old one is deleted in the end.
    installed.job("flights", env={"LEVEL": "2"}, **short)
    dropped = lambda: installed.did("", "configmaps", "delete")  # noqa: E731
    installed.until("the end of the old manifest", dropped)
    surplus = lambda: installed.did("headgate.io", "streamsnapshots", "delete")  # noqa: E731
    installed.until("the end of a surplus savepoint", surplus)
    cluster.kubectl("delete", "sj", "flights", "rays", *inside, "--timeout=600s")
    cluster.kubectl("delete", "node", "silent")
    cluster.kubectl("delete", "sj", "lost", *inside, "--timeout=600s")

    granted = rights(*JOBS, *KUBERAY, *LEASE, *LEASE_CREATION)
    asked = installed.asked()
    assert asked - granted == set()
    assert granted - asked == NOT_LOGGED


def pods(installed: Installed) -> list[str]:
    """The pods of its namespace that are on a node."""
    found = installed.cluster.get("pods", "-n", installed.namespace)["items"]
    return [each["metadata"]["name"] for each in found if "nodeName" in each["spec"]]


@pytest.mark.parametrize("where", ["installed", "installed_for_all"])
def test_everything_else_is_refused(
    where: str, kuberay: KubeRay, request: pytest.FixtureRequest
) -> None:
    """Every verb on every resource of the API server, by its own answer."""
    installed: Installed = request.getfixturevalue(where)
    ask = Review(installed.cluster, installed.account)
    resources = ask.resources()
    assert {("", "secrets"), ("", "pods/exec"), ("headgate.io", "streamjobs/status")} <= resources
    # The subresource of finalizers is known to authorization only.
    every = {(group, what, verb) for group, what in resources for verb in VERBS} | FINALIZERS
    jobs = rights(*JOBS, *KUBERAY)
    own = {each for each in every if ask.may(each, installed.namespace)}
    assert own == jobs | rights(*LEASE_CREATION)
    elsewhere = {each for each in every if ask.may(each, "kube-system")}
    assert elsewhere == (jobs if where == "installed_for_all" else set())
    # The Lease of this release, and no other.
    update = ("coordination.k8s.io", "leases", "update")
    assert ask.may(update, installed.namespace, "streams-headgate")
    assert not ask.may(update, installed.namespace, "other")


class Review:
    """Asks the API server whether an account may do something."""

    def __init__(self, cluster: Cluster, account: str) -> None:
        self.account = account
        self.connection = Connection(cluster.plane)

    def get(self, path: str) -> Object:
        found = self.connection.get(path)
        assert found is not None, path
        return found

    def resources(self) -> set[tuple[str, str]]:
        """Return all resources and subresources, with their API groups."""
        groups = self.get("/apis")["groups"]
        paths = {"": "/api/v1"} | {
            group["name"]: f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups
        }
        return {
            (group, resource["name"])
            for group, path in paths.items()
            for resource in self.get(path)["resources"]
        }

    def may(self, right: Right, namespace: str, name: str = "") -> bool:
        group, what, verb = right
        resource, _, subresource = what.partition("/")
        attributes = {"group": group, "resource": resource, "subresource": subresource}
        attributes |= {"verb": verb, "namespace": namespace, "name": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": self.account, "resourceAttributes": attributes},
        }
        answer = self.connection.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])


def test_an_owner_needs_the_right_to_its_finalizers(installed: Installed) -> None:
    """Why the table has it: the API server of these tests checks owner references, as OpenShift's does."""
    cluster, namespace = installed.cluster, installed.namespace
    cluster.kubectl("create", "serviceaccount", "plain", "-n", namespace)
    rule = ("--verb=create", "--resource=configmaps", "-n", namespace)
    cluster.kubectl("create", "role", "plain", *rule)
    bound = (f"--serviceaccount={namespace}:plain", "--role=plain", "-n", namespace)
    cluster.kubectl("create", "rolebinding", "plain", *bound)
    for kind in ("StreamJob", "StreamSnapshot"):
        owner = {"apiVersion": "headgate.io/v1alpha1", "kind": kind, "name": "x", "uid": "u-1"}
        owner |= {"blockOwnerDeletion": True}
        metadata = {"name": kind.lower(), "namespace": namespace, "ownerReferences": [owner]}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        create = ("create", "-f", "-", "--dry-run=server")
        token = cluster.token(namespace, "plain")
        with pytest.raises(CommandError, match="cannot set blockOwnerDeletion"):
            cluster.kubectl(*create, stdin=json.dumps(made), token=token)
        token = cluster.token(namespace, "streams-headgate")
        cluster.kubectl(*create, stdin=json.dumps(made), token=token)


def test_an_apply_needs_the_right_to_make_what_it_makes(installed: Installed) -> None:
    cluster, namespace = installed.cluster, installed.namespace
    cluster.kubectl("create", "serviceaccount", "patches", "-n", namespace)
    rule = ("--verb=get,patch", "--resource=services", "-n", namespace)
    cluster.kubectl("create", "role", "patches", *rule)
    bound = (f"--serviceaccount={namespace}:patches", "--role=patches", "-n", namespace)
    cluster.kubectl("create", "rolebinding", "patches", *bound)
    made = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}}
    made["metadata"] = {"name": "made", "namespace": namespace}
    token = cluster.token(namespace, "patches")
    with pytest.raises(CommandError, match='cannot create resource "services"'):
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(made), token=token)
