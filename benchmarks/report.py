"""Medians of the runs, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from engines import Case
from measure import Run
from queries import QUERIES

import headgate

HEADER = (
    "query", "source", "p", "ckpt", "engine", "M rec/s", "x Flink SQL by the clock", "CPU s/M",
    "x Flink SQL by CPU", "peak MB", "others", "runs",
)  # fmt: skip
FLINK = "Flink SQL"


@dataclass(slots=True)
class Results:
    """All runs, by engine and case; and what else is to be said."""

    runs: dict[tuple[str, Case], list[Run]] = field(default_factory=lambda: defaultdict(list))
    alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU seconds per million rows of the columns of a query without an engine, by query and source."""
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The lines of the table, engines of a case below each other."""
        cases = list(dict.fromkeys(case for _, case in self.runs))
        order = {name: number for number, name in enumerate(QUERIES)}
        cases.sort(key=lambda c: (order[c.query], c.source, c.parallelism, c.checkpoint))
        query = ""
        for case in cases:
            if case.query != query:
                query = case.query
                yield from self._alone(query)
            for engine in dict.fromkeys(engine for engine, _ in self.runs):
                runs = self.runs.get((engine, case))
                if runs:
                    yield self._row(engine, case, runs)

    def _alone(self, query: str) -> Iterator[tuple[str, ...]]:
        for name, found in self.alone.items():
            of, source = name.split()
            if of == query:
                cells = {"query": query, "source": source, "engine": "rows alone"}
                cells |= {"CPU s/M": f"{median(found):.3f}", "runs": str(len(found))}
                yield tuple(cells.get(name, "-") for name in HEADER)

    def _row(self, engine: str, case: Case, runs: list[Run]) -> tuple[str, ...]:
        clock, cpu = (
            spread(self._ratios(engine, case, measure)) for measure in (_seconds, _cpu_seconds)
        )
        return (
            case.query, case.source, str(case.parallelism), "1 s" if case.checkpoint else "-",
            engine, f"{median(1 / _seconds(run) for run in runs):.2f}", clock,
            f"{median(map(_cpu_seconds, runs)):.3f}", cpu,
            f"{median(run.peak_bytes for run in runs) / 1e6:,.0f}",
            f"{max(run.foreign_cores for run in runs):.2f}", str(len(runs)),
        )  # fmt: skip

    def _ratios(self, engine: str, case: Case, measure: Callable[[Run], float]) -> list[float]:
        """Return how many times as much Flink SQL takes, in each round."""
        pairs = zip(self.runs[engine, case], self.runs.get((FLINK, case), []), strict=False)
        return [measure(theirs) / measure(ours) for ours, theirs in pairs if engine != FLINK]

    def to_json(self) -> dict[str, Any]:
        """Everything, for files."""
        return {
            "machine": machine(),
            "headgate": headgate.__version__,
            "python": platform.python_version(),
            "checks": self.checks,
            "notes": self.notes,
            "alone": self.alone,
            "runs": [
                {"engine": engine, **asdict(case), **asdict(run)}
                for (engine, case), runs in self.runs.items()
                for run in runs
            ],
        }


def _seconds(run: Run) -> float:
    """Seconds by the clock per million records."""
    return run.seconds / run.events * 1e6


def _cpu_seconds(run: Run) -> float:
    return run.cpu_seconds / run.events * 1e6


def spread(values: list[float]) -> str:
    """Return the median with the least and the most, as `2.1 (1.9..2.4)`."""
    if not values:
        return "-"
    return f"{median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def machine() -> str:
    """The machine in a few words."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line for line in lines if line.startswith("model name")).split(":")[1]
    except (OSError, StopIteration):
        pass
    return f"{os.cpu_count()} x {model.strip()}, {sys.platform}"


def text_table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns, a line between queries."""
    table = [HEADER, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    lines, query = [], HEADER[0]
    for row in table:
        if row[0] != query:
            lines.append("")
            query = row[0]
        cells = [
            text.ljust(width) if column in (0, 1, 3, 4) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
