"""The client of a simulated job that takes savepoints of it, and what is true of savepoints.

Some savepoints stop the job; the next run then begins with them, at any parallelism.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headgate.errors import HeadgateError, InternalError
from headgate.runtime.protocol.names import SAVEPOINT_METADATA
from headgate.runtime.savepoint.store import Savepoint, decode

from .clients import ANSWER_S, ask
from .invariants import check_conserved
from .outside import World

if TYPE_CHECKING:
    from .run import Simulation

DIRECTORY = "memory://sim-savepoints"
STOP_RATE = 0.25
"""The probability that a savepoint stops the job."""
CLAIM_RATE = 0.3
"""The probability that a run deletes the savepoint that it began with, once it can."""


async def take(sim: Simulation) -> None:
    """Take savepoints, one after the other, until cancelled."""
    rng = random.Random(f"{sim.seed} saves")
    while True:
        await asyncio.sleep(rng.expovariate(1 / 0.4))
        verb = "stop" if rng.random() < STOP_RATE else "savepoint"
        given = {"savepoint": DIRECTORY, "native": rng.random() < 0.5}
        try:
            answer = await ask(sim.leader, verb, given, ANSWER_S)
        except (HeadgateError, TimeoutError) as error:
            sim.watch.seen[f"{verb} refused"] += 1
            if isinstance(error, InternalError):
                sim.world.violated(f"{verb}: {error}")
            continue
        sim.watch.seen[f"{verb} done"] += 1
        sim.saved.told.add(str(answer["savepoint"]))


class Savepoints:
    """The savepoints of one simulation.

    Args:
        world: of it.
        roots: the content of all stores, by address.
        conserves: see `Workload`.

    Attributes:
        told: the addresses of those that a client was told are complete.
    """

    def __init__(
        self, world: World, roots: Mapping[str, Mapping[str, bytes]], *, conserves: bool
    ) -> None:
        self.told: set[str] = set()
        self._world, self._roots, self._conserves = world, roots, conserves
        self._ids: dict[str, int] = {}
        """The id of each savepoint that there ever was, by its address."""
        self._late: set[str] = set()
        """The addresses of those that a coordinator has published behind the start of the next one."""
        self._begins_with = ""
        self._completed_before = 0

    def published(self, root: str, name: str, *, leads: bool, owns: bool) -> bool:
        """Check a file that was created, if it completes a savepoint; return whether it does.

        Args:
            root: of the store.
            name: of the file.
            leads: the newest coordinator has created it. One that does not know yet that it was replaced
                may publish the state of an attempt that is over.
            owns: it was created by the coordinator that leads by the log.
        """
        address = f"memory://{root}"
        if name != SAVEPOINT_METADATA or not address.startswith(DIRECTORY):
            return False
        found = self._read(root, address)
        manifest, content = found.manifest, self._roots[root]
        self._ids[address] = id_ = manifest.checkpoint_id
        if not owns:
            self._late.add(address)
        missing = manifest.files() - content.keys()
        if missing:
            self._world.violated(f"savepoint {id_} completed without its files: {sorted(missing)}")
        elif any(handle.channel is not None for handle in manifest.handles()):
            self._world.violated(f"savepoint {id_} has records on their way")
        elif self._conserves and leads:
            # A later checkpoint may have completed before it.
            visible = [
                record
                for each in self._world.transactions.values()
                if each.state == "committed" and each.checkpoint_id <= id_
                for record in each.records
            ]
            read = lambda handle: content[handle.file or ""]  # noqa: E731
            check_conserved(manifest, self._world, read, visible=visible)
        return True

    def _read(self, root: str, address: str) -> Savepoint:
        return decode(self._roots[root][SAVEPOINT_METADATA], address)

    def begins_with(self, reason: str) -> str:
        """Return the savepoint that the next run begins with; empty: none.

        Args:
            reason: why the last run ended.
        """
        completed = len(self._world.completed)
        stopped = [address for address in self._ids if f"savepoint {address} and " in reason]
        if stopped:
            self._begins_with = stopped[0]
        elif completed > self._completed_before:
            self._begins_with = ""  # the last run has a checkpoint, which the next one goes on from
        self._completed_before = completed
        if self._begins_with:
            self._world.begun_with.add(self._ids[self._begins_with])
        return self._begins_with

    def claimed(self) -> None:
        """Note that a run owns the savepoint that it begins with, and may delete it."""
        self.told.discard(self._begins_with)

    def check_at_end(self) -> None:
        """Savepoints belong to the user: whatever became of the job, they are there."""
        for address in sorted(self.told & self._late):
            self._world.violated(
                f"a client was told of a replaced coordinator's savepoint: {address}"
            )
        for address in sorted(self.told):
            root = address.removeprefix("memory://")
            content = self._roots.get(root, {})
            if SAVEPOINT_METADATA not in content:
                self._world.violated(f"a client was told of a savepoint that is gone: {address}")
            elif missing := self._read(root, address).manifest.files() - content.keys():
                self._world.violated(f"a savepoint has lost files: {address} {sorted(missing)}")
