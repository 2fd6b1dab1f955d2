"""Goal: the operator never replaces objects of others, and removes fields that it leaves out.

Method: the executor of actions on a real API server, with the objects of a job.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="pip install 'headgate[k8s]'")

from headgate.k8s import objects
from headgate.k8s.actions import Action, Create, Replace
from headgate.k8s.operator.api import FIELD_MANAGER, Api, ApiError
from headgate.k8s.operator.execute import Executor
from headgate.tests.k8s.conftest import deployment
from headgate.tests.kube.operators import Object
from headgate.tests.support.kube import control_plane
from headgate.tests.support.kube.cluster import Cluster

__all__ = ["deployment"]


@pytest.fixture
def supporting(deployment: Callable[..., Any], namespace: str) -> list[Object]:
    """The objects that are changed while a job runs, without their owner."""
    found = []
    for each in objects.supporting(deployment()):
        made = copy.deepcopy(each)
        made["metadata"]["namespace"] = namespace
        del made["metadata"]["ownerReferences"]
        found.append(made)
    assert {each["kind"] for each in found} == {
        *("Service", "NetworkPolicy", "PodDisruptionBudget"),
    }
    return found


@pytest.fixture
def execute(
    api_server: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Object]]:
    """Execute actions, and return the answers of the API server."""
    for name, value in control_plane.environment(api_server.plane).items():
        monkeypatch.setenv(name, value)
    resource = {"kind": "StreamJob", "metadata": {"namespace": namespace, "resourceVersion": "1"}}

    def run(*lists: list[Action]) -> list[Object]:
        written: list[Any] = []

        async def main() -> None:
            async with await Api.from_environment() as api:
                coordinators: Any = None
                executor = Executor(api, coordinators, written.append, "test", lambda: "")
                await asyncio.gather(*(executor.execute(resource, each) for each in lists))

        asyncio.run(main())
        return written

    return run


def replaced(execute: Callable[..., list[Object]], wanted: Object, seen: Object) -> list[Object]:
    """Return the result of replacing an object; nothing if it has changed since it was seen."""
    try:
        return execute([Replace(wanted, seen["metadata"]["resourceVersion"])])
    except ApiError as error:
        if error.status != 409:
            raise
        return []


def test_a_field_that_a_newer_operator_leaves_out_goes(
    api_server: Cluster,
    namespace: str,
    supporting: list[Object],
    execute: Callable[..., list[Object]],
) -> None:
    older = copy.deepcopy(supporting)
    for each in older:
        each["metadata"]["annotations"]["headgate.io/old"] = "x"
        each["metadata"]["labels"]["old"] = "x"
        if each["kind"] == "Service":
            each["spec"]["ports"].append({"name": "old", "port": 9999, "protocol": "TCP"})
            each["spec"]["sessionAffinity"] = "ClientIP"
        elif each["kind"] == "NetworkPolicy":
            each["spec"]["egress"] = [{}]
    execute([Create(each) for each in older])
    now = []
    for wanted in supporting:
        name = (wanted["kind"], wanted["metadata"]["name"], "-n", namespace)
        while not (written := replaced(execute, wanted, api_server.get(*name))):
            pass  # its controller has written a status meanwhile
        now += written
    for each, wanted in zip(now, supporting, strict=True):
        assert each["metadata"]["annotations"] == wanted["metadata"]["annotations"], each["kind"]
        assert each["metadata"]["labels"] == wanted["metadata"]["labels"]
        fields = each["metadata"]["managedFields"]
        ours = {one["operation"] for one in fields if one["manager"] == FIELD_MANAGER}
        assert ours == {"Apply"}
    service, policy, _ = now
    assert "old" not in [port["name"] for port in service["spec"]["ports"]]
    assert service["spec"]["sessionAffinity"] == "None"
    assert "egress" not in policy["spec"]


def test_create_does_not_replace(
    api_server: Cluster,
    namespace: str,
    supporting: list[Object],
    execute: Callable[..., list[Object]],
) -> None:
    """An operator with an old view, or another's object of the same name."""
    theirs = copy.deepcopy(supporting)
    for each in theirs:
        each["metadata"]["labels"] = {"whose": "theirs"}
    api_server.apply(*theirs, namespace=namespace)
    assert execute([Create(each) for each in supporting]) == []
    for each in supporting:
        found = api_server.get(each["kind"], each["metadata"]["name"], "-n", namespace)
        assert found["metadata"]["labels"] == {"whose": "theirs"}


def test_of_two_operators_one_makes_it(
    supporting: list[Object], execute: Callable[..., list[Object]]
) -> None:
    lists = [[Create(each)] for each in supporting for _ in range(8)]
    made = execute(*lists)
    assert len(made) == len(supporting)
