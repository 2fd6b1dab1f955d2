"""What stands in for each sink of a job in a harness, and listens to the side outputs nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..operators.base import Operator, OperatorContext
from ..operators.elements import Batch
from ..operators.sink import Guarantee, Sink, SinkWriter
from ..state.snapshot import CommitPermit
from .world import world_of

_ALL: Final = frozenset(Guarantee)


class CollectingSink(Sink):
    """Collects what is written, and shows it when the real sink would: at once, or when committed."""

    guarantees = _ALL

    def __init__(self, token: str, name: str, real: Sink) -> None:
        self.token = token
        self.name = name
        self.guarantee = real.guarantee
        self.needs_columns = real.needs_columns

    def writer(self) -> SinkWriter:
        return _CollectingWriter(self)

    def describe(self) -> str:
        return "harness"


class _CollectingWriter(SinkWriter):
    def __init__(self, sink: CollectingSink) -> None:
        self._world = world_of(sink.token)
        self._box = self._world.sinks[sink.name]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._world.begin_attempt(context.attempt)

    def write(self, batch: Batch) -> None:
        entry = (self._world.next_written(), batch)
        if self._box.transactional:
            self._box.writing.setdefault(self.context.subtask_index, []).append(entry)
        else:
            self._box.visible.append(entry)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        batches = self._box.writing.pop(self.context.subtask_index, [])
        if not batches:
            return None
        committable = f"{self._world.token}/{self._world.next_written()}".encode()
        self._box.rolled[committable] = (self.context.attempt, batches)
        return lambda: [committable]

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        """What is not there was committed before, or belongs to the world of a savepoint."""
        for committable in committables:
            _, batches = self._box.rolled.pop(committable, (0, []))
            self._box.visible.extend(batches)


class SideListener(Operator):
    """Collects a side output that no step of the job reads."""

    def __init__(self, token: str, name: str) -> None:
        self._world = world_of(token)
        self._box = self._world.sides[name]

    def process(self, batch: Batch, input_index: int) -> None:
        self._box.visible.append((self._world.next_written(), batch))

    def on_watermark(self, timestamp: int) -> None:
        """Nobody stands behind this operator."""

    def on_idle(self, idle: bool) -> None:
        """Nobody stands behind this operator."""
