"""Whole jobs through trouble that a seed decides; see docs/simulation.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headgate.tests.sim.__main__ import explain
from headgate.tests.sim.mutant import copied_package
from headgate.tests.sim.nemesis import ACTS
from headgate.tests.sim.run import simulate
from headgate.tests.sim.workloads import MORE_KINDS

SEEDS = 200
PORTION = 10
KEPT = [
    int(line.split()[0])
    for line in (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
def test_seeds(first: int) -> None:
    results = [simulate(seed) for seed in range(first, first + PORTION)]
    failed = [explain(result) for result in results if result.violations]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_kinds_that_no_seed_draws(kind: str) -> None:
    results = [simulate(seed, kind=kind) for seed in range(PORTION)]
    failed = [f"{kind}: {explain(result)}" for result in results if result.violations]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("seed", KEPT)
def test_kept_seeds(seed: int) -> None:
    result = simulate(seed)
    assert not result.violations, explain(result)


def test_everything_has_happened() -> None:
    """Trouble that never comes proves nothing.

    The seeds run here once more, until each event has been seen: the tests above may run in
    several processes, none of which sees what happened in the others.
    """
    missing = {act.__name__ for act in ACTS} | {
        "checkpoint with records on their way",
        "checkpoint done",
        "rescale done",
        "stop done",
        "cancel done",
        "restored",
        "restart of a part",
        "restart of all",
        "state kept in memory",
        "store existed",
        "job FINISHED",
        "groups 2",
        "groups 3",
    }
    for seed in range(SEEDS):
        missing -= simulate(seed).seen.keys()
        if not missing:
            return
    assert not missing


@pytest.mark.parametrize("kind", [kind for kind, of in MORE_KINDS.items() if of.saves])
def test_savepoints_are_taken_and_begun_with(kind: str) -> None:
    """Other kinds ask for a savepoint now and then, mostly when the job is just starting."""
    seen: Counter[str] = Counter()
    for seed in range(5):
        seen.update(simulate(seed, kind=kind).seen)
    assert seen["savepoint done"] >= 6
    assert seen["begun with a savepoint"] >= 3
    assert seen["failure"], "nothing has gone wrong between them"


SAME = (2, 3, 7, 11, 23)
"""The runs of 7, 11 and 23 depended on the name of a temporary directory once, and that of 7 on the one
of the checkout.
"""


def digests(hash_seed: str, folder: Path | None = None) -> list[str]:
    """Return the traces of some seeds, made in another process, of the package in this folder."""
    paths = sys.path if folder is None else [str(folder), *sys.path]
    code = (
        f"from headgate.tests.sim.run import simulate\nprint(*(simulate(s).digest for s in {SAME}))"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_same_seed_is_the_same_run() -> None:
    here = [simulate(seed).digest for seed in SAME]
    assert len(set(here)) == len(SAME)
    assert digests("1") == here == digests("2")


def test_the_same_seed_is_the_same_run_in_another_checkout(tmp_path: Path) -> None:
    """The text of an error, or of a line of the job, is part of messages, which take time by their size."""
    folder = tmp_path / "a-folder-with-a-name-of-some-length"
    copied_package(folder)
    assert digests("0", folder) == [simulate(seed).digest for seed in SAME]
