"""`python -m headgate.tests.chaos --minutes 30`: a job on real processes that are killed all the time."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from .campaign import Campaign
from .report import markdown, succeeded


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m headgate.tests.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of troubles; default %(default)s"
    )
    parser.add_argument("--seed", type=int, help="of troubles and moments; default: by chance")
    parser.add_argument(
        "--pause",
        type=float,
        default=4.0,
        help="s between troubles, on average; default %(default)s",
    )
    parser.add_argument(
        "--bound", type=float, default=120.0, help="s within which the job is healthy again"
    )
    parser.add_argument(
        "--report", type=Path, help="write the report to this file too, as Markdown"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the directory also if all is well"
    )
    chosen = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if chosen.seed is None else chosen.seed
    # Short, since Unix sockets lie below it.
    work = Path(tempfile.mkdtemp(prefix="hg-chaos-", dir="/tmp"))
    print(f"seed {seed}; the log is {work}/log.jsonl", flush=True)
    os.environ["HEADGATE_RUN_DIR"] = str(work / "run")
    campaign = Campaign(
        work, seed, minutes=chosen.minutes, pause_s=chosen.pause, bound_s=chosen.bound
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with the job
    try:
        record = asyncio.run(campaign.run())
    finally:
        campaign.kill_all()
    text = markdown(record)
    print(text)
    if chosen.report is not None:
        chosen.report.write_text(text)
    well = succeeded(record)
    if well and not chosen.keep:
        shutil.rmtree(work)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
