"""Prometheus and promtool, from Debian's package, unpacked once and kept outside of the tree."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .versitygw import NotAvailableError, cache_dir

DOWNLOAD_S_MAX = 300
START_S_MAX = 60
HOW = "apt-get download prometheus, unpacked with dpkg-deb"


def _unpacked() -> Path:
    """The directory of the unpacked package.

    Raises:
        NotAvailableError: there is no apt, or it cannot download.
    """
    directory = cache_dir() / "prometheus-debian"
    if (directory / "usr/bin/prometheus").exists():
        return directory
    tools = [shutil.which(tool) for tool in ("apt-get", "dpkg-deb")]
    if None in tools:
        raise NotAvailableError(
            f"put `promtool` and `prometheus` into {directory}/usr/bin; with Debian's tools: {HOW}"
        )
    building = cache_dir() / f"prometheus-{os.getpid()}"
    building.mkdir(parents=True, exist_ok=True)
    try:
        _run(["apt-get", "download", "prometheus"], building)
        (package,) = building.glob("prometheus_*.deb")
        _run(["dpkg-deb", "-x", str(package), str(building / "files")], building)
        with contextlib.suppress(OSError):  # another process was faster
            os.replace(building / "files", directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def _run(command: list[str], directory: Path) -> None:
    try:
        subprocess.run(
            command,
            cwd=directory,
            check=True,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S_MAX,
        )
    except subprocess.CalledProcessError as error:
        raise NotAvailableError(
            f"`{' '.join(command)}` failed; try `apt-get update`: {error.stderr[-1000:]}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NotAvailableError(f"`{' '.join(command)}` took too long") from error


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool, with `text` as its input.

    Raises:
        NotAvailableError: it cannot be had here.
    """
    tool = _unpacked() / "usr/bin/promtool"
    return subprocess.run(
        [str(tool), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Prometheus:
    """A server that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        data = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", data, timeout=30) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        assert isinstance(result, list)
        return result


@contextlib.contextmanager
def serving(directory: Path, targets: list[str], *, every: str = "250ms") -> Iterator[Prometheus]:
    """A server on loopback that scrapes `targets`, as host:port, for the time of the block.

    All series get the label `namespace`, which Prometheus would set on Kubernetes.

    Raises:
        NotAvailableError: it cannot be had here.
    """
    server = _unpacked() / "usr/bin/prometheus"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "scrape_configs": [
            {
                "job_name": "headgate",
                "static_configs": [{"targets": targets, "labels": {"namespace": "tests"}}],
            }
        ],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "prometheus.yml").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(server),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError(f"Prometheus did not start: {log.read_text(errors='replace')[-2000:]}")
