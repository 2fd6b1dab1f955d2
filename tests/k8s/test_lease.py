"""Goal: there is never more than one leader, and soon there is one again when it is lost.

Method: candidates whose clocks run at their own speed and show other times, on virtual time, over an API
server in memory that can hang, refuse or lose answers for each of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="pip install 'headgate[k8s]'")

from headgate.k8s.operator.api import ApiError
from headgate.k8s.operator.kinds import LEASE, Kind
from headgate.k8s.operator.lease import LEASE_S, RENEW_DEADLINE_S, RETRY_S, LeaseElection
from headgate.testing.loop import VirtualLoop
from headgate.tests.k8s.memory_api import MemoryApi

Object = dict[str, Any]


@dataclass
class Link:
    """The way of one candidate to the API server, with its troubles.

    Attributes:
        hangs: requests are swallowed: none arrives, none is answered.
        fails: requests are refused; after a write it has happened with the chance `half`.
    """

    api: MemoryApi
    rng: random.Random
    hangs: bool = False
    fails: float = 0.0
    half: float = 0.0

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        await self._trouble()
        return await self.api.get(kind, namespace, name)

    async def create(self, made: Object, kind: Kind) -> Object:
        await self._trouble()
        return self._lost(await self.api.create(made, kind))

    async def update(self, changed: Object, kind: Kind) -> Object:
        await self._trouble()
        return self._lost(await self.api.update(changed, kind))

    async def _trouble(self) -> None:
        await asyncio.sleep(self.rng.random() / 20)
        if self.hangs:
            await asyncio.Event().wait()
        if self.rng.random() < self.fails:
            raise ApiError(503, "unavailable")

    def _lost(self, answer: Object) -> Object:
        if self.rng.random() < self.half:
            raise ApiError(0, "the answer was lost")
        return answer


@dataclass
class Candidate:
    """One process: it waits for the Lease, leads until it may be lost, and begins again."""

    world: World = field(repr=False)
    name: str = ""
    speed: float = 1.0
    year: int = 2026
    leads: bool = False
    terms: int = 0
    lost_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = Link(self.world.api, self.world.rng)
        self.election = self._election()
        self.task = self.world.loop.create_task(self._run())

    def _election(self) -> LeaseElection:
        loop = self.world.loop

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds / self.speed)

        return LeaseElection(
            self.link, "n", "op", self.name, lambda: 77 + loop.time() * self.speed, self._now, sleep
        )  # fmt: skip

    def _now(self) -> str:
        """The time of day as this candidate's machine shows it."""
        shown = datetime(self.year, 1, 1, tzinfo=UTC) + timedelta(seconds=self.world.loop.time())
        return shown.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    async def _run(self) -> None:
        while True:
            await self.election.acquire()
            self.leads, self.terms = True, self.terms + 1
            self.world.check()
            try:
                await self.election.hold()
            finally:
                self.leads = False
            self.lost_at.append(self.world.loop.time())
            self.election = self._election()

    def die(self) -> None:
        """SIGKILL: nothing is released."""
        self.task.cancel()
        self.world.run(0.001)

    def stop(self) -> None:
        """SIGTERM."""
        self.die()
        self.world.loop.create_task(self.election.release())


class World:
    def __init__(self, seed: int = 1) -> None:
        self.loop = VirtualLoop(seed)
        asyncio.set_event_loop(self.loop)
        self.rng = random.Random(seed)
        self.api = MemoryApi()
        self.candidates: list[Candidate] = []

    def candidate(self, name: str, **more: Any) -> Candidate:
        self.candidates.append(Candidate(self, name, **more))
        return self.candidates[-1]

    def check(self) -> None:
        """Called whenever a term begins."""
        leaders = [each.name for each in self.candidates if each.leads]
        assert len(leaders) <= 1, leaders

    def run(self, seconds: float) -> None:
        self.loop.drive(self.loop.time() + seconds)

    def until_one_leads(self) -> float:
        """Seconds until there is a leader."""
        began = self.loop.time()
        while not any(each.leads for each in self.candidates):
            self.run(0.1)
            assert self.loop.time() - began < 120, "nobody leads"
        return self.loop.time() - began

    @property
    def spec(self) -> Object:
        spec: Object = self.api.objects[LEASE.name, "n", "op"]["spec"]
        return spec

    def close(self) -> None:
        for each in self.candidates:
            each.task.cancel()
        self.loop.drive(self.loop.time() + 0.01)
        self.loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_one_of_several_leads_and_keeps_the_lease(world: World) -> None:
    candidates = [world.candidate(name) for name in "abc"]
    world.run(600)
    assert sorted(each.terms for each in candidates) == [0, 0, 1]
    assert world.spec["leaseTransitions"] == 0
    assert world.spec["leaseDurationSeconds"] == LEASE_S


def test_a_leader_that_dies_is_replaced_after_the_lease_duration(world: World) -> None:
    first = world.candidate("a")
    world.run(5)
    second = world.candidate("b")
    world.run(30)
    first.die()
    assert LEASE_S - RETRY_S <= world.until_one_leads() <= LEASE_S + 2 * RETRY_S
    assert second.leads
    assert (world.spec["holderIdentity"], world.spec["leaseTransitions"]) == ("b", 1)


