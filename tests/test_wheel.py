"""The wheel holds the package and nothing else, and importing it is cheap."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import headgate
from headgate.tests.support.commands import ended_with

ROOT = Path(headgate.__file__).resolve().parent
ROOMS = ("state", "operators", "api", "connectors", "runtime", "k8s", "spark", "testing")
HEAVY = (
    "ray",
    "pyspark",
    "polars",
    "pyarrow",
    "numpy",
    "msgspec",
    "aiohttp",
    "prometheus_client",
    "boto3",
    "typer",
)


def tracked() -> list[str]:
    """The files of the repository, without what lies about uncommitted."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files, built without the network."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    built = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    ended_with(built, 0)
    (made,) = target.glob("*.whl")
    return made


def test_the_wheel_is_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"headgate/{name}"
        for name in tracked()
        if name.endswith(".py") and name.split("/")[0] in (*ROOMS, "__init__.py", "errors.py")
    }
    assert len(modules) > 100
    pages = {f"headgate/{name}" for name in tracked() if name.startswith("runtime/rest/ui/")}
    assert "headgate/runtime/rest/ui/index.html" in pages
    info = f"headgate-{headgate.__version__}.dist-info"
    metadata = {name for name in names if name.startswith(f"{info}/")}
    assert {f"{info}/METADATA", f"{info}/entry_points.txt"} <= metadata
    assert f"{info}/licenses/LICENSE" in metadata
    assert names - metadata == modules | pages | {"headgate/py.typed"}


def test_what_is_installed_imports_and_is_light(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import json, sys, headgate\n"
        "loaded = sorted(sys.modules)\n"
        "import headgate.runtime.cli, headgate.runtime.cluster.ray_actors\n"
        "print(json.dumps([headgate.__file__, headgate.__version__, loaded, dir(headgate)]))\n"
        "[getattr(headgate, name) for name in dir(headgate)]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    ended_with(ran, 0)
    file, version, loaded, public = json.loads(ran.stdout)
    assert Path(file) == tmp_path / "headgate" / "__init__.py"
    assert version == headgate.__version__
    assert set(HEAVY) & {name.split(".")[0] for name in loaded} == set()
    assert "Job" in public


def test_the_image_is_built_from_the_whole_package(wheel: Path) -> None:
    """The Dockerfile names what it copies: all that the wheel needs must be there."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    copied = {PurePosixPath(name).parts[0] for names in copies for name in names}
    needed = {
        PurePosixPath(name).relative_to("headgate").parts[0]
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("headgate/")
    }
    assert {*needed, "pyproject.toml", "setup.py", "README.md", "LICENSE"} <= copied
