"""The writes of incremental checkpoints: each kind of keyed state, a share of its keys changed.

A subject is filled and written once in full; then a share of its keys, drawn at random, is changed before
each of a row of checkpoints. Each builds on the one before, by the rules of the runtime: tables as chains
of Parquet files, local files of which each is uploaded once, with what says how they belong together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from rocksdict import Options, Rdict, WriteOptions
from state_operators import KINDS, Times, batch_of, feed, filled

from headgate.operators.base import Operator
from headgate.runtime.task.parquet_files import encode_tables
from headgate.state.chain import Chain, extend, plan
from headgate.state.codecs import codec_of
from headgate.state.hashing import hash_keys, key_groups_of
from headgate.state.keyed.base import KeyedBackend
from headgate.state.keyed.canonical import Layout, TableSpec
from headgate.state.keyed.keys import keys_of_type
from headgate.state.keyed.memory import MemoryBackend
from headgate.state.keygroups import KeyGroupRange
from headgate.state.rocksdb.backend import RocksDBBackend
from headgate.state.settings import RocksDBSettings
from headgate.state.snapshot import FilesCut, StateHandle, TableCut

SUBJECTS = (*KINDS, "per key, memory", "per key, rocksdb")
GROUPS = 128
CHAIN_FILES_MAX = 20
INLINE_BYTES_MAX = 20_000
"""Both as the options have them by default."""
WARM_UP = 15
"""Checkpoints. Files that the filling left behind are merged in them, once: as when a state grows."""
_BATCH_KEYS = 65_536
_READS = 100_000
_QUIET_POLLS = 5
_POLL_S = 0.002


class Store:
    """Counts the bytes that the checkpoints of one subtask write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ids: set[str] = set()
        self._chains: dict[str, Chain] = {}
        self.files = 0
        """Of the newest checkpoint."""

    def write(self, cuts: dict[str, TableCut | FilesCut]) -> int:
        """Bytes of a checkpoint that are new."""
        self.files = 0
        return sum(
            self._write_table(name, cut) if isinstance(cut, TableCut) else self._write_files(cut)
            for name, cut in cuts.items()
        )

    def _write_table(self, name: str, cut: TableCut) -> int:
        chain = self._chains.get(name, Chain())
        planned = plan(chain, cut.epoch, CHAIN_FILES_MAX)
        encoded = encode_tables([cut.make(planned.since)], lambda: self._directory / "spill")
        handle = None
        if encoded is not None:
            small = encoded.size_bytes <= INLINE_BYTES_MAX
            handle = StateHandle(
                state=name,
                kind="table" if planned.since is None else "delta",
                size_bytes=encoded.size_bytes,
                checksum=encoded.checksum,
                rows=encoded.rows,
                inline=b"" if small else None,
                file=None if small else "file",
            )
        self._chains[name] = chain = extend(chain, planned, handle, cut.epoch)
        if cut.confirm is not None:
            cut.confirm(chain.oldest_epoch or cut.epoch)
        self.files += len(chain.links)
        return 0 if handle is None else handle.size_bytes

    def _write_files(self, cut: FilesCut) -> int:
        collected = cut.collect()
        new = [file for file in collected.files if file.id not in self._ids]
        size = len(collected.meta) + sum(file.path.stat().st_size for file in new)
        self._ids = {file.id for file in collected.files}
        self.files += len(collected.files)
        cut.release()
        return size


class Subject(Protocol):
    """Keyed state that holds keys from 0 on."""

    def change(self, keys: np.ndarray) -> None:
        """Write new values."""

    def cut(self) -> dict[str, TableCut | FilesCut]:
        """A snapshot's synchronous part."""


class Vectorised:
    """A running or tumbling aggregate."""

    def __init__(self, kind: str, keys: int) -> None:
        self._operator: Operator = filled(kind, keys)
        self._cuts = 0

    def change(self, keys: np.ndarray) -> None:
        for first in range(0, len(keys), _BATCH_KEYS):
            feed(self._operator, batch_of(keys[first : first + _BATCH_KEYS]), Times())

    def cut(self) -> dict[str, TableCut | FilesCut]:
        self._cuts += 1
        self._operator.prepare_snapshot(self._cuts)
        snapshot = self._operator.snapshot(self._cuts)
        assert snapshot is not None
        return {**snapshot.tables, **snapshot.files}


