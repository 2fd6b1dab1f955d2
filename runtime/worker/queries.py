"""Queries of state at the worker that has it: each is a mail, between two batches of its subtask."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from ...errors import HeadgateError
from ...operators.base import Operator
from ...operators.clock import Clock
from ...operators.queries import TooLarge, to_json
from ...state.keyed.keys import decode_key
from ...state.queryable import NotKept
from ..control.messages import AskState, EndScan, Messages, ScanState, StateAnswer, StateOutcome
from ..task.subtask import Subtask
from .deployment import RunningRegions
from .scans import OpenScans


class StateQueries:
    """Passes queries to subtasks, and their answers to the coordinator.

    Args:
        regions: the deployments of the worker.
        send: takes messages to the coordinator.
        clock: of the worker.
    """

    def __init__(
        self, regions: RunningRegions, send: Callable[[Messages], None], clock: Clock
    ) -> None:
        self._regions = regions
        self._send = send
        self._clock = clock
        self._scans = OpenScans(clock)
        self._waiting: dict[Subtask, dict[int, AskState | ScanState]] = {}
        """The queries in the mailbox of each subtask, by number."""

    def ask(self, asked: AskState | ScanState) -> None:
        """Put a query into the mailbox of its subtask, or refuse it."""
        found = [
            (deployment.started, subtask)
            for deployment in self._regions.of_attempt(asked.attempt)
            for subtask in deployment.subtasks
            if (subtask.env.vertex.id, subtask.env.index) == (asked.vertex, asked.index)
        ]
        if not found:
            self._refuse(asked, StateOutcome.ELSEWHERE)
            return
        ((started, subtask),) = found
        waiting = self._waiting.get(subtask, {})
        if not started:
            self._refuse(asked, StateOutcome.STARTING)
        elif len(waiting) >= asked.waiting_max:
            self._refuse(asked, StateOutcome.BUSY)
        else:
            self._waiting.setdefault(subtask, {})[asked.query] = asked
            deadline = self._clock.monotonic() + asked.timeout_ms / 1000
            subtask.put_mail(partial(self._answer, asked, subtask, deadline))

    def refuse_waiting(self, regions: Collection[int] | None) -> None:
        """Refuse the queries of subtasks that are about to be dropped; None: of all."""
        dropped = [
            subtask
            for deployment in self._regions
            if regions is None or deployment.region in regions
            for subtask in deployment.subtasks
        ]
        for subtask in dropped if regions is not None else list(self._waiting):
            for asked in self._waiting.pop(subtask, {}).values():
                self._refuse(asked, StateOutcome.ELSEWHERE)
        self._scans.drop(None if regions is None else dropped)

    def end_scan(self, ended: EndScan) -> None:
        """Forget a scan."""
        self._scans.end(ended.scan)

    def _refuse(self, asked: AskState | ScanState, outcome: StateOutcome, text: str = "") -> None:
        self._send(StateAnswer(query=asked.query, outcome=outcome, text=text))

    def _answer(self, asked: AskState | ScanState, subtask: Subtask, deadline: float) -> None:
        """Read the state; runs in the mailbox. A query that goes wrong does not fail the subtask."""
        waiting = self._waiting.get(subtask, {})
        if waiting.pop(asked.query, None) is None:
            return  # it was refused, as the subtask is dropped
        if not waiting:
            del self._waiting[subtask]
        if self._clock.monotonic() >= deadline:
            return  # nobody waits any more
        operator = next(
            each.operator for each in subtask.chain.operators if each.name == asked.operator
        )
        try:
            if isinstance(asked, ScanState):
                answer = self._scans.read(asked, subtask, operator)
            else:
                answer = _read(asked, operator)
        except TooLarge:
            self._refuse(asked, StateOutcome.TOO_LARGE)
        except NotKept:
            self._refuse(asked, StateOutcome.NOT_KEPT)
        except HeadgateError as error:
            self._refuse(asked, StateOutcome.FAILED, str(error))
        except Exception as error:
            self._refuse(asked, StateOutcome.FAILED, f"{type(error).__name__}: {error}")
        else:
            self._send(answer)


def _read(asked: AskState, operator: Operator) -> StateAnswer:
    """Read the value of each key, all of one moment."""
    values: list[bytes] = []
    left = asked.bytes_max
    keys = list(map(decode_key, asked.keys))
    for value in operator.query_many(asked.state, keys, asked.checkpoint_id):
        values.append(to_json(value, left))
        left -= len(values[-1])
    return StateAnswer(query=asked.query, outcome=StateOutcome.READ, values=tuple(values))
