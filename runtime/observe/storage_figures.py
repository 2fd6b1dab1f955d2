"""What one process counts of its requests to the storage of checkpoints; read when somebody scrapes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal, TypeAlias, final, get_args

from ...errors import MissingFileError
from .catalogue import LATENCIES
from .metrics import PlainHistogram, Scope

Operation: TypeAlias = Literal["read", "write", "create", "list", "delete"]
Outcome: TypeAlias = Literal["ok", "throttled", "failed"]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


def _never(_: BaseException) -> bool:
    return False


@final
class StorageFigures:
    """Requests, bytes and retries of all stores of a process. Its event loop counts them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[Operation, Outcome]] = Counter()
        self.retries: Counter[Operation] = Counter()
        self.seconds = {operation: PlainHistogram(LATENCIES) for operation in OPERATIONS}
        self.read_bytes = 0
        self.written_bytes = 0

    @contextmanager
    def request(
        self, operation: Operation, is_throttled: Callable[[BaseException], bool] = _never
    ) -> Iterator[None]:
        """Count the request that is made in this block, and its time. A cancelled one does not count.

        Args:
            operation: the kind of request.
            is_throttled: whether an error says that the store wants fewer requests.
        """
        now = asyncio.get_running_loop().time
        began = now()
        try:
            yield
        except MissingFileError:  # that there is no such file is an answer
            self._ended(operation, "ok", now() - began)
            raise
        except Exception as error:
            outcome: Outcome = "throttled" if is_throttled(error) else "failed"
            self._ended(operation, outcome, now() - began)
            raise
        self._ended(operation, "ok", now() - began)

    def _ended(self, operation: Operation, outcome: Outcome, seconds: float) -> None:
        self.requests[operation, outcome] += 1
        self.seconds[operation].observe(seconds)

    def register(self, scope: Scope) -> None:
        """Show the figures in a scope; all series are there from the start."""
        for operation in OPERATIONS:
            labels = {"operation": operation}
            for outcome in OUTCOMES:
                read = partial(self.requests.__getitem__, (operation, outcome))
                scope.count("storage_requests", read, {**labels, "outcome": outcome})
            scope.count("storage_retries", partial(self.retries.__getitem__, operation), labels)
            scope.distribution("storage_request_seconds", self.seconds[operation], labels)
        scope.count("storage_read_bytes", lambda: self.read_bytes)
        scope.count("storage_written_bytes", lambda: self.written_bytes)
