"""The generation records of a job on a store: found, claimed and read."""

from __future__ import annotations

from typing import final

from ...errors import CorruptError
from ..protocol import joblog, names
from ..protocol.joblog import GenerationRecord, Leader
from .base import CheckpointStore, Created
from .read_back import ReadBack


@final
class Claims:
    """Claims generations in sequence; their records stay for ever.

    Attributes:
        last: the highest generation that is known to be claimed.
    """

    def __init__(self, store: CheckpointStore, read_back: ReadBack) -> None:
        self._store = store
        self._read_back = read_back
        self.last = 0

    async def find_last(self) -> int:
        """Return the highest claimed generation.

        They are dense and stay, so doubling steps find it.
        """
        present, step = self.last, 1
        while await self._is_claimed(present + step):
            present, step = present + step, step * 2
        absent = present + step
        while absent - present > 1:
            middle = (present + absent) // 2
            if await self._is_claimed(middle):
                present = middle
            else:
                absent = middle
        self.last = present
        return present

    async def claim(self, writer: str, run: str, leader: Leader | None) -> int:
        """Claim the next generation for `writer`, and return it."""
        while True:
            generation = await self.find_last() + 1
            name = names.generation_record(generation)
            data = joblog.RECORDS.encode(
                GenerationRecord(generation=generation, writer=writer, run=run, leader=leader)
            )
            result = await self._store.create_if_absent(name, data)
            if isinstance(result, Created) and await self._read_back.other(name, data) is None:
                self.last = generation
                return generation

    async def winner(self, generation: int, writer: str) -> str:
        """Return the writer whose claim it is; another one only on a store that is not atomic."""
        record = await self.read(generation) if self._read_back.needed else None
        return writer if record is None else record.writer

    async def read(self, generation: int) -> GenerationRecord | None:
        """Return the record of a generation; None: there is none.

        Raises:
            CorruptError: it is damaged, or that of another generation.
        """
        name = names.generation_record(generation)
        data = await self._store.read(name)
        if data is None:
            return None
        record = joblog.RECORDS.decode(data, name, self._store.describe())
        if record.generation != generation:
            raise CorruptError(
                f"the job log is damaged: a generation record is another one's name=`{name}` "
                f"found=`{record.generation}`",
                where=self._store.describe(),
                fix="were objects copied or renamed by hand? restore them",
            )
        return record

    async def _is_claimed(self, generation: int) -> bool:
        return await self._store.read(names.generation_record(generation)) is not None
