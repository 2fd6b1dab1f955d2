"""Prometheus and promtool, from Debian's package, unpacked once and kept outside of the tree."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headgate.testing.servers.process import HeldPort
from headgate.testing.servers.programs import NotAvailableError, made_once, run_command

from .skips import skip_or_fail

DOWNLOAD_S_MAX = 300
START_S_MAX = 180
PROGRAMS = ("promtool", "prometheus")


def program(name: str) -> Path:
    """Return the path of one of the programs; without it the test is skipped, and fails in CI."""
    try:
        return made_once("prometheus-debian", PROGRAMS, _unpack) / name
    except NotAvailableError as error:
        skip_or_fail(f"{error}; install Prometheus yourself (apt-get install prometheus)")


def _unpack(directory: Path) -> None:
    installed = [shutil.which(name) for name in PROGRAMS]
    if all(installed):
        for name, path in zip(PROGRAMS, installed, strict=True):
            (directory / name).symlink_to(str(path))
        return
    download = ("apt-get", "download", "prometheus")
    try:
        run_command(*download, seconds_max=DOWNLOAD_S_MAX, cwd=directory)
    except NotAvailableError:
        # A fresh container has no lists of packages.
        run_command("apt-get", "update", seconds_max=DOWNLOAD_S_MAX)
        run_command(*download, seconds_max=DOWNLOAD_S_MAX, cwd=directory)
    package = next(directory.glob("prometheus_*.deb"))
    run_command("dpkg-deb", "-x", str(package), str(directory / "unpacked"), seconds_max=120)
    for name in PROGRAMS:
        (directory / "unpacked/usr/bin" / name).rename(directory / name)
    shutil.rmtree(directory / "unpacked")
    package.unlink()


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool, with `text` as its input."""
    tool = program("promtool")
    return subprocess.run(
        [str(tool), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        return self._ask("query", expression)

    def query_range(
        self, expression: str, start: float, end: float, step_s: float
    ) -> list[dict[str, Any]]:
        """Return the series from `start` to `end`, in seconds since 1970."""
        return self._ask("query_range", expression, start=start, end=end, step=step_s)

    def _ask(self, what: str, expression: str, **more: float) -> list[dict[str, Any]]:
        data = urllib.parse.urlencode({"query": expression, **more}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}", data, timeout=30) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        assert isinstance(result, list)
        return result


@contextlib.contextmanager
def serving(directory: Path, targets: list[str], *, every: str = "250ms") -> Iterator[Prometheus]:
    """Run a server on loopback that scrapes `targets`, as host:port, for the time of the block.

    Series without a label `namespace` get one, as from the monitors of the chart on Kubernetes.
    """
    server = program("prometheus")
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "scrape_configs": [
            {
                "job_name": "headgate",
                "honor_labels": True,
                "static_configs": [{"targets": targets, "labels": {"namespace": "tests"}}],
            }
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "prometheus.yml").write_text(json.dumps(config))
    held = HeldPort()
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(server),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{held.number}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{held.number}", log)
        yield Prometheus(f"http://127.0.0.1:{held.number}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        held.release()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=30).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"Prometheus did not start: {log.read_text(errors='replace')[-2000:]}")
