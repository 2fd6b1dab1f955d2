"""Goal: the tests' API server is a real one: version, admission, authorization, and loopback only."""

from __future__ import annotations

import contextlib
import json

import psutil
import pytest

from headgate.tests.kube.pods import container, pod
from headgate.tests.support.kube.cluster import Cluster, CommandError
from headgate.tests.support.kube.programs import KUBERNETES


def test_it_answers_with_its_version(api_server: Cluster) -> None:
    assert json.loads(api_server.kubectl("get", "--raw", "/version"))["gitVersion"] == KUBERNETES
    assert api_server.kubectl("get", "--raw", "/readyz") == "ok"


def test_nothing_listens_on_another_address_than_loopback(api_server: Cluster) -> None:
    directory = str(api_server.plane.directory)
    listening = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a container may end meanwhile
            if directory in " ".join(process.cmdline()):
                listening += [
                    (process.name(), connection.laddr.ip)
                    for connection in process.net_connections("inet")
                    if connection.status == psutil.CONN_LISTEN
                ]
    assert {name for name, _ in listening} >= {"etcd", "kube-apiserver"}
    assert [entry for entry in listening if not entry[1].startswith("127.")] == []


def test_a_pod_that_is_not_restricted_is_refused(api_server: Cluster, namespace: str) -> None:
    root = pod("root", container("true", securityContext={}))
    with pytest.raises(CommandError, match='violates PodSecurity "restricted'):
        api_server.apply(root, namespace=namespace)


def test_a_service_account_may_do_nothing_at_first(api_server: Cluster, namespace: str) -> None:
    token = api_server.token(namespace, "default")
    with pytest.raises(CommandError, match=r"Forbidden.*cannot list resource \"secrets\""):
        api_server.kubectl("get", "secrets", "-n", namespace, token=token)
    with pytest.raises(CommandError, match="Unauthorized"):
        api_server.kubectl("get", "pods", "-n", namespace, token="wrong")
