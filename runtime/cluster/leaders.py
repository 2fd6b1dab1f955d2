"""Which of a job's coordinator processes on Ray leads: asked by the command that follows the job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from ...errors import HeadgateError, JobError
from ..protocol.job_result import JobOutcome
from .ray_actors import Lead

TAKEOVER_TIMEOUT_S = 60.0
"""If nobody leads for so long, a job whose coordinator crashed is given up."""
ANSWER_TIMEOUT_S = 5.0
"""A process that does not answer by then is left out."""
SEARCH_EVERY_S = 0.05
LOOK_EVERY_S = 1.0
"""While one leads, whether another does by now."""
CLOSE_TIMEOUT_S = 5.0
"""A coordinator that has not closed its server by then, after its job has ended, is killed."""
_T = TypeVar("_T")


class Leaders:
    """The actors of one job."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors

    async def find(self, but: Lead | None = None) -> Lead:
        """Wait for one that leads. Should it only believe so, `while_leading` finds out.

        Args:
            but: this one does not, whatever it says.

        Raises:
            HeadgateError: a coordinator could not start, or none is left.
        """
        # One by one: a process that is being made again answers late.
        loop = asyncio.get_running_loop()
        seeking = {loop.create_task(_seek(actor, but), name="seek leader") for actor in self.actors}
        waiting = set(seeking)
        problem: HeadgateError = JobError("the coordinator does not come back")
        try:
            async with asyncio.timeout(TAKEOVER_TIMEOUT_S):
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for found in [task.result() for task in done]:
                        if isinstance(found, Lead):
                            return found
                        problem = found or problem
        except TimeoutError:
            pass
        finally:
            for task in seeking:
                task.cancel()
            await asyncio.gather(*seeking, return_exceptions=True)
        raise problem

    async def successor(self, fenced: Lead) -> Lead | None:
        """Who leads instead of one that was fenced; None: it is none of these."""
        if len(self.actors) == 1:
            return None
        try:
            return await self.find(but=fenced)
        except HeadgateError:
            return None

    async def while_leading(self, lead: Lead, watching: Coroutine[Any, Any, _T]) -> _T | None:
        """What `watching` returns; None if another leads, and this one does not know, or hangs."""
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

    async def outcome(self) -> JobOutcome | None:
        """How the job ended, if one of them knows."""
        answers = await self._ask("ended")
        return next((answer for answer in answers if isinstance(answer, JobOutcome)), None)

    async def alive(self) -> bool:
        """False once all of them are through with the job."""
        return any(answer is not False for answer in await self._ask("alive"))

    async def leave(self) -> None:
        """Give coordinators whose job has ended the time to remove their sockets."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while True in await self._ask("alive"):  # noqa: ASYNC110
                    await asyncio.sleep(SEARCH_EVERY_S)

    async def _ask(self, method: str) -> list[Any]:
        return await asyncio.gather(*(_answer(actor, method) for actor in self.actors))


async def _seek(actor: Any, but: Lead | None) -> Lead | HeadgateError | None:
    """Wait until this actor leads. Returns why it never will, or None if it is through with the job."""
    while True:
        answer = await _answer(actor, "lead")
        if isinstance(answer, Lead) and (but is None or answer.pid != but.pid):
            return answer
        if isinstance(answer, RayTaskError):
            return _cause(answer)
        if isinstance(answer, ActorDiedError):
            return _removed()  # Ray says of one that it starts again that it is unavailable
        if await _answer(actor, "alive") is False:
            return None
        await asyncio.sleep(SEARCH_EVERY_S)


async def _answer(actor: Any, method: str) -> Any:
    """What an actor answers, or the error."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await asyncio.wrap_future(getattr(actor, method).remote().future())
    except (RayTaskError, RayActorError, TimeoutError) as error:
        return error


def _removed() -> JobError:
    return JobError(
        "the coordinator was removed from the cluster: another run took the job over (--take-over), or "
        "somebody killed its actor",
        fix="`headgate list` shows what runs; a run started again goes on from the newest checkpoint",
    )


def _cause(error: Any) -> HeadgateError:
    cause = error.cause
    return cause if isinstance(cause, HeadgateError) else JobError(str(cause))
