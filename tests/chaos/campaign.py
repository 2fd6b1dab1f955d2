"""A job under one trouble after the other, until the time is up and its output is compared."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headgate.errors import HeadgateError

from . import processes
from .driver import Driver, Line, Mode, completed
from .flights import Verdict, verdict, write_years
from .leftovers import left_in
from .processes import Sample
from .troubles import KINDS, RUN_AGAIN, Victims

FLIGHTS_PER_SECOND_MAX = 8_000.0
UNALIGNED = {"execution.checkpointing.unaligned.enabled": "true"}
MODES = (
    Mode("aligned", 4_000.0, 0.0),
    Mode("unaligned", FLIGHTS_PER_SECOND_MAX, 5.0, UNALIGNED),
    Mode(
        "unaligned after 100 ms",
        FLIGHTS_PER_SECOND_MAX,
        5.0,
        {**UNALIGNED, "execution.checkpointing.aligned-checkpoint-timeout": "100 ms"},
    ),
)
REST = Mode("the rest at full speed", 1e7, 0.0)
HEARTBEAT_TIMEOUT_S = 4.0
OPTIONS = {"heartbeat.interval": "500 ms", "heartbeat.timeout": f"{HEARTBEAT_TIMEOUT_S:g} s"}
SAMPLE_S = 2.0
RAY = "temporary files, Ray's"
STATE, LOG = "checkpoint directory, state", "checkpoint directory, log"
SAVEPOINTS, DRAFTS, RUN = "savepoints", "drafts of the sink", "run directory"
NONE_AT_THE_END = (STATE, SAVEPOINTS, DRAFTS, RUN)
"""Directories in which a finished job leaves no files; its log only keeps how it ended."""
FILES_OF_A_COORDINATOR = 2
"""Each that ever led has a record and an entry in the job log, for ever: they fence it."""
STOPS_MAX = 3
RUN_S = 120.0
"""A run is stopped with a savepoint after about so long, and goes on in another mode."""
END_S = 180.0
"""What must be run again ends within so long: Ray gives up its control store after a minute."""
REST_S = 1800.0
GONE_S = 300.0
"""Ray's own processes look that often for who started them, at the latest."""


@dataclass(frozen=True)
class Trouble:
    """The consequences of one trouble."""

    kind: str
    healthy_s: float
    """From the last signal to a checkpoint that began after it."""
    runs: int
    """The number of times the job had to be run again."""


@dataclass
class Record:
    """Everything a campaign has seen."""

    seed: int
    minutes: float
    began_s: float = 0.0
    ended_s: float = 0.0
    troubles: list[Trouble] = field(default_factory=list)
    modes: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    files: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    """When, and how many of each sort."""
    broken: list[str] = field(default_factory=list)
    """Promises that were not kept."""
    verdict: Verdict | None = None


