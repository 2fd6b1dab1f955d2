"""Coordinators on Ray: which process of a job leads, and jobs found by the names of their actors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from ...errors import HeadgateError, JobError, JobNotFound
from ..protocol.job_result import JobOutcome
from .connect import ray_cluster
from .ray_actors import NAMESPACE, STANDBY_SUFFIX, Lead, actor_names

FIND_TIMEOUT_S = 60.0
"""Commands for a job that they did not start wait at most this long for a coordinator that leads, in s."""
ANSWER_TIMEOUT_S = 5.0
"""A process that does not answer within this time is left out."""
SEARCH_EVERY_S = 0.05
LOOK_EVERY_S = 1.0
"""The pause between two checks, while one leads, whether another does by now."""
CLOSE_TIMEOUT_S = 5.0
"""A coordinator that has not closed its server within this time after the end of its job is killed."""
_T = TypeVar("_T")
_PREFIX = actor_names("")[0]


class Leaders:
    """The actors of one job."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors

    async def find(self, within_s: float, but: Lead | None = None) -> Lead | JobOutcome:
        """Wait for one that leads, or that knows how the job ended.

        One that leads may only believe so; `while_leading` finds out.

        Args:
            within_s: the longest time to wait, in seconds.
            but: this one does not lead, whatever it says.

        Raises:
            HeadgateError: a coordinator could not start, or none is left, or none leads in time.
        """
        # One by one: a process that is being made again answers late.
        loop = asyncio.get_running_loop()
        seeking = {loop.create_task(_seek(actor, but), name="seek leader") for actor in self.actors}
        waiting = set(seeking)
        problem: HeadgateError | None = None
        try:
            async with asyncio.timeout(within_s):
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for found in [task.result() for task in done]:
                        if isinstance(found, Lead | JobOutcome):
                            return found
                        problem = found or problem
        except TimeoutError:
            problem = problem or _nobody_in_time(within_s)
        finally:
            for task in seeking:
                task.cancel()
            await asyncio.gather(*seeking, return_exceptions=True)
        raise problem or _nobody_left()

    async def while_leading(self, lead: Lead, watching: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the result of `watching`; None if another one leads, unknown to this one, or it hangs."""
        task = asyncio.get_running_loop().create_task(watching)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_EVERY_S)
                if len(self.actors) > 1 and not task.done() and await self._is_deposed(lead):
                    return None
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _is_deposed(self, lead: Lead) -> bool:
        leads = [answer for answer in await self._ask("lead") if isinstance(answer, Lead)]
        newest = max(leads, key=lambda each: each.generation, default=lead)
        return newest.generation > 0 and newest.pid != lead.pid

    async def leave(self) -> None:
        """Give coordinators whose job has ended the time to remove their sockets."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while True in await self._ask("alive"):  # noqa: ASYNC110
                    await asyncio.sleep(SEARCH_EVERY_S)

    async def _ask(self, method: str) -> list[Any]:
        return await asyncio.gather(*(_answer(actor, method) for actor in self.actors))


async def _seek(actor: Any, but: Lead | None) -> Lead | JobOutcome | HeadgateError | None:
    """Wait until this actor leads, or is done with the job.

    Return how the job ended, if the actor knows that; why the actor will never lead; or None if another
    process has led the job to its end.
    """
    while True:
        # This is asked first: a job may end between two answers, so only what an actor says after it was
        # through with the job is its last word.
        through = await _answer(actor, "alive") is False
        if through and isinstance(ended := await _answer(actor, "ended"), JobOutcome):
            return ended
        answer = await _answer(actor, "lead")
        if isinstance(answer, RayTaskError):
            return _cause(answer)
        if isinstance(answer, ActorDiedError):
            return _dead(answer)  # Ray says of one that it starts again that it is unavailable
        if through:
            return None
        if isinstance(answer, Lead) and (but is None or answer.pid != but.pid):
            return answer
        await asyncio.sleep(SEARCH_EVERY_S)


async def ask_actor(actor: Any, method: str) -> Any:
    """Return the answer of an actor, which is waited for while Ray makes it again. None: it was removed.

    Raises:
        HeadgateError: what the actor raises; or it does not answer in time.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIND_TIMEOUT_S):
            while True:
                answer = await _answer(actor, method)
                if isinstance(answer, RayTaskError):
                    raise _cause(answer)
                if isinstance(answer, ActorDiedError):
                    return None
                if not isinstance(answer, RayActorError | TimeoutError):
                    return answer
                await asyncio.sleep(SEARCH_EVERY_S)
    raise _nobody_in_time(FIND_TIMEOUT_S)


async def _answer(actor: Any, method: str) -> Any:
    """Return the answer of an actor, or the error."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await asyncio.wrap_future(getattr(actor, method).remote().future())
    except (RayTaskError, RayActorError, TimeoutError) as error:
        return error


def _nobody_left() -> JobError:
    return JobError(
        "all processes of the coordinator have ended, and none of them knows how the job ended",
        fix="`headgate history` shows how, if the job has checkpoints; if it had not ended, run it again, "
        "and it goes on from the newest checkpoint",
    )


def _nobody_in_time(within_s: float) -> JobError:
    return JobError(
        f"the coordinator does not come back: no process of it has answered for {within_s:.0f} s",
        fix="look into the logs of Ray: has its machine too little memory, or too much to do? then run the "
        "job again: it goes on from the newest checkpoint",
    )


def _dead(error: ActorDiedError) -> JobError:
    """Return the error for an actor that Ray does not start again, with Ray's reason."""
    # The first line is the same for all deaths. Lines with a tab name the actor.
    lines = [line for line in error.error_msg.splitlines()[1:] if line.strip()]
    if error.actor_init_failed:
        return JobError(
            f"the process of the coordinator could not begin: {lines[-1].strip() if lines else error}",
            fix="its whole error is in the logs of Ray",
        )
    said = " ".join(line for line in lines if not line.startswith("\t"))
    reason = f", as Ray says: {said}" if said else ""
    return JobError(
        f"the coordinator was removed from the cluster{reason}",
        fix="did another run take the job over (--take-over), or somebody kill its actor? `headgate list` "
        "shows what runs; a run started again goes on from the newest checkpoint",
    )


def _cause(error: Any) -> HeadgateError:
    cause = error.cause
    return cause if isinstance(cause, HeadgateError) else JobError(str(cause))


async def find_on_cluster(address: str, job: str, timeout_ms: int) -> tuple[tuple[str, ...], str]:
    """Return the addresses of a job's coordinator, and its token, since Ray has let us in.

    Raises:
        JobNotFound: no such job runs there.
        JobError: the cluster, or the coordinator, does not answer.
    """
    async with ray_cluster(address, NAMESPACE, timeout_ms):
        actors = await asyncio.to_thread(_actors, actor_names(job))
        if not actors:
            running = ", ".join(await asyncio.to_thread(_names))
            raise JobNotFound(
                f"no such job runs on the cluster name=`{job}` cluster=`{address}`",
                fix=f"running jobs: {running}" if running else "no job runs there",
            )
        return await _find(actors)


async def list_on_cluster(address: str, timeout_ms: int) -> list[tuple[str, tuple[str, ...], str]]:
    """Name, addresses and token of every job on the cluster whose coordinator can be found, by name."""
    found = []
    async with ray_cluster(address, NAMESPACE, timeout_ms):
        for job in await asyncio.to_thread(_names):
            actors = await asyncio.to_thread(_actors, actor_names(job))
            try:
                found.append((job, *(await _find(actors))))
            except HeadgateError:
                continue  # it has ended, or could not begin
    return found


async def _find(actors: list[Any]) -> tuple[tuple[str, ...], str]:
    lead = await Leaders(actors).find(within_s=FIND_TIMEOUT_S)
    if isinstance(lead, JobOutcome):
        raise JobNotFound(
            f"the job does not run: it has just ended as {lead.status}",
            fix="`headgate history` shows its runs, if it has checkpoints",
        )
    for actor in actors:
        token: str | None = await ask_actor(actor, "credentials")
        if token is not None:
            return lead.addresses, token
    raise JobNotFound("the job does not run: its coordinator was removed from the cluster")


def _names() -> list[str]:
    """Return the jobs with an actor for a coordinator; workers of a job `headgate-...` have other names."""
    names = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE
    ]
    jobs = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    own = [job for job in jobs if not job.endswith(STANDBY_SUFFIX)]
    return sorted(job for job in own if any(hasattr(a, "lead") for a in _actors([_PREFIX + job])))


def _actors(names: list[str]) -> list[Any]:
    found = []
    for name in names:
        try:
            found.append(ray.get_actor(name, NAMESPACE))
        except ValueError:
            continue
    return found
