"""filter by a function: a record stays if the function's result is true."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import AsyncOperator, Operator
from .elements import Batch
from .per_record import UserFunction, pieces


class FilterOperator(Operator):
    """Keeps the records for which a function says yes. Conditions on columns: `expression_steps.py`."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            kept = kept_rows(self._user.apply(self._user.reader(piece)))
            if len(kept):
                self.output.emit(piece if len(kept) == len(piece) else piece.take(kept))


class AsyncFilterOperator(AsyncOperator):
    """The same for a coroutine function."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            kept = kept_rows(await self._user.apply_async(self._user.reader(piece)))
            if len(kept):
                self.output.emit(piece if len(kept) == len(piece) else piece.take(kept))


def kept_rows(answers: list[Any]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The places of the true answers."""
    return np.flatnonzero(np.fromiter(map(bool, answers), np.bool_, len(answers)))
