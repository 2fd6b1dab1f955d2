"""The operator of `filter` with a function: a record passes if the function's result is true."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base import AsyncOperator, Operator, OperatorContext, Output
from ..elements import Batch
from .base import UserFunction, pieces
from .guard import Answered, Guard


class FilterOperator(Operator):
    """Keeps the records for which a function is true. Conditions on columns: `expression_steps.py`."""

    def __init__(self, user: UserFunction) -> None:
        self._guard = Guard(user)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._guard.open(context, self.output)

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            _emit_kept(self._guard.results(piece), self.output)


class AsyncFilterOperator(AsyncOperator):
    """The same for a coroutine function."""

    def __init__(self, user: UserFunction) -> None:
        self._guard = Guard(user)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._guard.open(context, self.output)

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            _emit_kept(await self._guard.results_async(piece), self.output)


def _emit_kept(answered: Answered, output: Output) -> None:
    batch, _, answers = answered
    kept = kept_rows(answers)
    if len(kept):
        output.emit(batch if len(kept) == len(batch) else batch.take(kept))


def kept_rows(answers: list[Any]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the places of the true answers."""
    return np.flatnonzero(np.fromiter(map(bool, answers), np.bool_, len(answers)))
