"""Checkpoints under backpressure: `make bench-backpressure`, or `python benchmarks/backpressure.py`.

Five minutes, in three parts; compare the ratios of one run.
- `modes`: one job in five ways at the same time, its sink far slower than its source: how long
  checkpoints take from end to end, and what of that is the way of the barriers. Goals: with debloating at
  most twice its target; unaligned at most 1 s, and a twentieth of aligned; with both a fifth of the bytes.
- `cost`: the same job with a sink that takes nothing, with debloating and without, in turns. Goal: 0.98.
- `scaling`: duration and alignment against the size of the state, and against parallelism and shuffles.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import charts
from backpressure_job import make_job
from checkpoint_figures import REMEMBERED, Figures, figures
from checkpoint_scaling import scaling
from metering import read_marks
from process_cluster import running

UNALIGNED = "execution.checkpointing.unaligned.enabled"
TIMEOUT = "execution.checkpointing.aligned-checkpoint-timeout"
DEBLOAT = "taskmanager.network.memory.buffer-debloat.enabled"
MODES: dict[str, dict[str, str]] = {
    "aligned": {},
    "debloated": {DEBLOAT: "true"},
    "unaligned": {UNALIGNED: "true"},
    "both": {UNALIGNED: "true", DEBLOAT: "true"},
    "timeout 1 s": {UNALIGNED: "true", TIMEOUT: "1 s"},
}
RECORD_US = {"columns": 35.0, "objects": 350.0}
"""The time of the sink per record. On an idle machine it needs 15 s for a queue of full buffers."""
FULL_S = 10.0
"""Queues are full by then. Only debloating takes longer, until they are short."""
COST_ROWS = 6_000_000
COST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Mode:
    """One job under backpressure."""

    checkpoints: Figures
    rate: float
    """Records per second through the sink."""


async def one_mode(name: str, records: str, warm_s: float, measured_s: float) -> Mode:
    """Run the job in one mode. With debloating checkpoints count from `warm_s` on."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-bp-") as directory:
        options = MODES[name] | {"web.checkpoints.history": str(REMEMBERED)}
        title = f"bench-bp-{name.replace(' ', '-')}-{records}-{os.getpid()}"
        storage = str(Path(directory, "checkpoints"))
        job = make_job(title, records, RECORD_US[records], storage, options)
        async with running(job, directory) as client:
            await asyncio.sleep(FULL_S)
            since_ms = 1000 * time.time()
            await asyncio.sleep(warm_s - FULL_S)
            if DEBLOAT in options:
                since_ms = 1000 * time.time()
            began = time.monotonic()
            before = (await client.request("status"))["vertices"][-1]["records_in"]
            await asyncio.sleep(measured_s)
            after = (await client.request("status"))["vertices"][-1]["records_in"]
            rate = (after - before) / (time.monotonic() - began)
            return Mode(await figures(client, since_ms), rate)


async def modes(records: str, warm_s: float, measured_s: float) -> dict[str, Mode]:
    """All modes at the same time: their workers mostly sleep, and all meet the same load."""
    found = await asyncio.gather(*(one_mode(name, records, warm_s, measured_s) for name in MODES))
    return dict(zip(MODES, found, strict=True))


def print_modes(records: str, found: dict[str, Mode]) -> None:
    """The table, for a terminal and for Markdown."""
    print(f"\n{records}; times in ms, medians")
    print("| mode | checkpoints | end to end | p99 | max | start delay | alignment | written beside "
          "| in flight, kB | records/s |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, mode in found.items():
        c = mode.checkpoints
        cells = (
            name, c.count, f"{c.end_to_end:,.0f}", f"{c.end_to_end_p99:,.0f}",
            f"{c.end_to_end_max:,.0f}", f"{c.start_delay:,.0f}", f"{c.alignment:,.0f}",
            f"{c.async_part:,.0f}", f"{c.in_flight_bytes / 1000:,.0f}", f"{mode.rate:,.0f}",
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    times = {name: mode.checkpoints.end_to_end for name, mode in found.items()}
    saved = {name: mode.checkpoints.in_flight_bytes for name, mode in found.items()}
    print(f"debloated / target of 1 s: {times['debloated'] / 1000:.2f} (goal: at most 2)")
    print(f"aligned / unaligned: {times['aligned'] / max(1, times['unaligned']):.1f} (goal: 20), "
          f"unaligned {times['unaligned']:,.0f} ms (goal: 1,000)")  # fmt: skip
    print(f"in flight, unaligned / both: {saved['unaligned'] / max(1, saved['both']):.1f} (goal: 5)",
          flush=True)  # fmt: skip


def plot_modes(found: dict[str, Mode]) -> str:
    """Duration and its parts, per mode."""
    parts = {
        "end to end": [mode.checkpoints.end_to_end for mode in found.values()],
        "max": [mode.checkpoints.end_to_end_max for mode in found.values()],
        "start delay": [mode.checkpoints.start_delay for mode in found.values()],
        "alignment": [mode.checkpoints.alignment for mode in found.values()],
    }
    drawn = charts.bars("checkpoints under backpressure", "ms", list(found), parts, log=True)
    return charts.svg(drawn)


def cost_of_debloating(rows: int, rounds: int) -> list[float]:
    """Throughput with debloating, as a share of that without, of each round; by processor time."""
    shares = []
    for number in range(rounds):
        order = ("false", "true") if number % 2 else ("true", "false")
        rates = {debloat: _rate(rows, debloat) for debloat in order}
        shares.append(rates["true"] / rates["false"])
    return shares


def _rate(rows: int, debloat: str) -> float:
    with tempfile.TemporaryDirectory(prefix="hg-bench-bp-") as directory:
        job = make_job(
            f"bench-bp-cost-{os.getpid()}", "columns", 0.0, str(Path(directory, "checkpoints")),
            {DEBLOAT: debloat}, rows, metered=directory,
        )  # fmt: skip
        job.run()
        steady = read_marks(directory)
        return steady.events / steady.cpu_s


async def _run(options: argparse.Namespace) -> None:
    directory = Path(options.images)
    if "modes" in options.parts:
        for records in options.records:
            found = await modes(records, options.warm, options.measured)
            print_modes(records, found)
            (directory / f"backpressure-{records}.svg").write_text(plot_modes(found))
            if options.json:
                print({name: asdict(mode) for name, mode in found.items()}, flush=True)
    if "scaling" in options.parts:
        for name, picture in (await scaling()).items():
            (directory / f"{name}.svg").write_text(picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    known = ("modes", "cost", "scaling")
    parser.add_argument("parts", nargs="*", default=known, help="of modes, cost, scaling; all")
    parser.add_argument("--records", nargs="+", default=["columns"], choices=list(RECORD_US))
    parser.add_argument("--warm", type=float, default=55.0, help="seconds until debloating counts")
    parser.add_argument("--measured", type=float, default=75.0, help="seconds that count")
    parser.add_argument("--images", default=tempfile.gettempdir(), help="where plots go")
    parser.add_argument("--json", action="store_true", help="all numbers of the modes as well")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
    asyncio.run(_run(options))
    if "cost" in options.parts:
        shares = cost_of_debloating(COST_ROWS, COST_ROUNDS)
        print(f"debloating where nothing is slow: {median(shares):.3f} of the throughput "
              f"({min(shares):.3f} to {max(shares):.3f}; goal: 0.98)")  # fmt: skip
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
