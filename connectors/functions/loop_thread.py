"""A thread with an event loop, in which a connector makes calls while its subtask goes on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

T = TypeVar("T")

CLOSE_S_MAX: Final = 5.0
"""The longest wait for calls that were cancelled. A call that goes on after it does so unheard."""


class LoopThread:
    """An event loop that runs in a thread of its own.

    All calls of a subtask run in this one thread, also those of plain functions, so that objects that
    belong to a thread or to an event loop can be used: connections, sessions.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closing = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine; those that are submitted first begin first.

        After `close` the future is cancelled.
        """
        with self._lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused: Future[T] = Future()
        refused.cancel()
        return refused

    def soon(self, function: Callable[[], Any]) -> None:
        """Call a function that does not block in the thread, unless it is closed."""
        with self._lock:
            if not self._closing:
                self._loop.call_soon_threadsafe(function)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a plain or a coroutine function in the thread, and return its result.

        Blocks. Raises what the function raises, and concurrent.futures.CancelledError after `close`.
        """
        return self.submit(called(function, *arguments)).result()

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Cancel all calls, then call `last`, and end the thread. It must not be called in the thread.

        Raises:
            Exception: `last` raised it.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        ended = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        try:
            ended.result(CLOSE_S_MAX)
        except (TimeoutError, CancelledError):
            if ended.done():
                raise
            # A call does not return. The thread is a daemon, and left to itself.
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S_MAX if ended.done() else 0)

    async def _end(self, last: Callable[[], Any] | None) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        try:
            if last is not None:
                await called(last)
        finally:
            await self._loop.shutdown_asyncgens()


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain or a coroutine function."""
    made = function(*arguments)
    return await made if inspect.isawaitable(made) else made


def in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread with an event loop of its own, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()
