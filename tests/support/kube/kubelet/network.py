"""The network of the cluster: a namespace with a bridge, and one namespace per pod that is plugged into it.

Nothing of it is on the machine's own network, and it goes when the process does. The process kubelet stays
on the machine's network, where the API server is. Two threads of it are in the other: one opens sockets,
which the event loop waits for, and one runs commands, which take longer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from headgate.tests.support.kube.control_plane import SERVICE_RANGE

PODS = IPv4Network("10.244.0.0/16")
GATEWAY = PODS[1]
BRIDGE = "02:00:00:00:00:01"
"""The hardware address of the bridge. Without one of its own it has that of a pod, and another one when
pods come and go. All pods then send to the former one until they ask again, for half a minute."""
NEW_NETWORK = 0x40000000


@dataclass(frozen=True)
class PodNetwork:
    """The network namespace of one pod, which a process that only sleeps keeps alive."""

    address: str
    holder: subprocess.Popen[bytes]

    @property
    def namespace(self) -> str:
        """The file by which the namespace is entered."""
        return f"/proc/{self.holder.pid}/ns/net"

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()


@dataclass
class Network:
    """The bridge of all pods."""

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _sockets: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _pods: int = 1

    def __post_init__(self) -> None:
        namespace = self._thread.submit(_enter_new_network).result()
        self._sockets.submit(_enter_network, namespace).result()
        self._do("ip link set lo up")
        self._do("ip link add bridge type bridge")
        self._do(f"ip link set bridge address {BRIDGE}")
        self._do(f"ip addr add {GATEWAY}/{PODS.prefixlen} dev bridge")
        self._do("ip link set bridge up")
        # Every address of a service is one of this machine, so we can listen on it.
        self._do(f"ip route add local {SERVICE_RANGE} dev lo")

    async def plug_in(self) -> PodNetwork:
        """A namespace for a pod, with an address of its own."""
        return await asyncio.to_thread(self._plug_in)

    def _plug_in(self) -> PodNetwork:
        self._pods += 1
        number, address = self._pods, PODS[self._pods]
        sleeping = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "sleep", "infinity"]
        # The kernel kills it when the thread that started it ends, so this must be a thread that lives on.
        holder = self._thread.submit(subprocess.Popen, sleeping).result()
        pod = PodNetwork(str(address), holder)
        while os.readlink(pod.namespace) in (os.readlink("/proc/self/ns/net"), self._own()):
            if holder.poll() is not None:
                raise RuntimeError("a pod cannot have a network namespace of its own")
        self._do(f"ip link add pod{number} type veth peer name eth0 netns {holder.pid}")
        self._do(f"ip link set pod{number} master bridge up")
        inside = f"nsenter --target {holder.pid} --net "
        self._do(f"{inside}ip link set lo up")
        self._do(f"{inside}ip addr add {address}/{PODS.prefixlen} dev eth0")
        self._do(f"{inside}ip link set eth0 up")
        self._do(f"{inside}ip route add default via {GATEWAY}")
        return pod

    def listen(self, address: IPv4Address | str, port: int) -> socket.socket:
        """A socket that listens in the network of the pods."""
        return self._sockets.submit(socket.create_server, (str(address), port)).result()

    def socket(self) -> socket.socket:
        """A TCP socket of the network of the pods, not connected."""
        made = self._sockets.submit(socket.socket, socket.AF_INET, socket.SOCK_STREAM).result()
        made.setblocking(False)
        return made

    async def connect(
        self, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a pod."""
        opened = self.socket()
        try:
            await asyncio.get_running_loop().sock_connect(opened, (address, port))
        except BaseException:
            opened.close()
            raise
        return await asyncio.open_connection(sock=opened)

    def _do(self, command: str) -> None:
        self._thread.submit(subprocess.run, command.split(), check=True).result()

    def _own(self) -> str:
        return self._thread.submit(os.readlink, "/proc/thread-self/ns/net").result()


def _enter_new_network() -> str:
    """Have this thread leave for a network of its own. Returns the file by which others follow."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no new network namespace")
    return f"/proc/self/task/{threading.get_native_id()}/ns/net"


def _enter_network(namespace: str) -> None:
    """Have this thread leave for the network of another one."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
