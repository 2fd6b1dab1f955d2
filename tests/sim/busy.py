"""Subtasks that take their time: what comes faster waits in front of them, and barriers overtake it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from headgate.operators.elements import Batch
from headgate.runtime.task.input_subtask import InputSubtask

_process = InputSubtask._process_slice


class Busy:
    """A stand-in for the time of user code, which is none in a simulation."""

    target = "headgate.runtime.task.input_subtask.InputSubtask._process_slice"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.record_s = 0.0
        """The approximate time of a record."""

    def stand_in(self) -> Any:
        """A method of the subtask."""

        async def process(subtask: InputSubtask, batch: Batch, input_index: int) -> None:
            await _process(subtask, batch, input_index)
            if self.record_s:
                took_s = self.record_s * len(batch) * self._rng.uniform(0.5, 1.5)
                await asyncio.sleep(took_s)
                subtask._slices.took(len(batch), took_s)

        return process
