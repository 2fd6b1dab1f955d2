"""Decides when a subtask inside a loop forwards a probe. Pure.

Unlike a barrier a probe blocks nothing. Records that overtake it in another channel were sent after
a probe, and are counted where they come back. A channel from outside the loop carries no probes:
the probe waits until the data of that channel ends, since its records may still go round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import final

from ...operators.elements import LoopProbe

_NONE = -1


@final
class ProbeAlignment:
    """The probes of the loops that a subtask is part of; those of other loops are ignored."""

    def __init__(self, loops: Collection[str]) -> None:
        self._seen: dict[str, dict[int, int]] = {loop: {} for loop in loops}
        self._passed = dict.fromkeys(loops, _NONE)

    @property
    def in_a_loop(self) -> bool:
        """Return False if no probe will ever be due."""
        return bool(self._seen)

    def on_probe(self, position: int, probe: LoopProbe) -> None:
        """Handle a probe read from a channel."""
        if probe.loop in self._seen:
            self._seen[probe.loop][position] = probe.number

    def due(self, positions: Collection[int]) -> Iterator[LoopProbe]:
        """Yield probes to forward now; `positions` are the channels that still have data."""
        for loop, seen in self._seen.items():
            number = min((seen.get(each, _NONE) for each in positions), default=_NONE)
            if number > self._passed[loop]:
                self._passed[loop] = number
                yield LoopProbe(loop, number)
