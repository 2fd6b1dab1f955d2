"""A sink that forgets everything, to measure the rest of a job."""

from __future__ import annotations

from ..operators.elements import Batch
from ..operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter, parse_guarantee


class BlackholeSink(Sink):
    """Takes records and drops them; what never appears cannot appear twice, so any guarantee holds."""

    guarantees = frozenset(Guarantee)

    def __init__(self, guarantee: Guarantee) -> None:
        self.guarantee = guarantee

    def writer(self) -> SinkWriter:
        return BlackholeWriter()

    def describe(self) -> str:
        return "blackhole()"


class BlackholeWriter(SinkWriter):
    """Writes nothing."""

    def write(self, batch: Batch) -> None:
        return None


def blackhole(*, guarantee: GuaranteeLike = "none") -> BlackholeSink:
    """Drop all records; the operator's metrics still count them."""
    return BlackholeSink(parse_guarantee(guarantee))
