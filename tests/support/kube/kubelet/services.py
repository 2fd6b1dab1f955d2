"""The work of kube-proxy and the cluster's DNS: connections to services reach pods, names are known.

A listener on the address of a service passes connections on: to ready pods in turn, to the API server, or
to a port of the machine's loopback that a test names by the annotation `headgate.test/port`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.tests.support.kube.kubelet.network import Network
from headgate.tests.support.kube.kubelet.pod import Pod
from headgate.tests.support.kube.kubelet.spec import port_number, selects

Object = dict[str, Any]
CHUNK_BYTES = 65536
OUTSIDE = "headgate.test/port"
DOMAIN = "svc.cluster.local"


@dataclass
class Services:
    """Listeners for all services, and a hosts file for each namespace."""

    directory: Path
    network: Network
    api_port: int
    """The port of the API server, on loopback."""
    pods: Callable[[], Iterable[Pod]]
    known: dict[str, Object] = field(default_factory=dict)
    _servers: dict[tuple[str, int], asyncio.Server] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def changed(self, services: Iterable[Object]) -> None:
        """Listen for exactly these services."""
        async with self._changing:
            self.known = {s["metadata"]["uid"]: s for s in services}
            wanted = {
                (address, port["port"]): (service["metadata"]["uid"], port)
                for service in self.known.values()
                if (address := service["spec"].get("clusterIP")) not in (None, "", "None")
                for port in service["spec"].get("ports", [])
                if port.get("protocol", "TCP") == "TCP"
            }
            for key in self._servers.keys() - wanted.keys():
                self._servers.pop(key).close()
            for key in wanted.keys() - self._servers.keys():
                uid, port = wanted[key]
                with contextlib.suppress(OSError):
                    listening = self.network.listen(*key)
                    handler = self._handler(uid, port)
                    self._servers[key] = await asyncio.start_server(handler, sock=listening)
        self.write_hosts()

    def _handler(
        self, uid: str, port: Object
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inner_reader, inner_writer = await self._dial(uid, port)
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

        return pass_on

    async def _dial(
        self, uid: str, port: Object
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to what is behind the service; of several ready pods it is each in turn."""
        service = self.known.get(uid)
        if service is None:
            raise ConnectionRefusedError
        outside = service["metadata"].get("annotations", {}).get(OUTSIDE)
        if _full_name(service) == "kubernetes.default":
            outside = self.api_port
        if outside is not None:
            return await asyncio.open_connection("127.0.0.1", int(outside))
        found = self._pods_of(service)
        if not found:
            raise ConnectionRefusedError
        self._next[uid] = self._next.get(uid, 0) + 1
        pod = found[self._next[uid] % len(found)]
        wanted = port.get("targetPort", port["port"])
        for container in pod.pod["spec"]["containers"]:
            with contextlib.suppress(StopIteration):
                return await self.network.connect(pod.ip, port_number(container, wanted))
        raise ConnectionRefusedError

    def _pods_of(self, service: Object) -> list[Pod]:
        early = service["spec"].get("publishNotReadyAddresses", False)
        return [
            pod
            for pod in self.pods()
            if pod.pod["metadata"]["namespace"] == service["metadata"]["namespace"]
            if selects(service["spec"].get("selector"), pod.pod["metadata"].get("labels"))
            if pod.ready or (early and pod.phase == "Running")
        ]

    def of_namespace(self, namespace: str) -> list[Object]:
        return [s for s in self.known.values() if s["metadata"]["namespace"] == namespace]

    def hosts_file(self, namespace: str) -> Path:
        """The hosts file of the pods of a namespace; it is rewritten in place as services change."""
        path = self.directory / namespace
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._hosts(namespace))
        return path

    def write_hosts(self) -> None:
        """Rewrite the hosts files, because services or the pods behind them changed."""
        for path in self.directory.glob("*"):
            text = self._hosts(path.name)
            if path.read_text() != text:
                # It is never empty: a container may be reading it.
                with path.open("r+") as file:
                    file.write(text)
                    file.truncate()

    def _hosts(self, namespace: str) -> str:
        lines = ["127.0.0.1 localhost"]
        for service in self.known.values():
            name = _full_name(service)
            names = [name, f"{name}.svc", f"{name}.{DOMAIN}"]
            if service["metadata"]["namespace"] == namespace:
                names.append(service["metadata"]["name"])
            address = service["spec"].get("clusterIP")
            pods = self._pods_of(service)
            if address not in (None, "", "None"):
                lines.append(" ".join([address, *names]))
            elif pods:
                lines.append(" ".join([pods[0].ip, *names]))
            lines += [
                " ".join([pod.ip, *(f"{pod.pod['metadata']['name']}.{one}" for one in names)])
                for pod in pods
                if pod.pod["spec"].get("subdomain") == service["metadata"]["name"]
            ]
        return "\n".join(lines) + "\n"


def _full_name(service: Object) -> str:
    return f"{service['metadata']['name']}.{service['metadata']['namespace']}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side ends, and then end the other."""
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (OSError, RuntimeError):
        writer.transport.abort()
