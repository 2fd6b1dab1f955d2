"""Processes under measurement: asks them to run a job, and samples their CPU time and memory meanwhile."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CPU_EVERY_S = 0.2
MEMORY_EVERY_S = 1.0


class HostError(Exception):
    """A host did not answer, or with an error."""


class Sampler:
    """CPU time and memory of a process and all its descendants, and CPU time of the machine, over time.

    Memory is PSS, so that pages shared by several processes count once. Processes that ended keep what
    CPU time they had at their last sample.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_of: dict[int, float] = {}
        self._times: list[float] = []
        self._cpu: list[float] = []
        self._machine: list[float] = []
        self._memory: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(CPU_EVERY_S):
            with contextlib.suppress(psutil.Error):
                self._sample()

    def _sample(self) -> None:
        processes = [self._root, *self._root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                self._cpu_of[process.pid] = used.user + used.system
        self._times.append(time.monotonic())
        self._cpu.append(sum(self._cpu_of.values()))
        whole = psutil.cpu_times()
        self._machine.append(
            sum(whole) - whole.idle - whole.iowait - whole.guest - whole.guest_nice
        )
        if not self._memory or self._times[-1] - self._memory[-1][0] >= MEMORY_EVERY_S:
            total = 0
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self._memory.append((time.monotonic(), total))

    def cpu_seconds(self, began: float, ended: float) -> float:
        """CPU seconds between two moments, interpolated between samples."""
        return self._at(self._cpu, ended) - self._at(self._cpu, began)

    def foreign_cores(self, began: float, ended: float) -> float:
        """Return the number of cores that all other processes had between two moments."""
        whole = self._at(self._machine, ended) - self._at(self._machine, began)
        return max(0.0, whole - self.cpu_seconds(began, ended)) / (ended - began)

    def _at(self, cpu: list[float], at: float) -> float:
        times = self._times
        right = bisect_left(times, at)
        if right in (0, len(times)):
            return cpu[min(right, len(cpu) - 1)] if cpu else 0.0
        share = (at - times[right - 1]) / (times[right] - times[right - 1])
        return cpu[right - 1] + share * (cpu[right] - cpu[right - 1])

    def peak_bytes(self, began: float, ended: float) -> int:
        """The most memory seen between two moments, or around them if they are close."""
        seen = [
            size
            for at, size in self._memory
            if began - MEMORY_EVERY_S <= at <= ended + MEMORY_EVERY_S
        ]
        return max(seen, default=0)

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job. `seconds` and the rest belong to the measured part only."""

    events: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    answer: dict[str, Any]
    foreign_cores: float = 0.0
    """The part of the machine that other processes took meanwhile."""


class Host:
    """A child process that runs jobs on request: `host.py` or a peer's."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = Path(command[1]).stem
        self._log = log.open("a")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._sampler = Sampler(self._process.pid)
        try:
            self._answer(timeout_s=120)
        except HostError:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any], timeout_s: float = 300) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            HostError: there was none in time, or it says what went wrong.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise HostError(f"{self.name} is gone") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise HostError(f"{self.name} ended, or was killed after {timeout_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def measure(self, request: Mapping[str, Any], timeout_s: float = 300) -> Run:
        """Run a job and measure the part between its `began` and `ended`."""
        answer = self.ask(request, timeout_s)
        time.sleep(2 * CPU_EVERY_S)  # for a sample behind the end
        began, ended = answer["began"], answer["ended"]
        return Run(
            events=answer["events"],
            seconds=ended - began,
            cpu_seconds=self._sampler.cpu_seconds(began, ended),
            peak_bytes=self._sampler.peak_bytes(began, ended),
            answer=answer,
            foreign_cores=self._sampler.foreign_cores(began, ended),
        )

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process in good order; kill it if it does not go."""
        self._sampler.close()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