def test_a_leader_that_stops_is_replaced_at_once(world: World) -> None:
    first = world.candidate("a")
    world.run(5)
    world.candidate("b")
    world.run(30)
    first.stop()
    assert world.until_one_leads() <= RETRY_S + 0.2
    assert world.spec["holderIdentity"] == "b"


def test_another_leaders_lease_is_not_released(world: World) -> None:
    world.candidate("a")
    world.run(5)
    second = world.candidate("b")
    world.run(5)
    second.stop()
    world.run(1)
    assert world.spec["holderIdentity"] == "a"


def test_a_release_that_is_not_answered_does_not_keep_the_process(world: World) -> None:
    """It would be killed in the middle of something."""
    first = world.candidate("a")
    world.run(5)
    first.link.hangs = True
    task = world.loop.create_task(first.election.release())
    world.run(RENEW_DEADLINE_S)
    assert task.done()
    assert task.exception() is None


def test_a_leader_without_an_api_server_stops_in_time(world: World) -> None:
    """Before another one may take over, with time left for what it has sent already."""
    first = world.candidate("a")
    world.run(5)
    second = world.candidate("b")
    world.run(31)
    first.link.hangs = True
    cut_at = world.loop.time()
    while not second.leads:
        world.run(0.1)
    (lost_at,) = first.lost_at
    assert lost_at - cut_at <= RENEW_DEADLINE_S + 0.2
    assert world.loop.time() - lost_at >= LEASE_S - RENEW_DEADLINE_S - RETRY_S


def test_a_failed_renewal_is_tried_again_within_the_deadline(world: World) -> None:
    first = world.candidate("a")
    world.candidate("b")
    world.run(20)
    leader = next(each for each in world.candidates if each.leads)
    for _ in range(20):
        leader.link.fails = 1.0
        world.run(RENEW_DEADLINE_S - 2 * RETRY_S)
        leader.link.fails = 0.0
        world.run(2 * RETRY_S)
    assert leader.leads
    assert leader.lost_at == []
    assert first.terms + world.candidates[1].terms == 1


def test_a_failure_of_the_first_renewal_does_not_end_the_term(world: World) -> None:
    """What it has seen last is the Lease of the leader before."""
    first = world.candidate("a")
    world.run(5)
    second = world.candidate("b")
    world.run(10)
    first.die()
    world.until_one_leads()
    second.link.fails = 1.0
    world.run(1.5 * RETRY_S)
    second.link.fails = 0.0
    world.run(2 * RETRY_S)
    assert second.leads
    assert second.lost_at == []


def test_a_leader_that_finds_another_holder_stops_at_once(world: World) -> None:
    """As after a pause of its machine; it must not wait for its deadline."""
    first = world.candidate("a")
    world.run(10)
    held = world.api.objects[LEASE.name, "n", "op"]
    world.api.put({**held, "spec": held["spec"] | {"holderIdentity": "z"}})
    world.run(RETRY_S + 0.2)
    assert not first.leads


def test_a_lease_that_is_deleted_is_made_again_by_its_holder(world: World) -> None:
    first = world.candidate("a")
    world.run(10)
    del world.api.objects[LEASE.name, "n", "op"]
    world.run(RETRY_S + 0.2)
    assert first.leads
    assert world.spec["holderIdentity"] == "a"


def test_clocks_that_show_other_times_are_not_compared(world: World) -> None:
    first = world.candidate("a", year=1970)
    world.run(5)
    second = world.candidate("b", year=2400)
    world.run(300)
    assert (first.terms, second.terms) == (1, 0)
    first.die()
    assert world.until_one_leads() >= LEASE_S - RETRY_S


def test_a_lease_of_another_length_is_respected(world: World) -> None:
    first = world.candidate("a")
    world.run(5)
    first.die()
    held = world.api.objects[LEASE.name, "n", "op"]
    world.api.put({**held, "spec": held["spec"] | {"leaseDurationSeconds": 40}})
    world.candidate("b")
    assert 40 <= world.until_one_leads() <= 40 + 2 * RETRY_S


@pytest.mark.parametrize("seed", range(20))
def test_never_two_leaders_whatever_goes_wrong(seed: int) -> None:
    """Clocks differ by a tenth in speed, requests hang, fail, or happen without an answer."""
    world = World(seed)
    rng = random.Random(1000 + seed)
    for name in "abc":
        world.candidate(name, speed=rng.uniform(0.93, 1.07))
    for _ in range(60):
        each = rng.choice(world.candidates)
        each.link.hangs = rng.random() < 0.3
        each.link.fails = rng.choice((0.0, 0.0, 0.5, 1.0))
        each.link.half = rng.choice((0.0, 0.3))
        world.run(rng.uniform(0.5, 20))
    for each in world.candidates:
        each.link.hangs, each.link.fails, each.link.half = False, 0.0, 0.0
    world.run(2 * LEASE_S)  # what hangs ends, and with it a term that is lost already
    assert world.until_one_leads() <= LEASE_S + 2 * RETRY_S
    leader = next(each for each in world.candidates if each.leads)
    terms = leader.terms
    world.run(120)
    assert leader.leads
    assert leader.terms == terms
    world.close()
