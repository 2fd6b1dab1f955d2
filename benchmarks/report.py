"""Medians of the runs, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from engines import Case
from measure import Run
from queries import QUERIES

import headgate

HEADER = (
    "query", "source", "p", "ckpt", "engine", "M rec/s", "x Flink SQL", "CPU s/M", "peak MB", "runs",
)  # fmt: skip


@dataclass(slots=True)
class Results:
    """All runs, by engine and case; and what else is to be said."""

    runs: dict[tuple[str, Case], list[Run]] = field(default_factory=lambda: defaultdict(list))
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rate(self, engine: str, case: Case) -> float | None:
        """Median records a second; None without runs."""
        found = self.runs.get((engine, case))
        return median(run.events / run.seconds for run in found) if found else None

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The lines of the table, engines of a case below each other."""
        cases = list(dict.fromkeys(case for _, case in self.runs))
        order = {name: number for number, name in enumerate(QUERIES)}
        cases.sort(key=lambda c: (order[c.query], c.source, c.parallelism, c.checkpoint))
        for case in cases:
            for engine in dict.fromkeys(engine for engine, _ in self.runs):
                runs = self.runs.get((engine, case))
                if runs:
                    yield self._row(engine, case, runs)

    def _row(self, engine: str, case: Case, runs: list[Run]) -> tuple[str, ...]:
        rate = self.rate(engine, case) or 0.0
        flink = self.rate("Flink SQL", case)
        cpu = median(run.cpu_seconds / run.events * 1e6 for run in runs)
        peak = median(run.peak_bytes for run in runs) / 1e6
        ratio = f"{rate / flink:.2f}" if flink else "-"
        return (
            case.query, case.source, str(case.parallelism), "1 s" if case.checkpoint else "-",
            engine, f"{rate / 1e6:.3f}", ratio, f"{cpu:.3f}", f"{peak:,.0f}", str(len(runs)),
        )  # fmt: skip

    def goals(self) -> Iterator[str]:
        """Return the distance of the queries from the goals of the project, which hold for parallelism
        1.
        """
        for name, query in QUERIES.items():
            case = Case(name, "generator", 1, False)
            for engine in ("headgate", "headgate in-process"):
                rate = self.rate(engine, case)
                if rate is not None:
                    share = rate / 1e6 / query.goal
                    yield (
                        f"{name} ({query.title}): {engine} {rate / 1e6:.2f} of {query.goal:g} "
                        f"million records/s, {share:.0%}"
                    )

    def to_json(self) -> dict[str, Any]:
        """Everything, for files."""
        return {
            "machine": machine(),
            "headgate": headgate.__version__,
            "python": platform.python_version(),
            "checks": self.checks,
            "notes": self.notes,
            "goals": list(self.goals()),
            "runs": [
                {"engine": engine, **asdict(case), **asdict(run)}
                for (engine, case), runs in self.runs.items()
                for run in runs
            ],
        }


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


def markdown(results: Results, how: str) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        how,
        "",
        f"Measured on {machine()}, headgate {headgate.__version__},",
    ]
    lines += [
        f"Python {platform.python_version()}. Compare the ratios, not the absolute numbers.",
        "",
    ]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(row) + " |" for row in results.rows()]
    for title, texts in (
        ("Against the goals", list(results.goals())),
        ("Results compared", results.checks),
        ("Notes", results.notes),
    ):
        if texts:
            lines += ["", f"## {title}", "", *(f"* {text}" for text in texts)]
    return "\n".join(lines) + "\n"
