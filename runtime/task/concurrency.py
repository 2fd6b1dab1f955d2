"""Helpers for asyncio: concurrent coroutines, calls in threads, a signal, and timers of a mailbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    pass

T = TypeVar("T")


async def all_of(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order; the first error cancels the others, waits for them and is
    raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904  it carries its own cause
    return [task.result() for task in tasks]


async def to_the_end(call: Awaitable[T]) -> T:
    """Await `call`. If cancelled, wait until it has ended, then raise the cancellation.

    Otherwise the next attempt would begin while a thread of the last one still writes or commits.
    """
    running = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # marks the exception as retrieved
        raise


async def in_thread(threads: Executor, call: Callable[[], T]) -> T:
    """Return the result of a blocking call in a thread. A cancelled caller waits for its end."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(threads, call))


class Signal:
    """Like asyncio.Event with one waiter, made for being set far more often than awaited."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def raised(self) -> bool:
        """True if the next wait returns at once."""
        return self._set

    def set(self) -> None:
        """Wake the waiter, or let the next wait return at once."""
        self._set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return once `set` was called since the last return. Cancelling it loses no signal."""
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._set = False


class MailboxTimers:
    """Timers of the event loop whose callbacks become mail. All are cancelled with the subtask."""

    def __init__(self, put_mail: Callable[[Callable[[], None]], None]) -> None:
        self._put_mail = put_mail
        self._handles: dict[int, asyncio.TimerHandle] = {}
        self._next_id = 0
        self._still = False

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` once after `delay_ms`; return a function that cancels it."""
        timer_id = self._next_id
        self._next_id += 1
        cancelled = False

        def run() -> None:
            if not cancelled and not self._still:
                callback()

        def fire() -> None:
            self._handles.pop(timer_id, None)
            self._put_mail(run)

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            handle = self._handles.pop(timer_id, None)
            if handle is not None:
                handle.cancel()

        if self._still:
            return cancel
        loop = asyncio.get_running_loop()
        self._handles[timer_id] = loop.call_later(max(0, delay_ms) / 1000, fire)
        return cancel

    def stand_still(self) -> None:
        """Run no more callbacks, whether due, waiting, or not set yet."""
        self._still = True
        self.cancel_all()

    def cancel_all(self) -> None:
        """Cancel every timer that has not fired."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def forget(self) -> None:
        """Run nothing any more, and drop the way to the mailbox."""
        self.stand_still()
        self._put_mail = lambda mail: None


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Do `work` and wait for it, also where an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "headgate") as threads:
        return threads.submit(asyncio.run, work).result()
