"""Planted bugs: patches of the package, applied to a copy of it that the simulation then has to fail in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import headgate

PACKAGE = Path(headgate.__file__).resolve().parent
FOLDER = Path(__file__).resolve().parent / "mutants"
COPIED = ("api", "connectors", "operators", "runtime", "state", "testing", "tests/sim")
"""The rooms and folders that a simulation imports."""
PROGRAM = "headgate.tests.sim"
SEEDS_MAX = 1500
"""Each mutant must be found within this number of seeds."""
TIMEOUT_S = 1800.0


class PatchError(Exception):
    """A patch does not apply any more: the code it breaks is another one now."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: of its file.
        about: what is wrong.
        breaks: the promise that does not hold with it.
        changes: by file, pairs of lines that are there and lines to put in their place.
        kind: of the jobs that are simulated; empty: each seed draws one.
    """

    name: str
    about: str
    breaks: str
    changes: Mapping[str, list[tuple[str, str]]]
    kind: str = ""

    def patched(self, root: Path) -> dict[str, str]:
        """The changed files below `root`.

        Raises:
            PatchError: what is to be replaced is not there, or there several times.
        """
        texts: dict[str, str] = {}
        for name, changes in self.changes.items():
            path = root / name
            text = path.read_text() if path.exists() else ""
            for old, new in changes:
                if text.count(old) != 1:
                    raise PatchError(f"{self.name}: {name} has changed; look for\n{old}")
                text = text.replace(old, new)
            compile(text, name, "exec")
            texts[name] = text
        return texts


@dataclass(frozen=True, slots=True)
class Hunt:
    """The course of the hunt for a mutant.

    Attributes:
        mutant: what was looked for.
        seeds: how many were run.
        found: what the last of them found; empty: nothing.
    """

    mutant: Mutant
    seeds: int
    found: str


def all_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Those in the folder, by name."""
    return [read_mutant(path) for path in sorted(folder.glob("*.patch"))]


def read_mutant(path: Path) -> Mutant:
    """A unified diff behind two lines of text, or three. Where a hunk begins does not matter, only what
    it holds."""
    lines = path.read_text().splitlines(keepends=True)
    changes: dict[str, list[tuple[str, str]]] = {}
    old: list[str] = []
    new: list[str] = []
    kind = ""
    if lines[2].startswith("kind: "):
        kind = lines.pop(2).removeprefix("kind: ").strip()
    for line in lines[2:]:
        if line.startswith("--- "):
            hunks = changes.setdefault(line.split()[1].removeprefix("a/"), [])
        elif line.startswith("@@"):
            old, new = [], []
            hunks.append((f"{len(hunks)}", ""))  # replaced by what follows
        elif not line.startswith("+++ "):
            old += [line[1:]] * (line[0] != "+")
            new += [line[1:]] * (line[0] != "-")
            hunks[-1] = ("".join(old), "".join(new))
    breaks = lines[1].strip().removeprefix("breaks: ")
    return Mutant(path.stem, lines[0].strip(), breaks, changes, kind)


def copied_package(folder: Path, copied: Sequence[str] = COPIED) -> Path:
    """Copy these rooms and folders of the package, and its modules, into a folder; return the copy."""
    copy = folder / "headgate"
    hidden = shutil.ignore_patterns("__pycache__", "mutants")
    for name in copied:
        shutil.copytree(PACKAGE / name, copy / name, ignore=hidden)
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, copy)
    return copy


def hunt(
    mutant: Mutant,
    folder: Path,
    *,
    first: int = 0,
    seeds_max: int = SEEDS_MAX,
    program: str = PROGRAM,
    copied: Sequence[str] = COPIED,
) -> Hunt:
    """Simulate a copy of the package with this bug in a process of its own, until a seed fails.

    Args:
        mutant: the bug.
        folder: an empty directory for the copy.
        first: seed to begin with.
        seeds_max: the hunt gives up after this number of seeds.
        program: the module that runs seeds; it takes `--hunt` and `--first`.
        copied: all that it imports.

    Raises:
        PatchError: it cannot be planted.
    """
    texts = mutant.patched(PACKAGE)
    copy = copied_package(folder, copied)
    for name, text in texts.items():
        (copy / name).write_text(text)
    command = [sys.executable, "-m", program, "--hunt", str(seeds_max)]
    if mutant.kind:
        command += ["--kind", mutant.kind]
    done = subprocess.run(
        [*command, "--first", str(first)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    answer = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not answer:
        raise RuntimeError(f"{mutant.name}: the simulation broke\n{done.stderr}")
    seeds, _, found = answer[-1].partition(" ")
    return Hunt(mutant, int(seeds), found)
