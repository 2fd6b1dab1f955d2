"""A coordinator as its clients see it: the command line, handles, drivers and the process that stands by.

There are two ways to it. `rest/client.py` speaks HTTP, from any process; `coordinator/local_client.py`
calls the coordinator of the same process.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from ...errors import HeadgateError, JobError
from ..protocol.job_result import JobFailure, JobOutcome
from .events import Event


class HungUp(JobError):
    """The coordinator went away before it answered: it may have done what it was asked for, or not."""

    def __init__(
        self,
        message: str = "the coordinator hung up",
        *,
        fix: str = "ask again in a moment: a job that has not ended has another coordinator soon",
    ) -> None:
        super().__init__(message, fix=fix)


class Silent(HungUp):
    """The coordinator did not answer in time: it may be there, and hang."""


class JobClient(Protocol):
    """One coordinator, for one client."""

    async def request(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer, however long it takes.

        Args:
            verb: `status`, `checkpoints`, `subtasks`, `config`, `plan` and `metrics` look; `stop`,
                `cancel`, `checkpoint`, `savepoint`, `rescale`, `dispose` and `hand-over` do.
            arguments: of the verb; JSON values.

        Raises:
            HungUp: the coordinator went away.
            HeadgateError: the coordinator refused, or failed to do it.
        """
        ...

    def events(self) -> AsyncIterator[Event]:
        """Yield the events that are remembered, then each new one, until the coordinator goes away.

        Raises:
            HungUp: it went away without a word.
        """
        ...

    async def close(self) -> None:
        """Hang up."""
        ...


Connect: TypeAlias = Callable[[], Awaitable[JobClient]]
"""Makes a client. Raises JobError if the coordinator cannot be reached."""


def outcome_of(event: Event) -> JobOutcome:
    """The outcome of the job, from an `ended` event."""
    body = json.loads(event.body)
    return JobOutcome.of_json(body, _error_of(body))


def _error_of(body: Mapping[str, Any]) -> HeadgateError | None:
    if body.get("error") is None:
        return None
    return msgspec.convert(body["error"], JobFailure).as_error()
