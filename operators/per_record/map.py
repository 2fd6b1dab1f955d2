"""The operator of `map`: one record in, one out."""

from __future__ import annotations

from ..base import AsyncOperator, Operator, OperatorContext
from ..elements import Batch
from .base import UserFunction, pieces
from .guard import Guard


class MapOperator(Operator):
    """Calls a function for each record; results keep the event times of their records."""

    def __init__(self, user: UserFunction) -> None:
        self._guard = Guard(user)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._guard.open(context, self.output)

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            self.output.emit(self._guard.batch(self._guard.results(piece)))


class AsyncMapOperator(AsyncOperator):
    """The same for a coroutine function; results keep the order of the records."""

    def __init__(self, user: UserFunction) -> None:
        self._guard = Guard(user)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._guard.open(context, self.output)

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            self.output.emit(self._guard.batch(await self._guard.results_async(piece)))
