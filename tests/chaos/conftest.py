"""Runs jobs on a local Ray of their own, kills real processes, and looks for what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import headgate as hg
from headgate.errors import JobError
from headgate.runtime.cluster.launch import launch
from headgate.runtime.control.job_client import Connect, PublishedEvent
from headgate.runtime.job import runnable
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.tests.chaos.leftovers import left_in
from headgate.tests.support.held import Held, OverByFile

DEADLINE_S = 900.0
GONE_S_MAX = 120.0
"""Ray's processes may end some time after the job."""


@dataclass
class Chaos:
    """The troubles of a job while it runs: `on_event` is called for each event it announces."""

    rng: random.Random
    plan: Callable[[Chaos, PublishedEvent, dict[str, Any]], None]
    events: list[PublishedEvent] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    connect: Connect | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    state: dict[str, Any] = field(default_factory=dict)

    def on_event(self, event: PublishedEvent) -> None:
        self.events.append(event)
        body = json.loads(event.body) if event.body else {}
        self.plan(self, event, body)

    def on_listening(self, connect: Connect) -> None:
        self.connect = connect

    def later(self, delay_s: float, action: Callable[[Chaos], Any]) -> None:
        """Do something to the job at a random moment."""
        task = asyncio.get_running_loop().create_task(self._act(delay_s, action))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _act(self, delay_s: float, action: Callable[[Chaos], Any]) -> None:
        await asyncio.sleep(delay_s)
        done = action(self)
        if done is not None:
            await done

    async def status(self) -> dict[str, Any]:
        """Return the coordinator's status of the job."""
        assert self.connect is not None
        client = await self.connect()
        try:
            return await client.request("status")
        finally:
            await client.close()

    async def kill_worker(self, how: int = signal.SIGKILL) -> None:
        """Signal a random live worker, as soon as there is one."""
        while True:
            # The coordinator, or the victim, may have died just now, or be on its way.
            with contextlib.suppress(JobError, ProcessLookupError):
                if workers := (await self.status())["workers"]:
                    victim = self.rng.choice(workers)
                    os.kill(victim["pid"], how)
                    self.kills.append(f"{signal.Signals(how).name} {victim['worker']}")
                    return
            await asyncio.sleep(0.05)

    def coordinators(self) -> list[int]:
        """Processes that lead, or stand by."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended just now
                # Ray Data has an AutoscalingCoordinatorActor of its own.
                if any("::CoordinatorActor" in part for part in child.cmdline()):
                    found.append(child.pid)
        return found

    def kill_coordinator(self, how: int = signal.SIGKILL) -> None:
        """Signal the coordinator's process."""
        for pid in self.coordinators():
            self.kills.append(f"{signal.Signals(how).name} coordinator {pid}")
            os.kill(pid, how)

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]


@dataclass
class Ran:
    outcome: JobOutcome
    chaos: Chaos


def listening_beyond_loopback() -> set[tuple[int, str]]:
    """Sockets of ours that strangers could reach."""
    found: set[tuple[int, str]] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    ip = connection.laddr.ip
                    if ip not in ("127.0.0.1", "::1") and not ip.endswith("127.0.0.1"):
                        found.add((process.pid, f"{process.name()} {ip}:{connection.laddr.port}"))
        except psutil.Error:
            continue
    return found


def nices_of_actors() -> set[int]:
    """The priorities of the processes that host our actors, as `nice` counts them."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended just now
            if "Actor" in " ".join(child.cmdline()):
                found.add(child.nice())
    return found


def ray_processes() -> set[int]:
    """Descendants of this process that belong to Ray."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "ray" in " ".join(child.cmdline()):
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


