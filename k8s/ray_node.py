"""The start of Ray in a pod, without Ray: its command lines, and the processes of a node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ..runtime.protocol.worker_nodes import NO_WORKERS, NO_WORKERS_LABEL
from . import ports

SLOT_RESOURCE: Final = "headgate_slot"
"""The custom resource of Ray of which a node has one for each slot; KubeRay's nodes have it, too."""
OBJECT_STORE_BYTES: Final = 128 << 20
"""Records do not travel through Ray's object store, so it is small."""
WORKER_TITLE: Final = "ray::WorkerActor"
"""The beginning of the title of a worker's process."""


def start_head(pod_ip: str, address: str = "") -> list[str]:
    """Return the command that starts Ray in the head's pod, in the foreground; it hosts no workers.

    Args:
        pod_ip: the IP of this pod.
        address: the address of a Ray cluster that this pod joins; empty: it is the head of a new one.
    """
    # The autoscaler is not needed, because the operator makes the workers, and its monitor would open a
    # port.
    head = ("--head", f"--port={ports.RAY_GCS.number}", "--include-dashboard=false", "--no-monitor")
    joining = (f"--address={address}", f"--labels={NO_WORKERS_LABEL}={NO_WORKERS}")
    return [
        "ray", "start", "--block",
        *(joining if address else head),
        *fixed_ports(pod_ip),
        "--num-cpus=0",
    ]  # fmt: skip


def group_resource(group: str) -> str:
    """Return the custom resource of Ray of which a node of a slot sharing group has one for each slot."""
    return f"headgate_slot_of_{group}"


def node_resources(slots: int, group: str = "") -> dict[str, int]:
    """Return the custom resources of a node; without a group if the job has only the default one."""
    return {SLOT_RESOURCE: slots} | ({group_resource(group): slots} if group else {})


def start_worker(head: str, pod_ip: str, slots: int, group: str = "") -> list[str]:
    """Return the command that joins the cluster of a head and stays in the foreground.

    Args:
        head: the IP of the head.
        pod_ip: the IP at which the other nodes reach this one.
        slots: the number of subtasks of a step that this node hosts.
        group: the slot sharing group whose workers run here; empty: the job has one only.
    """
    return [
        "ray", "start", "--block",
        f"--address={head}:{ports.RAY_GCS.number}",
        *fixed_ports(pod_ip),
        "--num-cpus=0",
        f"--resources={json.dumps(node_resources(slots, group))}",
    ]  # fmt: skip


def fixed_ports(pod_ip: str) -> list[str]:
    """Return the arguments of `ray start` in every pod: address, fixed ports, and a small object store."""
    agents = (
        "metrics-export",
        "runtime-env-agent",
        "dashboard-agent-listen",
        "dashboard-agent-grpc",
    )
    return [
        *(f"--{name}-port={ports.RAY_AGENTS.number + n}" for n, name in enumerate(agents)),
        f"--node-ip-address={pod_ip}",
        f"--node-manager-port={ports.RAY_NODE.number}",
        f"--object-manager-port={ports.RAY_OBJECTS.number}",
        f"--min-worker-port={ports.RAY_WORKERS.number}",
        f"--max-worker-port={ports.RAY_WORKERS.last}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]


def descendants(parents: Mapping[int, int], root: int) -> set[int]:
    """Return the processes below `root`. `parents` has the parent of each process."""
    found: set[int] = set()
    below = {root}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below} - found
        found |= below
    return found


def worker_processes(root: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the workers' processes below the process `root`, which leave in good order after SIGTERM."""
    pids = [int(each.name) for each in proc.iterdir() if each.name.isdigit()]
    parents = dict(_parents(pids, proc))
    return sorted(
        pid
        for pid in descendants(parents, root)
        if _read(proc / str(pid) / "cmdline").startswith(WORKER_TITLE)
    )


def _parents(pids: Iterable[int], proc: Path) -> Iterable[tuple[int, int]]:
    for pid in pids:
        # pid (name) state parent ...: the name may have blanks and brackets.
        fields = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) > 1 and fields[0] != "Z":
            yield pid, int(fields[1])


def _read(path: Path) -> str:
    """Return the content of a file; empty if its process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
