"""A real Kubernetes control plane on loopback: etcd, the API server and the controller manager.

Nothing listens on another address than 127.0.0.1. The API server must *advertise* an address that is not of
loopback, else it refuses to start. It gets one that does not exist, and nothing connects to it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headgate.testing.servers.process import HeldPort
from headgate.tests.support.kube.programs import Programs

START_S_MAX = 300
REQUEST_S_MAX = 120
STOP_S_MAX = 15
ADVERTISED = "192.0.2.1"
"""An address for documentation (RFC 5737), which no machine has."""
AUDITED = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
"""Rights that service accounts ask for, without those of the controllers; a test compares them."""
SERVICE_RANGE = "10.96.0.0/16"
"""Addresses of services, which exist in the network of the pods only (`kubelet/network.py`)."""
UNUSED_CONTROLLERS = (
    *("cloud-node-lifecycle-controller", "node-ipam-controller", "node-route-controller"),
    *("service-lb-controller", "persistentvolume-attach-detach-controller"),
)


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane. `kubeconfig` has the rights of an administrator."""

    server: str
    port: int
    token: str
    ca_file: Path
    kubeconfig: Path
    directory: Path

    def requests(self, user: str) -> list[dict[str, Any]]:
        """Return all requests of a service account until now, from the API server's audit log."""
        # The last line may be half written.
        lines = (self.directory / "audit.log").read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if user in line and line.endswith("\n")]
        return [event for event in events if event["user"]["username"] == user]

    def context(self) -> ssl.SSLContext:
        """Return the context that verifies the API server's certificate."""
        return ssl.create_default_context(cafile=str(self.ca_file))


class Connection:
    """One connection to the API server, with the rights of an administrator, for many requests.

    It costs a small part of what a process of kubectl does.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._headers = {
            "Authorization": f"Bearer {plane.token}",
            "Content-Type": "application/json",
        }
        host = plane.server.removeprefix("https://").rpartition(":")[0]
        self._connection = http.client.HTTPSConnection(
            host, plane.port, timeout=REQUEST_S_MAX, context=plane.context()
        )

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the answer of the API server; None if there is no such object.

        Raises:
            RequestError: it refuses, or does not answer.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to an object that is sent; a request whose connection breaks is sent again.

        Raises:
            RequestError: as above.
        """
        answer = self._call("POST", path, json.dumps(body))
        if answer is None:
            raise RequestError(f"POST {path}: not found")
        return answer

    def _call(self, method: str, path: str, data: str | None) -> dict[str, Any] | None:
        deadline = time.monotonic() + REQUEST_S_MAX
        while True:
            try:
                self._connection.request(method, path, data, self._headers)
                answer = self._connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()  # the next request opens it again
                if time.monotonic() > deadline:
                    raise RequestError(f"{method} {path}: {error!r}") from error
                time.sleep(0.1)
        if answer.status == 404:
            return None
        if answer.status >= 400:
            raise RequestError(f"{method} {path}: {answer.status} {text.decode()[:1000]}")
        found: dict[str, Any] = json.loads(text)
        return found


class RequestError(Exception):
    """A request that the API server refused or did not answer."""


@contextlib.contextmanager
def running(
    programs: Programs, directory: Path, listen: str = "127.0.0.1"
) -> Iterator[ControlPlane]:
    """Run a control plane for the time of the block, with its data and logs in `directory`.

    Args:
        programs: the programs that are started.
        directory: an empty directory.
        listen: the address of this machine where the API server listens.

    Raises:
        RuntimeError: one of the processes ended or does not answer; the text has the end of its log.
    """
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(HeldPort()) for _ in range(3)]
        stack.enter_context(_etcd(programs, directory, ports[0], ports[1]))
        plane = _prepare(directory, listen, ports[2])
        stack.enter_context(_apiserver(programs, plane, ports[0], listen))
        stack.enter_context(_controller_manager(programs, plane))
        yield plane


def _etcd(
    programs: Programs, directory: Path, port: int, peer_port: int
) -> contextlib.AbstractContextManager[None]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    command = [
        *(str(programs.etcd), "--name", "test", "--data-dir", str(directory / "etcd")),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"test={peer}", "--logger", "zap", "--log-level", "error"),
    ]
    return run_process("etcd", command, directory, lambda: is_ok(f"{client}/health"), killed=True)