class PerKey:
    """Values of 60 bytes, in which there is something to compress but not much (hexadecimal digits)."""

    def __init__(self, directory: Path, keys: int, *, on_disk: bool) -> None:
        layout = Layout(keys_of_type(int), "value", codec_of(bytes))
        specs = {"s": TableSpec("s", layout)}
        self.backend: KeyedBackend
        if on_disk:
            self.backend = RocksDBBackend(
                layout.keys,
                specs,
                GROUPS,
                directory=directory / "rocksdb",
                key_groups=KeyGroupRange(0, GROUPS - 1),
                file_token="0",
                settings=RocksDBSettings(),
            )
        else:
            self.backend = MemoryBackend(layout.keys, specs, GROUPS)
        self.table: Any = self.backend.value_table("s")
        self._random = random.Random(1)
        self.key_groups = key_groups_of(hash_keys(list(range(keys))), GROUPS).tolist()
        self.change(np.arange(keys))

    def change(self, keys: np.ndarray) -> None:
        table, groups, draw = self.table, self.key_groups, self._random.randbytes
        for key in keys.tolist():
            self.backend.set_key(key, groups[key])
            table.put(draw(30).hex().encode())

    def cut(self) -> dict[str, TableCut | FilesCut]:
        self._settle()
        return self.backend.snapshot({})

    def _settle(self) -> None:
        """Let the merges of the last checkpoint end, so that their costs are measured as well."""
        if isinstance(self.backend, RocksDBBackend):
            number, quiet = self.table.database._number, 0
            while quiet < _QUIET_POLLS:
                busy = number("num-running-compactions") + number("num-running-flushes")
                quiet = 0 if busy else quiet + 1
                time.sleep(_POLL_S)


@dataclass(slots=True)
class Written:
    """The data that a row of checkpoints wrote.

    Attributes:
        full_bytes: of the first, which has everything.
        first: of the `WARM_UP` behind it: bytes, as shares of `full_bytes`.
        shares: of the others.
        files: of the last one.
        get_ratio: reads/s afterwards against a RocksDB with rocksdict's defaults that went through the
            same; 0: does not apply.
    """

    full_bytes: int
    first: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    files: int = 0
    get_ratio: float = 0.0

    @property
    def mean(self) -> float:
        """Of the shares."""
        return float(np.mean(self.shares))

    @property
    def mean_of_all(self) -> float:
        """With those of the warm-up."""
        return float(np.mean(self.first + self.shares))


@contextmanager
def opened(name: str, keys: int) -> Iterator[tuple[Subject, Path]]:
    """A subject that holds `keys` keys, and a directory for what it needs."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        if name in KINDS:
            yield Vectorised(name, keys), path
            return
        subject = PerKey(path, keys, on_disk=name == "per key, rocksdb")
        try:
            yield subject, path
        finally:
            subject.backend.close()


def checkpoints(name: str, keys: int, share: float, count: int) -> Written:
    """A full checkpoint, a warm-up and `count` more, with `share` of the keys changed before each."""
    rng = np.random.default_rng(2)
    with opened(name, keys) as (subject, directory):
        store = Store(directory)
        written = Written(store.write(subject.cut()))
        several = max(1, int(share * keys))
        changes: list[np.ndarray] = []
        for number in range(WARM_UP + count):
            changes.append(rng.choice(keys, several, replace=False))
            subject.change(changes[-1])
            new = store.write(subject.cut()) / written.full_bytes
            (written.first if number < WARM_UP else written.shares).append(new)
        written.files = store.files
        if isinstance(subject, PerKey) and isinstance(subject.backend, RocksDBBackend):
            written.get_ratio = _get_ratio(subject, directory / "plain", keys, changes)
    return written


def _get_ratio(subject: PerKey, directory: Path, keys: int, changes: list[np.ndarray]) -> float:
    plain = Rdict(str(directory), Options(raw_mode=True))
    without_log = WriteOptions()
    without_log.disable_wal = True
    plain.set_write_options(without_log)
    draw = random.Random(1).randbytes
    for changed in [np.arange(keys), *changes]:
        for key in changed.tolist():
            plain[key.to_bytes(9, "big")] = draw(30).hex().encode()
        plain.flush()
    some = np.random.default_rng(3).integers(0, keys, _READS).tolist()
    backend, get, groups = subject.backend, subject.table.get, subject.key_groups
    seconds: list[list[float]] = [[], []]
    for _ in range(3):
        began = time.perf_counter()
        for key in some:
            backend.set_key(key, groups[key])
            get()
        middle = time.perf_counter()
        for key in some:
            plain.get(key.to_bytes(9, "big"))
        seconds[0].append(middle - began)
        seconds[1].append(time.perf_counter() - middle)
    plain.close()
    return min(seconds[1]) / min(seconds[0])
