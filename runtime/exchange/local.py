"""A channel inside one worker: elements pass by reference, under the same credits as on a socket."""

from __future__ import annotations

from ...errors import check
from ...operators.elements import Batch, Control
from .channel import OutputChannel
from .gate import InputGate


class LocalOutputChannel(OutputChannel):
    """Sends to a gate of the same event loop."""

    _gate: InputGate | None = None
    _position = 0

    def bind(self, gate: InputGate) -> None:
        """Connect to the gate, which grants the first credits at once."""
        check(self._gate is None, "channel is bound already", channel=self.channel_id)
        self._gate = gate
        self._position = gate.attach(self.channel_id, self)
        gate.open(self._position)

    def _can_transmit(self) -> bool:
        return self._gate is not None

    def _transmit(self, batch: Batch, backlog: int) -> None:
        assert self._gate is not None
        self._gate.receive(self._position, batch, backlog)

    def _transmit_control(self, control: Control) -> None:
        assert self._gate is not None
        self._gate.receive_control(self._position, control)

    def _announce_backlog(self, backlog: int) -> None:
        assert self._gate is not None
        self._gate.receive_backlog(self._position, backlog)
