"""Troubles of a running job. Each kind is a function that returns when its last signal is out."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from . import processes
from .driver import Driver, Line, completed
from .processes import CONTROL_STORE, DRIVER

ALL = ("coordinator", "worker")
EARLY = "worker+starting"
"""Also what Ray has not yet told what to be."""
WAIT_S = 30.0
"""A kind that needs a moment of the job (a restore, a checkpoint) hits anyway after so long."""


@dataclass
class Victims:
    """The processes of the job that runs now."""

    driver: Driver
    rng: random.Random
    heartbeat_timeout_s: float

    def hit(self, role: str, number: signal.Signals, *, every: bool = False) -> list[int]:
        """Send a signal to one process of a role (or of several), or all; returns which."""
        if self.driver.ended:
            return []
        pids = [
            pid for name in role.split("+") for pid in processes.with_role(self.driver.pid, name)
        ]
        if pids and not every:
            pids = [self.rng.choice(pids)]
        hit = [pid for pid in pids if processes.send(pid, number)]
        self.driver.say(f"{number.name} {role} {' '.join(map(str, hit)) or '(none there)'}")
        return hit

    async def freeze(self, role: str, timeouts: float) -> None:
        """Stop a process for this number of heartbeat timeouts."""
        frozen = self.hit(role, SIGSTOP)
        await asyncio.sleep(timeouts * self.heartbeat_timeout_s)
        self.thaw(frozen)

    def thaw(self, frozen: list[int]) -> None:
        woken = [pid for pid in frozen if processes.send(pid, SIGCONT)]
        self.driver.say(f"SIGCONT {' '.join(map(str, woken)) or '(none there)'}")

    async def at(self, moment: Callable[[Line], bool], act: Callable[[], object]) -> None:
        """Act as soon as the job says something: within the call that reads the line."""
        done = asyncio.Event()

        def hook(line: Line) -> None:
            if moment(line) and not done.is_set():
                done.set()
                act()

        self.driver.hooks.append(hook)
        try:
            await asyncio.wait_for(done.wait(), WAIT_S)
        except TimeoutError:
            act()
        finally:
            self.driver.hooks.remove(hook)


def restoring(line: Line) -> bool:
    """An attempt is being deployed, or has just got its state."""
    deployed = line.event == "status" and line.body.get("status") == "INITIALIZING"
    return deployed or line.event in ("restart", "start", "restoring", "restored")


Kind = Callable[[Victims], Awaitable[None]]


def _one(role: str, number: signal.Signals, *, every: bool = False) -> Kind:
    async def act(victims: Victims) -> None:
        victims.hit(role, number, every=every)

    return act


def _freeze(role: str, low: float, high: float) -> Kind:
    async def act(victims: Victims) -> None:
        await victims.freeze(role, victims.rng.uniform(low, high))

    return act


async def _all_at_once(victims: Victims) -> None:
    for role in ALL:
        victims.hit(role, SIGKILL, every=True)


async def _burst(victims: Victims) -> None:
    for _ in range(victims.rng.randint(3, 6)):
        role = victims.rng.choice([EARLY, EARLY, "coordinator"])
        victims.hit(role, victims.rng.choice([SIGKILL, SIGKILL, SIGTERM]))
        await asyncio.sleep(victims.rng.expovariate(1.0))


async def _zombie(victims: Victims) -> None:
    """A worker sleeps while its coordinator dies: the next one does not know it, nor kills it."""
    frozen = victims.hit("worker", SIGSTOP)
    victims.hit("coordinator", SIGKILL)
    await asyncio.sleep(victims.rng.uniform(1.5, 3.0) * victims.heartbeat_timeout_s)
    victims.thaw(frozen)


async def _in_restore(victims: Victims) -> None:
    """Kill again, twice, while the job restores."""
    for number in range(3):
        role = victims.rng.choice([EARLY, "coordinator"]) if number else "worker"
        every = number > 0 and victims.rng.random() < 0.3

        def act(role: str = role, every: bool = every) -> None:
            victims.hit(role, SIGKILL, every=every)

        if number == 0:
            act()
        else:
            await victims.at(restoring, act)
            await asyncio.sleep(victims.rng.choice([0.0, 0.2]))


async def _in_commit(victims: Victims) -> None:
    """A checkpoint has completed; sinks are committing it."""
    role = victims.rng.choice(["worker", "coordinator", "all"])
    act = {
        "worker": lambda: victims.hit("worker", SIGKILL, every=True),
        "coordinator": lambda: victims.hit("coordinator", SIGKILL),
        "all": lambda: [victims.hit(role, SIGKILL, every=True) for role in ALL],
    }[role]
    await victims.at(completed, act)


KINDS: dict[str, tuple[int, Kind]] = {
    "kill -9 a worker": (4, _one("worker", SIGKILL)),
    "SIGTERM a worker": (3, _one("worker", SIGTERM)),
    "kill -9 all workers": (2, _one("worker", SIGKILL, every=True)),
    "kill -9 the coordinator": (3, _one("coordinator", SIGKILL)),
    "SIGTERM the coordinator": (2, _one("coordinator", SIGTERM)),
    "kill -9 coordinator and workers": (2, _all_at_once),
    "burst of kills": (3, _burst),
    "worker asleep, below the timeout": (2, _freeze("worker", 0.2, 0.7)),
    "worker asleep, beyond the timeout": (2, _freeze("worker", 1.3, 2.5)),
    "coordinator asleep, below the timeout": (1, _freeze("coordinator", 0.2, 0.7)),
    "coordinator asleep, beyond the timeout": (1, _freeze("coordinator", 1.3, 2.5)),
    "worker asleep while the coordinator dies": (2, _zombie),
    "kills during restore": (3, _in_restore),
    "kill in the commit window": (4, _in_commit),
    "kill -9 the raylet": (1, _one("raylet", SIGKILL)),
    "SIGTERM the raylet": (1, _one("raylet", SIGTERM)),
    "kill -9 Ray's control store": (1, _one(CONTROL_STORE, SIGKILL)),
    "kill -9 the command": (1, _one(DRIVER, SIGKILL)),
    "SIGTERM the command": (1, _one(DRIVER, SIGTERM)),
}
"""The trouble, its weight, and the function that makes it."""
RUN_AGAIN = frozenset(
    name for name in KINDS if "Ray" in name or "raylet" in name or "command" in name
)
"""Kinds after which somebody has to run the job again; after all others it goes on by itself."""
