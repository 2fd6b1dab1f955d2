"""An event loop whose clock moves only on request, and whose order depends only on a seed.

It is asyncio's own selector loop on a selector that never waits. asyncio calls `select` once per round,
with a timeout above zero only when nothing is left to do before the next timer: that is the moment to
move the clock, or to hand control back to the test. Work meant for threads runs inline.

It uses documented API only, except for the queue `loop._ready`, which is reordered by the seed: a task in
it is recognised by the `__self__` of its callback. tests/testing/test_loop.py pins both.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from ..errors import JobError

T = TypeVar("T")
START_MS: Final = 1_767_225_600_000
"""The first time of the wall clock of every harness: 2026-01-01, 00:00 UTC."""
ROUNDS_MAX: Final = 1_000_000
"""After this many rounds of the event loop without rest a job counts as running in circles."""
_ASYNCIO_SLACK_S: Final = time.get_clock_info("monotonic").resolution
_SLACK_S: Final = 1e-6
"""The tolerance for sums of floats: a timer this close to the end of a move still belongs to it."""


class _Selector(selectors.BaseSelector):
    """A selector that polls without waiting, and calls the loop instead of waiting."""

    def __init__(self, on_round: Callable[[], None], on_rest: Callable[[float], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._on_round = on_round
        self._on_rest = on_rest

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._real.select(0)
        if not events and (timeout is None or timeout > 0):
            self._on_rest(math.inf if timeout is None else timeout)
        else:
            self._on_round()
        return events

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop runs only inside `drive`; between two calls nothing in it moves."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now_s = 0.0
        self._until_s = 0.0
        self._rounds = 0
        self._in_circles = False
        super().__init__(_Selector(self._round, self._rest))

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._now_s

    def drive(self, until_s: float | None = None) -> None:
        """Run everything that can run, and let the clock go on to `until_s`; None: it stands still.

        Raises:
            JobError: the loop does not come to rest.
        """
        self._until_s = self._now_s if until_s is None else until_s
        self._rounds = 0
        self.run_forever()
        if self._in_circles:
            self._in_circles = False
            raise JobError(
                f"the job does not come to rest rounds=`{ROUNDS_MAX}`",
                fix="something calls itself again and again without waiting for anything",
            )

    def run_in_executor(  # type: ignore[override]  # the base class says Future or coroutine
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` in the loop itself, after everything that is ready now."""
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(_run_inline, future, func, args)
        return future

    def _rest(self, timeout_s: float) -> None:
        """Move the clock, or stop, as there is nothing to do for `timeout_s`."""
        self._rounds = 0
        wake_s = self._now_s + timeout_s
        if wake_s <= self._until_s + _SLACK_S and wake_s < math.inf:
            self._now_s = wake_s
            return
        if self._until_s < math.inf:
            self._now_s = max(self._now_s, self._until_s)
        self.stop()

    def _round(self) -> None:
        """Reorder the tasks that are ready by the seed."""
        self._rounds += 1
        if self._rounds > ROUNDS_MAX:
            self._in_circles = True
            self.stop()
        ready = self._ready  # type: ignore[attr-defined]
        if not ready and self._now_s + _ASYNCIO_SLACK_S == self._now_s:
            # A timer is due, and asyncio runs timers due *before* now plus some slack, which is lost in
            # rounding after a few weeks.
            self._now_s = math.nextafter(self._now_s, math.inf)
        # Plain callbacks keep their places: transports and locks rely on their order.
        places = [place for place, handle in enumerate(ready) if _is_task(handle)]
        if len(places) > 1:
            turns = [ready[place] for place in places]
            self._rng.shuffle(turns)
            for place, handle in zip(places, turns, strict=True):
                ready[place] = handle


class VirtualClock:
    """The clocks of a job in a harness."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_ms(self) -> int:
        # Rounds up: a timer for 200 ms fires at 0.2 s, which may be slightly less than 200 ms.
        return START_MS + int(self._loop.time() * 1000 + 1000 * _SLACK_S)

    def monotonic(self) -> float:
        return self._loop.time()


def _is_task(handle: asyncio.Handle) -> bool:
    callback = handle._callback  # type: ignore[attr-defined]
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


def _run_inline(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = func(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
