"""`headgate k8s worker`: workers leave before their raylet ends. Ray is played by a shell."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from aiohttp import ClientSession
from click.testing import Result
from typer.testing import CliRunner

from headgate.k8s import ports
from headgate.k8s.cli import app
from headgate.k8s.ray_node import descendants, start_worker, worker_processes
from headgate.k8s.worker_process import Node, probes

WORKER = """
[ "$2" = leaves ] && trap 'echo "worker left" >> "$1"; exit 0' TERM || trap "" TERM
echo "worker began" >> "$1"
while true; do sleep 0.05; done
"""
RAYLET = """
trap 'echo "raylet ended" >> "$1"; exit 0' TERM
bash -c 'exec -a ray::WorkerActor.run bash -c "$0" x "$1" "$2"' "$2" "$1" "$3" &
while true; do sleep 0.05; done
"""


def raylet(said: Path, worker: str) -> list[str]:
    return ["bash", "-c", RAYLET, "raylet", str(said), WORKER, worker]


async def told(said: Path, text: str) -> None:
    """Wait until a line was written."""
    async with asyncio.timeout(60):
        while not said.exists() or text not in said.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_the_command_has_the_ports_that_the_policy_lets_through() -> None:
    command = start_worker("10.1.2.1", "10.1.2.3", 2)
    assert command[:3] == ["ray", "start", "--block"]
    options = dict(each[2:].split("=", 1) for each in command[3:])
    assert options["address"] == "10.1.2.1:6379"
    assert options["node-ip-address"] == "10.1.2.3"
    assert options["resources"] == '{"headgate_slot": 2}'
    assert options["num-cpus"] == "0"
    fixed = {name: int(value) for name, value in options.items() if name.endswith("-port")}
    assert fixed == {
        "node-manager-port": ports.RAY_NODE.number,
        "object-manager-port": ports.RAY_OBJECTS.number,
        "min-worker-port": ports.RAY_WORKERS.number,
        "max-worker-port": ports.RAY_WORKERS.last,
        "metrics-export-port": ports.RAY_AGENTS.number,
        "runtime-env-agent-port": ports.RAY_AGENTS.number + 1,
        "dashboard-agent-listen-port": ports.RAY_AGENTS.number + 2,
        "dashboard-agent-grpc-port": ports.RAY_AGENTS.last,
    }


def test_only_workers_below_the_own_raylet_are_told(tmp_path: Path) -> None:
    """Pods may share a process namespace, and then each sees the workers of the others."""
    table = {10: (1, "ray"), 11: (10, "raylet"), 12: (11, "ray::WorkerActor.run"), 13: (11, "ray::IDLE"),
             20: (1, "ray"), 21: (20, "ray::WorkerActor.run")}  # fmt: skip
    for pid, (parent, title) in table.items():
        directory = tmp_path / str(pid)
        directory.mkdir()
        (directory / "stat").write_text(f"{pid} (a (name) 7) S {parent} 1 1")
        (directory / "cmdline").write_text(f"{title}\0")
    (tmp_path / "self").mkdir()
    assert worker_processes(10, tmp_path) == [12]
    assert descendants({pid: parent for pid, (parent, _) in table.items()}, 10) == {11, 12, 13}


def test_workers_leave_before_the_raylet_ends(tmp_path: Path) -> None:
    said = tmp_path / "said"

    async def scenario() -> int:
        node = Node(grace_s=60)
        running = asyncio.ensure_future(node.run(raylet(said, "leaves"), "127.0.0.1", 1))
        await told(said, "worker began")
        node.leave()
        return await running

    assert asyncio.run(scenario()) == 0
    assert said.read_text().splitlines() == ["worker began", "worker left", "raylet ended"]


def test_a_worker_that_stays_does_not_keep_the_pod(tmp_path: Path) -> None:
    said = tmp_path / "said"

    async def scenario() -> int:
        node = Node(grace_s=0)
        running = asyncio.ensure_future(node.run(raylet(said, "stays"), "127.0.0.1", 1))
        await told(said, "worker began")
        node.leave()
        return await running

    assert asyncio.run(scenario()) == 0
    assert said.read_text().splitlines() == ["worker began", "raylet ended"]


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (7, 7)])
def test_ray_that_ends_by_itself_is_a_failure(code: int, expected: int) -> None:
    node_ended = asyncio.run(Node(grace_s=0).run(["bash", "-c", f"exit {code}"], "127.0.0.1", 1))
    assert node_ended == expected


def test_the_probes_tell_whether_the_raylet_listens(tmp_path: Path) -> None:
    async def scenario() -> None:
        raylet_port = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = raylet_port.sockets[0].getsockname()[1]
        node = Node(grace_s=0)
        free = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        own = free.sockets[0].getsockname()[1]
        free.close()
        await free.wait_closed()
        async with probes(node, "127.0.0.1", own), ClientSession(f"http://127.0.0.1:{own}") as http:

            async def status(path: str) -> int:
                async with http.get(path) as answer:
                    return answer.status

            assert [await status("/healthz"), await status("/readyz")] == [200, 503]
            running = asyncio.ensure_future(node.run(["sleep", "1000"], "127.0.0.1", port))
            async with asyncio.timeout(60):
                while await status("/readyz") != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            node.leave()
            assert await status("/readyz") == 503
            await running
        raylet_port.close()

    asyncio.run(scenario())


def test_the_ip_of_the_pod_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_POD_IP", raising=False)
    result: Result = CliRunner().invoke(app, ["worker", "--head", "h"])
    assert result.exit_code == 2
    assert "HEADGATE_POD_IP" in result.output
    assert os.environ.get("HEADGATE_POD_IP") is None
