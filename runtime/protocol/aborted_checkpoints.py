"""Aborted checkpoints: their late acknowledgements are still recognised, so that their files are
deleted."""

from __future__ import annotations

from typing import final

from ...operators.elements import CheckpointOptions
from .ids import CheckpointId

ABORTED_REMEMBERED_MAX = 16


@final
class AbortedCheckpoints:
    """The last few aborted checkpoints with their options; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._options: dict[CheckpointId, CheckpointOptions] = {}

    def add(self, checkpoint_id: CheckpointId, options: CheckpointOptions) -> None:
        """Remember an aborted checkpoint."""
        self._options[checkpoint_id] = options
        if len(self._options) > ABORTED_REMEMBERED_MAX:
            del self._options[next(iter(self._options))]

    def options_of(self, checkpoint_id: CheckpointId) -> CheckpointOptions | None:
        """Return the options of an aborted checkpoint; None: it was not aborted, or too long ago."""
        return self._options.get(checkpoint_id)
