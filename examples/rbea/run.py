"""Run the service: queries come and go, a worker is killed half-way, and the answer is checked.

    python examples/rbea/run.py [--keep DIRECTORY]

Exits with 0 only if a checkpoint was restored, and results and failures are those of a plain loop over all
events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from answer import answer  # noqa: E402
from demo import GIVE_UP_S, STOP_S, Watch, ended_well, say  # noqa: E402
from query_file import read_messages  # noqa: E402
from rbea import EVERY_MS, Failure, Result  # noqa: E402

HEADGATE = str(Path(sys.executable).parent / "headgate")
EVENTS, EVENTS_PER_SECOND, USERS = 100_000, 8_000, 300

REVENUE = """
def query(event, user, out):
    if event.kind == "purchase":
        out.sum("revenue", event.amount, group=event.level, window="1m")
"""
STREAKS = """
def query(event, user, out):
    if event.kind == "game_start":
        user["games"] = user.get("games", 0) + 1
        out.max("longest streak", user["games"], window="2m", every="30s")
    elif event.kind == "purchase":
        user["games"] = 0
"""
BROKEN = """
def query(event, user, out):
    if event.amount == 99:
        out.sum("share", event.amount // (event.level - 9), window="1m")
"""
PLAN = [
    (0.0, {"add": "revenue", "script": REVENUE}),
    (0.2, {"add": "streaks", "script": STREAKS}),
    (0.4, {"add": "broken", "script": BROKEN}),
    (0.5, {"remove": "revenue"}),
    (0.6, {"remove": "broken"}),
    (0.7, {"add": "revenue", "script": REVENUE.replace("1m", "30s")}),
    (0.9, {"remove": "streaks"}),
]
"""The actions of analysts, and their times as a share of all event time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--keep", type=Path, help="a new directory for queries, results, checkpoints"
    )
    keep = parser.parse_args().keep
    if keep is not None and keep.exists():
        parser.error(f"{keep} is there already: delete it, or name another")
    work = (keep or Path(tempfile.mkdtemp(prefix="headgate-rbea-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        return run(work)
    finally:
        if keep is None:
            shutil.rmtree(work, ignore_errors=True)


def run(work: Path) -> int:
    queries = work / "queries.jsonl"
    environment = {
        **os.environ,
        "QUERIES": str(queries),
        "RESULTS": str(work / "results"),
        "BROKEN": str(work / "broken"),
        "CHECKPOINTS": str(work / "checkpoints"),
        "EVENTS": str(EVENTS),
        "EVENTS_PER_SECOND": str(EVENTS_PER_SECOND),
        "USERS": str(USERS),
    }
    say("headgate run examples/rbea/rbea.py   (parallelism 2, embedded Ray)")
    command = [HEADGATE, "run", str(HERE / "rbea.py")]
    service = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    watch = Watch(service, "rbea")
    watch.running.wait(GIVE_UP_S)
    ask(queries, service)
    if not ended_well(service):
        return 1
    watch.join(STOP_S)
    if not watch.killed or not watch.restored:
        say("no worker was killed, or no checkpoint was restored: this shows nothing")
        return 1
    return compare(work, queries)


def ask(queries: Path, service: subprocess.Popen[str]) -> None:
    """Write what analysts ask, as the events go on; between two messages, that there is nothing new."""
    plan = list(PLAN)
    steps = 100
    for step in range(steps + 1):
        while plan and plan[0][0] * steps <= step:
            message = plan.pop(0)[1]
            say(f"query {message.get('add') or message.get('remove')}: {next(iter(message))}")
            write(queries, {"at": step * EVENTS * EVERY_MS // steps, **message})
        write(queries, {"at": step * EVENTS * EVERY_MS // steps + 1})
        if service.poll() is not None:
            return
        time.sleep(EVENTS / EVENTS_PER_SECOND / steps)
    write(queries, {"end": True})


def write(queries: Path, message: dict[str, object]) -> None:
    """Append one message."""
    with queries.open("a") as file:
        file.write(json.dumps(message) + "\n")


def compare(work: Path, queries: Path) -> int:
    """Results and failures against those of a loop."""
    messages = read_messages(queries.read_text().splitlines())
    results, failures = answer(messages, EVENTS, USERS)
    found = sorted(rows(work / "results", Result), key=repr)
    broken = sorted(rows(work / "broken", Failure), key=repr)
    say(f"streamed: {len(found):,} windows, {len(broken):,} failures of scripts")
    if found != results or broken != failures:
        say(f"DIFFERENT: a loop over the events has {len(results):,} and {len(failures):,}")
        return 1
    say("EQUAL to a loop over all events: nothing lost, nothing twice")
    return 0


def rows(directory: Path, kind: type) -> list[object]:
    """The records of the Parquet files in a directory."""
    table = pl.read_parquet(directory / "*.parquet")
    return [kind(**row) for row in table.to_dicts()]


if __name__ == "__main__":
    sys.exit(main())
