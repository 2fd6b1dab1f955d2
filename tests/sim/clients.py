"""The clients of a simulated job that read its state: at its coordinators, and directly at its workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headgate.errors import HeadgateError, InternalError, StateError, UsageError
from headgate.runtime.control.job_client import HungUp, Silent
from headgate.runtime.coordinator.clients import LocalClient
from headgate.runtime.query import AsyncQueryClient
from headgate.runtime.rest.client import RestClient
from headgate.runtime.rest.state_answers import RowsAnswer

from .outside import KEYS
from .reading import (
    Reads,
    check_committed,
    check_followed,
    check_live,
    check_scanned,
    live_counts,
)

if TYPE_CHECKING:
    from .run import Leader, Simulation

A = TypeVar("A")
READERS = 3
"""The clients that read state at the coordinators, each one value at a time."""
CALLERS = 2
"""The callers of the client that reads state at the workers."""
ANSWER_S = 20.0
"""A client waits for this time."""


def begin(sim: Simulation, reads: Reads) -> list[asyncio.Task[None]]:
    """Begin all clients that read a state. They go on until they are cancelled."""
    readers = [_read(sim, reads, random.Random(f"{sim.seed} {each}")) for each in range(READERS)]
    follower = _follow(sim, reads, random.Random(f"{sim.seed} follows"))
    direct = DirectClient(sim, reads)
    callers = [direct.read(random.Random(f"{sim.seed} direct {each}")) for each in range(CALLERS)]
    named = [("reader", each) for each in readers] + [("follower", follower)]
    named += [("direct reader", each) for each in callers]
    return [sim.loop.create_task(each, name=name) for name, each in named]


async def ask(leader: Leader, verb: str, given: Mapping[str, Any], answer_s: float) -> Any:
    """Return what a coordinator answers to a request, which it carries out in its own process.

    Raises:
        TimeoutError: there was no answer within `answer_s`.
        HeadgateError: the request was refused.
    """
    loop = asyncio.get_running_loop()
    client = LocalClient(leader.coordinator.clients, loop)
    asking = leader.process.context.run(
        loop.create_task, client.request(verb, **given), name=f"answer {verb}"
    )
    try:
        async with asyncio.timeout(answer_s):
            return await asyncio.shield(asking)
    finally:
        asking.cancel()


async def _asked(sim: Simulation, verb: str, seen: str, **given: Any) -> Any | None:
    """Return what the newest coordinator answers; None: it refuses. Count it as `seen`."""
    try:
        answer = await ask(sim.leader, verb, given, ANSWER_S)
    except (HeadgateError, TimeoutError) as error:
        refused(sim, seen, error)
        return None
    sim.watch.seen[f"{seen} done"] += 1
    return answer


def refused(sim: Simulation, seen: str, error: Exception) -> None:
    """Note that a request was refused, which clients put up with, unless it is the fault of the job."""
    sim.watch.seen[f"{seen} refused"] += 1
    if isinstance(error, InternalError | UsageError | StateError):
        sim.world.violated(f"{seen}: {error}")


# -- at the coordinators ------------------------------------------------------------------------------


async def _read(sim: Simulation, reads: Reads, rng: random.Random) -> None:
    """Read values, as they are or as of a checkpoint, as long as there is a job."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / 0.05))
        level = rng.choice(("live", "committed"))
        if rng.random() < 0.3:
            await _scan(sim, reads, rng, level)
            continue
        keys = rng.sample(range(KEYS), rng.choice((1, 1, 4)))
        before = [reads.visible(sim.world, key) for key in keys]
        given = {"state": reads.state, "keys": [str(key) for key in keys], "level": level}
        answer = await _asked(sim, "rows", f"query {level}", **given)
        if answer is None:
            continue
        for key, visible, row in zip(keys, before, answer["rows"], strict=True):
            value = reads.value(row["value"])
            if level != "live":
                check_committed(sim.world, reads, answer["checkpoint"], key, value)
            reads.check(sim.world, key, visible, value)


async def _follow(sim: Simulation, reads: Reads, rng: random.Random) -> None:
    """Follow values as of checkpoints, at one coordinator after the other."""
    keys = rng.sample(range(KEYS), rng.choice((1, 3)))
    given, known = {"state": reads.state, "keys": [str(key) for key in keys]}, dict[int, Any]()
    told = position = ""
    while True:
        await asyncio.sleep(rng.expovariate(1 / 0.1))
        if rng.random() < 0.2:
            position = told  # the connection is another one: it goes on behind the last event
        answer = await _asked(sim, "changes", "changes", **given, after=position)
        if answer is not None:
            check_followed(sim.world, reads, keys, known, answer)
            position = answer["id"]
            told = position if answer["rows"] else told