class Ring:
    """Runs jobs under a plan of destruction."""

    def __init__(self, directory: Path) -> None:
        self.exposed: set[tuple[int, str]] = set()
        self.nices: set[int] = set()
        self._over = OverByFile(directory / "over")

    def run(
        self,
        job: hg.Job,
        plan: Callable[[Chaos, PublishedEvent, dict[str, Any]], None],
        seed: int,
        until: Callable[[Chaos], bool] | None = None,
        batches: int | None = None,
    ) -> Ran:
        """Run `job` to its end.

        Until `until` says that the plan is through, no source of the job ends, and each reader gives at
        most `batches` batches.
        """
        for node in runnable(job).graph.sources():
            if until is not None:
                assert node.source is not None
                node.source = Held(node.source, self._over, batches)
        chaos = Chaos(random.Random(seed), self._watching(plan, until))

        async def main() -> JobOutcome:
            async with asyncio.timeout(DEADLINE_S):
                outcome = await launch(
                    runnable(job).spec(),
                    "local",
                    on_event=chaos.on_event,
                    on_listening=chaos.on_listening,
                )
            for task in list(chaos.tasks):
                task.cancel()
            return outcome

        outcome = asyncio.run(main())
        assert outcome.status == "FINISHED", (outcome, chaos.kills, chaos.texts("failure"))
        return Ran(outcome, chaos)

    def _watching(self, plan: Any, until: Any) -> Any:
        def watch(chaos: Chaos, event: PublishedEvent, body: dict[str, Any]) -> None:
            if event.kind == "status" and body.get("status") == "RUNNING":
                self.exposed |= listening_beyond_loopback()
                self.nices |= nices_of_actors()
            plan(chaos, event, body)
            if until is not None and until(chaos):
                self._over.set()

        return watch


@pytest.fixture
def ring(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ring]:
    """Nothing is left of what it runs: no process, no socket, no temporary directory."""
    assert tmp_path_factory.getbasetemp()  # before temporary files go elsewhere
    temporary = Path(tempfile.mkdtemp(prefix="hg-"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(temporary / "run"))
    processes = ray_processes()
    ring = Ring(tmp_path_factory.mktemp("ring"))
    yield ring
    assert not ring.exposed
    assert ring.nices <= {psutil.Process().nice()}, "Ray's own choice is to run workers at 15"
    deadline = time.monotonic() + GONE_S_MAX
    while (left := ray_processes() - processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert left_in(temporary) == []
    shutil.rmtree(temporary)


def random_kills(workers: int, coordinators: int) -> Any:
    """Kill at random moments: after checkpoints, right after a start, and while state is restored."""

    def plan(chaos: Any, event: Any, body: dict[str, Any]) -> None:
        done = chaos.state
        checkpoint = event.kind == "checkpoint" and body.get("status") == "COMPLETED"
        if checkpoint and not done.get("armed"):
            if done.get("workers", 0) < workers:
                done["workers"] = done.get("workers", 0) + 1
                done["armed"] = True
                # 250 ms is the interval: also right after the next trigger, and in mid-snapshot.
                how = signal.SIGTERM if done["workers"] == 1 else signal.SIGKILL
                chaos.later(chaos.rng.uniform(0, 0.3), lambda c: c.kill_worker(how))
            elif done.get("coordinators", 0) < coordinators:
                done["coordinators"] = done.get("coordinators", 0) + 1
                done["armed"] = True
                chaos.later(chaos.rng.uniform(0, 0.3), lambda c: c.kill_coordinator())
        elif event.kind == "restored":
            done["armed"] = False
        elif event.kind == "restart" and done.get("workers", 0) == 2:
            # The third hits while the workers of a restart are starting or restoring.
            done["workers"] = 3
            chaos.later(chaos.rng.uniform(0.05, 0.3), lambda c: c.kill_worker())

    return plan


def killed(count: int) -> Callable[[Chaos], bool]:
    """Return the condition that this number of processes has been killed."""
    return lambda chaos: len(chaos.kills) >= count


@pytest.fixture
def killings() -> Callable[[int], Callable[[Chaos], bool]]:
    return killed


@pytest.fixture
def kills() -> Callable[..., Any]:
    """Makes plans: this number of workers and coordinators, at random moments."""
    return random_kills
