"""Detects that a loop is at rest: the coordinator adds up the feedback that all heads of a loop report.

Each head sends probe n into the loop when its inputs have ended and it has sent all it has. A probe
waits at every subtask for the probes of all channels, so when probe n is back at a head, everything
that was sent before any head's probe n has gone all the way round. A head reports how many records
came back in between. If none came back anywhere, no record is in flight: any such record would have
to come from a record that some head sent after its probe, and the first of those had come back
before. (Counting quiescence by rounds: Mattern, Algorithms for distributed termination detection,
1987, with the probe as the wave.)
"""

from __future__ import annotations

from typing import final

from ...errors import check


@final
class LoopRounds:
    """One loop in one attempt.

    Args:
        heads: subtasks of the loop's head.
    """

    def __init__(self, heads: int) -> None:
        check(heads > 0, "a loop without heads", heads=heads)
        self._heads = heads
        self._number: int | None = None
        self._reports: dict[int, int] = {}

    def report(self, index: int, number: int, records: int) -> int | None:
        """Note that head `index` has probe `number` back, and `records` came back; return the sum
        once all have."""
        if not self._reports:
            self._number = number
        check(number == self._number, "a head is in another round", head=index, number=number)
        check(index not in self._reports, "a head reports a round twice", head=index, number=number)
        self._reports[index] = records
        if len(self._reports) < self._heads:
            return None
        total = sum(self._reports.values())
        self._reports = {}
        return total
