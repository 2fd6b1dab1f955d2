"""Some cases of each target, always the same ones, and the cases that once were findings."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from headgate.tests.fuzz.__main__ import Findings, load, run_child, targets

CASES = {"records": 60, "expressions": 600, "manifests": 60}
FORMER_FINDINGS = [
    ("records", 922),
    ("expressions", 5860),
    ("expressions", 3330),
    ("expressions", 24285),
    ("manifests", 4809),
    ("manifests", 907),
]


@pytest.fixture(autouse=True)
def _back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # and back again behind the test


@pytest.mark.parametrize("target", targets())
def test_first_cases(target: str) -> None:
    run = load(target)
    for seed in range(CASES.get(target, 20)):
        run(random.Random(f"{target} {seed}"))


@pytest.mark.parametrize(("target", "seed"), FORMER_FINDINGS)
def test_former_findings(target: str, seed: int) -> None:
    load(target)(random.Random(f"{target} {seed}"))


def test_a_finding_is_told_with_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted bugs: a target that raises in its third case, and one whose process dies."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, types\n"
        "def target(fails):\n"
        "    module = types.ModuleType('x')\n"
        "    module.run = lambda rng: fails() if rng.random() == third else None\n"
        "    return module\n"
        "import random\n"
        "third = random.Random('records 3').random()\n"
        "def raises():\n"
        "    raise ValueError('planted')\n"
        "def dies():\n"
        "    os.abort()\n"
        "sys.modules['headgate.tests.fuzz.records'] = target(dies if os.environ.get('DIES') else raises)\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    findings = Findings()
    assert run_child("records", 1, 10, findings) == 4
    assert findings.found == ["records"]
    assert findings.cases["records"] == 3
    told = capsys.readouterr().out
    assert "FINDING in records, seed 3" in told
    assert "ValueError: planted" in told
    assert "--target records --case 3" in told
    monkeypatch.setenv("DIES", "1")
    assert run_child("records", 1, 10, findings) == 4
    assert "the process ended with -6" in capsys.readouterr().out
