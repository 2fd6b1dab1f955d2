"""`headgate k8s head` with `ray.mode: Managed`: the commands that it runs. Without Ray, and without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from . import ports
from .objects import TOKEN_KEY, head_name
from .pods import TOKEN_PATH
from .ray_node import SLOT_RESOURCE, fixed_ports

POD_IP: Final = "env:HEADGATE_POD_IP"
"""Each process reads it from its own environment: a worker that of its own pod."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """The run that a head is started for.

    Attributes:
        manifest: path of the StreamJob.
        name, namespace: of the StreamJob.
        run_id: see docs/design/operator.md.
        parallelism: of the run.
        start: `latest` is the newest checkpoint in the log.
        path: what it begins with, if that is a path. With `latest` it counts if `began_with` is the same.
        began_with: what the newest run in the log began with, if it has completed no checkpoint since.
    """

    manifest: str
    name: str
    namespace: str
    run_id: str
    parallelism: int
    start: Literal["latest", "path", "nothing"]
    path: str = ""
    began_with: str = ""
    allow_non_restored_state: bool = False


def start_head(pod_ip: str) -> list[str]:
    """The command that starts the head of Ray and stays in the foreground; it hosts no workers."""
    return [
        "ray", "start", "--block", "--head",
        f"--port={ports.RAY_GCS.number}",
        "--include-dashboard=false",
        *fixed_ports(pod_ip),
        "--num-cpus=0",
    ]  # fmt: skip


def run_job(run: HeadRun, pod_ip: str) -> list[str]:
    """The command that runs the job on that Ray until it ends, or is handed over."""
    command = [
        "headgate", "run", run.manifest,
        "--cluster", f"{pod_ip}:{ports.RAY_GCS.number}",
        "--run-id", run.run_id,
        "--parallelism", str(run.parallelism),
    ]  # fmt: skip
    if run.start == "nothing":
        command.append("--fresh")
    elif run.path and (run.start == "path" or run.path == run.began_with):
        command += ["--from", run.path]
    if run.allow_non_restored_state:
        command.append("--allow-non-restored-state")
    for key, value in settings(run).items():
        command += ["-D", f"{key}={value}"]
    return command


def settings(run: HeadRun) -> dict[str, str]:
    """The options that the shape of the pods needs; they win over those of the manifest."""
    service = f"{head_name(run.name)}.{run.namespace}.svc"
    return {
        "headgate.control.token-file": f"{TOKEN_PATH}/{TOKEN_KEY}",
        "headgate.ray.slot-resource": SLOT_RESOURCE,
        "headgate.ray.workers-on-head": "never",
        "jobmanager.bind-host": "0.0.0.0",
        "jobmanager.rpc.address": POD_IP,
        "jobmanager.rpc.port": str(ports.CONTROL.number),
        "metrics.bind-host": "0.0.0.0",
        "metrics.port": str(ports.METRICS.number),
        "rest.address": service,
        "rest.bind-address": "0.0.0.0",
        "rest.port": str(ports.REST.number),
        # Enough for one worker process in each pod: several need a range in `ports.EXCHANGE`.
        "taskmanager.bind-host": "0.0.0.0",
        "taskmanager.data.port": str(ports.EXCHANGE.number),
        "taskmanager.host": POD_IP,
    }
