"""Ctrl-C: the first one stops the job with a final checkpoint, the second cancels it.

A third one ends this process. Before the cluster is available the first one cancels, since nothing has
begun. SIGTERM counts as one Ctrl-C, and never as the second. It does not end a run whose id comes from
outside: that takes a checkpoint, and is left to its next start.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...errors import HeadgateError
from .job_client import Connect, ask_once


class Interrupts:
    """Turns signals into requests to the coordinator. Used as a context manager in the main thread."""

    def __init__(
        self, note: Callable[[str], None], *, checkpoints: bool, hands_over: bool = False
    ) -> None:
        """
        Args:
            note: shows the user a line.
            checkpoints: the job takes some.
            hands_over: SIGTERM leaves the run to its next start.
        """
        self._note = note
        self._hands_over = hands_over
        self._leaving = False
        self.checkpoints = checkpoints
        self._count = 0
        self._answered = 0
        self._begun = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._connect: Connect | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._before: dict[int, Any] = {}

    @property
    def stopping(self) -> bool:
        """True if the user asked for the end, and was shown a line about it."""
        return self._count > 0

    @property
    def cancelled(self) -> bool:
        """True if the user asked for the end at once, or before the job had begun."""
        return self._count > (1 if self._begun else 0)

    def __enter__(self) -> Interrupts:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for task in self._requests:
            task.cancel()

    def connected(self) -> None:
        """Let the first Ctrl-C stop the job from now on: the cluster is available, and the job begins."""
        self._begun = True

    def listening(self, connect: Connect) -> None:
        """Connect to the coordinator, which also gets the requests from before."""
        for number in self._before:  # Ray puts a SIGTERM handler of its own into this process
            signal.signal(number, self._on_signal)
        self._connect = connect
        if self._count > self._answered:
            self._ask()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Runs between any two bytecodes of the main thread, also while user code keeps the loop busy.
        if number == signal.SIGTERM and self._count:
            return
        self._count += 1
        self._leaving = self._hands_over and number == signal.SIGTERM
        if self._count > 2:
            os._exit(128 + signal.SIGINT)  # as shells report it
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._act)

    def _act(self) -> None:
        if self.cancelled:
            self._note("stopping at once")
        elif self._leaving:
            how = ", with a checkpoint" if self.checkpoints else ""
            self._note(f"leaving the run to its next start{how}")
        else:
            how = "with a final checkpoint " if self.checkpoints else ""
            self._note(f"stopping {how}(press Ctrl-C again to stop at once)")
        if self._connect is not None:
            self._ask()
        elif self.cancelled and self._main is not None:
            self._main.cancel()

    def _ask(self) -> None:
        verb = "cancel" if self.cancelled else "hand-over" if self._leaving else "stop"
        task = asyncio.get_running_loop().create_task(self._request(verb), name=f"ask to {verb}")
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _request(self, verb: str) -> None:
        assert self._connect is not None
        asked = self._count
        try:
            await ask_once(self._connect, verb)
            self._answered = max(self._answered, asked)
        except HeadgateError as error:
            if not self.cancelled:
                self._note(
                    f"the job did not stop: {error.message}; press Ctrl-C again to cancel it"
                )
