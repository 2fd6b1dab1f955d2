"""The cost of keyed state: `make bench-state`, or `python benchmarks/state_run.py [--full] [name part]`.

Each case prints rows and returns ratios, which are what to compare between two machines:
- `aggregation`: a job against a bare kernel over the same batches, ready in memory, and the longest pauses.
  To be at least 0.6.
- `snapshots`: the synchronous part under small batches, and what batches take beside it.
- `incremental`: bytes of a checkpoint, mean of 30, with 1 % of the keys changed before each, against a
  full one. To be at most 0.03. (Before them come 15 in which files of the filling are merged, once.)
- `interval`: rows/s with a checkpoint every second against none.
Without `--full` the sizes are small: it shows that everything runs, and not much more.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import pyarrow as pa
from aggregation import compare, plan_for
from state_incremental import SUBJECTS, checkpoints
from state_jobs import run_job
from state_operators import KINDS, snapshot_pauses

from headgate.runtime.cluster.process import tune_process

Ratios = dict[str, float]
MILLION = 1_000_000


def _row(*cells: object) -> None:
    print("  ".join(f"{cell!s:>16}" for cell in cells), flush=True)


def aggregation(full: bool) -> Ratios:
    """Count, sum and max per key in a job against the bare kernel: M rows per second of processor time."""
    ratios: Ratios = {}
    _row("aggregate", "keys", "keys are", "kernel", "job", "job / kernel", "from .. to", "by the clock",
         "kernel longest ms", "job longest ms")  # fmt: skip
    for kind in KINDS:
        for keys in (1_000, 100_000, MILLION, 10 * MILLION) if full else (1_000, 100_000):
            for scattered in (False, True):
                plan = plan_for(keys, scattered)
                if not full:
                    plan = replace(plan, window_rows=64 * plan.batch_rows)
                found = compare(kind, plan, 3 if keys > MILLION else 5)
                name = "scattered" if scattered else "numbered"
                ratios[f"{kind} {keys} {name}"] = ratio = median(found.ratios)
                _row(kind, f"{keys:,}", name, f"{found.bare_rate / 1e6:.1f}",
                     f"{found.job_rate / 1e6:.1f}", f"{ratio:.2f}",
                     f"{min(found.ratios):.2f} .. {max(found.ratios):.2f}",
                     f"{found.wall_ratio:.2f}", f"{found.bare_longest_ms:.0f}",
                     f"{found.job_longest_ms:.1f}")  # fmt: skip
    return ratios


def snapshots(full: bool) -> Ratios:
    """The synchronous part of a snapshot: how long a subtask is deaf."""
    ratios: Ratios = {}
    _row("aggregate", "keys", "sync p50 ms", "sync p99 ms", "batch p50 ms", "batch p99 ms",
         "sync / batch p99")  # fmt: skip
    for kind in KINDS:
        for keys in (MILLION, 10 * MILLION) if full else (100_000,):
            taken, times = snapshot_pauses(kind, keys, 100 if full else 20, 20)
            sync = 1000 * np.percentile(taken.seconds, (50, 99))
            batch = 1000 * np.percentile(times.seconds, (50, 99))
            ratios[f"{kind} {keys}"] = float(sync[1] / batch[1])
            _row(kind, f"{keys:,}", *(f"{each:.3f}" for each in (*sync, *batch)),
                 f"{sync[1] / batch[1]:.2f}")  # fmt: skip
    return ratios


def incremental(full: bool) -> Ratios:
    """Bytes per checkpoint with one key of a hundred changed before each, against a full one."""
    ratios: Ratios = {}
    keys, count = (5 * MILLION, 30) if full else (500_000, 30)
    _row("state", "keys", "full MB", "median %", "mean %", "worst %", "with first 15 %",
         "files", "get / rocksdict")  # fmt: skip
    for name in SUBJECTS:
        made = checkpoints(name, keys, 0.01, count)
        ratios[f"{name} {keys}"] = made.mean
        shares = 100 * np.array(made.shares)
        figures = (np.median(shares), 100 * made.mean, shares.max(), 100 * made.mean_of_all)
        cells = (f"{each:.2f}" for each in figures)
        reads = f"{made.get_ratio:.2f}" if made.get_ratio else "-"
        _row(name, f"{keys:,}", f"{made.full_bytes / 1e6:.2f}", *cells, made.files, reads)
    return ratios


def interval(full: bool) -> Ratios:
    """Throughput with a checkpoint every second (or, if the job is short, ten in a second)."""
    ratios, every = Ratios(), "1s" if full else "100ms"
    _row("aggregate", "keys", "none M rows/s", f"{every} M rows/s", "ratio")
    for kind in KINDS:
        keys, rows = (MILLION, 100 * MILLION) if full else (100_000, 4 * MILLION)
        without, with_ = run_job(kind, keys, rows), run_job(kind, keys, rows, every)
        ratios[f"{kind} {keys}"] = ratio = with_.rate / without.rate
        _row(
            kind,
            f"{keys:,}",
            f"{without.rate / 1e6:.1f}",
            f"{with_.rate / 1e6:.1f}",
            f"{ratio:.2f}",
        )
    return ratios


CASES: dict[str, Callable[[bool], Ratios]] = {
    case.__name__: case for case in (aggregation, snapshots, incremental, interval)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="case", help="which; all")
    parser.add_argument("--full", action="store_true", help="the real sizes: an hour, 8 GB")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON at the end")
    options = parser.parse_args()
    tune_process()  # as workers do
    pa.set_cpu_count(1)
    found = {}
    for name in options.names or CASES:
        print(f"\n{name}: {(CASES[name].__doc__ or '').strip()}")
        found[name] = CASES[name](options.full)
        gc.collect()
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
