"""Goal: a running job reveals nothing, neither by its ports nor of the secrets that it was given.

Method: a job with planted secrets runs in pods with the real operator, is asked everything, takes a
savepoint and is deleted. Then the secrets are looked for in all objects, logs, answers and files.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headgate.k8s import ports
from headgate.tests.kube.charts import CHART, headgate_command
from headgate.tests.kube.pods import config_map, secret
from headgate.tests.kube.stream_jobs import POLLED, explain, remove
from headgate.tests.kube.test_install import WAIT, definitions
from headgate.tests.kube.test_listening import asked, listening, scanner, sockets
from headgate.tests.support.commands import ended_with
from headgate.tests.support.kube.cluster import Cluster, CommandError

Object = dict[str, Any]
__all__ = ["definitions"]
JOB = "clicks"
PLANTED = {
    "PASSWORD": "planted-password-7f3a9c",
    "AWS_SECRET_ACCESS_KEY": "planted-access-key-51b8e2",
}
STEPS = """
import headgate as hg

class Guard(hg.Process):
    def __init__(self, password):
        self.password = password

    def on_record(self, record, ctx):
        assert self.password.startswith("planted")
        yield record
"""
CLAIM: Object = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "state"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
ON_THE_VOLUME = {
    "podTemplate": {
        "spec": {
            "containers": [
                {"name": "headgate", "volumeMounts": [{"name": "state", "mountPath": "/state"}]}
            ],
            "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": "state"}}],
        }
    }
}
STREAM_JOB: Object = {
    "apiVersion": "headgate.io/v1alpha1",
    "kind": "StreamJob",
    "metadata": {"name": JOB},
    "spec": {
        "checkpoint": {"every": "1s", "storage": "/state/checkpoints"},
        "options": {"s3.endpoint": "http://user:${PASSWORD}@minio"},
        "sources": {"numbers": {"generator": {"fields": {"n": "sequence"}, "rate": 50}}},
        "operators": {
            "guarded": {
                "from": "numbers",
                "process": {"python": "steps:Guard", "arguments": {"password": "${PASSWORD}"}},
                "into": {"n": "long"},
            }
        },
        "sinks": {"out": {"from": "guarded", "blackhole": {}}},
        "kubernetes": {
            "code": {"configMapRef": {"name": "steps"}},
            "env": {"PASSWORD": {"name": "broker", "key": "password"}},
            "storage": {"credentialsSecretRef": {"name": "bucket"}},
            "savepoints": {"directory": "/state/savepoints"},
            "coordinator": ON_THE_VOLUME,
            "workers": ON_THE_VOLUME,
        },
    },
}
READ = (
    *(
        "job",
        "job/vertices",
        "job/checkpoints",
        "job/watermarks",
        "job/backpressure",
        "openapi.json",
    ),
    *("job/exceptions", "job/config", "job/plan", "job/metrics"),
)
"""The answers of the REST API to those who have the token, below `/v1/`."""


@dataclass
class Running:
    """A running job, and the data that was collected about it."""

    cluster: Cluster
    namespace: str
    said: dict[str, bytes] = field(default_factory=dict)

    def pods(self, role: str) -> list[str]:
        selector = ("-l", f"headgate.io/job={JOB},headgate.io/role={role}")
        items = self.cluster.get("pods", "-n", self.namespace, *selector)["items"]
        return [each["metadata"]["name"] for each in items]

    def keep(self, name: str, *arguments: str) -> None:
        """Keep the output of kubectl."""
        text = self.cluster.kubectl(*arguments, "-n", self.namespace)
        self.said[name] = text.encode()

    def keep_objects(self, when: str) -> None:
        """Keep all objects of the namespace except Secrets, with the events, and all logs."""
        listed = ("api-resources", "--namespaced", "--verbs=list", "-o", "name")
        for kind in self.cluster.kubectl(*listed).split():
            if kind not in ("secrets", "pods.metrics.k8s.io"):
                self.keep(f"{when}: {kind}", "get", kind, "-o", "json", "--show-managed-fields")
        for pod in self.cluster.get("pods", "-n", self.namespace)["items"]:
            name = pod["metadata"]["name"]
            with contextlib.suppress(CommandError):
                self.keep(f"{when}: log of {name}", "logs", name, "--all-containers")


@pytest.fixture(scope="module")
def running(cluster: Cluster, definitions: str) -> Iterator[Running]:
    with cluster.namespace("given-away") as namespace:
        settings = f"crds.install=false,image.repository=headgate,watchNamespaces={{{namespace}}}"
        settings += f",{POLLED}"
        cluster.helm("install", "streams", str(CHART), "-n", namespace, "--set", settings, *WAIT)
        cluster.apply(
            CLAIM,
            config_map("steps", **{"steps.py": STEPS}),
            secret("broker", password=PLANTED["PASSWORD"]),
            secret("bucket", AWS_SECRET_ACCESS_KEY=PLANTED["AWS_SECRET_ACCESS_KEY"]),
            STREAM_JOB,
            namespace=namespace,
        )
        try:
            try:
                cluster.kubectl("wait", "-n", namespace, "--for=create", f"sj/{JOB}")
                cluster.wait(namespace, "condition=Ready", f"sj/{JOB}", seconds=600)
            except CommandError as error:
                raise AssertionError(f"{error}\n{explain(cluster, namespace)}") from None
            yield Running(cluster, namespace)
        finally:
            if cluster.get("sj", "-n", namespace)["items"]:
                remove(cluster, namespace, JOB)
            cluster.helm("uninstall", "streams", "-n", namespace, *WAIT)


def test_pods_listen_on_the_ports_of_the_table_and_answer_strangers_nothing(
    running: Running,
) -> None:
    cluster, namespace = running.cluster, running.namespace
    scanner(cluster, namespace)
    known = {
        number
        for port in ports.ALL
        for number in range(port.number, (port.last or port.number) + 1)
    }
    (head,), (worker, *_) = running.pods("head"), running.pods("worker")
    for name in (head, worker):
        found = listening(cluster, namespace, name)
        assert found <= known, (name, sorted(found - known), sockets(cluster, namespace, name))
        assert ports.REST.number in found
        answers = asked(cluster, namespace, name, ports.REST.number)
        good = {each for each, status in answers.items() if status == 200}
        assert good == {"GET /healthz", "GET /readyz"}, (name, answers)
        assert {answers[each] for each in answers.keys() - good} <= {401, 403, 404, 405}
        for port in sorted(found - {ports.REST.number}):
            answers = asked(cluster, namespace, name, port)
            good = {each for each, status in answers.items() if status == 200}
            # The metrics are the answer to every path of their port, and to nothing but GET.
            reads = {each for each in answers if each.startswith("GET ")}
            assert good <= (reads if port == ports.METRICS.number else set()), (name, port, good)
        address = cluster.get("pod", name, "-n", namespace)["status"]["podIP"]
        url = f"http://{address}:{ports.METRICS.number}/v1/job"
        text = cluster.inside(namespace, "scanner", "curl", "-sS", url)
        assert all(line.startswith(("#", "headgate_", "python_")) for line in text.splitlines())


def test_pods_of_a_job_have_no_token_of_the_api_server(running: Running) -> None:
    for name in (*running.pods("head"), *running.pods("worker")):
        pod = running.cluster.get("pod", name, "-n", running.namespace)["spec"]
        assert not any("projected" in each for each in pod["volumes"]), pod["volumes"]
        looked = running.cluster.inside(running.namespace, name, "ls", "/var/run")
        assert "secrets" not in looked.split()


def test_planted_secrets_are_nowhere_but_in_their_secrets(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test comes last: it deletes the job, with a savepoint."""
    cluster, namespace = running.cluster, running.namespace
    token = base64.b64decode(
        cluster.get("secret", f"{JOB}-token", "-n", namespace)["data"]["auth_token"]
    ).decode()
    (head,) = running.pods("head")
    for path in READ:
        ask = ("curl", "-sS", "-H", f"Authorization: Bearer {token}")
        url = f"http://$HEADGATE_POD_IP:{ports.REST.number}/v1/{path}"
        answer = cluster.inside(
            namespace, head, "sh", "-c", f"{' '.join(ask[:2])} -H '{ask[3]}' {url}"
        )
        assert json.loads(answer), path
        running.said[f"GET /v1/{path}"] = answer.encode()
    running.keep_objects("while it runs")
    volume = cluster.get("pvc", "state", "-n", namespace)["spec"]["volumeName"]
    storage = Path(cluster.get("pv", volume)["spec"]["hostPath"]["path"])
    cluster.kubectl("delete", "sj", JOB, "-n", namespace, "--timeout=600s")
    running.keep_objects("behind its end")
    names = {path.relative_to(storage).as_posix() for path in storage.rglob("*") if path.is_file()}
    assert any(name.startswith("savepoints/") for name in names), names
    for name in names:
        running.said[f"file {name}"] = (storage / name).read_bytes()

    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(STREAM_JOB))
    (tmp_path / "steps.py").write_text(STEPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PASSWORD", PLANTED["PASSWORD"])
    explained = headgate_command("explain", str(manifest))
    ended_with(explained, 0)
    running.said["headgate explain"] = (explained.stdout + explained.stderr).encode()

    found = [
        f"{name} is in {where}"
        for name, value in {**PLANTED, "the job's token": token}.items()
        for where, text in running.said.items()
        if any(form in text for form in forms(value))
    ]
    assert found == []
    assert len(running.said) > 60


def forms(value: str) -> list[bytes]:
    """Return a secret in all its encodings, such as that of Secrets, at every offset."""
    plain = value.encode()
    return [
        plain,
        plain.hex().encode(),
        *(base64.b64encode(b"x" * n + plain)[4:-4] for n in range(3)),
    ]
