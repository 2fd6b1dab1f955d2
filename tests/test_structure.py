"""The plan of the house, kept by a test: no import runs upwards or in a circle, no module is a giant."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import headgate

ROOT = Path(headgate.__file__).resolve().parent
ROOMS = {
    "errors": set(),
    "state": {"errors"},
    "operators": {"errors", "state"},
    "api": {"errors", "state", "operators"},
    "connectors": {"errors", "state", "operators", "api"},
    "runtime": {"errors", "state", "operators", "api", "connectors"},
    "testing": {"errors", "state", "operators", "api", "connectors", "runtime"},
    "spark": {"errors", "state", "operators", "api", "connectors", "runtime"},
    "k8s": {"errors", "operators", "api", "runtime"},
    "__init__": {"errors", "state", "operators", "api", "connectors", "runtime"},
}
"""The rooms of ours that each room may import (ARCHITECTURE.md, "The rooms")."""
LINES_MAX = 800
"""A hard cap of 500 made modules be cut where there was no seam. Above 400, ask whether it is one thing."""
CIRCLES: dict[str, frozenset[str]] = {
    "each operation of a stream returns a stream of some kind": frozenset(
        [
            "api.connected",
            "api.keyed_stream",
            "api.stream",
        ]
    ),
}
"""The circles among files that are there by decision: the reason, and the files. One may get smaller."""
LONGER_BY_DECISION: dict[str, int] = {}
"""Modules above LINES_MAX, with the limit each was granted."""
IMPURE = {
    "asyncio", "threading", "multiprocessing", "concurrent", "socket", "subprocess",
    "time", "datetime", "random", "secrets", "uuid", "os", "io", "pathlib", "tempfile", "shutil",
}  # fmt: skip
"""Modules that `runtime/protocol` must not import: I/O, clocks, chance, concurrency."""


def modules() -> dict[str, Path]:
    """All modules of the package, by dotted name below `headgate`."""
    found = {}
    tops = [ROOT / f"{room}.py" for room in ROOMS] + [ROOT / room for room in ROOMS]
    for top in tops:
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    return found


def imports(module: str, path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute dotted names a module imports, anywhere in it, and whether they are ours."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _ours(alias.name)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                base = node.module or ""
            else:
                above = package[: len(package) - node.level + 1]
                base = ".".join(["headgate", *above, *filter(None, [node.module])])
            name, ours = _ours(base)
            # `from . import a, b` names modules; `from .a import b` names one, or what is inside one.
            for alias in node.names:
                inside = f"{name}.{alias.name}".lstrip(".")
                if ours and (not node.module or inside in MODULES):
                    yield inside, True
                else:
                    yield name, ours


def _ours(name: str) -> tuple[str, bool]:
    if name.split(".")[0] != "headgate":
        return name, False
    return name.removeprefix("headgate").lstrip(".") or "__init__", True


MODULES = modules()


@cache
def all_imports() -> dict[str, list[tuple[str, bool]]]:
    """Return the imports of each module."""
    return {module: sorted(set(imports(module, path))) for module, path in MODULES.items()}


def test_the_package_was_found() -> None:
    assert {"errors", "operators.elements", "runtime.protocol.barriers.handler"} <= MODULES.keys()
    assert ("operators.elements", True) in all_imports()["runtime.protocol.barriers.handler"]
    assert ("errors", True) in all_imports()["state.keygroups"]


def test_no_import_runs_upwards() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in all_imports().items()
        for name, ours in names
        if ours and (room := name.split(".")[0]) != (own := module.split(".")[0])
        if room not in ROOMS[own]
    ]
    assert wrong == []


def test_the_protocol_is_pure() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in all_imports().items()
        if module.startswith("runtime.protocol.")
        for name, ours in names
        if (ours and name.startswith("runtime.") and not name.startswith("runtime.protocol"))
        or (not ours and name.split(".")[0] in IMPURE)
    ]
    assert wrong == []


def test_the_decisions_of_the_rest_api_are_pure() -> None:
    pure = {f"runtime.rest.{name}" for name in ("answers", "openapi", "requests", "routes")}
    assert pure <= MODULES.keys()
    wrong = [
        f"{module} imports {name}"
        for module in pure
        for name, ours in all_imports()[module]
        if not ours and name.split(".")[0] in IMPURE | {"aiohttp"}
    ]
    assert wrong == []


def test_only_the_cluster_imports_ray() -> None:
    wrong = [
        module
        for module, names in all_imports().items()
        if not module.startswith("runtime.cluster.")
        and any(not ours and name.split(".")[0] == "ray" for name, ours in names)
    ]
    assert wrong == []


def test_the_harness_stays_away_from_ray() -> None:
    assert any(name.startswith("runtime.cluster") for name, _ in all_imports()["testing.run"])
    wrong = [
        f"{module} imports {name}"
        for module, names in all_imports().items()
        if module.startswith("testing.")
        for name, ours in names
        if ours and name.startswith(("runtime.cluster.ray_", "runtime.cluster.embedded"))
    ]
    assert wrong == []


def room_of(module: str) -> str:
    """The room of a module; inside runtime the rooms are its subpackages."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "runtime" and len(parts) > 1 else parts[0]


