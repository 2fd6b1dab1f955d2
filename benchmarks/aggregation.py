"""Keyed aggregation in a job against the bare kernel, over the same batches, in turns.

Rates are per second of processor time, so that what else runs on the machine weighs less; a job that waits
would hide it there, so its rate by the clock, against that of the kernel, is given as well.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median

from bare_kernel import BareRun, run_running, run_windows
from metering import WARM_SHARE
from premade import WINDOW_MS, Premade, columns_of, made
from state_jobs import JobRun, run_premade

BATCH_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of both, one after the other. All figures are medians, but for the rounds themselves."""

    bare: list[BareRun]
    jobs: list[JobRun]

    @property
    def bare_rate(self) -> float:
        """Rows per second of processor time, of the kernel."""
        return median(run.rate for run in self.bare)

    @property
    def job_rate(self) -> float:
        """The same of the job."""
        return median(run.cpu_rate for run in self.jobs)

    @property
    def ratios(self) -> list[float]:
        """The job against the kernel of the same round, by processor time."""
        pairs = zip(self.bare, self.jobs, strict=True)
        return [job.cpu_rate / bare.rate for bare, job in pairs]

    @property
    def wall_ratio(self) -> float:
        """The same by the clock."""
        pairs = zip(self.bare, self.jobs, strict=True)
        return median(job.rate / bare.wall_rate for bare, job in pairs)

    @property
    def bare_longest_ms(self) -> float:
        """Processor time of the kernel's longest batch."""
        return median(run.longest_ms for run in self.bare)

    @property
    def job_longest_ms(self) -> float:
        """Most processor time between two reads of the job's source."""
        return median(run.longest_ms for run in self.jobs)


def plan_for(keys: int, scattered: bool) -> Premade:
    """The real size: windows in which most keys occur, the first of them for the warm-up."""
    if keys < 10_000_000:
        return Premade(keys, scattered, 512 * BATCH_ROWS, 4, BATCH_ROWS)
    return Premade(keys, scattered, 2_560 * BATCH_ROWS, 3, BATCH_ROWS)


def compare(kind: str, plan: Premade, rounds: int) -> Comparison:
    """Measure both."""
    columns = [columns_of(batch) for batch in made(plan)]
    warm = int(plan.rows * WARM_SHARE)
    found = Comparison([], [])
    for _ in range(rounds):
        if kind == "running":
            found.bare.append(run_running(columns, warm))
        else:
            found.bare.append(run_windows(columns, WINDOW_MS, warm))
        found.jobs.append(run_premade(kind, plan))
        gc.collect()
    return found
