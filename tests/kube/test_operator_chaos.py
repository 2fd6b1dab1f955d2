"""Goal: an API server that refuses and loses requests costs the operator only time.

Method: the same StreamJobs are made, changed, suspended and deleted in several namespaces of a real API
server: in one as it is, and in the others through a proxy with faults by a seed. The objects at the end
have to be the same. There are no nodes, so no pod runs, and no coordinator answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="pip install 'headgate[k8s]'")

from headgate.k8s.operator.api import Api, Patience
from headgate.tests.kube.operators import Object, stream_job
from headgate.tests.kube.test_operator import definitions
from headgate.tests.kube.test_operator_troubles import at, operating
from headgate.tests.support.kube.cluster import Cluster
from headgate.tests.support.kube.proxies import Faults, FaultyProxy

__all__ = ["definitions"]
PATIENCE = Patience(request_s=5, watch_s=10, margin_s=5)
STEP_S_MAX = 300.0
REST_S_MAX = 300.0
LOOKS_AT_REST = 3
SEEDS = (1, 2)
KINDS = "sts,deploy,cm,svc,netpol,pdb,jobs,secrets,pods,streamjobs,streamsnapshots"
METADATA = ("name", "labels", "annotations", "finalizers")
CHANGING = ("clusterIP", "clusterIPs", "uid", "lastTransitionTime", "startedAt", "phaseSince")
"""Fields that differ from one run to the next, wherever they are."""


def job(name: str, **kubernetes: Any) -> Object:
    made = stream_job(kubernetes=kubernetes)
    made["metadata"]["name"] = name
    return made


def snapshot(name: str, of: str) -> Object:
    return {
        "apiVersion": "headgate.io/v1alpha1",
        "kind": "StreamSnapshot",
        "metadata": {"name": name},
        "spec": {"jobRef": {"name": of}},
    }


class User:
    """A user who makes one request after the other, and waits until the operator has carried it out."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    async def apply(self, *made: Object) -> None:
        await asyncio.to_thread(self.cluster.apply, *made, namespace=self.namespace)

    async def delete(self, *what: str) -> None:
        command = ("delete", *what, "-n", self.namespace, "--wait=false")
        await asyncio.to_thread(self.cluster.kubectl, *command)

    async def until(self, what: str, **status: Any) -> None:
        """Wait until an object has these values in its status; without values until it is deleted."""
        seen: Object | None = None
        for _ in range(int(STEP_S_MAX / 0.2)):
            seen = await asyncio.to_thread(self.cluster.find, self.namespace, what)
            if seen is None and not status:
                return
            if seen is not None and status and _has(seen, status):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(
            f"{what} did not become {status or 'absent'}: {json.dumps(seen)[:3000]}"
        )

    async def live(self) -> None:
        """Take three jobs through changes, a suspension and a mistake."""
        await self.apply(job("a"), job("b"), job("c"), snapshot("s", "b"))
        for name in "abc":
            await self.until(f"sj/{name}", phase="Deploying", run__number=1)
            await self.until(f"deploy/{name}-workers", replicas=3)
        await self.until("streamsnapshot/s", message="the job does not answer")
        changed = job("a", env={"SIZE": "large"})
        await self.apply(changed)
        await self.until("sj/a", phase="Upgrading", run__number=2)
        await self.apply(job("b", state="Suspended"))
        await self.until("sj/b", phase="Suspended")
        await self.until("sts/b-head")
        wrong = copy.deepcopy(changed)
        wrong["spec"]["sinks"]["out"]["prnt"] = {}
        await self.apply(wrong)
        await self.until("sj/a", conditions__Accepted="False")
        await self.apply(changed)
        await self.until("sj/a", conditions__Accepted="True")
        await self.delete("sj/c")
        await self.until("sj/c")
        await self.apply(job("b"))
        await self.until("sj/b", run__number=2)
        await self.until("deploy/a-workers", replicas=3)
        await self.until("deploy/b-workers", replicas=3)
        await self.delete("streamsnapshot/s")
        await self.until("streamsnapshot/s")
        # The dependents of what was deleted go as well.
        for kind in ("sts/c-head", "svc/c-head", "secret/c-token", "netpol/c", "pdb/c-workers"):
            await self.until(kind)

    async def objects(self) -> dict[str, Any]:
        """Return all objects, without the fields that differ between runs."""
        everything = await asyncio.to_thread(self.cluster.get, KINDS, "-n", self.namespace)
        uids = {
            each["metadata"]["uid"]: f"uid of {each['kind']} {each['metadata']['name']}"
            for each in everything["items"]
        }
        text = json.dumps([_plain(each) for each in everything["items"]])
        for uid, name in uids.items():
            text = text.replace(uid, name)
        text = text.replace(self.namespace, "NAMESPACE")
        return {f"{each['kind']} {each['metadata']['name']}": each for each in json.loads(text)}


