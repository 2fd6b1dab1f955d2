"""Operations that clients began: each has an id of the client's choice, and begins once. Without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...errors import JobNotReady
from .answers import OperationAnswer, OperationStatus
from .problems import Problem, RequestProblem


@dataclass(slots=True)
class _Entry:
    arguments: dict[str, Any]
    answer: OperationAnswer


class Operations:
    """Remembers a bounded number of operations; those that go on are never forgotten."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._entries: dict[str, _Entry] = {}

    def begin(
        self, trigger_id: str, verb: str, arguments: Mapping[str, Any], now_ms: int
    ) -> tuple[OperationAnswer, bool]:
        """The operation of this id, and whether it is new: only then it has to be carried out.

        One that was refused because the job was not ready is new when it is sent again: nothing was done.

        Raises:
            RequestProblem: the id is that of another operation (409), or too many go on (503).
        """
        entry = self._entries.get(trigger_id)
        if entry is not None:
            if (entry.answer.verb, entry.arguments) != (verb, dict(arguments)):
                raise RequestProblem(
                    409,
                    f"another operation has this triggerId triggerId=`{trigger_id}` "
                    f"verb=`{entry.answer.verb}`\n  choose a new id for each operation",
                )
            found = entry.answer.problem
            if found is None or found.error != JobNotReady.__name__:
                return entry.answer, False
            del self._entries[trigger_id]
        self._make_room()
        answer = OperationAnswer(
            trigger_id=trigger_id, verb=verb, status=OperationStatus.IN_PROGRESS, began_ms=now_ms
        )
        self._entries[trigger_id] = _Entry(dict(arguments), answer)
        return answer, True

    def complete(self, trigger_id: str, result: dict[str, Any], now_ms: int) -> None:
        """The operation is done."""
        self._end(trigger_id, now_ms, status=OperationStatus.COMPLETED, result=result)

    def fail(self, trigger_id: str, problem: Problem, now_ms: int) -> None:
        """The operation was refused, or failed."""
        self._end(trigger_id, now_ms, status=OperationStatus.FAILED, problem=problem)

    def find(self, trigger_id: str) -> OperationAnswer:
        """The operation of this id.

        Raises:
            RequestProblem: none is remembered (404).
        """
        entry = self._entries.get(trigger_id)
        if entry is None:
            raise RequestProblem(
                404,
                f"no such operation triggerId=`{trigger_id}`\n  a coordinator that has taken over does not "
                "know those of the one before: send the request again, with the same triggerId",
            )
        return entry.answer

    @property
    def all(self) -> list[OperationAnswer]:
        """All that are remembered, oldest first."""
        return [entry.answer for entry in self._entries.values()]

    def _end(self, trigger_id: str, now_ms: int, **changes: Any) -> None:
        entry = self._entries[trigger_id]
        entry.answer = msgspec.structs.replace(entry.answer, ended_ms=now_ms, **changes)

    def _make_room(self) -> None:
        if len(self._entries) < self._kept:
            return
        over = (
            trigger_id
            for trigger_id, entry in self._entries.items()
            if entry.answer.status is not OperationStatus.IN_PROGRESS
        )
        oldest = next(over, None)
        if oldest is None:
            raise RequestProblem(
                503, f"too many operations go on headgate.rest.operations=`{self._kept}`"
            )
        del self._entries[oldest]