def _prepare(directory: Path, address: str, port: int) -> ControlPlane:
    """Make the keys and files with which the processes are started."""
    token = secrets.token_hex(16)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (directory / "service-account.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    (directory / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    (directory / "certificates").mkdir()
    (directory / "audit.json").write_text(json.dumps(AUDITED))
    plane = ControlPlane(
        server=f"https://{address}:{port}",
        port=port,
        token=token,
        ca_file=directory / "certificates" / "apiserver.crt",
        kubeconfig=directory / "kubeconfig",
        directory=directory,
    )
    plane.kubeconfig.touch(mode=0o600)
    plane.kubeconfig.write_text(kubeconfig(plane, token))
    return plane


def kubeconfig(plane: ControlPlane, token: str, namespace: str = "default") -> str:
    """Return the text of a kubeconfig file for the holder of `token` (JSON is YAML too)."""
    cluster = {"server": plane.server, "certificate-authority": str(plane.ca_file)}
    context = {"cluster": "test", "user": "test", "namespace": namespace}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
    )


def _apiserver(
    programs: Programs, plane: ControlPlane, etcd_port: int, listen: str
) -> contextlib.AbstractContextManager[None]:
    key = str(plane.directory / "service-account.key")
    command = [
        *(str(programs.apiserver), f"--etcd-servers=http://127.0.0.1:{etcd_port}"),
        *(
            f"--bind-address={listen}",
            f"--secure-port={plane.port}",
            f"--advertise-address={ADVERTISED}",
        ),
        *(
            f"--cert-dir={plane.ca_file.parent}",
            f"--token-auth-file={plane.directory / 'tokens.csv'}",
        ),
        *("--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc"),
        *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
        *(f"--service-cluster-ip-range={SERVICE_RANGE}", "--profiling=false"),
        *(
            f"--audit-policy-file={plane.directory / 'audit.json'}",
            f"--audit-log-path={plane.directory / 'audit.log'}",
        ),
        # As on OpenShift: an owner that blocks its deletion is a right of its own.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        "--kubelet-preferred-address-types=InternalIP",
    ]
    return run_process(
        "kube-apiserver", command, plane.directory, lambda: _ready(plane), killed=True
    )


def _controller_manager(
    programs: Programs, plane: ControlPlane
) -> contextlib.AbstractContextManager[None]:
    controllers = ",".join(["*", *(f"-{name}" for name in UNUSED_CONTROLLERS)])
    command = [
        *(str(programs.controller_manager), f"--kubeconfig={plane.kubeconfig}", "--secure-port=0"),
        *(
            "--leader-elect=false",
            # A node whose heartbeats a slow machine delays stays ready.
            "--node-monitor-grace-period=5m",
            f"--root-ca-file={plane.ca_file}",
            f"--controllers={controllers}",
        ),
        f"--service-account-private-key-file={plane.directory / 'service-account.key'}",
        *("--use-service-account-credentials=true", "--kube-api-qps=200", "--kube-api-burst=300"),
    ]
    # It makes the default service account of each namespace, without which no pod is admitted.
    account = f"{plane.server}/api/v1/namespaces/default/serviceaccounts/default"
    return run_process(
        "kube-controller-manager",
        command,
        plane.directory,
        lambda: is_ok(account, plane),
        killed=True,
    )


def _ready(plane: ControlPlane) -> bool:
    return plane.ca_file.exists() and is_ok(f"{plane.server}/readyz", plane)


def is_ok(url: str, plane: ControlPlane | None = None) -> bool:
    headers = {"Authorization": f"Bearer {plane.token}"} if plane else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers),
            timeout=30,
            context=plane.context() if plane else None,
        ) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def run_process(
    name: str,
    command: list[str],
    directory: Path,
    answers: Callable[[], bool],
    env: dict[str, str] | None = None,
    *,
    killed: bool = False,
) -> Iterator[None]:
    """Run a process for the time of the block, which begins when it answers; its log is in `directory`.

    With `killed` it is killed in the end, because nobody needs its data any more.

    Raises:
        RuntimeError: it ended or does not answer; the text has the end of its log.
    """
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            bound_to_us(command), stdout=output, stderr=subprocess.STDOUT, cwd=directory, env=env
        )
    try:
        deadline = time.monotonic() + START_S_MAX
        while not answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{name} did not start: {log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.1)
        yield
    finally:
        if killed:
            process.kill()
        stop(process)


def bound_to_us(command: list[str]) -> list[str]:
    """Return the command in a form in which the kernel kills its process whenever ours dies."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, by force if it does not end by itself."""
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment(plane: ControlPlane) -> dict[str, str]:
    """Return the environment of kubectl and helm, in which they do not touch files of the user."""
    home = plane.directory / "home"
    home.mkdir(exist_ok=True)
    ours = {
        "KUBECONFIG": str(plane.kubeconfig),
        "HOME": str(home),
        "KUBECACHEDIR": str(home / "cache"),
    }
    theirs = ("KUBE", "HELM_", "XDG_")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(theirs)}, **ours}
