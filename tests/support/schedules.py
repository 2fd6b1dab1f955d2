"""Threads for state on disk that work at moments which a seed decides, and not beside the caller.

What a flush or a merge writes may be there long before the caller learns of it, or may be missing until the
caller waits. With real threads either lasts for microseconds, so mistakes in it are hardly ever seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from headgate.operators import spilling_space


class Work(Future[Any]):
    """A call that is made at once, or when the caller asks for it, and seems to be under way until then."""

    def __init__(self, call: Callable[[], Any], rng: random.Random) -> None:
        super().__init__()
        self._call, self._rng, self._begun, self._seen = call, rng, False, False
        if rng.random() < 0.5:
            self._run()

    def _run(self) -> None:
        if not self._begun:
            self._begun = True
            try:
                self.set_result(self._call())
            except Exception as error:
                self.set_exception(error)

    def done(self) -> bool:
        """Return True if the call has been made, and the caller may know it."""
        if not self._seen and self._rng.random() < 0.1:
            self._see()
        return self._seen

    def _see(self) -> None:
        self._run()
        self._seen = True

    def result(self, timeout: float | None = None) -> Any:
        """Make the call, and return its result."""
        self._see()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Make the call, and return its error."""
        self._see()
        return super().exception(timeout)


class Threads:
    """Stands for the threads of a `SpillingSpace`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def submit(self, call: Callable[[], Any]) -> Work:
        """Have a call made at some time."""
        return Work(call, self._rng)

    def shutdown(self, *, wait: bool) -> None:
        """There is nothing to end."""


def seeded_threads(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let all state on disk have such threads."""
    rng = random.Random(seed)
    monkeypatch.setattr(spilling_space, "ThreadPoolExecutor", lambda *_, **__: Threads(rng))