def _has(seen: Object, wanted: Object) -> bool:
    """True if the status has these values; `run__number` is the field `number` of `run`."""
    status = seen.get("status", {})
    for name, value in wanted.items():
        first, _, second = name.partition("__")
        at_first = status.get(first)
        if first == "conditions":
            at_first = {each["type"]: each["status"] for each in at_first or ()}
        if (at_first or {}).get(second) != value if second else at_first != value:
            return False
    return True


def _plain(made: Object) -> Object:
    kind, metadata = made["kind"], made["metadata"]
    if kind == "Pod":  # its controller gives it a name
        return {"kind": kind, "metadata": {"name": re.sub(r"-\w+-\w{5}$", "", metadata["name"])}}
    plain = {"kind": kind, "metadata": {k: metadata[k] for k in METADATA if k in metadata}}
    annotations = plain["metadata"].get("annotations", {})
    # A hash of the object, with the uid of its owner in it; and what kubectl remembers.
    annotations.pop("headgate.io/content", None)
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    plain |= {name: _without(made[name]) for name in ("spec", "immutable") if name in made}
    plain["data"] = sorted(made.get("data", {})) if kind == "Secret" else made.get("data")
    if kind in ("StreamJob", "StreamSnapshot"):
        plain["status"] = _without(made["status"])
        if kind == "StreamJob":
            # The conditions of pods are their scheduler's, which there is not.
            plain["status"].pop("message", None)
            plain["status"]["conditions"] = {
                each["type"]: (each["status"], each["reason"])
                for each in made["status"]["conditions"]
            }
    return plain


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without(v) for k, v in value.items() if k not in CHANGING}
    return [_without(each) for each in value] if isinstance(value, list) else value


async def lived(user: User, faults: Faults) -> None:
    """Do what `User.live` does, and go on with the faults until there has been one of each kind."""
    await user.live()
    deadline = time.monotonic() + STEP_S_MAX
    while faults.chance and missing(faults):
        assert time.monotonic() < deadline, f"no fault {missing(faults)} in {faults.seen}"
        await asyncio.sleep(0.5)
    faults.chance = 0.0


def missing(faults: Faults) -> set[str]:
    """Return the kinds of faults that there have not been."""
    return {"refuse", "hang", "lose", "cut"} - {each.partition(" ")[0] for each in faults.seen}


async def until_alike(users: list[User]) -> dict[str, Any]:
    """Wait until the objects of all users are the same and stay so; return them.

    They are compared with each other, and not with those of an earlier moment, because a watch or a
    reconciliation that has failed, or a slow machine, may pause for longer than the time between two looks.
    """
    deadline = time.monotonic() + REST_S_MAX
    equal_looks = 0
    while True:
        first, *others = await asyncio.gather(*(user.objects() for user in users))
        at_rest = not [each for each in first if each.startswith("Pod c")]
        alike = at_rest and all(each == first for each in others)
        equal_looks = equal_looks + 1 if alike else 0
        if equal_looks == LOOKS_AT_REST:
            return first
        if time.monotonic() > deadline:
            for user, seen in zip(users[1:], others, strict=True):
                assert set(seen) == set(first), user.namespace
                for name, each in first.items():
                    assert seen[name] == each, (user.namespace, name)
            raise AssertionError(f"the objects do not come to rest: {sorted(first)}")
        await asyncio.sleep(1)


def test_the_same_objects_with_and_without_faults(
    api_server: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users live side by side, each in a namespace with its own operator."""
    all_faults = [Faults(0, chance=0.0), *(Faults(seed, chance=0.2) for seed in SEEDS)]

    async def main(namespaces: list[str]) -> None:
        users = [User(api_server, each) for each in namespaces]
        async with contextlib.AsyncExitStack() as stack:
            for own, faults in zip(namespaces, all_faults, strict=True):
                proxy = FaultyProxy(api_server.plane, faults)
                await stack.enter_async_context(proxy.open())
                at(proxy.url, api_server, tmp_path, monkeypatch)
                api = await stack.enter_async_context(await Api.from_environment(PATIENCE))
                await stack.enter_async_context(operating(api, own))
            await asyncio.gather(*(lived(*each) for each in zip(users, all_faults, strict=True)))
            found = await until_alike(users)
        assert {each for each in found if each.startswith("StreamJob")} == {
            *("StreamJob a", "StreamJob b"),
        }

    with contextlib.ExitStack() as stack:
        made = (api_server.namespace(f"{namespace}-{faults.seed}") for faults in all_faults)
        asyncio.run(main([stack.enter_context(each) for each in made]))
