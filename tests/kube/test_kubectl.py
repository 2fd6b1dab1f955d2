"""Goal: `kubectl headgate` shows and changes StreamJobs on a real API server; its errors say what to do.

Method: the real kubectl finds our executable as its plugin. There is no operator: the tests write the
statuses that it would write. The head of the job is a pod in which a job runs with its REST API.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest
from playwright.async_api import expect

from headgate.k8s.objects import HEAD, TOKEN_KEY, head_name, selector, token_name
from headgate.k8s.pods import TOKEN_PATH
from headgate.k8s.ports import REST
from headgate.tests.k8s.conftest import RESOURCE
from headgate.tests.kube.pods import config_map, container, pod_spec, secret, stateful_set
from headgate.tests.kube.test_operator import definitions  # noqa: F401
from headgate.tests.support.commands import ended_with, ends_with
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.ui.conftest import behind_prefix, opened

Object = dict[str, Any]
TOKEN = "0123456789abcdef0123456789abcdef"
JOB = f"""\
import headgate as hg
from headgate.connectors import blackhole, generator

job = hg.Job("clicks", options={{
    "rest.port": "{REST.number}",
    "rest.bind-address": "0.0.0.0",
    "web.checkpoints.history": "10000",
    "headgate.control.token-file": "{TOKEN_PATH}/{TOKEN_KEY}",
}})
job.checkpoint(every="200ms", storage="/tmp/checkpoints")
numbers = job.read(generator({{"n": "sequence"}}, rate=100), name="numbers")
numbers.write(blackhole(), name="out")
print("here is the head")
job.run()
"""


class Plugin:
    """kubectl with our plugin."""

    def __init__(self, cluster: Cluster, namespace: str, directory: Path) -> None:
        self.cluster, self.namespace = cluster, namespace
        executable = directory / "kubectl-headgate"
        script = "from headgate.k8s.cli import kubectl; kubectl()"
        executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{script}" "$@"\n')
        executable.chmod(0o755)
        environment = control_plane.environment(cluster.plane)
        self.environment = {**environment, "PATH": f"{directory}:{environment['PATH']}"}

    def command(self, *arguments: str) -> list[str]:
        return [str(self.cluster.programs.kubectl), "headgate", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        # A shell lets commands in the background, and so these tests, ignore Ctrl-C; that is inherited.
        command = ["env", "--default-signal=INT", *self.command(*arguments, "-n", self.namespace)]
        return subprocess.Popen(
            control_plane.bound_to_us(command),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_kubectl(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of kubectl itself."""
        command = [str(self.cluster.programs.kubectl), *arguments, "-n", self.namespace]
        return subprocess.Popen(
            control_plane.bound_to_us(command),
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, "-n", self.namespace),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def says(self, *arguments: str) -> str:
        """Return the output of a verb on stdout."""
        done = self.run(*arguments)
        ended_with(done, 0)
        return done.stdout

    def refuses(self, *arguments: str) -> str:
        """Return the output of a failing verb on stderr."""
        done = self.run(*arguments)
        assert done.returncode, done.stdout
        return done.stderr


@pytest.fixture
def plugin(api_server: Cluster, namespace: str, tmp_path: Path) -> Plugin:
    return Plugin(api_server, namespace, tmp_path)


@pytest.fixture
def job(api_server: Cluster, namespace: str) -> Object:
    """A StreamJob that no operator has seen."""
    made = copy.deepcopy(RESOURCE)
    made["metadata"] = {"name": "clicks"}
    api_server.apply(made, namespace=namespace)
    return made


def write_status(cluster: Cluster, namespace: str, what: str, status: Object) -> None:
    patch = json.dumps({"status": status})
    where = ("-n", namespace, "--subresource=status", "--type=merge")
    cluster.kubectl("patch", what, *where, "-p", patch)


def line_with(stream: IO[str] | None, text: str) -> str:
    """The next line with this text; the test's time limit is the limit."""
    assert stream is not None
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"`{text}` was not written")


