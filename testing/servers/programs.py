"""Programs that no Python package brings: they are made once, and kept outside of the tree."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

_DOWNLOAD_S_MAX: Final = 300


class NotAvailableError(Exception):
    """A program cannot be made here. The text gives the reason and a remedy."""


def cache_dir() -> Path:
    """Return the directory of the programs: `HEADGATE_TEST_CACHE`, or one in the user's cache."""
    named = os.environ.get("HEADGATE_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "headgate-tests"


def made_once(name: str, wanted: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache. If it is not there, `make` puts its files into a new one.

    The directory appears complete or not at all, and only one of several processes makes it.

    Raises:
        NotAvailableError: `make` raised it, or did not make all files in `wanted`.
    """
    with contextlib.suppress(NotAvailableError):
        return made(name, wanted)
    with _locked(cache_dir() / f"{name}.lock"):
        with contextlib.suppress(NotAvailableError):
            return made(name, wanted)
        making = cache_dir() / f"{name}.making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        try:
            make(making)
            shutil.rmtree(cache_dir() / name, ignore_errors=True)
            making.rename(cache_dir() / name)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return made(name, wanted)


def made(name: str, wanted: Sequence[str]) -> Path:
    """Return the directory `name` of the cache, which `made_once` has made before.

    Raises:
        NotAvailableError: it is not there, or lacks one of the files `wanted`.
    """
    directory = cache_dir() / name
    missing = [file for file in wanted if not (directory / file).is_file()]
    if missing:
        raise NotAvailableError(f"{directory} has no {', '.join(missing)}")
    return directory


def go_command(*arguments: str, seconds_max: int, cwd: Path | None = None, **env: str) -> None:
    """Run `go` at low priority and without C, so that its programs run on any machine.

    Raises:
        NotAvailableError: there is no Go or no network, or it took longer than `seconds_max`.
    """
    if shutil.which("go") is None:
        raise NotAvailableError(
            "`go` is not installed: install Go 1.24 or newer (apt-get install golang)"
        )
    run_command(
        *("nice", "-n", "10", "go", *arguments),
        seconds_max=seconds_max,
        cwd=cwd,
        env={"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", **env},
    )


def run_command(
    *command: str, seconds_max: int, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run a command that makes a program, and return its output.

    Raises:
        NotAvailableError: it failed, or took longer than `seconds_max`.
    """
    line = " ".join(command)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=seconds_max,
            check=False,
        )
    except FileNotFoundError as error:
        raise NotAvailableError(
            f"`{command[0]}` is not installed, and `{line}` needs it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NotAvailableError(f"`{line}` took more than {seconds_max} s") from error
    if done.returncode:
        raise NotAvailableError(f"`{line}` failed: {done.stderr[-2000:]}")
    return done.stdout


def debian_packages(directory: Path, packages: Sequence[str], name: str, package: str) -> None:
    """Unpack packages of Debian into a directory; nothing is installed.

    Args:
        directory: for their files.
        packages: what to unpack, with the libraries that a small Debian may not have.
        name: of the program, for errors.
        package: the one that a user would install.

    Raises:
        NotAvailableError: this is no Debian, or there is no network.
    """
    download = ("apt-get", "download", *packages)
    try:
        try:
            run_command(*download, seconds_max=_DOWNLOAD_S_MAX, cwd=directory)
        except NotAvailableError:
            # A fresh container has no lists of packages, or old ones.
            run_command("apt-get", "update", seconds_max=_DOWNLOAD_S_MAX)
            run_command(*download, seconds_max=_DOWNLOAD_S_MAX, cwd=directory)
    except NotAvailableError as error:
        raise NotAvailableError(
            f"{error}; install {name} yourself (apt-get install {package})"
        ) from error
    for file in directory.glob("*.deb"):
        run_command("dpkg-deb", "-x", str(file), str(directory), seconds_max=120)
        file.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
