"""Debian's Chromium, unpacked once and kept outside of the tree, and pages of it for tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, async_playwright

from headgate.testing.servers.programs import NotAvailableError, made_once, run_command

from .skips import skip_or_fail

PACKAGE = "chromium-headless-shell"
PROGRAM = "usr/lib/chromium/chromium-headless-shell"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
DOWNLOAD_S_MAX = 600


def chromium() -> Path:
    """Return the directory with Chromium; without it the test is skipped, and fails in CI."""
    try:
        return made_once("chromium-debian", (PROGRAM, "usr/lib/chromium/icudtl.dat"), _unpack)
    except NotAvailableError as error:
        skip_or_fail(f"{error}; the web UI is tested in Chromium (apt-get install {PACKAGE})")


def _unpack(directory: Path) -> None:
    packages = _missing_packages()
    if not packages:
        for name in ("icudtl.dat", Path(PROGRAM).name):
            (directory / PROGRAM).parent.mkdir(parents=True, exist_ok=True)
            (directory / PROGRAM).with_name(name).symlink_to(f"/usr/lib/chromium/{name}")
        return
    run_command("apt-get", "download", *packages, seconds_max=DOWNLOAD_S_MAX, cwd=directory)
    for package in directory.glob("*.deb"):
        run_command("dpkg-deb", "-x", str(package), str(directory), seconds_max=120)
        package.unlink()
    shutil.rmtree(directory / "usr/share", ignore_errors=True)


def _missing_packages() -> list[str]:
    """Return Chromium and all packages that it needs, as far as they are not installed here."""
    simulate = ("apt-get", "install", "--simulate", "--no-install-recommends", PACKAGE)
    try:
        listed = run_command(*simulate, seconds_max=60)
    except NotAvailableError:
        # A fresh container has no lists of packages.
        run_command("apt-get", "update", seconds_max=DOWNLOAD_S_MAX)
        listed = run_command(*simulate, seconds_max=60)
    lines = (line.split() for line in listed.splitlines())
    return [words[1] for words in lines if words[:1] == ["Inst"]]


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run Chromium without a window until the end of the block."""
    directory = chromium()
    libraries = directory / LIBRARIES
    found = f"{libraries}:{libraries / 'pulseaudio'}"
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(
            executable_path=directory / PROGRAM,
            # The sandbox needs user namespaces or a setuid program, which containers lack.
            args=["--no-sandbox"],
            env={**os.environ, "LD_LIBRARY_PATH": found},
        )
        try:
            yield started
        finally:
            await started.close()