def test_jobs_that_there_are_and_one_that_is_not(plugin: Plugin, job: Object) -> None:
    row = plugin.says("status").splitlines()[1].split()
    assert row[:3] == ["clicks", "Pending", "no"]
    assert "no operator has looked at this StreamJob yet" in plugin.says("status", "clicks")
    seen = json.loads(plugin.says("status", "clicks", "-o", "json"))
    assert (seen["name"], seen["phase"]) == ("clicks", "Pending")
    missing = plugin.refuses("status", "clocks")
    assert f"no such StreamJob name=`clocks` namespace=`{plugin.namespace}`" in missing
    assert "StreamJobs there: clicks" in missing


def test_suspend_resume_and_scale_change_the_spec(
    plugin: Plugin, api_server: Cluster, namespace: str, job: Object
) -> None:
    plugin.says("suspend", "clicks")
    spec = api_server.get("sj", "clicks", "-n", namespace)["spec"]
    assert spec["kubernetes"]["state"] == "Suspended"
    assert spec["sources"] == job["spec"]["sources"]
    plugin.says("scale", "clicks", "7")
    assert api_server.get("sj", "clicks", "-n", namespace)["spec"]["parallelism"] == 7
    resuming = plugin.start("resume", "clicks", "--wait")
    line_with(resuming.stderr, "Pending")
    generation = api_server.get("sj", "clicks", "-n", namespace)["metadata"]["generation"]
    running = {"phase": "Running", "observedGeneration": generation}
    write_status(api_server, namespace, "sj/clicks", running)
    assert line_with(resuming.stdout, "streamjob clicks runs")
    ends_with(resuming, 0)


def test_what_does_not_come_in_time_is_said(plugin: Plugin, job: Object) -> None:
    assert "not done after 1ms" in plugin.refuses("suspend", "clicks", "--wait", "--timeout", "1ms")


def test_a_savepoint_is_an_object_that_is_waited_for(
    plugin: Plugin, api_server: Cluster, namespace: str, job: Object
) -> None:
    taking = plugin.start("savepoint", "clicks", "--name", "before", "--native", "--wait")
    line_with(taking.stderr, "streamsnapshot before is asked for")
    line_with(taking.stderr, "Pending")
    write_status(api_server, namespace, "ss/before", {"phase": "Running", "message": "attempt 1"})
    line_with(taking.stderr, "Running: attempt 1")
    complete = {
        "phase": "Completed",
        "path": "s3://bucket/sp-1",
        "sizeBytes": 14827,
        "completedAt": "2026-01-01T00:00:00Z",
    }
    write_status(api_server, namespace, "ss/before", complete)
    line_with(taking.stdout, "s3://bucket/sp-1")
    ends_with(taking, 0)
    spec = api_server.get("ss", "before", "-n", namespace)["spec"]
    assert spec == {"jobRef": {"name": "clicks"}, "format": "Native"}
    listed = plugin.says("snapshots", "clicks").splitlines()[1]
    assert "before" in listed
    assert "14,827 B" in listed
    assert "before" in plugin.says("status", "clicks")


def test_a_savepoint_that_fails_is_an_error(
    plugin: Plugin, api_server: Cluster, namespace: str, job: Object
) -> None:
    taking = plugin.start("savepoint", "clicks", "--name", "never", "--wait")
    line_with(taking.stderr, "asked for")
    ended = {"phase": "Failed", "message": "no room", "completedAt": "2026-01-01T00:00:00Z"}
    write_status(api_server, namespace, "ss/never", ended)
    line_with(taking.stderr, "error: the savepoint is Failed name=`never`: no room")
    ends_with(taking, 1)


def test_explain_and_the_manifest_on_the_cluster(plugin: Plugin, job: Object) -> None:
    assert "numbers" in plugin.says("explain", "clicks")
    assert "flowchart" in plugin.says("explain", "clicks", "--mermaid")


