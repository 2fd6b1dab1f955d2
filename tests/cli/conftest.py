"""The command as a user runs it: a process of its own, its output read line by line."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WAIT_S = 600
COMMAND = [sys.executable, "-c", "from headgate.runtime.cli import main; main()"]

TICKER = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata:
  name: ticker
spec:
  checkpoint: {every: 1h, storage: checkpoints}
  sources:
    ticks:
      generator:
        fields: {n: sequence, user: {kind: pattern, prefix: u, distinct: 10}}
        rate: 1000
        batchRows: 50
  operators:
    counts: {from: ticks, keyBy: user, aggregate: {n: count()}, queryable: counts}
  sinks:
    out: {from: counts, blackhole: {}, guarantee: exactly_once}
"""


class Started:
    """A running command, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """The next line on stderr that holds `text`."""
        deadline = time.monotonic() + WAIT_S
        while True:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, f"ended without `{text}`: {self.seen}"
            self.seen.append(line)
            if text in line:
                return line

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole process group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and everything on stderr, once the command has ended."""
        code = self.process.wait(WAIT_S)
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            self.seen.append(line)
        return code, "\n".join(self.seen)


class Cli:
    """Runs `headgate` in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HEADGATE_")},
            "HEADGATE_RUN_DIR": str(directory / "run"),
        }
        self._started: list[Started] = []

    def write(self, name: str, text: str) -> str:
        (self.directory / name).write_text(text)
        return name

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    def start(self, *arguments: str, **environment: str) -> Started:
        """Start a command and go on."""
        return self._start([*COMMAND, *arguments], environment)

    def start_program(self, file: str, stdin: int | None = None) -> Started:
        """Start a program of the user's and go on."""
        return self._start([sys.executable, file], {}, stdin)

    def _start(
        self, command: list[str], environment: dict[str, str], stdin: int | None = None
    ) -> Started:
        started = Started(
            subprocess.Popen(
                command,
                cwd=self.directory,
                env={**self.environment, **environment},
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        self._started.append(started)
        return started

    def close(self) -> None:
        for started in self._started:
            if started.process.poll() is None:
                started.process.kill()
            started.process.wait()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    made = Cli(tmp_path)
    yield made
    made.close()


@pytest.fixture
def shared_ray(cli: Cli) -> Iterator[str]:
    """The address of a Ray cluster on this machine that outlives the commands which use it."""
    directory = tempfile.mkdtemp(prefix="hg-r-", dir="/tmp")  # sockets need a short path
    options = {
        "--node-ip-address": "127.0.0.1",
        "--port": "0",
        "--dashboard-agent-listen-port": "0",
        "--include-dashboard": "false",
        "--num-cpus": "8",
        "--object-store-memory": str(80 << 20),
        "--temp-dir": directory,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    head = subprocess.Popen(
        [
            *command,
            "--disable-usage-stats",
            *(f"{name}={value}" for name, value in options.items()),
        ],
        env=cli.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert head.stdout is not None
    said: list[str] = []
    try:
        for line in head.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                address = Path(directory, "ray_current_cluster")
                while not (address.exists() and address.read_text().strip()):
                    time.sleep(0.05)  # Ray writes it just behind that line
                yield address.read_text().strip()
                break
        else:
            pytest.fail(f"no Ray: {said}")
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # asked nicely, it takes half a minute
        head.communicate()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def ticker(cli: Cli) -> str:
    """A manifest of a job without end."""
    return cli.write("ticker.yaml", TICKER)
