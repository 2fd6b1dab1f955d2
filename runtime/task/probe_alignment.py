"""When a subtask inside a loop passes a probe on: pure decisions about channels.

Unlike a barrier a probe blocks nothing. What overtakes it in another channel was sent behind a probe, and
is counted where it comes back. A channel from outside the loop carries no probes: it is waited for until
its data ends, since records in it may still go round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import final

from ...operators.elements import LoopProbe

_NONE = -1


@final
class ProbeAlignment:
    """The probes of the loops that a subtask is part of; those of other loops are none of its business."""

    def __init__(self, loops: Collection[str]) -> None:
        self._seen: dict[str, dict[int, int]] = {loop: {} for loop in loops}
        self._passed = dict.fromkeys(loops, _NONE)

    @property
    def in_a_loop(self) -> bool:
        """False if no probe will ever be due."""
        return bool(self._seen)

    def on_probe(self, position: int, probe: LoopProbe) -> None:
        """A probe was read from a channel."""
        if probe.loop in self._seen:
            self._seen[probe.loop][position] = probe.number

    def due(self, positions: Collection[int]) -> Iterator[LoopProbe]:
        """Probes to pass on now; `positions` are the channels that still have data."""
        for loop, seen in self._seen.items():
            number = min((seen.get(each, _NONE) for each in positions), default=_NONE)
            if number > self._passed[loop]:
                self._passed[loop] = number
                yield LoopProbe(loop, number)
