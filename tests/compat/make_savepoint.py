"""Makes the savepoints of `vX.Y/`, with what a job that goes on from them must come to. See README.md:

    python tests/compat/make_savepoint.py v0.1-format-5

Each version of the format is made once and then kept: a savepoint in here must load for ever.

    input/                what the job reads; half of it before the savepoints
    canonical/savepoint/  a canonical savepoint, of state in memory, parallelism 2
    native/savepoint/     one with the files of the `rocksdb` backend
    .../output/           the drafts of the exactly-once sink, pending in that savepoint
    expected.json         what a job over the whole input comes to (`Outputs.rows`); by plain Python,
                          not by headgate

State names files of the input and drafts by their whole path. `paths.json` says which directory that was,
and the time that input files must have been changed at.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from headgate.runtime.job import runnable
from headgate.tests.support.lab import Lab
from headgate.tests.support.modules import load

HERE = Path(__file__).parent
CHANGED_NS = 1_700_000_000 * 10**9
ROWS = 24
STEP_S = 150
START = datetime(2024, 2, 29, 23, 30, tzinfo=UTC)
BACKENDS = {"canonical": "hashmap", "native": "rocksdb"}


state_job = load(HERE / "state_job.py", "state_job")


def events(part: int, rng: random.Random) -> list[dict[str, Any]]:
    """An hour of records with keys of their own; every key comes in the first minutes."""
    names = ["ann", "bob", "élan", None]
    rows = []
    for number in range(ROWS):
        rows.append(
            {
                "id": part * 100 + (number % 3),
                "name": rng.choice(names),
                "number": rng.choice([None, rng.randrange(-(2**40), 2**40)]),
                "ratio": rng.choice([None, rng.randrange(-999, 999) / 8]),
                "price": rng.choice([None, Decimal(rng.randrange(-999, 9999)) / 100]),
                "at": START + timedelta(seconds=STEP_S * number, milliseconds=rng.randrange(1000)),
            }
        )
    return rows


def write_input(directory: Path, parts: list[list[dict[str, Any]]]) -> None:
    directory.mkdir(parents=True)
    for number, rows in enumerate(parts):
        path = directory / f"part{number}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            for row in rows:
                at = f"{row['at']:%Y-%m-%dT%H:%M:%S}.{row['at'].microsecond // 1000:03}Z"
                writer.writerow({**row, "at": at})
        os.utime(path, ns=(CHANGED_NS, CHANGED_NS))


# --- what must come out, in plain Python -----------------------------------------------------------


def aggregates(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def of(column: str) -> list[Any]:
        return [row[column] for row in rows if row[column] is not None]

    numbers, ratios, prices = of("number"), of("ratio"), of("price")
    return {
        "n": len(rows),
        "numbers": len(numbers),
        "number_sum": sum(numbers) if numbers else None,
        "number_min": min(numbers, default=None),
        "number_max": max(numbers, default=None),
        "ratio_sum": sum(ratios) if ratios else None,
        "ratio_max": max(ratios, default=None),
        "ratio_avg": sum(ratios) / len(ratios) if ratios else None,
        "price_sum": sum(prices).quantize(Decimal("0.01")) if prices else None,
        "price_min": min(prices).quantize(Decimal("0.01")) if prices else None,
    }


def groups(rows: list[dict[str, Any]], key: Any) -> dict[Any, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def floor(at: datetime, minutes: int) -> datetime:
    seconds = int(at.timestamp()) // (60 * minutes) * 60 * minutes
    return datetime.fromtimestamp(seconds, UTC)


def window(start: datetime, minutes: int) -> dict[str, Any]:
    return {"window_start": start, "window_end": start + timedelta(minutes=minutes)}


def results_of_process(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last result of each key."""
    results = []
    for id_, mine in groups(rows, lambda row: row["id"]).items():
        ratios = [row["ratio"] for row in mine if row["ratio"] is not None]
        names = [row["name"] or "nobody" for row in mine]
        total = sum(row["number"] or 0 for row in mine)
        counted = {name: names.count(name) for name in sorted(set(names))}
        results.append(
            {
                "id": id_,
                "n": len(mine),
                "total": total,
                "spent": str(sum((row["price"] or Decimal(0) for row in mine), Decimal("0.00"))),
                "last": mine[-1]["at"].isoformat(),
                "label": mine[-1]["name"],
                "pickled": str(complex(len(mine), total)),
                "local": mine[-1]["at"].replace(tzinfo=None).isoformat(),
                "ratios": ratios[-3:],
                "mean": sum(ratios) / len(ratios),
                "names": counted,
                "visits": counted,
                "greatest": max(row["number"] or 0 for row in mine),
                "lasting": len(mine),
            }
        )
    return results


