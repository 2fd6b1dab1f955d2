"""One `headgate run` after the other, each in a session of its own, followed by its log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headgate.errors import JobError
from headgate.runtime.control import registry
from headgate.runtime.rest.client import RestClient

from . import processes

NAME = "delays"
JOB = Path(__file__).with_name("delays.py")
COMMAND = "import sys; from headgate.runtime.cli import main; sys.argv[0] = 'headgate'; main()"
LINE_BYTES_MAX = 1 << 24
"""A line of progress has everything the coordinator knows in it."""


@dataclass(frozen=True)
class Mode:
    """The checkpoints of a run, and its highest rate."""

    name: str
    flights_per_second: float
    toll_ms: float
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """Something the job said."""

    at_s: float
    """When, on the monotonic clock."""
    event: str
    text: str
    body: dict[str, Any]


def completed(line: Line) -> bool:
    """A checkpoint is complete, and its sinks are told to commit."""
    return line.event == "checkpoint" and line.body.get("status") == "COMPLETED"


class Driver:
    """Runs the job in `work`, and runs it again. Everything it writes is below `work`."""

    def __init__(self, work: Path, options: dict[str, str]) -> None:
        self._work = work
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._log = (work / "log.jsonl").open("a", buffering=1)
        self.hooks: list[Callable[[Line], None]] = []
        """Called at once with whatever the job says."""
        self.lines: list[Line] = []
        self.runs = 0
        self._sessions: list[int] = []
        """The sessions of all runs."""
        self._from = ""
        for name in ("tmp", "run"):
            (work / name).mkdir()

    @property
    def pid(self) -> int:
        """The process id of `headgate run`, which is the id of its session as well."""
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self, mode: Mode, savepoint: str = "") -> None:
        """Run the job, from a savepoint or from where it was.

        A savepoint is given again until the job has a checkpoint of its own.
        """
        savepoint = self._from = savepoint or self._from
        self._alive()
        arguments = ["run", str(JOB), "--log-level", "error"]
        for key, value in {**self._options, **mode.options}.items():
            arguments += ["-D", f"{key}={value}"]
        if savepoint:
            arguments += ["--from", savepoint, "--claim-mode", "claim"]
        self.runs += 1
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, *arguments),
            env={
                **os.environ,
                "HEADGATE_LOG_FORMAT": "json",
                "HEADGATE_RUN_DIR": str(self._work / "run"),
                "TMPDIR": str(self._work / "tmp"),
                "FLIGHTS": str(self._work / "flights"),
                "RESULTS": str(self._work / "delays"),
                "CHECKPOINTS": str(self._work / "checkpoints"),
                "FLIGHTS_PER_SECOND": str(mode.flights_per_second),
                "TOLL_MS": str(mode.toll_ms),
            },
            cwd=self._work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )
        self._sessions.append(self.pid)
        self._reader = asyncio.create_task(self._read(self._process))
        self.say(f"run {self.runs}, {mode.name}{savepoint and f', from {savepoint}'}")

    def say(self, text: str) -> None:
        """A line of the rig's own, in the same log."""
        self._log.write(json.dumps({"time_ms": time.time_ns() // 1_000_000, "rig": text}) + "\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while text := await process.stderr.readline():
            try:
                said = json.loads(text)
            except ValueError:
                said = {"message": text.decode(errors="replace").rstrip()}
            line = Line(
                time.monotonic(),
                said.get("event", "log"),
                said.get("message", ""),
                said.get("body", {}),
            )
            if line.event == "progress":
                continue
            self._log.write(json.dumps(said) + "\n")
            self.lines.append(line)
            if completed(line):
                self._from = ""
            for hook in list(self.hooks):
                hook(line)
            self._changed.set()
        self._changed.set()

    async def said(
        self, wanted: Callable[[Line], bool], since: int, within_s: float
    ) -> Line | None:
        """The first such line from line number `since` on; None if it does not come, or the job ended."""
        deadline = time.monotonic() + within_s
        while True:
            self._changed.clear()
            for line in self.lines[since:]:
                if wanted(line):
                    return line
            since = len(self.lines)
            left = deadline - time.monotonic()
            if self.ended or left <= 0:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue

    async def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask the coordinator, as `headgate` does; HEADGATE_RUN_DIR is `run` below `work`.

        Raises:
            HeadgateError: it refused, or is not there.
        """
        record = registry.find(NAME)
        if record is None:
            raise JobError("the job is not registered")
        client = await RestClient.connect(record.addresses, record.token)
        try:
            return await client.request(verb, **arguments)
        finally:
            await client.close()

    async def end(self, within_s: float) -> bool:
        """Wait for the command to end; False if it had to be killed."""
        assert self._process is not None
        assert self._reader is not None
        deadline = time.monotonic() + within_s
        while not self.ended and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if killed := not self.ended:
            self.say("does not end: killed")
            self._process.kill()
        # Ray's processes have the other end of the pipe too, and may live on for a while.
        await asyncio.wait([self._reader], timeout=2.0)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self.say(f"run {self.runs} ended with exit code {self.exit_code}")
        return not killed

    async def left_behind(self, within_s: float) -> list[str]:
        """Processes that are not gone within so long, now that the last run has ended."""
        deadline = time.monotonic() + within_s
        while (left := self._alive()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return [processes.title(process) for process in left]

    def kill_all(self) -> None:
        """Kill what is left of all runs."""
        for process in self._alive():
            processes.send(process.pid, signal.SIGKILL)

    def _alive(self) -> list[psutil.Process]:
        found = {session: processes.of_session(session) for session in self._sessions}
        # The number of an empty session may be somebody else's soon.
        self._sessions = [session for session, alive in found.items() if alive]
        return [process for alive in found.values() for process in alive]