def test_no_circle_among_rooms() -> None:
    reach: dict[str, set[str]] = {}
    for module, names in all_imports().items():
        targets = {room_of(name) for name, ours in names if ours} - {room_of(module)}
        reach.setdefault(room_of(module), set()).update(targets)
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    assert sorted(room for room, targets in reach.items() if room in targets) == []


def circles() -> list[frozenset[str]]:
    """The groups of files that import each other, directly or not, wherever the imports are.

    Re-exports of packages are not counted: an import of a package is none of a file in it.
    """
    reach: dict[str, set[str]] = {}
    for start in MODULES:
        found: set[str] = set()
        front = [start]
        while front:
            for name, ours in all_imports()[front.pop()]:
                if ours and name in MODULES and name not in found:
                    found.add(name)
                    front.append(name)
        reach[start] = found
    return sorted(
        {
            frozenset(other for other in reach[module] if module in reach[other])
            for module in MODULES
            if module in reach[module]
        },
        key=sorted,
    )


def test_no_circle_among_files() -> None:
    wrong = [
        sorted(circle)
        for circle in circles()
        if not any(circle <= allowed for allowed in CIRCLES.values())
    ]
    assert wrong == []


def test_no_circle_is_allowed_that_is_gone() -> None:
    found = frozenset().union(*circles())
    assert {
        reason: sorted(files - found) for reason, files in CIRCLES.items() if files - found
    } == {}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_a_giant(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= LONGER_BY_DECISION.get(module, LINES_MAX)


@pytest.mark.parametrize("module", MODULES)
def test_no_struct_has_a_field_of_dataclasses(module: str) -> None:
    """A Struct takes such a field for the default value, and shows what it should keep out of texts."""
    tree = ast.parse(MODULES[module].read_text())
    theirs = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for alias in node.names
        if alias.name == "field"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(b) for b in node.bases):
            used = [
                ast.unparse(each)
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and isinstance(each.value, ast.Call)
                and ast.unparse(each.value.func) in {*theirs, "dataclasses.field"}
            ]
            assert not used, f"{node.name}: {used}"


REPLACED = """
import dataclasses
from dataclasses import dataclass, replace
from typing import Optional, Union

import msgspec


class Base(msgspec.Struct):
    a: int


class Derived(Base):
    b: int


@dataclass
class Data:
    a: int


def uses(one: Base, two: Optional[Derived], three: Data, four: Union[Derived, Data]) -> None:
    replace(three, a=1)
    msgspec.structs.replace(one, a=1)
    replace(one, a=1)  # wrong
    dataclasses.replace(four, a=1)  # wrong
    if two is not None:
        replace(two, b=1)  # wrong
"""


def test_types_are_checked_for_structs_that_are_replaced_as_dataclasses(tmp_path: Path) -> None:
    """That fails at run time only: mypy takes them for dataclasses, without our plugin for `make types`."""
    pytest.importorskip("mypy")
    path = tmp_path / "replaced.py"
    path.write_text(REPLACED)
    given = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", *given, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"replaced.py:(\d+): error: .* is a Struct", ran.stdout)
    lines = REPLACED.splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert [int(number) for number in found] == wrong, ran.stdout + ran.stderr