def expected(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    reduced = []
    for (id_, name), mine in groups(rows, lambda row: (row["id"], row["name"])).items():
        for count in range(1, len(mine) + 1):
            total = sum(row["number"] or 0 for row in mine[:count])
            reduced.append((id_, name, total, [name] * min(3, count)))
    running = groups(rows, lambda row: row["name"]).items()
    tens = groups(rows, lambda row: floor(row["at"], 10)).items()
    fives = groups(rows, lambda row: (row["id"], floor(row["at"], 5))).items()
    found = {
        "process": results_of_process(rows),
        "reduce": reduced,
        "running": [{"name": name, **aggregates(mine)} for name, mine in running],
        "everything": [
            {**window(start, 10), "n": len(mine), "top": top(mine)} for start, mine in tens
        ],
        "windows": [
            {
                "id": id_,
                **window(start, 5),
                "name_max": max((r["name"] for r in mine if r["name"]), default=None),
                **aggregates(mine),
            }
            for (id_, start), mine in fives
        ],
    }
    return {name: state_job.in_order(results) for name, results in found.items()}


def top(rows: list[dict[str, Any]]) -> Decimal | None:
    prices = [row["price"] for row in rows if row["price"] is not None]
    return max(prices).quantize(Decimal("0.01")) if prices else None


# --- the savepoints ----------------------------------------------------------------------------------


async def processed(running: Any) -> int:
    """Return the number of records that have come to the process function."""
    vertices = (await running.status())["vertices"]
    return sum(v["records_in"] for v in vertices if v["name"].startswith("process"))


def take(work: Path, target: Path, kind: str) -> None:
    """Run the job half-way, and keep a savepoint with the drafts that it names."""
    outputs = state_job.Outputs(work / kind / "output")
    job = state_job.make_job(
        work, outputs, parallelism=2, mark=target.name, storage=f"memory://compat-{kind}", rate=8
    )
    runnable(job).override({"state.backend.type": BACKENDS[kind]})

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        while await processed(running) < 0.75 * 2 * ROWS:
            await running.tick()
        native = kind == "native"
        done = await running.request("savepoint", savepoint=str(work / kind), native=native)
        shutil.copytree(done["savepoint"], target / kind / "savepoint")
        shutil.copytree(outputs.directory, target / kind / "output")
        await running.request("cancel")

    Lab(work).run(job, script)


def main() -> None:
    target = HERE / sys.argv[1]
    rng = random.Random(1)
    parts = [events(part, rng) for part in range(2)]
    work = Path(tempfile.mkdtemp())
    write_input(work / "input", parts)
    shutil.copytree(work / "input", target / "input")
    for kind in BACKENDS:
        take(work, target, kind)
    (target / "expected.json").write_text(json.dumps(expected(parts[0] + parts[1])) + "\n")
    paths = {"directory": str(work), "changed_ns": CHANGED_NS}
    (target / "paths.json").write_text(json.dumps(paths) + "\n")
    shutil.rmtree(work)
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:8,} {path.relative_to(target)}")


if __name__ == "__main__":
    main()
