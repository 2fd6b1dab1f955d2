"""The simulation finds planted bugs; `make sim-mutants` looks for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.tests.sim.mutant import FOLDER, PACKAGE, all_mutants, hunt, read_mutant

MUTANTS = all_mutants()
SEEDS = 60
"""The mutants that are run here are found by nearly every seed, whatever it draws."""


def test_every_patch_still_applies() -> None:
    assert len(MUTANTS) >= 25
    for mutant in MUTANTS:
        changed = mutant.patched(PACKAGE)
        assert mutant.about, mutant.name
        assert mutant.breaks, mutant.name
        assert changed, mutant.name
        assert all(text != (PACKAGE / name).read_text() for name, text in changed.items())


def test_every_mutant_is_in_the_documentation() -> None:
    text = (PACKAGE / "docs/simulation.md").read_text()
    for mutant in MUTANTS:
        assert f"\n| {mutant.name} | " in text, mutant.name


@pytest.mark.parametrize(
    "name",
    [
        "committed-before-complete",
        "completed-without-one-ack",
        "barriers-not-aligned",
        "splits-of-others-unknown",
        "taken-splits-forgotten",
    ],
)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    assert hunt(read_mutant(FOLDER / f"{name}.patch"), tmp_path, seeds_max=SEEDS).found