def test_a_right_that_is_missing_is_named(
    plugin: Plugin, api_server: Cluster, namespace: str, job: Object
) -> None:
    api_server.kubectl("create", "serviceaccount", "guest", "-n", namespace)
    token = api_server.token(namespace, "guest")
    plugin.environment["KUBECONFIG"] = str(api_server.kubeconfig(token))
    said = plugin.refuses("status")
    assert f"you may not list streamjobs in namespace {namespace}" in said
    assert "apiGroups: ['headgate.io'], resources: ['streamjobs'], verbs: ['list']" in said
    assert f"kubectl auth can-i list streamjobs.headgate.io -n {namespace}" in said
    look = ("--verb=get,list", "--resource=streamjobs.headgate.io", "-n", namespace)
    api_server.kubectl("create", "role", "look", *look)
    grant = ("--role=look", f"--serviceaccount={namespace}:guest", "-n", namespace)
    api_server.kubectl("create", "rolebinding", "look", *grant)
    assert "clicks" in plugin.says("status")
    of_one = plugin.says("status", "clicks")
    assert "no operator has looked at this StreamJob" in of_one
    for resource in ("pods", "streamsnapshots"):
        assert f"note: you may not list {resource} in namespace {namespace}" in of_one
    assert "you may not patch streamjobs" in plugin.refuses("suspend", "clicks")


def test_a_token_that_nobody_knows(plugin: Plugin, api_server: Cluster, job: Object) -> None:
    plugin.environment["KUBECONFIG"] = str(api_server.kubeconfig("no token of this cluster"))
    assert "the API server does not know you" in plugin.refuses("status")


