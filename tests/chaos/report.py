"""The findings of a campaign, as Markdown."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import inf
from statistics import median

from .campaign import RAY, Record
from .processes import Sample

YOUNG_S = 10.0
"""A process that begins is not looked at: it has not loaded everything yet."""
GROWTH_MAX = 1.25
"""More than this, and more than the slack, is growth."""
MB = 1 << 20
SLACK = {"MB": 20.0, "descriptors": 25.0, "files": 10.0, "processes": 5.0, "log files": inf}
"""Ray has some log files for each process it ever started; they go with the run."""


def flatness(record: Record) -> list[tuple[str, str, float, float, bool]]:
    """Return each quantity: its unit, its medians in the second and last quarter, if it is flat."""
    series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    alive: dict[float, int] = defaultdict(int)
    for sample in record.samples:
        alive[sample.at_s] += 1
        if sample.age_s >= YOUNG_S:
            role = sample.role
            series[f"memory, {role}", "MB"].append((sample.at_s, sample.rss_bytes / MB))
            series[f"descriptors, {role}", "descriptors"].append((sample.at_s, sample.descriptors))
    series["processes of a run", "processes"] = sorted(alive.items())
    for at_s, counts in record.files:
        for name, number in counts.items():
            series[name, "log files" if name == RAY else "files"].append((at_s, number))
    quarter_s = (record.ended_s - record.began_s) / 4
    rows = []
    for (name, unit), values in series.items():
        second = [v for at, v in values if 1 <= (at - record.began_s) / quarter_s < 2]
        last = [v for at, v in values if 3 <= (at - record.began_s) / quarter_s < 4]
        if second and last:
            before, after = median(second), median(last)
            flat = after <= max(GROWTH_MAX * before, before + SLACK[unit])
            rows.append((name, unit, before, after, flat))
    return rows


def grown(record: Record) -> list[str]:
    """Return the quantities that are not flat."""
    return [name for name, *_, flat in flatness(record) if not flat]


def longest_lived(samples: Iterable[Sample]) -> list[tuple[str, float, Sample, Sample]]:
    """Return, for each role, the process watched for longest: the seconds, its first and last sample."""
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.age_s >= YOUNG_S:
            lives[sample.role, sample.pid].append(sample)
    best: dict[str, list[Sample]] = {}
    for (role, _), life in lives.items():
        length: Callable[[list[Sample]], float] = lambda found: found[-1].at_s - found[0].at_s  # noqa: E731
        if role not in best or length(life) > length(best[role]):
            best[role] = life
    return [(role, life[-1].at_s - life[0].at_s, life[0], life[-1]) for role, life in best.items()]


def succeeded(record: Record) -> bool:
    """True if every promise was kept."""
    exact = record.verdict is not None and record.verdict.exact
    return exact and not record.broken and not grown(record)


def markdown(record: Record) -> str:
    """The whole report."""
    parts = [_summary(record), _broken(record), _troubles(record), _flat(record), _lives(record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(record: Record) -> str:
    events, verdict = record.events, record.verdict
    minutes = (record.ended_s - record.began_s) / 60
    modes = ", ".join(f"{name} {number}" for name, number in sorted(record.modes.items()))
    lines = [
        f"Seed {record.seed}, {minutes:.0f} minutes of troubles, {os.cpu_count()} processors: "
        f"{len(record.troubles)} troubles, {sum(record.modes.values())} runs ({modes}), "
        f"{events['takeover']} takeovers, {events['restart']} restarts, "
        f"{events['checkpoint completed']:,} checkpoints.",
        "The output was not compared."
        if verdict is None
        else f"{verdict.flights:,} flights in {verdict.windows:,} windows: lost {verdict.lost:,}, "
        f"doubled {verdict.doubled:,}, wrong {verdict.wrong:,}.",
    ]
    return "\n".join(lines)


def _broken(record: Record) -> str:
    broken = [*record.broken, *(f"not flat: {name}" for name in grown(record))]
    return "\n".join(["Broken promises:", "", *(f"* {text}" for text in broken)]) if broken else ""


def _troubles(record: Record) -> str:
    by_kind: dict[str, list[float]] = defaultdict(list)
    runs: dict[str, int] = defaultdict(int)
    for trouble in record.troubles:
        by_kind[trouble.kind].append(trouble.healthy_s)
        runs[trouble.kind] += trouble.runs
    rows = [
        f"| {kind} | {len(times)} | {median(times):.1f} | {max(times):.1f} | {runs[kind]} |"
        for kind, times in sorted(by_kind.items())
    ]
    head = [
        "| trouble | times | s to healthy, median | longest | run again |",
        "|---|--:|--:|--:|--:|",
    ]
    return "\n".join(head + rows)


def _flat(record: Record) -> str:
    rows = [
        f"| {name} | {unit} | {before:,.0f} | {after:,.0f} | {_judged(unit, flat)} |"
        for name, unit, before, after, flat in flatness(record)
    ]
    head = ["| median | | second quarter | last quarter | |", "|---|---|--:|--:|---|"]
    return "\n".join(head + rows)


def _judged(unit: str, flat: bool) -> str:
    if SLACK[unit] == inf:
        return ""
    return "flat" if flat else "GROWS"


def _lives(record: Record) -> str:
    rows = [
        f"| {role} | {seconds:.0f} | {first.rss_bytes / MB:.0f} | {last.rss_bytes / MB:.0f} "
        f"| {first.descriptors} | {last.descriptors} |"
        for role, seconds, first, last in longest_lived(record.samples)
    ]
    head = [
        "| lived longest | s | MB at first | MB at last | descriptors at first | at last |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join(head + rows)
