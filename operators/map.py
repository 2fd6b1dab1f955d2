"""map: one record in, one out."""

from __future__ import annotations

from .base import AsyncOperator, Operator
from .elements import Batch
from .per_record import UserFunction, pieces


class MapOperator(Operator):
    """Calls a function for each record; event times go with their records."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    def process(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            records = self._user.reader(piece)
            results = self._user.apply(records)
            self.output.emit(self._user.batch(results, piece.timestamps, records))


class AsyncMapOperator(AsyncOperator):
    """The same for a coroutine function; results keep the order of the records."""

    def __init__(self, user: UserFunction) -> None:
        self._user = user

    async def process_async(self, batch: Batch, input_index: int) -> None:
        for piece in pieces(batch):
            records = self._user.reader(piece)
            results = await self._user.apply_async(records)
            self.output.emit(self._user.batch(results, piece.timestamps, records))
