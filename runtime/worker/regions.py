"""All that runs on one worker: one deployment per region, each begun and dropped without the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence

from ..control.messages import Deployed
from ..exchange.hub import ExchangeHub
from .deployment import Deployment
from .watch import StepWatch


class RunningRegions:
    """The deployments of a worker, and the tasks that prepare and start them."""

    def __init__(self, hub: ExchangeHub, watch: StepWatch) -> None:
        self._hub = hub
        self._watch = watch
        self._deployments: dict[int, Deployment] = {}
        self._tasks: dict[asyncio.Task[None], frozenset[int]] = {}
        self._leaving: dict[asyncio.Task[None], frozenset[int]] = {}

    def __iter__(self) -> Iterator[Deployment]:
        return iter(list(self._deployments.values()))

    def of_attempt(self, attempt: int) -> list[Deployment]:
        """The deployments of one attempt; none if it is over."""
        return [each for each in self if each.attempt == attempt]

    def add(self, deployment: Deployment) -> None:
        """A region begins; nothing of an earlier attempt of it is left."""
        self._deployments[deployment.region] = deployment
        self._watch.begin(deployment.region, deployment.subtasks)

    def spawn(self, regions: Collection[int], work: Coroutine[None, None, None], name: str) -> None:
        """Do something for some regions beside the messages; it is cancelled with any of them."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = frozenset(regions)
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def stop(self, regions: Collection[int]) -> None:
        """Cancel what was spawned for some regions, and wait for its end."""
        wanted = frozenset(regions)
        await _cancelled([task for task, own in self._tasks.items() if own & wanted])

    def drop(self, regions: Collection[int], done: Callable[[], None]) -> None:
        """Cancel some regions. They hear of nothing any more; `done` is called once they are gone."""
        wanted = frozenset(regions)
        tasks = [task for task, own in self._tasks.items() if own & wanted]
        dropped = [own for r in wanted if (own := self._deployments.pop(r, None)) is not None]
        # Cancelled once more, it is not gone before the first time is over: that resets the hub, too.
        before = [leaving for leaving, own in self._leaving.items() if own & wanted]

        async def leave() -> None:
            await asyncio.gather(*before, return_exceptions=True)
            await _cancelled(tasks)
            await asyncio.gather(*(deployment.cancel() for deployment in dropped))
            self._watch.end(wanted)
            await self._hub.reset(wanted)
            done()

        leaving = asyncio.get_running_loop().create_task(leave(), name="drop regions")
        self._leaving[leaving] = wanted
        leaving.add_done_callback(lambda gone: self._leaving.pop(gone, None))

    async def drop_all(self) -> None:
        """Cancel whatever runs here."""
        await _cancelled(list(self._tasks))
        await asyncio.gather(*self._leaving, return_exceptions=True)
        dropped, self._deployments = list(self._deployments.values()), {}
        await asyncio.gather(*(deployment.cancel() for deployment in dropped))
        self._watch.end({deployment.region for deployment in dropped})
        await self._hub.reset()


def deployed(attempt: int, deployments: Sequence[Deployment]) -> Deployed:
    """The report for the time when all of an attempt is prepared here."""
    parts = [deployment.deployed for deployment in deployments]
    return Deployed(
        attempt=attempt,
        fetching_ms=max((part.fetching_ms for part in parts), default=0),
        opening_ms=max((part.opening_ms for part in parts), default=0),
        # Copies are counted for the worker as a whole.
        local_bytes=max((part.local_bytes for part in parts), default=0),
        read_bytes=sum(part.read_bytes for part in parts),
    )


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