async def _scan(sim: Simulation, reads: Reads, rng: random.Random, level: str) -> None:
    """Read the values of all keys, a page at a time."""
    before = {key: reads.visible(sim.world, key) for key in range(KEYS)}
    pages: list[dict[str, Any]] = []
    more: dict[str, Any] = {"level": level}
    while "next" not in more or more["next"] is not None:
        limit = rng.choice((1, 3, 100))
        given = {"state": reads.state, "limit": limit, **more}
        page = await _asked(sim, "scan", f"page {level}", **given)
        if page is None:
            return
        pages.append(page)
        more = {"next": page["next"]}
        await asyncio.sleep(rng.choice((0, 0, 0.05, 0.5)))
    sim.watch.seen[f"scan {level} done"] += 1
    check_scanned(sim.world, reads, level, before, pages)


# -- at the workers -----------------------------------------------------------------------------------


class _RestStandIn(RestClient):
    """The REST API of one coordinator, without HTTP."""

    def __init__(self, leader: Leader) -> None:
        super().__init__("http://simulated", "token")
        self._leader = leader

    async def _get(
        self,
        name: str,
        answer: type[A],
        *,
        query: Mapping[str, int] | None = None,
        texts: Mapping[str, str | Sequence[str]] | None = None,
        **parameters: Any,
    ) -> A:
        given: dict[str, Any] = {**parameters, **(texts or {})}
        if name == "rows":
            given["keys"] = given.pop("key")
        if name == "states":
            return msgspec.convert(self._leader.coordinator.clients.view(name), answer)
        if self._leader.process.dead:
            raise HungUp
        try:
            return msgspec.convert(await ask(self._leader, name, given, 5.0), answer)
        except TimeoutError:
            raise Silent("the coordinator does not answer") from None


class DirectClient:
    """A client that reads values where they are, for callers that go on at the same time.

    It finds a coordinator only when the one that it knows is gone, as real clients do.
    """

    def __init__(self, sim: Simulation, reads: Reads) -> None:
        self._sim, self._reads = sim, reads
        self._client = AsyncQueryClient(self._connect, 10.0)
        self._newest = 0
        """The newest checkpoint that it was told of."""
        self._attempt = 0
        """The newest attempt that it was told of."""

    async def _connect(self) -> RestClient:
        await asyncio.sleep(self._sim.loop.network.delay_s())
        leader = self._sim.leader
        if leader.process.dead or leader.task.done():
            raise HungUp
        return _RestStandIn(leader)

    async def read(self, rng: random.Random) -> None:
        """Read values until cancelled."""
        try:
            while True:
                await asyncio.sleep(rng.expovariate(1 / 0.05))
                await self._read(
                    rng.sample(range(KEYS), rng.choice((1, 1, 4))),
                    committed=rng.random() < 0.5,
                )
        finally:
            await self._client.close()

    async def _read(self, keys: list[int], *, committed: bool) -> None:
        sim, reads, newest, attempt = self._sim, self._reads, self._newest, self._attempt
        level = "committed" if committed else "live"
        before, over = live_counts(sim.world), set(sim.world.closed)
        asking = self._client.query_many(reads.state, keys, level=level)
        try:
            answer = await asking
        except (HeadgateError, TimeoutError) as error:
            refused(sim, f"direct {level}", error)
            return
        sim.watch.seen[f"direct {level} done"] += 1
        self._check_order(answer, newest, attempt)
        for row in answer.rows:
            value = reads.value(row.value)
            if (row.attempt, row.subtask) in over:
                sim.world.violated(
                    f"subtask {row.subtask} of attempt {row.attempt} has answered after its end"
                )
            if answer.checkpoint is not None:
                check_committed(sim.world, reads, answer.checkpoint, row.key, value)
            elif reads.live:
                check_live(sim.world, row.attempt, row.key, before, value)

    def _check_order(self, answer: RowsAnswer, newest: int, attempt: int) -> None:
        """Check that no answer is of before one that the client had when it asked."""
        world = self._sim.world
        found = min(row.attempt for row in answer.rows)
        if found < attempt:
            world.violated(f"a client has read attempt {found} after {attempt}")
        self._attempt = max(self._attempt, found)
        if answer.checkpoint is not None:
            if answer.checkpoint < newest:
                world.violated(f"a client has read {answer.checkpoint} after {newest}")
            self._newest = max(self._newest, answer.checkpoint)
