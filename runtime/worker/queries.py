"""Queries of state at the worker that has it: each is a mail, between two batches of its subtask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

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

_KEYS_AT_ONCE: Final = 1_000
"""The most keys that are read in one turn for several queries."""


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
        self._waiting: dict[Subtask, dict[int, tuple[AskState | ScanState, float]]] = {}
        """The queries in the mailbox of each subtask by number, and when nobody waits for them any more."""

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
            deadline = self._clock.monotonic() + asked.timeout_ms / 1000
            self._waiting.setdefault(subtask, {})[asked.query] = asked, deadline
            subtask.put_mail(partial(self._answer, asked, subtask))

    def refuse_waiting(self, regions: Collection[int] | None) -> None:
        """Refuse the queries of subtasks that are about to be dropped; None: of all."""
        dropped = [
            subtask
            for deployment in self._regions
            if regions is None or deployment.region in regions
            for subtask in deployment.subtasks
        ]
        for subtask in dropped if regions is not None else list(self._waiting):
            for asked, _ in self._waiting.pop(subtask, {}).values():
                self._refuse(asked, StateOutcome.ELSEWHERE)
        self._scans.drop(None if regions is None else dropped)

    def end_scan(self, ended: EndScan) -> None:
        """Forget a scan."""
        self._scans.end(ended.scan)

    def _refuse(self, asked: AskState | ScanState, outcome: StateOutcome, text: str = "") -> None:
        self._send(StateAnswer(query=asked.query, outcome=outcome, text=text))

    def _answer(self, asked: AskState | ScanState, subtask: Subtask) -> None:
        """Read the state; runs in the mailbox. A query that goes wrong does not fail the subtask.

        Waiting queries for other keys of the same state are answered with it: most of the cost of reading
        a running aggregate does not depend on the number of keys.
        """
        waiting = self._waiting.get(subtask, {})
        if asked.query not in waiting:
            return  # it was answered with another one, or refused, as the subtask is dropped
        now = self._clock.monotonic()
        found = [(each, waiting.pop(each.query)[1]) for each in _alike(asked, waiting)]
        if not waiting:
            del self._waiting[subtask]
        together = [each for each, deadline in found if now < deadline]  # or nobody waits any more
        operator = next(
            each.operator for each in subtask.chain.operators if each.name == asked.operator
        )
        if len(together) > 1:
            try:
                answers = _read_together([e for e in together if isinstance(e, AskState)], operator)
            except Exception:
                pass  # it is that of one of them, which gets it below
            else:
                for answer in answers:
                    self._send(answer)
                return
        for each in together:
            self._answer_one(each, subtask, operator)

    def _answer_one(
        self, asked: AskState | ScanState, subtask: Subtask, operator: Operator
    ) -> None:
        try:
            if isinstance(asked, ScanState):
                answer = self._scans.read(asked, subtask, operator)
            else:
                (answer,) = _read_together([asked], operator)
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


def _alike(
    asked: AskState | ScanState, waiting: Mapping[int, tuple[AskState | ScanState, float]]
) -> list[AskState | ScanState]:
    """Return a query and those that can be read with it, as far as one turn may have keys."""
    found = [asked]
    if isinstance(asked, AskState):
        of_state, keys = (asked.operator, asked.state, asked.checkpoint_id), len(asked.keys)
        for each, _ in waiting.values():
            if isinstance(each, ScanState) or each is asked:
                continue
            if (each.operator, each.state, each.checkpoint_id) != of_state:
                continue
            keys += len(each.keys)
            if keys > _KEYS_AT_ONCE:
                break
            found.append(each)
    return found


def _read_together(asked: Sequence[AskState], operator: Operator) -> list[StateAnswer]:
    """Read the value of each key of some queries of one state, all of one moment."""
    first, answers = asked[0], []
    keys = [decode_key(key) for each in asked for key in each.keys]
    read = iter(operator.query_many(first.state, keys, first.checkpoint_id))
    for each in asked:
        values: list[bytes] = []
        left = each.bytes_max
        for value in islice(read, len(each.keys)):
            values.append(to_json(value, left))
            left -= len(values[-1])
        answers.append(
            StateAnswer(query=each.query, outcome=StateOutcome.READ, values=tuple(values))
        )
    return answers