class Campaign:
    """One job under troubles for some minutes."""

    def __init__(
        self,
        work: Path,
        seed: int,
        *,
        minutes: float,
        pause_s: float,
        bound_s: float,
        kinds: Sequence[str] = (),
        slower: float = 1.0,
    ) -> None:
        """A campaign that has not begun.

        Args:
            work: an empty directory with a short path: Unix sockets lie below it.
            seed: of the troubles, their victims and their moments.
            minutes: for how long; there is input for more than that.
            pause_s: between two troubles, on average.
            bound_s: within which the job is healthy again.
            kinds: these troubles and then the end, instead of others by chance until the time is up.
            slower: the job works off its input this number of times slower.
        """
        self._work = work
        self._rng = random.Random(seed)
        self._kinds = kinds
        self._slower = slower
        self._pause_s = pause_s
        self._bound_s = bound_s
        self._driver = Driver(work, OPTIONS)
        self._driver.hooks.append(self._count)
        self._run_until_s = 0.0
        self.record = Record(seed, minutes)

    async def run(self) -> Record:
        """The campaign, from the input to the comparison."""
        record, driver = self.record, self._driver
        seconds = record.minutes * 60
        flights = self._work / "flights"
        written = write_years(flights, int(FLIGHTS_PER_SECOND_MAX * seconds / self._slower))
        driver.say(f"seed {record.seed}, {written:,} flights")
        await self._start()
        sampling = asyncio.create_task(self._sample())
        try:
            await self._expect_health("the start", time.monotonic())
            record.began_s = time.monotonic()
            record.ended_s = record.began_s + seconds
            for kind in self._kinds:
                await self._trouble(kind)
            while not self._kinds and time.monotonic() < record.ended_s:
                await self._next()
        finally:
            record.ended_s = time.monotonic()
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        await self._finish()
        record.verdict = verdict(flights, self._work / "delays")
        return record

    def kill_all(self) -> None:
        """Leave no process behind, whatever happened."""
        self._driver.kill_all()

    # -- the job ------------------------------------------------------------------------------------

    async def _start(self, savepoint: str = "", mode: Mode | None = None) -> None:
        if mode is None:
            mode = self._rng.choice(MODES)
            mode = dataclasses.replace(
                mode,
                flights_per_second=mode.flights_per_second / self._slower,
                toll_ms=mode.toll_ms * self._slower,
            )
        self.record.modes[mode.name] += 1
        self._run_until_s = 0.0
        await self._driver.start(mode, savepoint)

    async def _stop(self) -> str:
        """Stop the job with a savepoint; returns where it is, or nothing if the job has to be run again.

        A job that fails at this moment goes on instead of stopping, and is asked again.
        """
        driver = self._driver
        directory = str(self._work / "savepoints")
        for _ in range(STOPS_MAX):
            try:
                async with asyncio.timeout(self._bound_s):
                    native = self._rng.random() < 0.5
                    done = await driver.ask("stop", savepoint=directory, drain=False, native=native)
            except (HeadgateError, TimeoutError) as error:
                driver.say(f"not stopped: {error or 'no answer'}")
                await self._expect_health("a stop that was refused", time.monotonic())
                continue
            if not await driver.end(self._bound_s) or driver.exit_code:
                self._broke(f"a stopped job ends with exit code {driver.exit_code}")
            return str(done["savepoint"])
        self._broke(f"not stopped at {STOPS_MAX} attempts")
        await driver.end(0.0)
        return ""

    async def _finish(self) -> None:
        """Work off the rest of the input, without troubles."""
        driver = self._driver
        await self._start(await self._stop(), REST)
        if not await driver.end(REST_S) or driver.exit_code:
            self._broke(f"the last run ends with exit code {driver.exit_code}")
        self.record.broken += [
            f"a process is left: {title}" for title in await driver.left_behind(GONE_S)
        ]
        self.record.broken += [
            f"a temporary file is left: {path}" for path in left_in(self._work / "tmp")
        ]
        self.record.broken += [
            f"{number} files are left: {name}"
            for name, number in self._files().items()
            if number and name in NONE_AT_THE_END
        ]

    # -- troubles -----------------------------------------------------------------------------------

    async def _next(self) -> None:
        await asyncio.sleep(min(self._rng.expovariate(1 / self._pause_s), 5 * self._pause_s))
        if self._driver.ended:
            self._broke(f"the job ended by itself with exit code {self._driver.exit_code}")
            await self._again()
            await self._expect_health("the end of the command", time.monotonic())
        elif time.monotonic() > self._run_until_s:
            await self._start(await self._stop())
            await self._expect_health("stop with savepoint, and on", time.monotonic())
        else:
            weights = [weight for weight, _ in KINDS.values()]
            await self._trouble(*self._rng.choices(list(KINDS), weights))

    async def _trouble(self, kind: str) -> None:
        self._driver.say(f"trouble: {kind}")
        await KINDS[kind][1](Victims(self._driver, self._rng, HEARTBEAT_TIMEOUT_S))
        await self._expect_health(kind, time.monotonic())

    async def _expect_health(self, kind: str, since_s: float) -> None:
        """Wait until a checkpoint is complete that began after `since_s`; run the job again if need be."""
        driver, record = self._driver, self.record
        runs, first, deadline = driver.runs, 0, since_s + self._bound_s
        if kind in RUN_AGAIN:
            await driver.said(lambda line: False, len(driver.lines), END_S)
            if driver.ended:  # in good order perhaps, with a checkpoint
                first = await self._again()
        while True:
            left_s = deadline - time.monotonic()
            found = await driver.said(began_after(since_s), first, left_s)
            if found is not None:
                break
            in_time = time.monotonic() < deadline
            if not in_time:
                self._broke(f"no checkpoint within {self._bound_s:g} s: {kind}")
                since_s, deadline = time.monotonic(), time.monotonic() + self._bound_s
            elif kind not in RUN_AGAIN:
                self._broke(f"the job ended with exit code {driver.exit_code}: {kind}")
            first = await self._again()
        if not self._run_until_s:
            self._run_until_s = time.monotonic() + self._rng.uniform(0.5, 1.5) * RUN_S
        healthy_s = found.at_s - since_s
        record.troubles.append(Trouble(kind, healthy_s, driver.runs - runs))
        driver.lines.clear()
        driver.say(f"healthy after {healthy_s:.1f} s")

    async def _again(self) -> int:
        """Run the job again, by force if need be; returns where the new run's lines begin."""
        await self._driver.end(0.0)
        first = len(self._driver.lines)
        await self._start()
        return first

    def _broke(self, text: str) -> None:
        self._driver.say(f"BROKEN: {text}")
        self.record.broken.append(f"{text} (run {self._driver.runs})")

    # -- what is seen -------------------------------------------------------------------------------

    def _count(self, line: Line) -> None:
        self.record.events["checkpoint completed" if completed(line) else line.event] += 1

    async def _sample(self) -> None:
        while True:
            at_s = time.monotonic()
            if not self._driver.ended:
                self.record.samples += await asyncio.to_thread(
                    processes.sample, self._driver.pid, at_s
                )
            self.record.files.append((at_s, await asyncio.to_thread(self._files)))
            await asyncio.sleep(SAMPLE_S)

    def _files(self) -> dict[str, int]:
        work, count = self._work, processes.files_below
        log = work / "checkpoints" / "delays" / "log"
        ray = sum(count(directory) for directory in (work / "tmp").glob("hg-ray-*"))
        return {
            STATE: count(work / "checkpoints" / "delays" / "chk"),
            LOG: count(log) - FILES_OF_A_COORDINATOR * count(log / "generation"),
            SAVEPOINTS: count(work / "savepoints"),
            DRAFTS: count(work / "delays" / ".headgate"),
            RUN: count(work / "run"),
            RAY: ray,
            "temporary files, ours": count(work / "tmp") - ray,
        }


def began_after(since_s: float) -> Callable[[Line], bool]:
    """Lines of complete checkpoints that began after that."""

    def wanted(line: Line) -> bool:
        return completed(line) and line.at_s - line.body["duration_ms"] / 1000 > since_s

    return wanted
