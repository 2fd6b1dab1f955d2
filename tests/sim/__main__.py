"""`python -m headgate.tests.sim 17` replays seed 17 with its diary; `--seeds 20000` runs many."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from .run import Result, simulate

COMMAND = "python -m headgate.tests.sim"
PORTION = 20
"""Seeds that a process gets at a time."""


def run_many(seeds: list[int]) -> list[Result]:
    """One after the other."""
    return [simulate(seed) for seed in seeds]


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
    chosen = parser.parse_args(arguments)
    return _replay(chosen.seed) if chosen.seed else _run(chosen.seeds, chosen.first, chosen.jobs)


def _replay(seeds: list[int]) -> int:
    failed = 0
    for seed in seeds:
        result = simulate(seed, keep_diary=True)
        print("\n".join(result.diary or ()))
        print(f"digest {result.digest}")
        if result.violations:
            failed += 1
            print(explain(result))
    return min(failed, 1)


def _run(count: int, first: int | None, jobs: int) -> int:
    first = random.SystemRandom().randrange(1_000_000_000) if first is None else first
    print(f"{count} seeds from {first} on, in {jobs} processes", flush=True)
    seeds = range(first, first + count)
    portions = [list(seeds[at : at + PORTION]) for at in range(0, count, PORTION)]
    failed, seen = 0, Counter[str]()
    with ProcessPoolExecutor(jobs) as pool:
        for results in pool.map(run_many, portions):
            for result in results:
                seen += result.seen
                if result.violations:
                    failed += 1
                    print(explain(result), flush=True)
    print(", ".join(f"{name} {number}" for name, number in sorted(seen.items())))
    print(f"{failed} of {count} seeds failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
