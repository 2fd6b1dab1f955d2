"""The process of the simulation that runs: coordinators and workers share a thread, but not a fate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

from headgate.errors import StorageError


class Process:
    """A process that can be killed or stopped at any step.

    All its tasks and callbacks run in `context`, by which the loop, the store and the network know whose
    they are. Killed, its tasks are cancelled and clean up after themselves, but nothing they do has an
    effect any more. Stopped (SIGSTOP), nothing of it runs until it goes on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.stopped = False
        self.clock_ms = 0
        """By how much its wall clock is wrong."""
        self.held: list[asyncio.Handle] = []
        """The callbacks that became ready while it was stopped."""
        self.on_death: list[Callable[[], None]] = []
        """Closes its connections."""
        self.context = copy_context()
        self.context.run(_CURRENT.set, self)

    def die(self) -> None:
        """Kill it: its connections break. The owner of its tasks cancels them."""
        if not self.dead:
            self.dead = True
            for close in self.on_death:
                close()
            self.on_death.clear()


_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """The process whose code runs; None: the simulation itself."""
    return _CURRENT.get()


def of_handle(handle: asyncio.Handle) -> Process | None:
    """The process a callback belongs to."""
    context: Any = handle._context  # type: ignore[attr-defined]
    return context.get(_CURRENT) if context is not None else None


def is_dead() -> bool:
    """True if the code that asks is the clean-up of a killed process."""
    process = _CURRENT.get()
    return process is not None and process.dead


def check_alive() -> None:
    """Raise StorageError if the process that asks is dead: what it does has no effect."""
    if is_dead():
        raise StorageError("the process is dead")
