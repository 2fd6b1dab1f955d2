"""Some cases of each target, always the same ones, and the cases that once were findings."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.tests.fuzz import __main__ as fuzz
from headgate.tests.fuzz.__main__ import (
    CASE_CPU_S_MAX,
    IDLE_CPU_S,
    IDLE_LOOKS_MAX,
    Findings,
    Patience,
    load,
    run_child,
    targets,
)

CASES = {"records": 60, "expressions": 600, "manifests": 60}
FORMER_FINDINGS = [
    ("records", 922),
    ("expressions", 5860),
    ("expressions", 3330),
    ("expressions", 24285),
    ("manifests", 4809),
    ("manifests", 907),
    ("expressions", 91602),
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


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plants a bug into the third case of the target `records`, in processes that are started later."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, random, sys, time, types\n"
        "third = random.Random('records 3').random()\n"
        "def run(rng):\n"
        "    if rng.random() == third:\n"
        "        exec(os.environ['PLANTED'])\n"
        "module = types.ModuleType('x')\n"
        "module.run = run\n"
        "sys.modules['headgate.tests.fuzz.records'] = module\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return lambda code: monkeypatch.setenv("PLANTED", code)


def test_a_finding_is_told_with_its_seed(
    planted: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    planted("raise ValueError('planted')")
    findings = Findings()
    assert run_child("records", 1, 10, findings) == 4
    assert findings.found == ["records"]
    assert findings.cases["records"] == 3
    told = capsys.readouterr().out
    assert "FINDING in records, seed 3" in told
    assert "ValueError: planted" in told
    assert "--target records --case 3" in told
    planted("os.abort()")
    assert run_child("records", 1, 10, findings) == 4
    assert "the process ended with -6" in capsys.readouterr().out


def test_a_case_that_hangs_is_told_with_its_stack(
    planted: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted("while True: pass")
    monkeypatch.setattr(fuzz, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(fuzz, "CASE_CPU_S_MAX", 0.2)
    monkeypatch.setattr(fuzz, "IDLE_LOOKS_MAX", 10**6)
    assert run_child("records", 1, 10, Findings()) == 4
    told = capsys.readouterr().out
    assert "FINDING in records, seed 3:\nno end within 0 s of CPU time" in told
    assert "sitecustomize.py" in told


def test_a_slow_machine_is_no_finding() -> None:
    patience = Patience(0.0)
    used = 0.0
    for _ in range(100_000):  # the start of the process, which may use any time
        used += 1.0
        assert not patience.look(used)
    for _ in range(10):
        patience.begin(used)
        for _ in range(1000):  # for hours, but with little CPU time
            used += IDLE_CPU_S * 2
            assert not patience.look(used)


def test_a_case_that_computes_or_waits_for_ever_is_a_finding() -> None:
    computes = Patience(0.0)
    computes.begin(30.0)
    assert not computes.look(30.0 + CASE_CPU_S_MAX)
    assert "of CPU time" in computes.look(30.1 + CASE_CPU_S_MAX)
    for begun in (True, False):
        waits = Patience(0.0)
        if begun:
            waits.begin(0.0)
        assert [bool(waits.look(0.0)) for _ in range(IDLE_LOOKS_MAX)].index(True) == (
            IDLE_LOOKS_MAX - 1
        )
