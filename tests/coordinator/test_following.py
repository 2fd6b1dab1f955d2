"""The command that follows a job on a cluster, without the cluster.

`World` stands for the cluster. It passes through phases, each of which lasts for a given number of
questions, so a test can have a coordinator die, or its job end, between any two questions of the command.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from headgate.errors import JobError, JobNotFound
from headgate.runtime.cluster import leaders, ray_driver
from headgate.runtime.cluster.leaders import Leaders, ask_actor
from headgate.runtime.cluster.ray_actors import Lead
from headgate.runtime.control.job_client import PublishedEvent
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.runtime.protocol.joblog import JobEnded, JobStatus
from headgate.runtime.rest.client import RestClient

from .test_takeovers import make_spec

ASKED_MAX = 1000
FINISHED = JobOutcome("FINISHED", "")
FENCED = JobOutcome("FAILED", "fenced")
REFUSED = JobError("the store is away")


class Phase(Enum):
    """The state of the process of a coordinator."""

    STARTS = auto()
    """It does not listen yet."""
    LEADS = auto()
    REPLACED = auto()
    """Another process of the same actor leads, because Ray took the one before for dead; it was fenced."""
    ENDED = auto()
    """The job has ended under it."""
    LEFT = auto()
    """The job has ended under another process."""
    FAILED = auto()
    DIED = auto()
    """Ray makes another process."""
    REMOVED = auto()


STARTS, LEADS, REPLACED, ENDED, LEFT, FAILED, DIED, REMOVED = Phase
Phases = Sequence[tuple[Phase, int]]


class World:
    """A coordinator's actor that passes through `phases`; the last one lasts for ever."""

    def __init__(self, phases: Phases, *, says_how: bool) -> None:
        """Nothing was asked yet.

        Args:
            phases: each with the number of questions that it lasts.
            says_how: a client that is connected when the job ends is told how.
        """
        self._phases = list(phases)
        self.says_how = says_how
        self._asked = 0
        self._pid = 1
        self.connected = 0
        self._logged_end = False

    @property
    def phase(self) -> Phase:
        return self._phases[0][0]

    def step(self) -> Phase:
        """The phase in which one more question is answered."""
        self._asked += 1
        assert self._asked < ASKED_MAX, "it asks for ever"
        phase, left = self._phases[0]
        self._logged_end |= phase is ENDED
        if left > 1 or len(self._phases) == 1:
            self._phases[0] = (phase, left - 1)
        else:
            self._phases.pop(0)
            self._pid += phase is DIED or self.phase is REPLACED
        return phase

    def answer(self, method: str) -> Any:
        phase = self.step()
        if phase is DIED:
            raise ActorUnavailableError("it is made again", None)
        if phase is REMOVED:
            raise ActorDiedError
        if method == "alive":
            return phase in (STARTS, LEADS, REPLACED)
        if method == "ended":
            return FINISHED if phase is ENDED else None
        if method == "credentials":
            return "token"
        assert method == "lead"
        if phase is FAILED:
            raise RayTaskError("lead", "", REFUSED)
        return Lead((), self._pid, 1) if phase in (LEADS, REPLACED) else None

    async def connect(self, addresses: Any, token: str) -> Any:
        phase = self.step()
        if phase not in (LEADS, REPLACED):
            raise JobError("the coordinator does not answer: unix:/nowhere")
        self.connected += 1
        return Client(self, phase)

    async def find_job(self, *_: Any) -> World:
        return self

    def end_of(self, run: str) -> JobEnded | None:
        if not self._logged_end:
            return None
        return JobEnded(generation=1, writer="w", status=JobStatus.FINISHED, reason="", ended_ms=1)

    def __getattr__(self, method: str) -> Any:
        return Method(self, method)


class Method:
    """A method of an actor of Ray."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def remote(self) -> Method:
        return self

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._world.answer(self._name))
        except Exception as error:
            future.set_exception(error)
        return future


class Client:
    """Hears of the job until the process that it is connected to leads no more."""

    def __init__(self, world: World, phase: Phase) -> None:
        self._world, self._phase = world, phase

    async def events(self) -> AsyncIterator[PublishedEvent]:
        while (phase := self._world.step()) is self._phase:
            yield PublishedEvent(kind="checkpoint", text="", body=b"{}")
        told = {ENDED: FINISHED, REPLACED: FENCED}.get(phase)
        if told is not None and self._world.says_how:
            yield PublishedEvent(kind="ended", text="", body=json.dumps(told.as_json()).encode())

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "SEARCH_EVERY_S", 0.0)
    monkeypatch.setattr(leaders, "SEARCH_EVERY_S", 0.0)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function of the driver for the job whose coordinators are these; the first one is reached."""
    spec = make_spec()

    def ask(
        function: Callable[..., Coroutine[Any, Any, Any]],
        *worlds: World,
        options: dict[str, str] | None = None,
    ) -> Any:
        told = replace(spec, options={**spec.options, **(options or {})})
        monkeypatch.setattr(RestClient, "connect", worlds[0].connect)
        monkeypatch.setattr(ray_driver, "find_job", worlds[0].find_job)
        return asyncio.run(function(told, Leaders(worlds), "token"))

    return ask


async def follow(*args: Any) -> JobOutcome:
    return await ray_driver._follow(*args, None, None)


