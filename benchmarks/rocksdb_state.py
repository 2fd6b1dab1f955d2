"""The cost of the RocksDB backend: `python benchmarks/rocksdb_state.py [--keys N] [--rows N]`.

Prints, and returns as ratios:
- `put`, `get`, `read_modify_write`: operations/s through the backend (set the key, encode, call) against
  rocksdict alone with the same options and bytes. To be at least 0.5.
- `cut_ms`: the synchronous part of a snapshot; `longest_gap_ms`: the longest time between two operations
  while a thread collects the files.
What incremental checkpoints write is measured by `state_run.py incremental`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headgate.state.codecs import codec_of
from headgate.state.hashing import hash_keys, key_groups_of
from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.canonical import Layout, TableSpec
from headgate.state.keyed.keys import keys_of_type
from headgate.state.keygroups import KeyGroupRange
from headgate.state.rocksdb.backend import RocksDBBackend
from headgate.state.rocksdb.database import Database
from headgate.state.rocksdb.layout import Places
from headgate.state.settings import RocksDBSettings
from headgate.state.snapshot import FilesCut

GROUPS = KeyGroupRange(0, 127)


def rate(count: int, work: Callable[[], None]) -> float:
    """Operations/s of `work`, which does `count`."""
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def main(keys: int, rows: int) -> dict[str, float]:
    """Run all cases; returns the ratios."""
    with tempfile.TemporaryDirectory() as directory:
        return _main(Path(directory), keys, rows)


def _main(directory: Path, keys: int, rows: int) -> dict[str, float]:
    rng = random.Random(1)
    some = [rng.randrange(keys) for _ in range(rows)]
    groups = key_groups_of(hash_keys(list(range(keys))), 128).tolist()
    layout = Layout(keys_of_type(int), "value", codec_of(bytes))
    backend = RocksDBBackend(
        layout.keys,
        {"s": TableSpec("s", layout)},
        128,
        directory=directory / "backend",
        key_groups=GROUPS,
        file_token="0",
        settings=RocksDBSettings(),
    )
    table: Any = backend.value_table("s")
    raw = Database(directory / "raw", RocksDBSettings(), GROUPS)._db
    places, value = Places(layout), bytes(80)
    encoded = [places.encode(groups[key], key, None, None) for key in some]
    stored = layout.value.encode(value)

    def fill() -> None:
        for key in range(keys):
            backend.set_key(key, groups[key])
            table.put(value)
            raw[places.encode(groups[key], key, None, None)] = stored

    def put() -> None:
        for key in some:
            backend.set_key(key, groups[key])
            table.put(value)

    def raw_put() -> None:
        for key in encoded:
            raw[key] = stored

    def get() -> None:
        for key in some:
            backend.set_key(key, groups[key])
            table.get()

    def raw_get() -> None:
        find = raw.get
        for key in encoded:
            find(key)

    def modify() -> None:
        for key in some:
            backend.set_key(key, groups[key])
            before = table.get()
            table.put(value if before is ABSENT else before)

    def raw_modify() -> None:
        find = raw.get
        for key in encoded:
            found = find(key)
            raw[key] = stored if found is None else found

    fill()
    ratios: dict[str, float] = {}
    cases = {
        "put": (put, raw_put),
        "get": (get, raw_get),
        "read_modify_write": (modify, raw_modify),
    }
    for name, (ours, theirs) in cases.items():
        best = [max(rate(rows, work) for _ in range(3)) for work in (ours, theirs)]
        ratios[name] = best[0] / best[1]
        print(f"{name:>18}  {best[0]:>10,.0f}/s  rocksdict {best[1]:>10,.0f}/s", flush=True)
    ratios.update(_snapshots(backend, groups, value))
    backend.close()
    raw.close()
    return ratios


def _snapshots(backend: RocksDBBackend, groups: list[int], value: bytes) -> dict[str, float]:
    table: Any = backend.value_table("s")
    ratios: dict[str, float] = {}
    for _ in range(2):
        started = time.perf_counter()
        cut = backend.snapshot({})["s"]
        ratios["cut_ms"] = 1e3 * (time.perf_counter() - started)
        assert isinstance(cut, FilesCut)
        thread = threading.Thread(target=cut.collect)
        thread.start()
        gap, before, key = 0.0, time.perf_counter(), 0
        while thread.is_alive():
            backend.set_key(key % len(groups), groups[key % len(groups)])
            table.put(value)
            now = time.perf_counter()
            gap, before, key = max(gap, now - before), now, key + 1
        ratios["longest_gap_ms"] = 1e3 * gap
        cut.release()
        for key in range(0, len(groups), 100):
            backend.set_key(key, groups[key])
            table.put(value)
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=200_000)
    given = parser.parse_args()
    print(json.dumps({name: round(r, 3) for name, r in main(given.keys, given.rows).items()}))
