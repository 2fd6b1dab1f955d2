"""The configuration files of a node: containerd, CNI, kubelet and kube-proxy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headgate.tests.support.kube.control_plane import ADVERTISED
from headgate.tests.support.kube.node.packages import PLUGINS

NAME = "node"
PODS = "10.244.0.0/16"
CGROUPS = Path("/sys/fs/cgroup")
ALL_PODS = CGROUPS / "cpu" / "k8s.io"
"""The group of all containers, in the first version of cgroups."""
PAUSE = "localhost/headgate-pause:test"
"""The image of the process that holds the namespaces of a pod."""


def containerd(directory: Path, unpacked: Path) -> str:
    """Everything is below `directory`. A machine may forbid to lower scores of the OOM killer."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""
version = 2
root = "{directory}/containerd"
state = "{directory}/containerd-state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
address = "{socket(directory)}"
[{cri}]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[{cri}.cni]
bin_dir = "{unpacked / PLUGINS}"
conf_dir = "{directory}/cni"
[{cri}.containerd]
snapshotter = "overlayfs"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
BinaryName = "{unpacked}/usr/sbin/runc"
SystemdCgroup = false
"""


def socket(directory: Path) -> Path:
    """Return the address at which containerd listens."""
    return directory / "containerd.sock"


def cni(directory: Path) -> str:
    """A bridge to which all pods are connected."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(directory / "addresses"),
            "ranges": [[{"subnet": PODS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]})


def kubelet(directory: Path) -> str:
    """Without groups of cgroups for classes of pods, and without evictions: this node is no server."""
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADVERTISED,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "localStorageCapacityIsolation": False,
        "evictionHard": {f"{name}.available": "0%" for name in ("memory", "nodefs", "imagefs")},
        "imageGCHighThresholdPercent": 100,
        "containerRuntimeEndpoint": f"unix://{socket(directory)}",
        "clusterDNS": [ADVERTISED],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "podLogsDir": str(directory / "pod-logs"),
        "volumePluginDir": str(directory / "volume-plugins"),
    }
    return json.dumps(config)


def kube_proxy(kubeconfig: Path) -> str:
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": NAME,
        "clusterCIDR": PODS,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }
    return json.dumps(config)
