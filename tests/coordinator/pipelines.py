"""The pipelines of test_regional: in a module that workers import, so that they find the test's world."""

from __future__ import annotations

import headgate as hg
from headgate.operators.elements import Batch, ObjectBatch
from headgate.operators.sink import Guarantee, Sink, SinkWriter
from headgate.tests.sim.counting import Counted, alone, key_of
from headgate.tests.sim.outside import WORLDS, Ledger, Numbers

TOKEN = "regional"
MARKED = 401
"""Raises once, when the test says so; it is in split 1."""
FAILS: set[int] = set()
CUTS: list[Numbers] = []
"""Each time that a `CutAnew` was cut into splits."""


class _RaiseOnce:
    def __call__(self, number: int) -> int:
        if number in FAILS:
            FAILS.remove(number)
            raise ValueError("the marked number")
        return number


class Seen(Sink):
    """Notes at once when which record came."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE})

    def writer(self) -> SinkWriter:
        return _SeenWriter()


class _SeenWriter(SinkWriter):
    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ObjectBatch)
        world = WORLDS[TOKEN]
        for record in batch.records:
            world.on_effect(f"{record[2]}")


class CutAnew(Numbers):
    """Its splits come in another order each time that they are made, like those of files that change."""

    def splits(self, parallelism: int) -> list[bytes]:
        CUTS.append(self)
        return super().splits(parallelism)[:: 1 if len(CUTS) % 2 else -1]


def graph(
    job: hg.Job, splits: range, name: str, *, keyed: bool, source: type[Numbers] = Numbers
) -> None:
    """One pipeline."""
    numbers = job.read(source(TOKEN, splits), name=f"numbers {name}")
    numbers = numbers.map(_RaiseOnce(), name=f"raise {name}")
    out = (
        numbers.key_with(key_of).process(Counted(), name=f"count {name}")
        if keyed
        else numbers.map(alone, name=f"alone {name}")
    )
    out.write(Ledger(TOKEN), name=f"out {name}")
    out.write(Seen(), name=f"seen {name}")
