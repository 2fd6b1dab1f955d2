"""One simulation: a whole job with its coordinators, workers and exchange, decided by a seed alone.

First everything may fail (safety: nothing wrong becomes visible), then nothing does any more (liveness:
the job must finish, and leave nothing behind).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import headgate
from headgate.errors import (
    FencedError,
    HeadgateError,
    InternalError,
    JobError,
    StorageError,
)
from headgate.operators.functions.user_code import traceback_text
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.coordinator.job import JobCoordinator
from headgate.runtime.job import runnable
from headgate.runtime.plan import JobSpec
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.testing.run import waiting_tasks

from . import clients, nemesis, saving
from .busy import Busy
from .clock import SimClock
from .cluster import SimCluster
from .invariants import STAND_INS
from .loop import SimLoop
from .outside import WORLDS, World
from .process import Process
from .reading import noted_open, noted_snapshot, noted_windows
from .store import Storage
from .watch import Watch
from .workloads import COMMON, KINDS, draw_job, make_job, spread_over_groups, workload

LIVENESS_S = 300.0
"""Virtual time that a job gets to finish once nothing fails any more."""
LEAVING_S = 60.0
"""Virtual time behind its end in which all tasks of a job must have ended."""
FOREVER_S = 1e6
BOUNDED_RATE = 0.7
"""The probability that data which may be endless ends by itself."""
ROUNDS_MAX = 50_000
"""Rounds of the event loop at one moment after which a job runs in circles."""


CHECKOUT = Path(headgate.__file__).resolve().parent


def _path_in_checkout(path: str) -> str:
    found = Path(path)
    return str(found.relative_to(CHECKOUT)) if found.is_relative_to(CHECKOUT) else found.name


def _text_of_traceback(error: BaseException) -> str:
    return traceback_text(error).replace(str(CHECKOUT), "headgate")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a simulation.

    Attributes:
        seed: of the simulation.
        violations: broken promises; none is what is wanted.
        digest: hash of all that happened.
        virtual_s: how much time passed in it.
        seen: how often things happened.
        diary: what happened, if it was to be kept.
    """

    seed: int
    violations: list[str]
    digest: str
    virtual_s: float
    seen: Counter[str]
    diary: list[str] | None


def simulate(
    seed: int, *, keep_diary: bool = False, kind: str = "", to_the_end: bool = True
) -> Result:
    """Run the job that this seed draws, or one of this kind, through the trouble that it draws.

    Args:
        seed: draws all that is left to chance.
        keep_diary: note what happens.
        kind: of job; empty: the seed draws it.
        to_the_end: False: end with the first broken promise. A job that reads twice or waits for what is
            lost may take a hundred times as long to come to its own end.
    """
    logger = logging.getLogger("headgate")
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-sim-"))
        simulation = Simulation(seed, folder, keep_diary=keep_diary, kind=kind)
        if not to_the_end:
            simulation.world.on_violation = simulation.loop.stop
        for target, stand_in in simulation.stand_ins():
            stack.enter_context(mock.patch(target, stand_in))
        try:
            return simulation.run()
        finally:
            simulation.close()


class Leader:
    """A coordinator: the one in charge, or one that was."""

    def __init__(self, sim: Simulation, number: int) -> None:
        self._sim = sim
        self._number = number
        self.process = Process(f"coordinator-{number}")
        self.deposed: asyncio.Future[None] = sim.loop.create_future()
        """Done when it is to have a successor."""
        self.process.context.run(self._begin, sim)

    def _begin(self, sim: Simulation) -> None:
        self.coordinator = JobCoordinator(
            sim.spec,
            cluster=sim.cluster,
            clock=sim.clock,
            open_store=sim.storage.open,
            open_at=sim.storage.open_at,
            token="token",
        )
        self.coordinator.on_event = partial(sim.on_event, self._number)
        self.task: asyncio.Task[JobOutcome] = sim.loop.create_task(
            self.coordinator.run(), name=self.process.name
        )

    def depose(self) -> None:
        """Another is to take over, whatever becomes of this one."""
        if not self.deposed.done():
            self.deposed.set_result(None)

    def crash(self) -> None:
        """It dies."""
        if not self.process.dead:
            self.process.die()
            self._sim.loop.continue_process(self.process)
            self.task.cancel()
        self.depose()


