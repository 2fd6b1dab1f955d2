"""`python -m headgate.tests.k8s.model 17` runs a seed; `--hunt 100` runs seeds until one is broken."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from headgate.tests.sim.mutant import Hunt, Mutant, all_mutants, hunt

from .run import simulate

PROGRAM = "headgate.tests.k8s.model"
COPIED = ("api", "connectors", "operators", "runtime", "state", "k8s", "tests/k8s", "tests/sim")
FOLDER = Path(__file__).resolve().parent / "mutants"
SEEDS_MAX = 400
"""Within this many seeds each mutant must be found."""


def mutants() -> list[Mutant]:
    """The planted bugs of this model."""
    return all_mutants(FOLDER)


def hunted(mutant: Mutant, folder: Path, *, seeds_max: int = SEEDS_MAX) -> Hunt:
    """Run seeds with this bug until one is broken; `folder` is an empty directory."""
    return hunt(mutant, folder, seeds_max=seeds_max, program=PROGRAM, copied=COPIED)


def hunt_all() -> int:
    """Plant each bug, and print how many seeds it took to find it."""
    missed = 0
    for mutant in mutants():
        with tempfile.TemporaryDirectory(prefix="headgate-mutant-") as folder:
            found = hunted(mutant, Path(folder))
        missed += not found.found
        print(f"{mutant.name}: {found.seeds} seeds: {found.found or 'NOT FOUND'}", flush=True)
    return 1 if missed else 0


def main(arguments: list[str]) -> int:
    """Prints how many seeds were run, and what the last of them broke, as the hunt for mutants wants it."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("seed", nargs="*", type=int)
    parser.add_argument("--hunt", type=int, default=0, help="run this many seeds at most")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--mutants", action="store_true", help="plant each bug")
    chosen = parser.parse_args(arguments)
    if chosen.mutants:
        return hunt_all()
    for seed in chosen.seed:
        print(simulate(seed) or f"seed {seed}: nothing is broken")
    for number in range(chosen.hunt):
        found = simulate(chosen.first + number)
        if found:
            print(found, file=sys.stderr)
            print(number + 1, found.splitlines()[0])
            return 1
    if chosen.hunt:
        print(chosen.hunt)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
