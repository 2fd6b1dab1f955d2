"""The keys that are due for reconciliation: each at most once at a time, and later after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

Key: TypeAlias = tuple[str, str, str]
"""Kind, namespace and name."""
BACKOFF_S: Final = 0.5
BACKOFF_S_MAX: Final = 60.0


class WorkQueue:
    """Keys with the time at which they become due.

    A key that is added while it is being worked on is due again once `done` is called for it, so no change
    is missed and no key is worked on twice at once.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._working: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Make a key due after this time, unless it is due earlier."""
        due = self._clock() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._changed.set()

    def take(self) -> Key | None:
        """Return a key that is due now; None if there is none. Call `done` or `failed` for it."""
        now = self._clock()
        due = [(at, key) for key, at in self._due.items() if at <= now and key not in self._working]
        if not due:
            return None
        _, key = min(due)
        del self._due[key]
        self._working.add(key)
        return key

    async def next(self) -> Key:
        """Return the next key, once one is due."""
        while True:
            key = self.take()
            if key is not None:
                return key
            self._changed.clear()
            wait_s = self._wait_s()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """Note a success, so that the next failure counts as the first."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: Key, at_least_s: float = 0.0) -> None:
        """Note a failure: the key is due again after a pause that doubles each time.

        Args:
            key: the key.
            at_least_s: the pause is not shorter than this, even if the key was added meanwhile; at most
                `BACKOFF_S_MAX` is taken.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self._release(key)
        if at_least_s:
            self._due.pop(key, None)
        pause_s = max(BACKOFF_S * 2 ** min(failures, 16), at_least_s)
        self.add(key, min(pause_s, BACKOFF_S_MAX))

    def oldest_s(self) -> float:
        """Return how long the key that was due first has waited, in seconds."""
        return max(0.0, self._clock() - min(self._due.values(), default=self._clock()))

    def _release(self, key: Key) -> None:
        self._working.discard(key)
        self._changed.set()

    def _wait_s(self) -> float | None:
        waiting = [due for key, due in self._due.items() if key not in self._working]
        return max(0.0, min(waiting) - self._clock()) if waiting else None