class Simulation:
    """All there is of one."""

    def __init__(self, seed: int, folder: str, *, keep_diary: bool, kind: str) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = SimLoop(self.rng)
        self.clock = SimClock(self.loop)
        self._kind = kind or self.rng.choice(COMMON if self.rng.random() < 0.4 else sorted(KINDS))
        self._workload = workload(self._kind)
        self.plan = nemesis.draw_plan(self.rng)
        if self._workload.keeps:
            self.plan = nemesis.survived_plan(self.rng, self.plan)
        if self._workload.saves:
            self.plan = nemesis.saved_plan(self.rng, self.plan)
        self.busy = Busy(self.rng)
        self._settings, self._options = draw_job(self.rng, self.plan.overtaking)
        if seed % 5 == 0 or self._workload.keeps:  # not drawn: most seeds mean what they meant
            self._options["headgate.recovery.keep-state"] = "true"
        self.folder = folder
        """For files on the disks of workers."""
        self.spoiling = self.rng.choice((0.0, 0.1, 0.5, 1.0))
        """The share of the local copies of state that are damaged or gone after a kill."""
        self._slots = self.rng.randint(1, 2)
        if self._workload.keeps:
            self._slots, self._settings["parallelism"], self._settings["every"] = 1, 3, "150ms"
        self._stands_by = seed % 3 == 1  # not drawn: most seeds mean what they meant
        """A process waits to take over from a coordinator that goes, or seems to."""
        self._in_groups = random.Random(seed) if seed % 4 == 2 else None
        """Chooses slot sharing groups for steps, others for each run of the job; None: they share slots."""
        hurry = self.plan.overtaking
        rows = 600 if hurry else self.rng.choice((48, 204, 504))
        batch_rows = self.rng.choice((1, 8, 40))
        # At once, or for as long as there is trouble: one reader alone would take so long.
        last_s = self.rng.choice((0.1, 3.0, 3.0 if hurry else 12.0))
        if self._workload.keeps or self._workload.saves:
            rows, last_s = 504, 12.0
        batches = rows / ((1 + batch_rows) / 2)
        self.world = World(
            self.rng,
            rows=rows,
            check=self._workload.check,
            seed=seed,
            batch_rows=batch_rows,
            pause_s=last_s / batches,
            bounded=(self._workload.flushes or self.rng.random() < BOUNDED_RATE)
            and not self._workload.endless,
        )
        self.watch = Watch(
            self.world, self.loop, conserves=self._workload.conserves, keep=keep_diary
        )
        self.storage = self.watch.storage = Storage(self.rng, self.watch.stored)
        self.saved = saving.Savepoints(
            self.world, self.storage.roots, conserves=self._workload.conserves
        )
        if self._workload.saves:
            self.watch.saved = self.saved
        self.world.on_effect = self.watch.note
        self.loop.network.latency_s = self.rng.choice((0.0005, 0.01))
        self.cluster = SimCluster(self.loop, self.rng, self.clock, self.storage.open)
        self.leaders: list[Leader] = []
        self.spec: JobSpec
        self._zombies_at_end = False
        """Their workers may still write what nobody needs."""
        self._ran = False
        """All subtasks of the last attempt were told to begin."""
        self._leads = 0
        """The newest coordinator that has told workers about itself."""
        self._restarted_by = 0
        """The number of the last coordinator that did not go on with what it found."""
        self._requests: set[asyncio.Task[None]] = set()
        self._saving: asyncio.Task[None] | None = None
        self._numbers = [random.Random(n).randrange(1 << 61, 1 << 62) for n in range(1_000)]
        """Where coordinators begin to count; not drawn, so that seeds mean what they meant."""
        WORLDS["sim"] = self.world
        self.loop.set_exception_handler(self._on_problem)
        self.watch.note(f"{self._kind} {self.plan.storm_s:.1f} s {sorted(self.plan.kinds)}")
        self.watch.note(f"{self._settings} {sorted(self._options.items())}")

    def stand_ins(self) -> list[tuple[str, Any]]:
        """Replace those things for a simulation that are not passed in."""
        return [
            # Not by an option: its name is another one in each run, and so would be the size, and with it
            # the delay, of compressed messages to workers.
            ("tempfile.tempdir", self.folder),
            # The size of a message may not depend on where the checkout is, either.
            ("headgate.operators.origin.shown_path", _path_in_checkout),
            ("headgate.operators.functions.user_code.traceback_text", _text_of_traceback),
            ("headgate.runtime.protocol.failures.traceback_text", _text_of_traceback),
            *STAND_INS,
            ("secrets.token_hex", lambda count=32: self.rng.randbytes(count).hex()),
            ("secrets.randbits", lambda bits: self._numbers.pop()),
            ("os.getpid", lambda: 1),
            (self.busy.target, self.busy.stand_in()),
            ("headgate.testing.loop.ROUNDS_MAX", ROUNDS_MAX),
            ("headgate.runtime.worker.worker.open_store_at", self.storage.open_at),
            ("headgate.operators.process.operator.ProcessOperator.open", noted_open),
            ("headgate.operators.process.operator.ProcessOperator.snapshot", noted_snapshot),
            ("headgate.operators.windows.tumbling.TumblingAggregate.snapshot", noted_windows),
            ("headgate.operators.windows.counts.DEAD_MIN", 16),
            ("headgate.operators.windows.panes.table.DEAD_MIN", 16),
        ]

    @property
    def leader(self) -> Leader:
        """The newest coordinator."""
        return self.leaders[-1]

    # -- life ---------------------------------------------------------------------------------------

    def run(self) -> Result:
        """To the end."""
        self.spec = self._make_spec()
        self.watch.seen.update(
            [f"job: {self._kind}", *(f"plan {kind}" for kind in self.plan.kinds)]
        )
        main = self.loop.create_task(self._main(), name="simulation")
        main.add_done_callback(lambda _: self.loop.stop())
        try:
            self.loop.drive(FOREVER_S)
            if main.done() or not self.world.violations:
                main.result()
        except (JobError, asyncio.InvalidStateError) as error:
            self.world.violated(f"does not come to rest: {error!r}")
        self.watch.seen["records"] += len(self.world.visible)
        self.watch.seen["takeover"] += len(self.leaders) - 1
        return Result(
            self.seed,
            self.world.violations,
            self.watch.digest,
            self.loop.time(),
            self.watch.seen,
            self.watch.diary,
        )

    def close(self) -> None:
        """End the loop, and whatever is left in it."""
        self.loop.set_exception_handler(lambda *_: None)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with suppress(HeadgateError):
            self.loop.drive(self.loop.time() + FOREVER_S)
        self.loop.close()
        del WORLDS["sim"]

    def _make_spec(self, begins_with: str = "") -> JobSpec:
        """Another run of the job, which may begin with a savepoint."""
        job = make_job("sim", self._kind, self._settings, self._options)
        if self._in_groups is not None:
            self.watch.seen[f"groups {spread_over_groups(job, self._in_groups)}"] += 1
        if not begins_with:
            return replace(runnable(job).spec(), slots_per_worker=self._slots)
        self.watch.seen["begun with a savepoint"] += 1
        claim = self.rng.random() < saving.CLAIM_RATE
        if claim:
            self.saved.claimed()
        spec = runnable(job).spec(restore_from=begins_with, claim=claim)
        return replace(spec, slots_per_worker=self._slots)

    async def _main(self) -> None:
        supervising = self.loop.create_task(self._supervise(), name="supervisor")
        storm = self.loop.create_task(nemesis.storm(self, self.plan), name="storm")
        reads = self._workload.queried
        reading = clients.begin(self, reads) if reads is not None else []
        if self._workload.saves:
            self._saving = self.loop.create_task(saving.take(self), name="savepoints")
        await asyncio.wait({supervising}, timeout=self.plan.storm_s)
        storm.cancel()
        if self._saving is not None:
            self._saving.cancel()
        await asyncio.wait({storm})
        if not storm.cancelled():
            storm.result()
        self.watch.note("calm")
        nemesis.heal(self)
        stopping = self.loop.create_task(self._stop_when_done(), name="operator")
        await asyncio.wait({supervising}, timeout=LIVENESS_S)
        stopping.cancel()
        for client in reading:
            client.cancel()
        if not supervising.done():
            self.world.violated(f"does not finish; it waits for\n  {waiting_tasks(self.loop)}")
            supervising.cancel()
        else:
            supervising.result()
            await self._check_end()
        await self._leave()

    def _all_is_visible(self) -> bool:
        return not (self.world.bounded or self._workload.missing(self.world))

    async def _stop_when_done(self) -> None:
        """A source that never ends is stopped once all it had has come out."""
        while True:
            await asyncio.sleep(1)
            if self._all_is_visible():
                self.ask("stop")

    async def _supervise(self) -> None:
        """A coordinator that goes gets a successor, until the job has finished."""
        while True:
            leader = Leader(self, len(self.leaders))
            self.leaders.append(leader)
            self.watch.leader = leader.process.name
            await asyncio.wait({leader.task, leader.deposed}, return_when=asyncio.FIRST_COMPLETED)
            if leader.task.done() and self._is_over(leader):
                return
            if not self._stands_by:
                await asyncio.sleep(self.rng.expovariate(1 / 0.2))

    def _is_over(self, leader: Leader) -> bool:
        """Judge how a coordinator ended."""
        if leader.task.cancelled():
            return False
        error = leader.task.exception()
        if error is not None:
            if not isinstance(error, StorageError | FencedError):
                self.world.violated(f"a coordinator ended with {error!r}")
            self.watch.note(f"coordinator ended: {error}")
            return False
        outcome = leader.task.result()
        self.watch.note(f"job ended: {outcome.status} {outcome.reason}")
        self.watch.seen[f"job {outcome.status}"] += 1
        if outcome.status == "FAILED":
            self.world.violated(f"the job failed: {outcome.reason} {outcome.error!r}")
            return True
        stopped_at_end = outcome.status == "SUSPENDED" and self._all_is_visible()
        if outcome.status != "FINISHED" and not stopped_at_end:
            self._settings["parallelism"] = self.rng.randint(1, 3)
            self.spec = self._make_spec(self.saved.begins_with(outcome.reason))
            return False
        others = (other.task.done() for other in self.leaders if other is not leader)
        self._zombies_at_end = not all(others)
        return True

    async def _check_end(self) -> None:
        missing = self._workload.missing(self.world)
        if not self.world.violations and missing:
            self.world.violated(f"lost: {missing[:10]} and {max(0, len(missing) - 10)} more")
        self.saved.check_at_end()
        clean = (
            self.world.bounded and not self._zombies_at_end
        )  # who was stopped keeps a checkpoint
        if not self.world.violations and clean:
            self.watch.check_storage_at_end()

    async def _leave(self) -> None:
        for leader in self.leaders:
            await asyncio.wait({leader.task}, timeout=LEAVING_S)
            leader.task.cancel()
            await asyncio.wait({leader.task})
            await leader.coordinator.close()
        await asyncio.sleep(LEAVING_S)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        left = sorted(task.get_name() for task in tasks if not self.loop.belongs_to_the_dead(task))
        if left and not self.world.violations:
            self.world.violated(f"tasks left behind: {left}; {waiting_tasks(self.loop)}")
        await self.cluster.close()

    # -- clients ------------------------------------------------------------------------------------

    def ask(self, verb: str, **arguments: Any) -> None:
        """A client asks the coordinator for something; refusals are fine."""
        task = self.loop.create_task(self._ask(verb, arguments), name=f"client {verb}")
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _ask(self, verb: str, arguments: dict[str, Any]) -> None:
        leader = self.leader
        await asyncio.sleep(self.loop.network.delay_s())
        client = LocalClient(leader.coordinator.clients, self.loop)
        asking = leader.process.context.run(
            self.loop.create_task, client.request(verb, **arguments), name=f"answer {verb}"
        )
        try:
            async with asyncio.timeout(20):
                answer = await asyncio.shield(asking)
                await asyncio.sleep(self.loop.network.delay_s())
        except (HeadgateError, TimeoutError) as error:
            self.watch.note(f"{verb} refused: {error}")
            self.watch.seen[f"{verb} refused"] += 1
            if isinstance(error, InternalError):
                self.world.violated(f"{verb}: {error}")
        else:
            self.watch.note(f"{verb} done: {sorted(answer)}")
            self.watch.seen[f"{verb} done"] += 1
        finally:
            asking.cancel()

    # -- what is told -------------------------------------------------------------------------------

    def on_event(self, leader: int, event: PublishedEvent) -> None:
        """A coordinator announces something."""
        if event.kind == "progress":
            return
        self.watch.note(f"{event.kind} {event.text}")
        self.watch.seen[event.kind] += 1
        if event.kind == "restart":
            body = json.loads(event.body)
            part = body["tasks"] < body["tasks_total"]
            self.watch.seen["restart of a part" if part else "restart of all"] += 1
        if event.kind == "recovered" and json.loads(event.body)["lastRestartKeptStateSize"]:
            self.watch.seen["state kept in memory"] += 1
        if event.kind == "start":
            self._leads = max(self._leads, leader)
        # Workers that already obey a successor do not begin an attempt of its predecessor, which may not
        # know that yet.
        if event.kind == "status" and leader >= self._leads:
            self._ran = self._ran or json.loads(event.body).get("status") == "RUNNING"
        if event.kind == "adopted":
            self._taken_over(leader, json.loads(event.body))
        # `_ran` is over when a takeover has said why it restarts the job. Those before it, if they do not
        # know of it yet, see their workers go.
        unexpected = event.kind == "failure" or (event.kind == "restored" and self._ran)
        if self.plan.gentle and unexpected and leader >= self._restarted_by:
            self.world.violated(f"nothing had happened to the workers: {event.text}")
        if event.kind == "failure":
            body = json.loads(event.body)
            if body.get("failure") in ("internal", "stalled", "recovery_stalled"):
                self.world.violated(f"a promise of the runtime was broken: {event.text}")

    def _taken_over(self, leader: int, body: dict[str, Any]) -> None:
        """A coordinator that takes over from one that died alone goes on with what runs, unless
        nothing did.
        """
        if not body["adopted"]:
            self._restarted_by = leader
        self.watch.seen["went on" if body["adopted"] else "restarted"] += 1
        may_restart = ("had not begun", "runs another attempt", "runs nothing", "last checkpoint")
        reason = str(body.get("reason", ""))
        ran, self._ran = self._ran, self._ran and bool(body["adopted"])
        if self.plan.gentle and ran and reason and not any(text in reason for text in may_restart):
            self.world.violated(f"the attempt could have gone on: {reason}")

    def _on_problem(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, HeadgateError | OSError):
            self.world.violated(f"nobody caught: {context.get('message')} {error!r}")
