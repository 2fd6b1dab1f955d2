"""Goal: pods run, restart, wait and end on the process kubelet as they do on a real one.

Method: real pods of a real API server. The containers report in their logs.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from headgate.tests.kube.pods import (
    RESTRICTED,
    Object,
    config_map,
    container,
    pod,
    pod_spec,
    secret,
    stateful_set,
)
from headgate.tests.support.kube.cluster import WAIT_S_MAX, Cluster
from headgate.tests.support.kube.kubelet.network import GATEWAY, Network

SLEEP = ("sleep", "infinity")
SERVE = (
    "python",
    "-c",
    "import http.server, os\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200 if not os.path.exists('/tmp/bad') else 503); self.end_headers()\n"
    "        self.wfile.write(os.environ['HOSTNAME'].encode())\n"
    "    def log_message(self, *_): pass\n"
    "http.server.HTTPServer((os.environ['POD_IP'], 8080), H).serve_forever()\n",
)
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A server on the machine's loopback."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"outside")

    def log_message(self, *_: object) -> None:
        pass


def test_a_stateful_set_runs_and_a_killed_process_is_a_restart(
    cluster: Cluster, namespace: str
) -> None:
    # A node has room for one of them only, whatever else is there.
    large = container(*SLEEP, resources={"requests": {"cpu": "5"}})
    cluster.apply(stateful_set("web", 2, pod_spec(large)), namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.readyReplicas}=2", "statefulset/web")
    nodes = {p["spec"]["nodeName"] for p in cluster.get("pods", "-n", namespace)["items"]}
    assert nodes == {"node-a", "node-b"}
    before = cluster.pid(namespace, "web-1")
    os.kill(before, signal.SIGKILL)
    restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    cluster.wait(namespace, restarted, "pod/web-1")
    cluster.wait(namespace, "condition=Ready", "pod/web-1")
    status = cluster.get("pod", "web-1", "-n", namespace)["status"]["containerStatuses"][0]
    assert status["lastState"]["terminated"]["exitCode"] == 137
    assert cluster.pid(namespace, "web-1") != before


def test_a_container_sees_its_volumes_its_variables_and_nothing_of_the_machines_tmp(
    cluster: Cluster, namespace: str
) -> None:
    look = container(
        "sh",
        "-ec",
        'cat /etc/headgate/job/job.yaml /run/headgate/key; echo; echo "$NAME $KEY $NODE $COPY $(hostname)";'
        "id -u; ls /tmp; touch /tmp/ours; touch /etc/not 2>&1 || true; headgate --version",
        env=[
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "COPY", "value": "<$(NAME)>"},
        ],
        volumeMounts=[
            {"name": "job", "mountPath": "/etc/headgate/job"},
            {"name": "secret", "mountPath": "/run/headgate"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    )
    volumes = [
        {"name": "job", "configMap": {"name": "job"}},
        {"name": "secret", "projected": {"sources": [{"secret": {"name": "secret"}}]}},
        {"name": "tmp", "emptyDir": {}},
    ]
    once = pod(
        "look",
        look,
        volumes=volumes,
        restartPolicy="Never",
    )
    # The pod comes first and waits for what it refers to.
    cluster.apply(once, namespace=namespace)
    waits = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=ContainerCreating"
    cluster.wait(namespace, waits, "pod/look")
    files = [config_map("job", **{"job.yaml": "kind: StreamJob\n"}), secret("secret", key="s3cret")]
    cluster.apply(*files, namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.phase}=Succeeded", "pod/look")
    lines = cluster.kubectl("logs", "look", "-n", namespace).splitlines()
    node = cluster.get("pod", "look", "-n", namespace)["spec"]["nodeName"]
    assert lines[:4] == ["kind: StreamJob", "s3cret", f"look s3cret {node} <look> look", "10001"]
    assert "Read-only file system" in lines[4]
    assert lines[5].startswith("headgate 0.")
    assert not Path("/tmp/ours").exists()
    assert not Path("/etc/not").exists()


def test_probes_decide_what_is_ready_and_what_is_restarted(
    cluster: Cluster, namespace: str
) -> None:
    get = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    served = container(
        *SERVE,
        env=[POD_IP],
        ports=[{"name": "http", "containerPort": 8080}],
        startupProbe={**get, "failureThreshold": 60},
        readinessProbe=get,
        livenessProbe={"exec": {"command": ["test", "!", "-e", "/tmp/dead"]}, "periodSeconds": 1},
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    volumes = [{"name": "tmp", "emptyDir": {}}]
    cluster.apply(pod("served", served, volumes=volumes), namespace=namespace)
    cluster.wait(namespace, "condition=Ready", "pod/served")
    root = Path(f"/proc/{cluster.pid(namespace, 'served')}/root")
    (root / "tmp/bad").touch()
    cluster.wait(namespace, "condition=Ready=false", "pod/served")
    (root / "tmp/bad").unlink()
    cluster.wait(namespace, "condition=Ready", "pod/served")
    (root / "tmp/dead").touch()
    restarted = "jsonpath={.status.containerStatuses[0].lastState.terminated.exitCode}"
    cluster.wait(namespace, restarted, "pod/served")


def test_a_service_reaches_ready_pods_by_address_variable_and_name(
    cluster: Cluster, namespace: str
) -> None:
    get = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    ports = [{"containerPort": 8080}]
    served = container(*SERVE, env=[POD_IP], ports=ports, readinessProbe=get)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 8080}]},
    }
    cluster.apply(service, pod("web", served), namespace=namespace)
    cluster.wait(namespace, "condition=Ready", "pod/web")
    elsewhere = http.server.HTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=elsewhere.handle_request, daemon=True).start()
    outside = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "outside",
            "annotations": {"headgate.test/port": str(elsewhere.server_port)},
        },
        "spec": {"ports": [{"port": 8080}]},
    }
    cluster.apply(outside, namespace=namespace)
    ask = (
        "import os, time, urllib.request as u\n"
        "def answer(host):\n"
        "    while True:  # what is new reaches a node some time after the API server\n"
        "        try:\n"
        "            return u.urlopen(f'http://{host}:8080/', timeout=120).read().decode()\n"
        "        except OSError:\n"
        "            time.sleep(0.1)\n"
        f"for host in (os.environ['WEB_SERVICE_HOST'], 'web', 'web.{namespace}.svc', 'outside'):\n"
        "    print(answer(host))\n"
    )
    asking = pod("ask", container("python", "-c", ask), restartPolicy="Never")
    cluster.apply(asking, namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.phase}=Succeeded", "pod/ask")
    assert cluster.kubectl("logs", "ask", "-n", namespace).split() == [
        "web",
        "web",
        "web",
        "outside",
    ]
    elsewhere.server_close()


def test_the_way_out_of_a_pod_stays_the_same_while_others_come_and_go(cluster: Cluster) -> None:
    """A pod that has the former hardware address of the gateway loses the API server for half a minute."""
    network, found = Network(), set()
    for _ in range(6):
        one = asyncio.run(network.plug_in())
        inside = ("nsenter", f"--net={one.namespace}")
        subprocess.run([*inside, "curl", "--silent", f"http://{GATEWAY}:9"], check=False)
        asked = [*inside, "ip", "neighbour", "show", str(GATEWAY)]
        known = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        found.add(known.partition(" lladdr ")[2].split()[0])
        one.close()
    assert len(found) == 1


def test_sigterm_gives_the_grace_period_and_then_all_processes_are_killed(
    cluster: Cluster, namespace: str
) -> None:
    stubborn = (
        "trap 'echo asked to stop >> /shared/log' TERM; sleep infinity & "
        "while true; do sleep 0.1; done"
    )
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    mounted = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    }
    security = {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 10001,
    }
    more = {"volumes": volumes, "securityContext": security}
    stays = pod("stays", container("sh", "-c", stubborn, **mounted), **more)
    cluster.apply(claim, stays, namespace=namespace)
    cluster.wait(namespace, "condition=Ready", "pod/stays")
    process = psutil.Process(cluster.pid(namespace, "stays"))
    deadline = time.monotonic() + WAIT_S_MAX
    # The shell's child begins after its trap is set.
    while not (children := process.children(recursive=True)):
        assert time.monotonic() < deadline, "the shell started nothing"
        time.sleep(0.05)
    everything = [process, *children]
    # The period is long enough for the container to answer, and is then shortened to its end.
    delete = ("delete", "pod", "stays", "-n", namespace)
    cluster.kubectl(*delete, "--grace-period=600", "--wait=false")
    claimed = cluster.get("pvc", "shared", "-n", namespace)["spec"]["volumeName"]
    log = Path(cluster.get("pv", claimed)["spec"]["hostPath"]["path"]) / "log"
    deadline = time.monotonic() + WAIT_S_MAX
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline, "it was not asked to stop"
        time.sleep(0.05)
    assert process.is_running()
    cluster.kubectl(*delete, "--grace-period=1")
    psutil.wait_procs(everything, timeout=WAIT_S_MAX)
    assert [one for one in everything if one.is_running()] == []
    reads = pod("reads", container("cat", "/shared/log", **mounted), restartPolicy="Never", **more)
    cluster.apply(reads, namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.phase}=Succeeded", "pod/reads")
    assert cluster.kubectl("logs", "reads", "-n", namespace) == "asked to stop\n"


def test_a_container_that_failed_has_its_own_last_words_or_its_log(
    cluster: Cluster, namespace: str
) -> None:
    def failing(name: str, script: str, **more: Any) -> Object:
        return pod(name, container("sh", "-c", f"{script}; exit 3", **more), restartPolicy="Never")

    falls_back = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    says = "echo logged; echo why > /dev/termination-log"
    cluster.apply(
        failing("says", says, **falls_back),
        failing("logs", "echo logged", **falls_back),
        failing("silent", "echo logged"),
        namespace=namespace,
    )
    messages = []
    for name in ("says", "logs", "silent"):
        cluster.wait(namespace, "jsonpath={.status.phase}=Failed", f"pod/{name}")
        status = cluster.get("pod", name, "-n", namespace)["status"]["containerStatuses"][0]
        assert status["state"]["terminated"]["exitCode"] == 3
        messages.append(status["state"]["terminated"].get("message", ""))
    assert messages == ["why\n", "logged\n", ""]
    assert not Path("/dev/termination-log").exists()


def test_an_image_that_is_not_there_and_a_pod_that_fits_nowhere_say_so(
    cluster: Cluster, namespace: str
) -> None:
    bad = pod("bad", container(*SLEEP, image="registry.example/none:1"))
    large = pod("large", container(*SLEEP, resources={"requests": {"cpu": "100"}}))
    cluster.apply(bad, large, namespace=namespace)
    waits = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=ErrImagePull"
    cluster.wait(namespace, waits, "pod/bad")
    why = "0/2 nodes are available: 2 Insufficient cpu."
    cluster.wait(namespace, f"jsonpath={{.status.conditions[*].message}}={why}", "pod/large")
    cluster.wait(namespace, "condition=PodScheduled=false", "pod/large")


def test_a_drained_node_loses_its_pods_and_the_other_one_takes_them(
    cluster: Cluster, namespace: str
) -> None:
    cluster.apply(stateful_set("drained", 2, pod_spec(container(*SLEEP))), namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.readyReplicas}=2", "statefulset/drained")
    try:
        cluster.kubectl("drain", "node-a", "--pod-selector=app=drained", "--timeout=300s")
        # The status of the set may still be that of before.
        for name in ("drained-0", "drained-1"):
            cluster.wait(namespace, "create", f"pod/{name}")
            cluster.wait(namespace, "jsonpath={.spec.nodeName}=node-b", f"pod/{name}")
            cluster.wait(namespace, "condition=Ready", f"pod/{name}")
    finally:
        cluster.kubectl("uncordon", "node-a")


def test_a_pod_reaches_the_api_server_with_the_token_of_its_service_account(
    cluster: Cluster, namespace: str
) -> None:
    ask = (
        "import json, os, ssl, urllib.request as u\n"
        "d = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "r = {'apiVersion': 'authentication.k8s.io/v1', 'kind': 'SelfSubjectReview'}\n"
        "url = 'https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}'.format(**os.environ)\n"
        "q = u.Request(url + '/apis/authentication.k8s.io/v1/selfsubjectreviews', json.dumps(r).encode())\n"
        "q.add_header('Authorization', 'Bearer ' + open(d + 'token').read())\n"
        "q.add_header('Content-Type', 'application/json')\n"
        "answer = u.urlopen(q, context=ssl.create_default_context(cafile=d + 'ca.crt'), timeout=120)\n"
        "print(json.dumps(json.load(answer)['status']['userInfo']['username']))\n"
    )
    once = container("python", "-c", ask, securityContext=RESTRICTED)
    cluster.apply(pod("ask", once, restartPolicy="Never"), namespace=namespace)
    cluster.wait(namespace, "jsonpath={.status.phase}=Succeeded", "pod/ask")
    said = json.loads(cluster.kubectl("logs", "ask", "-n", namespace))
    assert said == f"system:serviceaccount:{namespace}:default"
