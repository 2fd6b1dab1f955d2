"""The loop of a simulation: virtual time, processes that stop, threads and sockets that are none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from headgate.testing.loop import VirtualLoop

from .network import MemoryServer, Network
from .process import Process, current, of_handle

T = TypeVar("T")
HANGING_S = 1.5


class SimLoop(VirtualLoop):
    """Everything by chance comes from one generator: the order of tasks, and how long anything takes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(0)
        self._rng = rng
        self._stopped = 0
        self._owners: WeakKeyDictionary[asyncio.Task[Any], Process] = WeakKeyDictionary()
        self.network = Network(self, rng)
        self.thread_s = 0.002
        """The mean time of a call in a thread."""
        self.hanging_rate = 0.0
        """The probability that a call takes up to `HANGING_S` instead, as on a slow disk."""

    # -- processes ----------------------------------------------------------------------------------

    def stop_process(self, process: Process) -> None:
        """SIGSTOP."""
        if not process.stopped:
            process.stopped = True
            self._stopped += 1

    def continue_process(self, process: Process) -> None:
        """SIGCONT: what has become ready meanwhile runs, in its order."""
        if process.stopped:
            process.stopped = False
            self._stopped -= 1
            self._ready.extend(process.held)  # type: ignore[attr-defined]
            process.held.clear()

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        owner = current()
        if owner is not None:
            self._owners[task] = owner
        return task

    def belongs_to_the_dead(self, task: asyncio.Task[Any]) -> bool:
        """True for a task of a killed process: with a real one it would be gone."""
        owner = self._owners.get(task)
        return owner is not None and owner.dead

    def _round(self) -> None:
        super()._round()
        if self._stopped:
            ready = self._ready  # type: ignore[attr-defined]
            running = []
            for handle in ready:
                process = of_handle(handle)
                if process is not None and process.stopped:
                    process.held.append(handle)
                else:
                    running.append(handle)
            ready.clear()
            ready.extend(running)

    # -- threads ------------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]  # the base class says Future or coroutine
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` after a while, and tell of it after another; in between others go on."""
        future: asyncio.Future[T] = self.create_future()
        process = current()

        def begin() -> None:
            # Timers of a stopped process still fire; callbacks that become ready now wait.
            self.call_soon(run)

        def run() -> None:
            if future.cancelled():
                return
            if process is not None and process.dead:
                future.set_exception(OSError("the process is dead"))
                return
            try:
                result = func(*args)
            except Exception as error:
                self._later(_fail, future, error)
            else:
                self._later(_succeed, future, result)

        self._later(begin)
        return future

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        hangs = self.hanging_rate and self._rng.random() < self.hanging_rate
        delay_s = (
            self._rng.uniform(0, HANGING_S) if hangs else self._rng.expovariate(1 / self.thread_s)
        )
        self.call_later(delay_s, call, *args)

    # -- sockets ------------------------------------------------------------------------------------

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **_: Any
    ) -> MemoryServer:
        """A server that only this loop can reach."""
        return self.network.listen(protocol_factory)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        """A connection to such a server.

        Raises:
            ConnectionRefusedError: nobody listens there.
        """
        return await self.network.connect(protocol_factory, port)


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
