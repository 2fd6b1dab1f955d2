"""Goal: a release is installed, upgraded, rolled back, tested and removed, with the rights that it needs.

Method: real Helm, a real API server, and the real operator. Restricted pods run as processes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headgate.tests.kube.charts import CHART, CRDS, headgate_command
from headgate.tests.kube.stream_jobs import POLLED, explain
from headgate.tests.support.commands import ended_with
from headgate.tests.support.kube.cluster import WAIT_S_MAX, Cluster, CommandError

IMAGE = ("--set", "image.repository=headgate", "--set-string", "image.tag=1")
WAIT = ("--wait", "--timeout", "10m")
OPERATOR = "deployment/streams-headgate"


@pytest.fixture(scope="module")
def definitions(api_server: Cluster) -> str:
    """The resource definitions, once for all releases of a module."""
    release = ("headgate-crds", str(CRDS), "-n", "kube-system")
    return api_server.helm("upgrade", "--install", *release, "--take-ownership")


@pytest.fixture
def release(cluster: Cluster, namespace: str, definitions: str) -> Iterator[str]:
    """A release `streams` for its own namespace only."""
    install(cluster, namespace, "--set", f"watchNamespaces={{{namespace}}}")
    yield namespace
    releases = json.loads(cluster.helm("list", "-n", namespace, "-o", "json"))
    if releases:
        cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)


@pytest.fixture(scope="module")
def standing(cluster: Cluster, definitions: str) -> Iterator[str]:
    """The same for all tests that leave it as it is."""
    with cluster.namespace("standing") as namespace:
        settings = f"watchNamespaces={{{namespace}}},test.timeoutSeconds=900,{POLLED}"
        install(cluster, namespace, "--set", settings)
        yield namespace
        cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)


def install(cluster: Cluster, namespace: str, *arguments: str) -> None:
    """Install without the resource definitions, which belong to a release of their own."""
    own = ("--set", "crds.install=false", *IMAGE, *WAIT)
    cluster.helm("install", "streams", str(CHART), "-n", namespace, *own, *arguments)


def operator_token(cluster: Cluster, namespace: str) -> str:
    return cluster.token(namespace, "streams-headgate")


def may(cluster: Cluster, token: str, verb: str, what: str, namespace: str) -> bool:
    """Return whether the holder of the token has a right to `kind`, `kind/name` or `kind:subresource`."""
    kind, _, sub = what.partition(":")
    arguments = (verb, kind, f"--subresource={sub}", "-n", namespace)
    try:
        answer = cluster.kubectl("auth", "can-i", *arguments, token=token)
    except CommandError as error:
        # kubectl fails if the answer is no.
        answer = str(error).rpartition(": ")[2]
    said = answer.split()
    assert "yes" in said or "no" in said, answer
    return "yes" in said


def until_may(cluster: Cluster, token: str, verb: str, what: str, namespace: str) -> None:
    """Wait until a right that was just given is known to the API server's authorization."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not may(cluster, token, verb, what, namespace):
        assert time.monotonic() < deadline, f"the right to {verb} {what} did not come"


def test_install_upgrade_rollback_uninstall(cluster: Cluster, release: str) -> None:
    def image() -> str:
        found = cluster.get(OPERATOR, "-n", release)
        return str(found["spec"]["template"]["spec"]["containers"][0]["image"])

    def upgrade(*settings: str) -> None:
        arguments = ("-n", release, "--reuse-values", *WAIT, *settings)
        cluster.helm("upgrade", "streams", str(CHART), *arguments)

    assert image() == "headgate:1"
    upgrade("--set-string", "image.tag=2", "--set", "operator.replicas=2")
    assert image() == "headgate:2"
    # Helm waits for the pods that are to come, not for the end of those before.
    cluster.wait(release, "jsonpath={.status.readyReplicas}=2", OPERATOR)
    # A release that never becomes ready fails in time, and goes back by itself.
    with pytest.raises(CommandError, match=r"rolled back|context deadline|not ready"):
        upgrade("--set", "image.repository=registry.example/none", "--atomic", "--timeout", "10s")
    assert image() == "headgate:2"
    cluster.helm("rollback", "streams", "1", "-n", release, *WAIT)
    assert image() == "headgate:1"
    cluster.wait(release, "jsonpath={.status.readyReplicas}=1", OPERATOR)

    cluster.helm("uninstall", "streams", "-n", release, *WAIT)
    kinds = "deploy,svc,sa,role,rolebinding,networkpolicy,pdb,cm"
    left = cluster.get(kinds, "-n", release, "-l", "app.kubernetes.io/instance=streams")
    assert left["items"] == []


