"""The figures of a job's vertices over the last minutes, and their present rates.

The coordinator takes a sample about once a second. A sample has counters, which begin at 0 again after a
restart. A rate is the increase of a counter over time, and a counter that has become smaller has not
increased.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, final

RATE_SAMPLES: Final = 5
"""Present rates are taken over this many samples, because single ones jitter."""


class VertexSample(NamedTuple):
    """The figures of a vertex at one moment: counters, and the mean time use in ms per second."""

    records_in: int
    records_out: int
    busy: int
    backpressured: int
    idle: int


class EdgeSample(NamedTuple):
    """The counters of an exchange at one moment."""

    records: int
    bytes: int


@final
class Curves:
    """A bounded history of samples; each takes 40 bytes per vertex."""

    def __init__(self, samples_max: int) -> None:
        self.samples_max = samples_max
        self._at_ms: deque[int] = deque(maxlen=max(samples_max, RATE_SAMPLES + 1))
        self._rows: deque[array[int]] = deque(maxlen=self._at_ms.maxlen)
        self._vertices: tuple[int, ...] = ()
        self._edges: deque[Mapping[int, EdgeSample]] = deque(maxlen=RATE_SAMPLES + 1)

    def sample(
        self,
        at_ms: int,
        vertices: Mapping[int, VertexSample],
        edges: Mapping[int, EdgeSample],
    ) -> None:
        """Add a sample. If the job has other vertices than before, the history begins with it."""
        if self._at_ms and at_ms <= self._at_ms[-1]:
            return
        if tuple(vertices) != self._vertices:
            self._vertices = tuple(vertices)
            for kept in (self._at_ms, self._rows, self._edges):
                kept.clear()
        self._at_ms.append(at_ms)
        self._rows.append(array("q", [value for each in vertices.values() for value in each]))
        self._edges.append(edges)

    @property
    def at_ms(self) -> list[int]:
        """The times of the samples that are kept, oldest first."""
        return list(self._at_ms)[-self.samples_max :] if self.samples_max else []

    def of(self, vertex: int) -> list[VertexSample]:
        """Return the samples of a vertex, one for each time in `at_ms`."""
        if vertex not in self._vertices or not self.samples_max:
            return []
        width = len(VertexSample._fields)
        begin = width * self._vertices.index(vertex)
        rows = list(self._rows)[-self.samples_max :]
        return [VertexSample(*row[begin : begin + width]) for row in rows]

    def vertex_rates(self, vertex: int) -> tuple[float, float]:
        """Return how many records per second a vertex takes and gives now; 0 before the second sample."""
        if vertex not in self._vertices:
            return 0.0, 0.0
        begin = len(VertexSample._fields) * self._vertices.index(vertex)
        rows = list(self._rows)[-RATE_SAMPLES - 1 :]
        taken, given = ([row[begin + field] for row in rows] for field in (0, 1))
        return self._rate(taken), self._rate(given)

    def edge_rates(self, edge: int) -> tuple[float, float]:
        """Return how many records and bytes per second an exchange carries now."""
        known = [sample.get(edge, EdgeSample(0, 0)) for sample in self._edges]
        return self._rate([each.records for each in known]), self._rate(
            [each.bytes for each in known]
        )

    def _rate(self, counters: Sequence[int]) -> float:
        """Return the increase per second of a counter over the last samples."""
        if len(counters) < 2:
            return 0.0
        spent_ms = self._at_ms[-1] - self._at_ms[-len(counters)]
        return 1000 * sum(increases(counters)) / spent_ms


def increases(counters: Sequence[int]) -> list[int]:
    """Return the increases from each value of a counter to the next one."""
    return [max(0, later - before) for before, later in pairwise(counters)]


def rates(counters: Sequence[int], at_ms: Sequence[int]) -> list[float | None]:
    """Return the rate at each time, per second; None for the first one."""
    spent_ms = [later - before for before, later in pairwise(at_ms)]
    found = zip(increases(counters), spent_ms, strict=True)
    return [None, *(round(1000 * more / ms, 1) for more, ms in found)] if counters else []
