"""Processor time per record against parallelism: `python benchmarks/parallelism.py [--rounds 3]`.

One job runs in one process at several parallelisms, far above the number of cores. It does the same work
each time, so what the processor time grows by is the price of being cut into pieces: small batches,
buffers, watermarks on many channels. `--query w` runs Python functions per record. `--other CHECKOUT` runs
each case in another checkout too (with its `.venv`), in turns, and prints the ratio.

Each run is a process of its own. The first quarter of the records is warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as in every worker process
HERE = Path(__file__).resolve()
EVENTS = {"q5": 16_000_000, "q7": 16_000_000, "w": 1_500_000}
BATCH_ROWS = 32_768
"""The default of sources."""


def run(query: str, parallelism: int, events: int, batch_rows: int) -> dict[str, float]:
    """Run a query in this process; return its processor seconds per million records, and its memory."""
    import queries
    from metering import MeteredSource, TallySink, read_marks

    import headgate as hg
    from headgate.connectors.nexmark import nexmark
    from headgate.runtime.cluster.process import tune_process

    tune_process()
    with tempfile.TemporaryDirectory(prefix="hg-bench-") as directory:
        job = hg.Job(f"parallelism-{query}-{parallelism}", parallelism=parallelism)
        source = nexmark("bid", events=events, batch_rows=batch_rows)
        stream = job.read(MeteredSource(source, directory), name="bids")
        queries.QUERIES[query].build(stream, "1s").write(TallySink(directory, False), name="out")
        job.run(cluster="in-process")
        steady = read_marks(directory)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_s": 1e6 * steady.cpu_s / steady.events, "memory_mb": memory_mb}


def run_in(checkout: Path, case: list[str]) -> dict[str, float]:
    """Run a case in a process of a checkout, with the benchmarks of that checkout."""
    command = [str(checkout / ".venv/bin/python"), str(HERE), "--serve", str(checkout), *case]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _table(options: argparse.Namespace) -> None:
    here = HERE.parent.parent
    checkouts = [here] if options.other is None else [here, options.other.resolve()]
    found: dict[tuple[Path, int], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for parallelism in options.parallelism:
            for checkout in checkouts if number % 2 else checkouts[::-1]:
                events = options.events or EVENTS[options.query]
                case = [options.query, str(parallelism), str(events), str(options.batch_rows)]
                found.setdefault((checkout, parallelism), []).append(run_in(checkout, case))

    def middle(checkout: Path, parallelism: int, key: str) -> float:
        return median(each[key] for each in found[checkout, parallelism])

    print(
        f"{options.query}: processor seconds per million records, medians; peak memory of the process"
    )
    head = f"{'p':>3} {'CPU s/M':>9} {'of p=1':>7} {'MB':>6}"
    print(head + (f"   {'other':>9} {'of p=1':>7} {'MB':>6} {'ratio':>6}" if options.other else ""))
    for parallelism in options.parallelism:
        cells = [f"{parallelism:>3}"]
        for checkout in checkouts:
            cpu = middle(checkout, parallelism, "cpu_s")
            growth = cpu / middle(checkout, options.parallelism[0], "cpu_s")
            memory = middle(checkout, parallelism, "memory_mb")
            cells.append(f"{cpu:9.4f} {growth:7.2f} {memory:6.0f}")
        line = " ".join(cells[:2]) + ("   " + cells[2] if options.other else "")
        if options.other:
            pairs = [found[each, parallelism] for each in checkouts]
            ratios = [a["cpu_s"] / b["cpu_s"] for a, b in zip(*pairs, strict=True)]
            line += f" {median(ratios):6.2f}"
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--query", choices=EVENTS, default="q5")
    parser.add_argument("--parallelism", type=_numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--events", type=int, default=0)
    parser.add_argument("--batch-rows", type=int, default=BATCH_ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, help="another checkout, with its .venv")
    _table(parser.parse_args(arguments))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _serve(checkout: str, query: str, *numbers: str) -> None:
    sys.path[0] = str(Path(checkout, "benchmarks"))
    parallelism, events, batch_rows = map(int, numbers)
    answer: dict[str, Any] = run(query, parallelism, events, batch_rows)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(*sys.argv[2:])
    else:
        main()
