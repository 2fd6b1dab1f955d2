"""The operator's decisions against a cluster that fails: promises hold, and it comes to rest.

`python -m headgate.tests.k8s.model --hunt 500` runs more seeds; with a number it replays one.
`python -m headgate.tests.k8s.model --mutants` plants each bug of `model/mutants`, and looks whether a seed
finds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.tests.k8s.model.__main__ import hunted, mutants
from headgate.tests.k8s.model.run import Model, simulate
from headgate.tests.sim.mutant import PACKAGE

MUTANTS = mutants()


@pytest.mark.parametrize("seed", range(16))
def test_every_promise_holds_and_it_comes_to_rest(seed: int) -> None:
    assert simulate(seed) == ""


def test_a_seed_is_the_same_every_time() -> None:
    traces = []
    for _ in range(2):
        model = Model(3)
        model.run()
        traces.append(model.cluster.trace)
    assert traces[0] == traces[1]


def test_every_patch_still_applies() -> None:
    assert len(MUTANTS) >= 12
    for mutant in MUTANTS:
        changed = mutant.patched(PACKAGE)
        assert mutant.about, mutant.name
        assert mutant.breaks, mutant.name
        assert all(text != (PACKAGE / name).read_text() for name, text in changed.items())


@pytest.mark.parametrize(
    "name", ["let-go-too-early", "state-always-deleted", "resumed-without-state"]
)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    assert hunted(mutant, tmp_path, seeds_max=60).found
