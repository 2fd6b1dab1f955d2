"""Requested checkpoints and savepoints that wait for their turn."""

from __future__ import annotations

from collections import deque
from typing import final

from ...operators.elements import CheckpointOptions
from .checkpoint_decisions import RequestToken

REQUESTS_WAITING_MAX = 1000


@final
class CheckpointRequests:
    """Two queues, each in order of arrival; savepoints go before checkpoints."""

    def __init__(self) -> None:
        self._checkpoints: deque[RequestToken] = deque()
        self._savepoints: deque[tuple[RequestToken, CheckpointOptions]] = deque()

    def __len__(self) -> int:
        return len(self._checkpoints) + len(self._savepoints)

    @property
    def full(self) -> bool:
        """True if no more requests may wait."""
        return len(self) >= REQUESTS_WAITING_MAX

    @property
    def tokens(self) -> tuple[RequestToken, ...]:
        """Return all waiting requests."""
        return (*self._checkpoints, *(token for token, _ in self._savepoints))

    def add_checkpoint(self, token: RequestToken) -> None:
        """Add a request for a checkpoint."""
        self._checkpoints.append(token)

    def add_savepoint(self, token: RequestToken, options: CheckpointOptions) -> None:
        """Add a request for a savepoint."""
        self._savepoints.append((token, options))

    def next_checkpoint(self) -> RequestToken | None:
        """Remove and return the oldest request for a checkpoint."""
        return self._checkpoints.popleft() if self._checkpoints else None

    def next_savepoint(self) -> tuple[RequestToken, CheckpointOptions] | None:
        """Remove and return the oldest request for a savepoint."""
        return self._savepoints.popleft() if self._savepoints else None

    def clear(self) -> None:
        """Remove all requests."""
        self._checkpoints.clear()
        self._savepoints.clear()
