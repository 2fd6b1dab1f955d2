"""Waits, in a process that is ready to run a coordinator, for its turn: `protocol/standby.py` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...errors import JobError
from ...operators.clock import Clock
from ..control.job_client import FENCED, JobClient, Silent, watch
from ..protocol.standby import (
    Step,
    Turn,
    Watched,
    first_step,
    step_behind,
    step_by_turn,
    step_fenced,
)
from ..rest.client import RestClient

ASK_EVERY_S = 0.1
"""The pause between two questions, while the other process neither leads nor is gone."""


@dataclass(frozen=True, slots=True)
class StandbyAnswer:
    """The answer of the other process about itself."""

    turn: Turn
    addresses: tuple[str, ...] = ()
    """The addresses of its REST API, if it leads and listens."""


class Standby:
    """One of the two processes, while it does not lead."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[StandbyAnswer]],
        token: str,
        clock: Clock,
        *,
        first: bool,
        restarted: bool,
        interval_ms: int,
        silent_max_ms: int,
    ) -> None:
        """Nothing is asked yet.

        Args:
            ask: the other process.
            token: the secret of both coordinators.
            clock: time.
            first: this is the one that the job began with.
            restarted: this process is there in place of one that died.
            interval_ms: how often a leader is asked whether it lives.
            silent_max_ms: one that does not answer within this time counts as dead.
        """
        self._ask = ask
        self._token = token
        self._clock = clock
        self._first = first
        self._interval_s = interval_ms / 1000
        self._silent_max_ms = silent_max_ms
        self._step = first_step(first=first, restarted=restarted)

    async def is_fenced_by_other(self) -> bool:
        """A leader was fenced: True if the other one leads, so that this one stands by from now on."""
        self._step = Step.ASK
        while self._step is Step.ASK:
            self._step = step_fenced((await self._ask()).turn)
        return self._step is Step.WATCH

    async def wait(self) -> bool:
        """Wait for the turn of this process, and return True; False: there is nothing left to do."""
        silent_since = self._clock.monotonic()
        while self._step not in (Step.LEAD, Step.LEAVE):
            answer = await self._ask()
            if answer.turn is not Turn.SILENT:
                silent_since = self._clock.monotonic()
            self._step = step_by_turn(
                answer.turn,
                first=self._first,
                silent_ms=int(1000 * (self._clock.monotonic() - silent_since)),
                silent_max_ms=self._silent_max_ms,
            )
            if self._step is Step.WATCH:
                watched = await self._watch(answer.addresses)
                self._step = Step.ASK if watched is None else step_behind(watched)
            if self._step is Step.ASK:
                await asyncio.sleep(ASK_EVERY_S)
        lead = self._step is Step.LEAD
        self._step = Step.ASK  # after the next time that it leads
        return lead

    async def _watch(self, addresses: tuple[str, ...]) -> Watched | None:
        """Wait until the leader at these addresses leads no more; None: it cannot be reached (yet)."""
        try:
            client = await RestClient.connect(
                addresses, self._token, timeout_s=self._silent_max_ms / 1000
            )
        except Silent:
            return Watched.LOST
        except JobError:
            return None
        loop = asyncio.get_running_loop()
        hearing = loop.create_task(_hear(client), name="hear leader")
        asking = loop.create_task(self._ask_on(client), name="ask leader")
        try:
            await asyncio.wait({hearing, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done() and asking.result() is Turn.SILENT:
                return Watched.LOST
            return await hearing  # it may have said something before it hung up
        finally:
            hearing.cancel()
            asking.cancel()
            await asyncio.gather(hearing, asking, return_exceptions=True)
            await client.close()

    async def _ask_on(self, client: JobClient) -> Turn:
        """Ask a leader whether it lives, until it does not answer in time, or has closed the connection."""
        try:
            while True:
                async with asyncio.timeout(self._silent_max_ms / 1000):
                    await client.request("status")
                await asyncio.sleep(self._interval_s)
        except TimeoutError:
            return Turn.SILENT
        except JobError:
            return Turn.GONE


async def _hear(client: JobClient) -> Watched:
    outcome = await watch(client)
    if outcome is None:
        return Watched.LOST
    return Watched.DEPOSED if outcome.reason == FENCED else Watched.JOB_ENDED
