"""Wrong code in `uses/` passes neither mypy nor pyright; right code passes both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

USES = sorted(Path(__file__).with_name("uses").glob("*.py"))
WRONG = "  # wrong"
Finding = tuple[str, int, str]
"""File, line from 1, and what the tool says of it."""


def by_mypy(root: Path) -> list[Finding]:
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-pretty", *map(str, USES)],
        cwd=root,
        env={**os.environ, "MYPYPATH": str(root / ".cache" / "src")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    lines = re.findall(r"^(.+?):(\d+): error: (.*)", ran.stdout, re.MULTILINE)
    return [(Path(name).name, int(line), said) for name, line, said in lines]


def by_pyright(root: Path) -> list[Finding]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run([*command, *map(str, USES)], cwd=root, capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    said = json.loads(ran.stdout)
    assert said["summary"]["filesAnalyzed"] == len(USES)
    return [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in said["generalDiagnostics"]
        if each["severity"] == "error"
    ]


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def findings(request: pytest.FixtureRequest) -> Sequence[Finding]:
    """Return the findings of a tool that runs once over all files."""
    pytest.importorskip(request.param)
    root = request.config.rootpath
    # The package is the repository itself: the tools need a directory that has it under its name.
    link = root / ".cache" / "src" / "headgate"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(os.path.join("..", ".."))
    return by_mypy(root) if request.param == "mypy" else by_pyright(root)


@pytest.mark.parametrize("path", USES, ids=lambda path: path.stem)
def test_what_is_wrong_is_found_and_nothing_else(findings: Sequence[Finding], path: Path) -> None:
    lines = path.read_text().splitlines()
    wrong = {number for number, text in enumerate(lines, 1) if text.endswith(WRONG)}
    found = {line: said for name, line, said in findings if name == path.name}
    unexpected = {line: found[line] for line in found.keys() - wrong}
    missed = {line: lines[line - 1].strip() for line in wrong - found.keys()}
    assert (unexpected, missed) == ({}, {})


def test_the_list_of_wrong_uses_is_not_short() -> None:
    assert sum(path.read_text().count(f"{WRONG}\n") for path in USES) >= 100