def test_a_cluster_without_the_definitions(
    api_server: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.k8s.kubectl.cluster import JobCluster, explained
    from headgate.k8s.operator.api import Api, ApiError
    from headgate.k8s.operator.kinds import Kind

    for name, value in control_plane.environment(api_server.plane).items():
        monkeypatch.setenv(name, value)

    async def ask() -> ApiError:
        async with await Api.from_environment() as api:
            unknown = Kind("StreamJob", "headgate.example/v1", "streamjobs", selector="")
            assert JobCluster(api, namespace).namespace == namespace
            with pytest.raises(ApiError) as refused:
                await api.list(unknown, namespace)
            return refused.value

    said = str(explained(asyncio.run(ask())))
    assert "the cluster has no StreamJobs" in said
    assert "helm install" in said


# -- with a head that runs --------------------------------------------------------------------------


@pytest.fixture
def head(cluster: Cluster, namespace: str, job: Object) -> str:
    """Start the head of the job, a pod in which it runs, and return the name of the pod."""
    volumes = [
        {"name": "token", "secret": {"secretName": token_name("clicks")}},
        {"name": "code", "configMap": {"name": "code"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts = [
        {"name": "token", "mountPath": TOKEN_PATH},
        {"name": "code", "mountPath": "/etc/code"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    ready = {"httpGet": {"path": "/readyz", "port": REST.number}, "periodSeconds": 1}
    one = container("python", "/etc/code/job.py", volumeMounts=mounts) | {"name": "headgate"}
    one["readinessProbe"] = ready
    made = stateful_set(head_name("clicks"), 1, pod_spec(one, volumes=volumes))
    labels = selector("clicks", HEAD)
    made["spec"]["selector"]["matchLabels"] = labels
    made["spec"]["template"]["metadata"]["labels"] = labels
    cluster.apply(
        secret(token_name("clicks"), **{TOKEN_KEY: TOKEN}),
        config_map("code", **{"job.py": JOB}),
        made,
        namespace=namespace,
    )
    what = f"statefulset/{head_name('clicks')}"
    cluster.wait(namespace, "jsonpath={.status.readyReplicas}=1", what)
    return f"{head_name('clicks')}-0"


@pytest.fixture
def interrupted() -> Iterator[Callable[[subprocess.Popen[str]], int]]:
    """End a command as Ctrl-C does, and return its exit code."""
    started: list[subprocess.Popen[str]] = []

    def interrupt(process: subprocess.Popen[str]) -> int:
        started.append(process)
        os.kill(process.pid, signal.SIGINT)
        return process.wait(timeout=300)

    yield interrupt
    for process in started:
        process.kill()


def test_the_rest_api_and_the_logs_of_a_head(
    plugin: Plugin,
    cluster: Cluster,
    namespace: str,
    head: str,
    interrupted: Callable[[subprocess.Popen[str]], int],
) -> None:
    shown = plugin.says("status", "clicks")
    assert f"{head}  head" in shown
    complete: list[int] = []
    while not complete:
        answer = json.loads(plugin.says("checkpoints", "clicks", "-o", "json"))
        complete = [each["id"] for each in answer["history"] if each["status"] == "COMPLETED"]
    number = complete[0]
    assert "COMPLETED" in plugin.says("checkpoints", "clicks")
    assert f"{number}: COMPLETED" in plugin.says("checkpoints", "clicks", str(number))
    assert "no failure since its coordinator began" in plugin.says("history", "clicks")
    assert "is not remembered" in plugin.refuses("checkpoints", "clicks", "999999")

    forwarding = plugin.start("port-forward", "clicks", "0")
    line = line_with(forwarding.stdout, "is the REST API of clicks")
    request = urllib.request.Request(
        f"{line.split()[0]}/v1/job", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=300) as answered:
        assert json.load(answered)["status"] == "RUNNING"
    assert interrupted(forwarding) == 130

    assert f"[{head}] here is the head\n" in plugin.says("logs", "clicks")
    following = plugin.start("logs", "clicks", "-f", "--role", "head")
    line_with(following.stdout, f"[{head}] here is the head")
    os.kill(cluster.pid(namespace, head), signal.SIGKILL)
    # The log of the container that was started again is followed as well.
    line_with(following.stdout, f"[{head}] here is the head")
    assert interrupted(following) == 130
    assert f"[{head}] here is the head\n" in plugin.says("logs", "clicks", "--previous")


def test_the_web_ui_through_a_port_that_kubectl_forwards(plugin: Plugin, head: str) -> None:
    with plugin.start_kubectl("port-forward", f"pod/{head}", f":{REST.number}") as forwarding:
        try:
            # Forwarding from 127.0.0.1:34567 -> 8081
            line = line_with(forwarding.stdout, "Forwarding from 127.0.0.1:")
            asyncio.run(_look_at_ui(int(line.split()[2].rpartition(":")[2])))
        finally:
            forwarding.kill()


async def _look_at_ui(port: int) -> None:
    """Look at the web UI as it is at a port, and below a prefix that a proxy adds."""
    url = f"http://localhost:{port}"
    async with behind_prefix(url, "/team/clicks") as below:
        for place in (url, f"http://127.0.0.1:{port}", below):
            async with opened(f"{place}/ui/#token={TOKEN}") as watched:
                page = watched.page
                heading = page.get_by_role("heading", name="Overview", level=2)
                await expect(heading).to_be_visible()
                await expect(page.get_by_text("RUNNING").first).to_be_visible()
                await expect(page.locator(".chart")).to_have_count(2)
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {TOKEN}", "Host": "elsewhere.invalid"}
        async with session.get(f"{url}/v1/job", headers=headers) as refused:
            assert refused.status in (400, 403, 421)


def test_a_token_that_may_not_be_read(
    plugin: Plugin, cluster: Cluster, namespace: str, head: str
) -> None:
    cluster.kubectl("create", "serviceaccount", "guest", "-n", namespace)
    resources = "streamjobs.headgate.io,pods,statefulsets.apps"
    look = ("--verb=get,list", f"--resource={resources}", "-n", namespace)
    cluster.kubectl("create", "role", "look", *look)
    grant = ("--role=look", f"--serviceaccount={namespace}:guest", "-n", namespace)
    cluster.kubectl("create", "rolebinding", "look", *grant)
    plugin.environment["KUBECONFIG"] = str(cluster.kubeconfig(cluster.token(namespace, "guest")))
    said = plugin.refuses("checkpoints", "clicks")
    assert "the token of the job's REST API cannot be read" in said
    assert f"you may not get secrets in namespace {namespace}" in said
    assert "Secret clicks-token" in said
    forward = plugin.refuses("port-forward", "clicks", "0")
    assert f"you may not get pods/portforward in namespace {namespace}" in forward
    assert "--subresource=portforward" in forward


def test_a_head_that_does_not_run(
    plugin: Plugin, api_server: Cluster, namespace: str, job: Object
) -> None:
    write_status(api_server, namespace, "sj/clicks", {"phase": "Suspended"})
    said = plugin.refuses("checkpoints", "clicks")
    assert "the head of job clicks does not run: the job is Suspended" in said
    assert "resume" in said
    assert "job clicks has no head or worker pod" in plugin.refuses("logs", "clicks")
