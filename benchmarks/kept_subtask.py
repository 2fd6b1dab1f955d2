"""Measures what one subtask takes to begin again: to read its state, and to take it over from memory.

`python benchmarks/kept_subtask.py reduce --keys 1250000` does so for a step alone, which has as many keys
as one of eight subtasks of a job with ten million. The checkpoint has a base and a delta, and records have
come since. To read them means to decode both files, merge them and restore the operator. Of a job of eight
workers, of which one dies, one subtask reads and seven take over. What a job does beside that, such as
stopping and connecting, and reading bytes from a storage, is left out: `kept_state.py` has it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from kept_price import ROWS, STEPS, Step, Subject, given

from headgate.operators.base import Operator
from headgate.runtime.task.parquet_files import EncodedTable, encode_tables, read_whole
from headgate.runtime.task.state_restore import merge_chain
from headgate.state.keygroups import KeyGroupRange
from headgate.state.snapshot import CommitPermit, RestoredState, TableCut

WORKERS = 8
OWN = KeyGroupRange(0, 127)
DELTA_BATCHES = 3
"""The batches between two checkpoints."""
BEHIND = 3
"""The batches that come behind the last one."""


class Files:
    """The files of a checkpoint, by state: a base, and perhaps a delta."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._numbers = directory, count()
        self._chains: dict[str, tuple[tuple[str, ...], list[EncodedTable]]] = {}
        self._base: dict[str, int] = {}

    def add(self, cuts: dict[str, TableCut]) -> None:
        """Write what has changed since the last call, or all."""
        for name, cut in cuts.items():
            since = self._base.get(name) or None
            encoded = encode_tables([cut.make(since)], self._path)
            if encoded is not None:
                chain = self._chains.setdefault(name, (cut.keys, []))[1]
                chain[:] = [*chain, encoded] if since else [encoded]
            self._base[name] = cut.epoch
            if cut.confirm is not None and cut.epoch:
                cut.confirm(cut.epoch)

    def _path(self) -> Path:
        return self._directory / f"{next(self._numbers)}"

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.size_bytes for _, chain in self._chains.values() for file in chain)

    def read(self) -> dict[str, pa.Table]:
        """Return the tables."""
        return {
            name: merge_chain([read_whole(file.data, OWN) for file in chain], keys)
            for name, (keys, chain) in self._chains.items()
        }


async def _restored(operator: Operator, state: RestoredState) -> None:
    waiting: Awaitable[None] | None = operator.restore(state)
    if waiting is not None:
        await waiting


async def timed(call: Callable[[], Awaitable[None]]) -> float:
    """Return the CPU seconds of a call."""
    gc.collect()
    began = time.process_time()
    await call()
    return time.process_time() - began


async def measure(step: Step, keys: int, seed: int, directory: Path) -> tuple[float, float, int]:
    """Return the CPU seconds to read and to take over, and the bytes of the files."""
    rng = np.random.default_rng(seed)
    subject, files, number = Subject(step, keys, True), Files(directory), 0
    operator = subject.operator
    for first in range(0, keys, ROWS):
        subject.process(given(step, np.arange(first, min(first + ROWS, keys)), number), 0)
        number += ROWS
    for checkpoint_id in (1, 2):
        files.add(operator.snapshot(checkpoint_id).tables)  # type: ignore[union-attr]
        waiting: Any = operator.on_checkpoint_complete(CommitPermit("bench", 1, checkpoint_id))
        assert waiting is None
        for _ in range(DELTA_BATCHES if checkpoint_id == 1 else BEHIND):
            subject.process(given(step, rng.integers(0, keys, ROWS), number), 0)
            number += ROWS

    async def take_over() -> None:
        kept = operator.keep()
        operator.close()
        state = RestoredState(kept=kept, checkpoint_id=2)
        await _restored(Subject(step, keys, True, restored=2).operator, state)

    async def read() -> None:
        other = Subject(step, keys, True, restored=2).operator
        infos = {info.name: info for info in other.states()}
        await _restored(other, RestoredState(tables=files.read(), states=infos))

    took_over = await timed(take_over)
    return await timed(read), took_over, files.size


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--keys", type=int, default=1_250_000, help="of the subtask")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    ratios = []
    for seed in range(chosen.rounds):
        with tempfile.TemporaryDirectory(prefix="hg-bench-kept-") as directory:
            one = measure(STEPS[chosen.step], chosen.keys, seed, Path(directory))
            read, kept, size = asyncio.run(one)
        ratios.append((read + (WORKERS - 1) * kept) / (WORKERS * read))
        text = f"  {read:.3f} CPU s to read {size:,} bytes, {kept:.3f} to take over"
        print(f"{text}: {ratios[-1]:.2f} of {WORKERS} workers", flush=True)
    print(f"{chosen.step}, {chosen.keys:,} keys: a ratio of {median(ratios):.2f}")


if __name__ == "__main__":
    main()
