"""Processing-time callbacks that run in the mailbox of a subtask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
