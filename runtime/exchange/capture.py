"""The records in front of the barriers of one checkpoint, at the receiving end (features.md 3.3)."""

from __future__ import annotations

from .in_flight import InFlightRecords


class GateCapture:
    """The records that a gate keeps for one checkpoint while its barriers come in.

    `open` are the positions of the channels whose barrier has not come: records that arrive there are kept.
    """

    def __init__(self, checkpoint_id: int) -> None:
        self.checkpoint_id = checkpoint_id
        self.records = InFlightRecords()
        self.open: set[int] = set()