def test_definitions_of_the_chart_itself_are_upgraded_and_stay(
    cluster: Cluster, namespace: str, definitions: str
) -> None:
    """A release that was removed and comes again takes the definitions over that it had left."""
    settings = ("--set", f"crds.install=true,watchNamespaces={{{namespace}}}", "--take-ownership")
    for _ in range(2):
        install(cluster, namespace, *settings)
        cluster.helm("upgrade", "streams", str(CHART), "-n", namespace, "--reuse-values", *WAIT)
        cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)
        cluster.kubectl("get", "crd", "streamjobs.headgate.io", "streamsnapshots.headgate.io")


def test_helm_test_runs_a_job_and_leaves_nothing(cluster: Cluster, standing: str) -> None:
    try:
        said = cluster.helm("test", "streams", "-n", standing, "--timeout", "15m")
    except CommandError as error:
        # The pod of a test that failed stays; Helm's own `--logs` fails where it does not.
        error.add_note(cluster.kubectl("logs", "streams-headgate-test", "-n", standing))
        error.add_note(explain(cluster, standing))
        raise
    assert re.search(r"TEST SUITE:\s+streams-headgate-test\n.*Phase:\s+Succeeded", said, re.DOTALL)
    for left in (
        ("pods,sa,role,rolebinding,cm", "-l", "app.kubernetes.io/component=test"),
        ("streamjobs", "--all"),
    ):
        # At once if there are none.
        cluster.wait(standing, "delete", *left)


def test_the_first_job_of_the_notes_is_accepted_and_runs(
    cluster: Cluster, standing: str, tmp_path: Path
) -> None:
    notes = cluster.helm("get", "notes", "streams", "-n", standing)
    manifest = re.search(r"<<EOF\n(.*?)\n\s*EOF", notes, re.DOTALL)
    assert manifest, notes
    text = "\n".join(line.removeprefix("  ") for line in manifest[1].splitlines())
    path = tmp_path / "hello.yaml"
    path.write_text(text)
    ran = headgate_command("run", "--cluster", "in-process", str(path))
    ended_with(ran, 0)
    cluster.kubectl("apply", "-n", standing, "-f", str(path))
    wait = re.search(r"kubectl (wait .*)", notes)
    assert wait
    # A loaded machine needs longer than the notes say.
    patient = re.sub(r"--timeout=\S+", "--timeout=15m", wait[1])
    cluster.kubectl(*(part.replace("'", "") for part in patient.split()))
    name = yaml.safe_load(text)["metadata"]["name"]
    cluster.kubectl("delete", "streamjob", name, "-n", standing)


