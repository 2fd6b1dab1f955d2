"""The cost of buffer debloating where nothing waits: `python benchmarks/debloating.py [rounds]`.

The same job with and without it, in one process and in turns: rows per second of the process's CPU time
in the best round of each, which is the one that other processes disturbed least. Above 1, debloating costs.
First, and with 0 rounds only, what it does for each slice of records is measured alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median
from types import SimpleNamespace

import pyarrow as pa

import headgate as hg
from headgate.connectors import blackhole, generator, numbers, pattern, random_int, sequence
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.runtime.exchange.gate import InputChannelSpec, InputGate
from headgate.runtime.protocol.debloating import DebloatSettings
from headgate.runtime.task.accounting import TimeAccounting
from headgate.runtime.task.debloater import Debloater

ROWS = {"numbers as columns": 6_000_000, "texts as columns": 3_000_000, "objects": 1_000_000}
BATCH_ROWS = 8_192
OBJECTS = 2_048


def job(kind: str, debloated: bool, storage: str) -> hg.Job:
    """Two shuffles between steps that do little, two subtasks each."""
    enabled = {"taskmanager.network.memory.buffer-debloat.enabled": str(debloated).lower()}
    job = hg.Job("debloating", parallelism=2, options=enabled)
    job.checkpoint(every="1h", storage=storage)
    rows = ROWS[kind]
    if kind == "objects":
        read = job.read(numbers(rows, batch_rows=BATCH_ROWS), name="in")
        passed = read.rebalance().filter(lambda n: n >= 0, name="pass")
    else:
        fields = {"n": sequence(), "key": random_int(0, 1000)}
        if kind.startswith("texts"):
            fields["text"] = pattern("user-", distinct=1000)
        read = job.read(generator(fields, rows=rows, batch_rows=BATCH_ROWS), name="in")
        passed = read.rebalance().filter("n >= 0", name="pass")
    passed.rebalance().write(blackhole(), name="out")
    return job


def slices() -> dict[str, Batch]:
    """Return the batches that a step is given, of each kind."""
    numbers = pa.array(range(BATCH_ROWS))
    texts = pa.array([f"user-{n}" for n in range(BATCH_ROWS)])
    return {
        "numbers as columns": ColumnBatch(pa.record_batch({"n": numbers, "key": numbers})),
        "texts as columns": ColumnBatch(
            pa.record_batch({"n": numbers, "key": numbers, "text": texts})
        ),
        "objects": ObjectBatch(list(range(OBJECTS))),
    }


def alone(batch: Batch) -> float:
    """CPU seconds of debloating for a slice, in the best of some rounds."""
    gate = InputGate([InputChannelSpec(0, 0)])
    room = SimpleNamespace(debloated_bytes=None, emitted_bytes=0)
    time_of = TimeAccounting(time.monotonic)
    debloater = Debloater(DebloatSettings(size_max=1 << 20), time_of, [room])
    debloater.watch(gate)
    best = float("inf")
    for _ in range(30):
        began = time.process_time()
        for _ in range(1000):
            debloater.rows_at_once()
            debloater.slice_begins()
            debloater.slice_over(batch, 0)
        best = min(best, (time.process_time() - began) / 1000)
    return best


def cpu_seconds(kind: str, debloated: bool) -> float:
    with tempfile.TemporaryDirectory(prefix="hg-debloating-") as storage:
        made = job(kind, debloated, storage)
        began = time.process_time()
        made.run()
        return time.process_time() - began


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    for kind, batch in slices().items():
        seconds = alone(batch)
        per_row = f"{seconds / len(batch) * 1e9:.2f} ns per record"
        print(f"{kind:<20} {seconds * 1e6:5.2f} us per slice of {len(batch)}, {per_row}")
    if not rounds:
        return
    print("records               without       with          ratio  of medians")
    for kind, rows in ROWS.items():
        spent: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for debloated in (False, True) if number % 2 else (True, False):
                spent[debloated].append(cpu_seconds(kind, debloated))
        without, with_ = min(spent[False]), min(spent[True])
        medians = median(spent[True]) / median(spent[False])
        print(
            f"{kind:<20} {rows / without / 1e6:7.2f} M/s   {rows / with_ / 1e6:7.2f} M/s"
            f"   {with_ / without:8.3f} {medians:8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
