"""Ray's control store on a volume: its objects, and when a head may open it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.errors import JobError
from headgate.k8s import gcs_storage
from headgate.k8s.modes import pod_makers
from headgate.k8s.objects import Deployment

Make = Callable[..., Deployment]
LOCKS = (
    "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "print('locked', flush=True); sys.stdin.read()"
)


def container(maker: dict[str, Any]) -> dict[str, Any]:
    (found,) = maker["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(maker: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container(maker)["env"]}


def test_without_a_volume_ray_keeps_its_control_store_in_memory(deployment: Make) -> None:
    head, workers = pod_makers(deployment())
    assert "volumeClaimTemplates" not in head["spec"]
    assert "--gcs-volume" not in container(head)["command"]
    assert environment(workers)["RAY_gcs_rpc_server_reconnect_timeout_s"] == "20"


def test_the_volume_is_that_of_the_head_alone_and_goes_with_the_run(deployment: Make) -> None:
    storage = {"type": "RocksDB", "size": "2Gi", "storageClassName": "fast"}
    head, workers = pod_makers(deployment(ray={"gcsStorage": storage}))
    (claim,) = head["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["metadata"]["labels"]["headgate.io/job"] == "flights"
    retention = head["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert retention == {"whenDeleted": "Delete", "whenScaled": "Delete"}
    command = container(head)["command"]
    path = command[command.index("--gcs-volume") + 1]
    mounted = {each["name"]: each["mountPath"] for each in container(head)["volumeMounts"]}
    assert mounted[claim["metadata"]["name"]] == path
    assert path not in [each["mountPath"] for each in container(workers)["volumeMounts"]]
    # A head that comes back knows the workers' nodes, so they wait for it.
    assert environment(workers)["RAY_gcs_rpc_server_reconnect_timeout_s"] == "60"


def test_the_size_and_the_class_of_the_volume_are_optional(deployment: Make) -> None:
    head, _ = pod_makers(deployment(ray={"gcsStorage": {"type": "RocksDB"}}))
    (claim,) = head["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Gi"}}
    assert "storageClassName" not in claim["spec"]


@contextmanager
def locked(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process has the lock of a file; it gives it back when its input ends."""
    command = [sys.executable, "-c", LOCKS, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_run_has_the_volume_for_itself(tmp_path: Path) -> None:
    for name in ("u-1-3", "u-1-4", "lost+found"):
        (tmp_path / name / "kv").mkdir(parents=True)
        (tmp_path / name / "kv" / "LOCK").touch()
    own = asyncio.run(gcs_storage.prepare(tmp_path, "u-1-4"))
    assert own == tmp_path / "u-1-4"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lost+found", "u-1-4"]
    assert (own / "kv" / "LOCK").exists()


def test_a_head_waits_until_the_one_before_it_has_closed_its_store(tmp_path: Path) -> None:
    lock = tmp_path / "u-1-3" / "tables" / "LOCK"
    lock.parent.mkdir(parents=True)
    lock.touch()

    async def wait(process: subprocess.Popen[str]) -> None:
        preparing = asyncio.ensure_future(gcs_storage.prepare(tmp_path, "u-1-4"))
        done, _ = await asyncio.wait({preparing}, timeout=3 * gcs_storage.LOOK_S)
        assert not done
        assert lock.exists()
        process.kill()
        await preparing
        assert not lock.exists()

    with locked(lock) as process:
        asyncio.run(wait(process))


def test_a_store_that_stays_open_is_an_error_that_may_pass(tmp_path: Path) -> None:
    lock = tmp_path / "u-1-4" / "kv" / "LOCK"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with locked(lock), pytest.raises(JobError, match="another process has Ray's control store"):
        asyncio.run(gcs_storage.prepare(tmp_path, "u-1-4", within_s=0.0))
    assert lock.exists()