def test_a_namespaced_operator_has_no_rights_elsewhere(cluster: Cluster, standing: str) -> None:
    token = operator_token(cluster, standing)
    assert may(cluster, token, "list", "streamjobs.headgate.io", standing)
    assert may(cluster, token, "create", "statefulsets.apps", standing)
    assert may(cluster, token, "get", "secrets/any", standing)
    assert may(cluster, token, "patch", "streamjobs.headgate.io:status", standing)
    for verb, what in [
        ("list", "secrets"),
        ("watch", "secrets"),
        ("delete", "secrets/any"),
        ("create", "pods"),
        ("create", "pods:exec"),
        ("create", "roles.rbac.authorization.k8s.io"),
        ("create", "serviceaccounts:token"),
        ("delete", "streamjobs.headgate.io"),
        ("deletecollection", "statefulsets.apps"),
    ]:
        assert not may(cluster, token, verb, what, standing), (verb, what)
    for verb, what in [
        ("list", "streamjobs.headgate.io"),
        ("get", "secrets/any"),
        ("list", "pods"),
    ]:
        assert not may(cluster, token, verb, what, "kube-system"), (verb, what)
    with pytest.raises(CommandError, match="cannot list resource"):
        cluster.kubectl("get", "secrets", "-n", standing, token=token)


def test_the_lease_of_the_leader_is_the_only_one(cluster: Cluster, standing: str) -> None:
    token = operator_token(cluster, standing)
    assert may(cluster, token, "create", "leases.coordination.k8s.io", standing)
    assert may(cluster, token, "update", "leases.coordination.k8s.io/streams-headgate", standing)
    assert not may(cluster, token, "update", "leases.coordination.k8s.io/other", standing)
    assert not may(cluster, token, "list", "leases.coordination.k8s.io", standing)


def test_an_operator_of_the_whole_cluster_sees_all_jobs_and_no_list_of_secrets(
    cluster: Cluster, namespace: str, definitions: str
) -> None:
    install(cluster, namespace)
    try:
        token = operator_token(cluster, namespace)
        for somewhere in (namespace, "default"):
            assert may(cluster, token, "watch", "streamjobs.headgate.io", somewhere)
            assert not may(cluster, token, "list", "secrets", somewhere)
            assert not may(cluster, token, "update", "leases.coordination.k8s.io", somewhere)
        assert not may(cluster, token, "list", "nodes", "default")
    finally:
        cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)
    names = cluster.kubectl("get", "clusterrole,clusterrolebinding", "-o", "name")
    # The namespace is a part of the names of all releases.
    assert f"streams-headgate-{namespace}" not in names


def test_the_account_of_jobs_may_do_nothing(
    cluster: Cluster, namespace: str, definitions: str
) -> None:
    settings = f"watchNamespaces={{{namespace}}},jobs.serviceAccount.create=true"
    install(cluster, namespace, "--set", settings)
    try:
        token = cluster.token(namespace, "headgate-jobs")
        for what in ("secrets", "pods", "streamjobs.headgate.io", "configmaps"):
            assert not may(cluster, token, "list", what, namespace)
    finally:
        cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)


def test_people_who_may_edit_or_view_a_namespace_may_do_so_with_its_jobs(
    cluster: Cluster, standing: str
) -> None:
    for role in ("view", "edit"):
        cluster.kubectl("create", "serviceaccount", role, "-n", standing)
        bound = f"--serviceaccount={standing}:{role}"
        cluster.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", bound, "-n", standing
        )
    # The roles are put together by a controller.
    for role, part in (("view", "status"), ("edit", "scale")):
        gathered = f"jsonpath={{.rules[?(@.resources[0]=='streamjobs/{part}')].verbs[0]}}"
        cluster.kubectl(
            "wait", f"clusterrole/{role}", f"--for={gathered}", f"--timeout={WAIT_S_MAX}s"
        )
    view, edit = (cluster.token(standing, role) for role in ("view", "edit"))
    for token in (view, edit):
        until_may(cluster, token, "get", "streamjobs.headgate.io", standing)
    assert not may(cluster, view, "create", "streamjobs.headgate.io", standing)
    assert may(cluster, edit, "create", "streamsnapshots.headgate.io", standing)
    assert may(cluster, edit, "update", "streamjobs.headgate.io:scale", standing)
    assert not may(cluster, edit, "update", "streamjobs.headgate.io:status", standing)
