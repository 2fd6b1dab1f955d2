"""Packages of the npm registry: those that the web UI includes, and axe-core, which tests its pages."""

from __future__ import annotations

import base64
import hashlib
import tarfile
from pathlib import Path

from headgate.testing.servers.programs import NotAvailableError, made_once, run_command

from .skips import skip_or_fail

AXE = (
    "axe-core",
    "4.14.1",
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
)
"""The name, the version and the checksum of the package."""


def axe_script() -> Path:
    """Return the path of axe-core; without it the test is skipped, and fails in CI."""
    return package(*AXE) / "axe.min.js"


def package(name: str, version: str, integrity: str) -> Path:
    """Return the directory of a package; it is fetched by npm if it is not in the cache."""

    def fetch(directory: Path) -> None:
        command = ("npm", "pack", "--silent", f"{name}@{version}")
        run_command(*command, seconds_max=300, cwd=directory)
        archive = directory / f"{name}-{version}.tgz"
        digest = hashlib.sha512(archive.read_bytes()).digest()
        if f"sha512-{base64.b64encode(digest).decode()}" != integrity:
            raise NotAvailableError(f"{archive.name} does not have the checksum {integrity}")
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
        archive.unlink()

    try:
        return made_once(f"npm-{name}-{version}", ("package/package.json",), fetch) / "package"
    except NotAvailableError as error:
        skip_or_fail(f"{error}; install npm (apt-get install npm)")
