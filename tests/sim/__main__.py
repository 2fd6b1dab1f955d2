"""`python -m headgate.tests.sim 17` replays seed 17 with its diary; `--seeds 20000` runs many."""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from .run import Result, simulate
from .summary import Summary

COMMAND = "python -m headgate.tests.sim"
PORTION = 20
"""Seeds that a process gets at a time."""


def collect_rarely() -> None:
    """For a process that simulates all the time: an eighth less work, by garbage that lies for longer."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run_many(seeds: list[int], kind: str = "") -> list[Result]:
    """One after the other."""
    return [simulate(seed, kind=kind) for seed in seeds]


def explain(result: Result) -> str:
    """A failed seed, and how to see it again."""
    lines = "\n  ".join(result.violations[:3])
    return f"seed {result.seed}: {lines}\n  again, with its diary: {COMMAND} {result.seed}"


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("seed", type=int, nargs="*", help="replay these, with diaries")
    parser.add_argument("--seeds", type=int, default=200, help="how many to run (default 200)")
    parser.add_argument(
        "--first", type=int, default=None, help="the first of them; default: by chance"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--summary", type=Path, help="a page to write what was seen to")
    parser.add_argument(
        "--hunt",
        type=int,
        help="run up to this number of seeds, until one fails; say what it found",
    )
    parser.add_argument("--kind", default="", help="of the job; default: by chance")
    chosen = parser.parse_args(arguments)
    if chosen.hunt is not None:
        return _hunt(chosen.first or 0, chosen.hunt, chosen.kind)
    if chosen.seed:
        return _replay(chosen.seed, chosen.kind)
    return _run(chosen.seeds, chosen.first, chosen.jobs, chosen.summary, chosen.kind)


def _replay(seeds: list[int], kind: str) -> int:
    failed = 0
    for seed in seeds:
        result = simulate(seed, keep_diary=True, kind=kind)
        print("\n".join(result.diary or ()))
        print(f"digest {result.digest}")
        if result.violations:
            failed += 1
            print(explain(result))
    return min(failed, 1)


def _hunt(first: int, count: int, kind: str) -> int:
    """Print how many seeds ran, and what the last of them found."""
    collect_rarely()
    for number, seed in enumerate(range(first, first + count), 1):
        result = simulate(seed, kind=kind, to_the_end=False)
        if result.violations:
            print(number, " ".join(result.violations[0].split()))
            return 1
    print(count)
    return 0


def _run(count: int, first: int | None, jobs: int, page: Path | None, kind: str) -> int:
    first = random.SystemRandom().randrange(1_000_000_000) if first is None else first
    print(f"{count} seeds from {first} on, in {jobs} processes", flush=True)
    seeds = range(first, first + count)
    portions = [list(seeds[at : at + PORTION]) for at in range(0, count, PORTION)]
    summary = Summary(first)
    with ProcessPoolExecutor(jobs, initializer=collect_rarely) as pool:
        for results in pool.map(partial(run_many, kind=kind), portions):
            for result in results:
                summary.add(result.violations, result.virtual_s, result.seen)
                if result.violations:
                    print(explain(result), flush=True)
    print(summary.text())
    print(f"{summary.failed} of {count} seeds failed")
    if page is not None:
        command = f"{COMMAND} --seeds {count} --first {first}"
        page.write_text(f"# What the simulation has seen\n\n{summary.markdown(command)}")
    return min(summary.failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
