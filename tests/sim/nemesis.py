"""The troubles of a simulation: each seed draws some kinds, and how much of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .copies import spoil_copies
from .process import Process
from .workloads import STORAGE

if TYPE_CHECKING:
    from .run import Simulation


@dataclass(frozen=True, slots=True)
class Plan:
    """The troubles that a seed has drawn."""

    kinds: frozenset[str]
    mean_s: float
    """Between two acts."""
    storm_s: float
    """The time until which there is trouble; after it nothing fails any more."""

    @property
    def gentle(self) -> bool:
        """Only coordinators go: whatever runs must go on."""
        return self.kinds <= GENTLE

    @property
    def overtaking(self) -> bool:
        """Records wait wherever they can, and barriers overtake them."""
        return self.kinds in (CHANGES, OVERTAKING)


LASTING = (
    "latency",
    "before",
    "after",
    "late",
    "map",
    "prepare",
    "commit",
    "refusals",
    "narrow",
    "threads",
    "busy",
    "reach",
)
"""Kinds of trouble that lie in wait all the time."""
CHANGES = frozenset({"ask_rescale", "ask_checkpoint", "narrow", "latency", "busy"})
"""Kinds with which changes of parallelism succeed, with records on their way."""
OVERTAKING = frozenset(
    {"kill_worker", "break_connection", "ask_checkpoint", "ask_cancel", "narrow", "busy"}
)
"""Kinds with which checkpoints are restored that have records on their way."""
GENTLE = frozenset({"kill_coordinator", "make_zombie", "ask_checkpoint"})
"""Kinds that do no harm to the workers."""

SURVIVED = frozenset({"kill_worker", "break_connection", "ask_checkpoint", "refusals"})
"""Kinds after which most workers still have their state."""

SAVED = frozenset({"kill_worker", "break_connection", "ask_checkpoint", "kill_coordinator"})
"""Kinds between which a savepoint can be taken."""


def draw_plan(rng: random.Random) -> Plan:
    """Some of all kinds: a trouble that hides another must be absent sometimes."""
    share = rng.choice((0.15, 0.35, 0.65))
    every = (*LASTING, *(act.__name__ for act in ACTS))
    kinds = frozenset(kind for kind in every if rng.random() < share)
    mean_s, storm_s = rng.choice((0.3, 1.0, 3.0)), rng.uniform(2, 12)
    if storm_s > 10.5:
        kinds = GENTLE
    elif storm_s > 9.5:
        kinds = CHANGES
    elif storm_s > 8.5:
        kinds = OVERTAKING
    return Plan(kinds, mean_s, storm_s)


def survived_plan(rng: random.Random, drawn: Plan) -> Plan:
    """Return a plan of restarts with workers that live; some seeds keep what they had drawn, too."""
    others = drawn.kinds if rng.random() < 0.3 else frozenset[str]()
    return Plan(SURVIVED | others, 0.7, 12.0)


def saved_plan(rng: random.Random, drawn: Plan) -> Plan:
    """Return a plan in which savepoints succeed; some seeds keep what they had drawn, too.

    No file is created late: a savepoint that has failed would come back without its files.
    """
    others = drawn.kinds - {"late"} if rng.random() < 0.3 else frozenset[str]()
    slow = frozenset({"latency"}) if rng.random() < 0.5 else frozenset[str]()
    return Plan(SAVED | others | slow, 1.5, 12.0)


async def storm(sim: Simulation, plan: Plan) -> None:
    """Make trouble until cancelled."""
    _begin_lasting(sim, plan)
    acts = [act for act in ACTS if act.__name__ in plan.kinds]
    while True:
        await asyncio.sleep(sim.rng.expovariate(1 / plan.mean_s))
        if acts:
            act = sim.rng.choice(acts)
            sim.watch.note(f"nemesis {act.__name__}")
            sim.watch.seen[act.__name__] += 1
            await act(sim)


def heal(sim: Simulation) -> None:
    """From now on nothing fails; but what has failed stays so."""
    sim.storage.faults.heal()
    sim.world.faults.heal()
    sim.cluster.refusal_rate = sim.cluster.out_of_reach_rate = 0.0
    sim.loop.hanging_rate = 0.0
    sim.busy.record_s = 0.0
    sim.world.pause_s = min(sim.world.pause_s, 0.002)  # what is left comes at once
    sim.loop.network.bytes_per_s, sim.loop.network.far = 100e6, 1
    for worker in sim.cluster.workers:
        sim.loop.continue_process(worker.process)
    for leader in sim.leaders:
        sim.loop.continue_process(leader.process)
        if leader is not sim.leader:
            leader.crash()


def _begin_lasting(sim: Simulation, plan: Plan) -> None:
    rng, faults = sim.rng, sim.storage.faults
    rates = {kind: rng.choice((0.003, 0.02, 0.1)) for kind in LASTING}
    chosen = {kind: rate for kind, rate in rates.items() if kind in plan.kinds}
    if "latency" in chosen:
        faults.latency_s = rng.choice((0.01, 0.1))
        faults.slow_rate = chosen["latency"] / 2
    faults.fail_before_rate = chosen.get("before", 0.0)
    faults.fail_after_rate = chosen.get("after", 0.0)
    faults.late_rate = chosen.get("late", 0.0)
    sim.world.faults.map_rate = chosen.get("map", 0.0) / 20  # per record
    sim.world.faults.prepare_rate = chosen.get("prepare", 0.0)
    sim.world.faults.commit_rate = chosen.get("commit", 0.0)
    sim.cluster.refusal_rate = 3 * chosen.get("refusals", 0.0)
    sim.loop.hanging_rate = rng.choice((0.1, 0.3, 0.6)) if "threads" in chosen else 0.0
    sim.cluster.out_of_reach_rate = 0.5 if "reach" in chosen else 0.0
    if "busy" in chosen:
        sim.busy.record_s = rng.choice((0.0005, 0.002, 0.01))
    if "narrow" in chosen:
        sim.loop.network.bytes_per_s = rng.choice((3e4, 3e5))
        sim.loop.network.far = rng.choice((1, 5))


# -- acts -------------------------------------------------------------------------------------------


async def kill_worker(sim: Simulation) -> None:
    """kill -9."""
    live = sim.cluster.live
    if live:
        sim.rng.choice(live).crash()
        spoil_copies(sim)


async def kill_two_workers(sim: Simulation) -> None:
    """The second while the job still deals with the first."""
    await kill_worker(sim)
    await asyncio.sleep(sim.rng.uniform(0, 0.5))
    await kill_worker(sim)


async def kill_coordinator(sim: Simulation) -> None:
    """Its workers notice by themselves; a successor begins."""
    sim.leader.crash()


async def kill_all(sim: Simulation) -> None:
    """The power fails."""
    for worker in sim.cluster.live:
        worker.crash()
    sim.leader.crash()
    spoil_copies(sim)


async def make_zombie(sim: Simulation) -> None:
    """The cluster takes a coordinator for dead that is not."""
    sim.leader.depose()


async def stop_worker(sim: Simulation) -> None:
    """It hangs, for shorter or longer than its heartbeats allow."""
    if sim.cluster.live:
        _stop_for(sim, sim.rng.choice(sim.cluster.live).process, sim.rng.choice((0.1, 1.0, 8.0)))


async def stop_coordinator(sim: Simulation) -> None:
    """It hangs; perhaps another takes over before it goes on."""
    leader = sim.leader
    _stop_for(sim, leader.process, sim.rng.choice((0.1, 1.0, 8.0)))
    if sim.rng.random() < 0.5:
        await asyncio.sleep(sim.rng.uniform(0, 1))
        leader.depose()


async def slow_worker(sim: Simulation) -> None:
    """For a while it gets little of its processor."""
    if not sim.cluster.live:
        return
    process = sim.rng.choice(sim.cluster.live).process
    for _ in range(sim.rng.randint(5, 40)):
        _stop_for(sim, process, sim.rng.uniform(0.005, 0.05))
        await asyncio.sleep(sim.rng.uniform(0.01, 0.08))


async def break_connection(sim: Simulation) -> None:
    """One between two workers."""
    open_ = [pair for pair in sim.loop.network.pairs if not pair[0].is_closing()]
    if open_:
        sim.rng.choice(open_)[0].break_down()


async def cut_pair(sim: Simulation) -> None:
    """Two workers do not reach each other, while everybody else reaches both."""
    open_ = [pair for pair in sim.loop.network.pairs if not pair[0].is_closing()]
    if open_:
        near, far = sim.rng.choice(open_)
        sim.loop.network.cut(near.owner, far.owner, sim.rng.choice((0.1, 1.0, 8.0)))


async def jump_clock(sim: Simulation) -> None:
    """Somebody sets the clock of a machine, forward or back."""
    processes = [sim.leader.process, *(worker.process for worker in sim.cluster.live)]
    step_ms = sim.rng.choice((100, 5_000, 3_600_000)) * sim.rng.choice((-1, 1))
    sim.rng.choice(processes).clock_ms += step_ms


async def burst(sim: Simulation) -> None:
    """Failures in a row, each while the job still deals with the one before."""
    for _ in range(sim.rng.randint(3, 8)):
        await sim.rng.choice((kill_worker, kill_worker, break_connection, kill_coordinator))(sim)
        await asyncio.sleep(sim.rng.expovariate(1 / 0.2))


async def ask_checkpoint(sim: Simulation) -> None:
    """A client wants a checkpoint."""
    sim.ask("checkpoint")


async def ask_savepoint(sim: Simulation) -> None:
    """A client wants a savepoint."""
    sim.ask("savepoint", savepoint=f"{STORAGE}-savepoints", native=sim.rng.random() < 0.5)


async def ask_rescale(sim: Simulation) -> None:
    """A client wants another parallelism."""
    sim.ask("rescale", parallelism=sim.rng.randint(1, 4))


async def ask_stop(sim: Simulation) -> None:
    """A client stops the job; another run goes on from there."""
    if sim.rng.random() < 0.3:
        sim.ask("stop", savepoint=f"{STORAGE}-savepoints")
    else:
        sim.ask("stop")


async def ask_cancel(sim: Simulation) -> None:
    """A client cancels the job; another run goes on from its last checkpoint."""
    sim.ask("cancel")


ACTS: tuple[Callable[[Any], Awaitable[None]], ...] = (
    kill_worker,
    kill_two_workers,
    kill_coordinator,
    kill_all,
    make_zombie,
    stop_worker,
    stop_coordinator,
    slow_worker,
    break_connection,
    cut_pair,
    jump_clock,
    burst,
    ask_checkpoint,
    ask_savepoint,
    ask_rescale,
    ask_stop,
    ask_cancel,
)


def _stop_for(sim: Simulation, process: Process, seconds: float) -> None:
    sim.loop.stop_process(process)
    sim.loop.call_later(seconds, sim.loop.continue_process, process)
