"""The queries of state, and for profiles, that workers have not answered yet."""

from __future__ import annotations

import asyncio
import secrets
from itertools import count
from typing import Any, final

from ..control.messages import ProfileAnswer, StateAnswer, StateOutcome


@final
class PendingQueries:
    """The queries that workers have not answered yet."""

    def __init__(self) -> None:
        # A worker that is adopted may still answer what the coordinator before has asked.
        self._numbers = count(secrets.randbits(62))
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    def __len__(self) -> int:
        """Return how many answers are outstanding."""
        return len(self._pending)

    def add(self, worker_id: str) -> tuple[int, asyncio.Future[Any]]:
        """Return the number of a query to a worker, and its answer to come. `drop` must follow."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pending[number] = worker_id, answer
        return number, answer

    def unawaited(self) -> int:
        """Return the number of a query whose answer is not awaited."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Forget a query: it is answered, or nobody waits for it any more."""
        self._pending.pop(number, None)

    def answered(self, message: StateAnswer | ProfileAnswer) -> None:
        """Take the answer of a worker; one that came too late has no effect."""
        _, answer = self._pending.get(message.query, ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def lost(self, worker_id: str | None = None) -> None:
        """Note that a worker (None: each worker) is gone, with all queries that it was asked."""
        for number, (asked, answer) in self._pending.items():
            if worker_id in (None, asked) and not answer.done():
                answer.set_result(StateAnswer(query=number, outcome=StateOutcome.ELSEWHERE))
