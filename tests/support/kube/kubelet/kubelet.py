"""The process kubelet: nodes whose containers are local processes.

It registers nodes, binds pending pods to them, runs the containers (see `sandbox.py`), and reports. It also
does the work of kube-proxy, of the cluster's DNS and of a provisioner of volumes. It is not a copy of the
real kubelet: there are no resource limits and no network policies.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headgate.tests.support.kube.kubelet import nodes, spec
from headgate.tests.support.kube.kubelet.api import Api, ApiError, Mirror
from headgate.tests.support.kube.kubelet.network import Network
from headgate.tests.support.kube.kubelet.pod import Machine, Pod
from headgate.tests.support.kube.kubelet.services import Services
from headgate.tests.support.kube.kubelet.volumes import TOKEN_SECONDS

Object = dict[str, Any]
HEARTBEAT_S = 10
SCHEDULE_S = 0.5


@dataclass
class Kubelet:
    """All nodes of a cluster, in one process."""

    api: Api
    directory: Path
    node_names: list[str]
    capacity: nodes.Capacity
    images: dict[str, str]
    """Patterns of the images that can be pulled, with a directory of programs each, or an empty text."""
    network: Network
    log_port: int = 0
    pods: dict[str, Pod] = field(default_factory=dict)
    services: Services = field(init=False)
    _mirrors: dict[str, Mirror] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _changing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        port = int(self.api.server.rpartition(":")[2])
        hosts = self.directory / "hosts"
        self.services = Services(hosts, self.network, port, lambda: self.pods.values())
        watched = {
            "nodes": self._something,
            "configmaps": self._something,
            "secrets": self._something,
            "persistentvolumes": self._something,
            "persistentvolumeclaims": self._something,
            "services": self._services_changed,
            "pods": self._pod_changed,
        }
        self._mirrors = {
            kind: Mirror(self.api, f"/api/v1/{kind}", changed) for kind, changed in watched.items()
        }

    async def run(self, ready: asyncio.Event) -> None:
        """Serve until cancelled; then all processes are killed, and nothing is reported any more."""
        for name in self.node_names:
            await nodes.register(self.api, name, self.capacity, self.log_port)
        async with asyncio.TaskGroup() as group:
            for kind, mirror in self._mirrors.items():
                group.create_task(mirror.follow())
                if kind != "pods":
                    await mirror.synced.wait()
            group.create_task(self._heartbeats())
            group.create_task(self._schedule())
            ready.set()

    def _something(self, found: Object, gone: bool) -> None:
        self._wake.set()

    def _services_changed(self, found: Object, gone: bool) -> None:
        services = self._mirrors["services"].objects.values()
        task = asyncio.create_task(self.services.changed(list(services)))
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    def _pod_changed(self, found: Object, gone: bool) -> None:
        uid = found["metadata"]["uid"]
        self._wake.set()
        if uid in self.pods:
            self.pods[uid].changed(found, gone)
            self.services.write_hosts()
        elif not gone and found["spec"].get("nodeName") in self.node_names:
            self._begin(uid, found)

    def _begin(self, uid: str, found: Object) -> None:
        pod = Pod(found, self._machine(uid, found))
        self.pods[uid] = pod
        pod.changed(found, gone=False)
        task = asyncio.create_task(pod.run())
        self._tasks[uid] = task

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception():
                traceback.print_exception(task.exception())
            self.pods.pop(uid, None)
            self._tasks.pop(uid, None)

        task.add_done_callback(ended)

    def _machine(self, uid: str, found: Object) -> Machine:
        metadata = found["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"

        async def token(wanted: Object) -> str:
            audiences = [wanted["audience"]] if wanted.get("audience") else []
            bound = {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid}
            request = {
                "audiences": audiences,
                "boundObjectRef": bound,
                "expirationSeconds": max(600, wanted.get("expirationSeconds", TOKEN_SECONDS)),
            }
            account = found["spec"].get("serviceAccountName", "default")
            made = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
            try:
                answer = await self.api.post(made, {"spec": request})
            except ApiError as error:
                raise spec.NotReadyError(f"there is no token of {account}: {error}") from None
            return str(answer["status"]["token"])

        async def report(status: Object) -> None:
            body = {"metadata": {"uid": uid}, "status": status}
            await self.api.until_answered(lambda: self.api.patch(f"{path}/status", body))

        async def remove() -> None:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            await self.api.until_answered(lambda: self.api.delete(path, body))

        return Machine(
            directory=self.directory / "pods" / uid,
            lookup=lambda kind, wanted: self._lookup(kind, namespace, wanted),
            claim=lambda wanted: self._claim(namespace, wanted),
            token=token,
            report=report,
            remove=remove,
            environment=lambda: self._environment(namespace),
            hosts=self.services.hosts_file(namespace),
            network=self.network,
            image=self._image,
        )

    def _environment(self, namespace: str) -> Mapping[str, str]:
        shown = self.services.of_namespace(namespace)
        if namespace != "default":
            api = self.services.of_namespace("default")
            shown = [*shown, *(s for s in api if s["metadata"]["name"] == "kubernetes")]
        return spec.service_environment(shown)

    def _lookup(self, kind: str, namespace: str, name: str) -> Mapping[str, bytes] | None:
        found = self._find(kind, namespace, name)
        if found is None:
            return None
        if kind == "secrets":
            return {k: base64.b64decode(v) for k, v in found.get("data", {}).items()}
        binary = {k: base64.b64decode(v) for k, v in found.get("binaryData", {}).items()}
        return {**{k: v.encode() for k, v in found.get("data", {}).items()}, **binary}

    def _find(self, kind: str, namespace: str, name: str) -> Object | None:
        for found in self._mirrors[kind].objects.values():
            metadata = found["metadata"]
            if metadata["name"] == name and metadata.get("namespace") == namespace:
                return found
        return None

    def _claim(self, namespace: str, name: str) -> Path:
        claim = self._find("persistentvolumeclaims", namespace, name)
        if claim is None or claim.get("status", {}).get("phase") != "Bound":
            raise spec.NotReadyError(f"persistentvolumeclaim {name} is not bound")
        for volume in self._mirrors["persistentvolumes"].objects.values():
            if volume["metadata"]["name"] == claim["spec"]["volumeName"]:
                path = Path(volume["spec"]["hostPath"]["path"])
                path.mkdir(parents=True, exist_ok=True)
                return path
        raise spec.NotReadyError(f"the volume of persistentvolumeclaim {name} is not there")

    def _image(self, image: str) -> str | None:
        return next(
            (programs for known, programs in self.images.items() if fnmatch(image, known)), None
        )

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for name in self.node_names:
                with contextlib.suppress(ApiError):
                    await nodes.renew(self.api, name)

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            await self._provision()
            pods = list(self._mirrors["pods"].objects.values())
            for pod in pods:
                waits = not pod["spec"].get("nodeName") and not pod["metadata"].get(
                    "deletionTimestamp"
                )
                if waits and not pod["spec"].get("schedulingGates"):
                    await self._bind(pod, pods)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), SCHEDULE_S)

    async def _bind(self, pod: Object, pods: list[Object]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        ours = [
            node
            for node in self._mirrors["nodes"].objects.values()
            if node["metadata"]["name"] in self.node_names
        ]
        node, why = nodes.choose(pod, ours, pods)
        with contextlib.suppress(ApiError):
            if node is not None:
                target = {"apiVersion": "v1", "kind": "Node", "name": node}
                await self.api.post(
                    f"{path}/binding", {"metadata": metadata_of(pod), "target": target}
                )
                pod["spec"]["nodeName"] = node
                return
            told = [c.get("message") for c in pod.get("status", {}).get("conditions", [])]
            if why not in told:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                status = {"conditions": [{**condition, "message": why}]}
                await self.api.patch(f"{path}/status", {"status": status})

    async def _provision(self) -> None:
        """A directory of the machine for each volume claim that has no volume yet."""
        for claim in list(self._mirrors["persistentvolumeclaims"].objects.values()):
            uid = claim["metadata"]["uid"]
            if claim.get("status", {}).get("phase") != "Pending" or claim["spec"].get("volumeName"):
                continue
            reference = {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "uid": uid,
                "namespace": claim["metadata"]["namespace"],
                "name": claim["metadata"]["name"],
            }
            volume = {
                "metadata": {"name": f"pv-{uid}"},
                "spec": {
                    "capacity": claim["spec"]["resources"]["requests"],
                    "accessModes": claim["spec"]["accessModes"],
                    "storageClassName": claim["spec"].get("storageClassName", ""),
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(self.directory / "claims" / uid)},
                    "claimRef": reference,
                },
            }
            with contextlib.suppress(ApiError):
                await self.api.post("/api/v1/persistentvolumes", volume)

    async def stop(self) -> None:
        """Kill all processes, at once."""
        for pod in self.pods.values():
            pod.changed(pod.pod, gone=True)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def metadata_of(pod: Object) -> Object:
    """Return the identity of a pod."""
    return {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