def worlds(*phases: Phase) -> Iterator[World]:
    """One for each number of questions that each phase may last."""
    for lengths in itertools.product((1, 2, 3), repeat=len(phases) - 1):
        for says_how in (True, False):
            yield World(list(zip(phases, (*lengths, ASKED_MAX), strict=True)), says_how=says_how)


@pytest.mark.parametrize(
    "phases",
    [
        (STARTS, LEADS, ENDED),
        (DIED, STARTS, LEADS, ENDED),
        (STARTS, ENDED),
        (LEADS, DIED, STARTS, LEADS, ENDED),
        (LEADS, DIED, STARTS, DIED, STARTS, ENDED),
        (LEADS, ENDED, DIED, STARTS, LEADS, ENDED),
        (STARTS, LEADS, REPLACED, ENDED),
        (LEADS, ENDED, REMOVED),
        (LEADS, ENDED, DIED, STARTS, LEFT),
    ],
    ids=lambda phases: "-".join(phase.name for phase in phases),
)
def test_a_job_that_finished_is_never_reported_as_failed(ask: Any, phases: Any) -> None:
    for world in worlds(*phases):
        assert ask(follow, world).status == "FINISHED"


def test_of_two_coordinators_the_one_that_knows_is_believed(ask: Any) -> None:
    for world in worlds(LEADS, ENDED):
        assert ask(follow, world, World([(LEFT, 1)], says_how=False)).status == "FINISHED"


@pytest.mark.parametrize("function", [follow, ray_driver._begun])
def test_why_a_job_could_not_begin_is_told_however_late_it_is_asked(
    ask: Any, function: Any
) -> None:
    for world in worlds(DIED, STARTS, FAILED):
        with pytest.raises(JobError, match="the store is away"):
            ask(function, world)


def test_the_reason_of_ray_for_the_end_of_an_actor_is_told() -> None:
    killed = ActorDiedErrorContext(
        class_name="CoordinatorActor",
        actor_id=b"a" * 16,
        pid=7,
        error_message="The actor is dead because all references to the actor were removed.",
    )
    said = leaders._dead(ActorDiedError(killed))
    assert said.message == (
        "the coordinator was removed from the cluster, as Ray says: "
        "The actor is dead because all references to the actor were removed."
    )
    broken = RayTaskError(
        "__init__", "Traceback:\n  in enter\nOSError: no such pipe", OSError(), actor_id="aa"
    )
    said = leaders._dead(ActorDiedError(broken))
    assert said.message == "the process of the coordinator could not begin: OSError: no such pipe"


@pytest.mark.parametrize("phases", [(LEADS, REMOVED), (STARTS, LEFT)])
def test_a_job_that_nobody_knows_the_end_of_is_reported_as_failed(ask: Any, phases: Any) -> None:
    for world in worlds(*phases):
        with pytest.raises(JobError, match="removed from the cluster|none of them knows") as caught:
            ask(follow, world)
        assert "run" in caught.value.fix


@pytest.mark.parametrize(
    "phases",
    [
        (STARTS, LEADS),
        (LEADS, DIED, STARTS, LEADS),
        (STARTS, LEADS, ENDED),
        (STARTS, ENDED),
        (LEADS, ENDED, REMOVED),
    ],
)
def test_a_job_that_is_submitted_has_begun_if_it_leads_or_has_ended(ask: Any, phases: Any) -> None:
    for world in worlds(*phases):
        ask(ray_driver._begun, world)
        assert world.connected or world.phase in (ENDED, REMOVED)


def test_a_submission_does_not_wait_for_what_was_announced_long_ago(ask: Any) -> None:
    # The coordinator keeps its last events only, and the job began hours ago.
    world = World([(LEADS, ASKED_MAX)], says_how=False)
    ask(ray_driver._begun, world)
    assert world.connected == 1


def test_a_coordinator_that_cannot_be_reached_is_not_tried_for_ever(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def out_of_reach(addresses: Any, token: str) -> Any:
        loop = asyncio.get_running_loop()
        now = loop.time() + 30.0
        monkeypatch.setattr(loop, "time", lambda: now)
        tries.append(now)
        raise JobError("the coordinator does not answer: unix:/nowhere")

    world = World([(LEADS, ASKED_MAX)], says_how=False)
    tries: list[float] = []
    monkeypatch.setattr(world, "connect", out_of_reach)
    with pytest.raises(JobError, match="does not answer: unix:/nowhere"):
        ask(follow, world, options={"headgate.coordinator.return-timeout": "100 s"})
    assert len(tries) == 4


def test_a_process_that_is_being_made_again_is_asked_until_it_answers() -> None:
    assert asyncio.run(ask_actor(World([(DIED, 3), (LEADS, 1)], says_how=False), "alive")) is True
    assert asyncio.run(ask_actor(World([(DIED, 1), (REMOVED, 1)], says_how=False), "alive")) is None
    with pytest.raises(JobError, match="the store is away"):
        asyncio.run(ask_actor(World([(DIED, 1), (FAILED, 1)], says_how=False), "lead"))


def test_a_process_that_never_answers_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaders, "FIND_TIMEOUT_S", 0.0)
    with pytest.raises(JobError, match="does not come back"):
        asyncio.run(ask_actor(World([(DIED, 1)], says_how=False), "alive"))


def test_a_job_that_has_just_ended_is_not_found_any_more() -> None:
    for world in worlds(STARTS, ENDED):
        with pytest.raises(JobNotFound, match="ended as FINISHED"):
            asyncio.run(leaders._find([world]))
