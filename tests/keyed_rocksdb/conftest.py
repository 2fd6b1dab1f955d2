"""RocksDB backends whose files are uploaded to, and restored from, a directory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headgate.state.codecs import codec_of
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.base import KeyedBackend
from headgate.state.keyed.canonical import Layout, TableSpec
from headgate.state.keyed.keys import entry_codec, keys_of_type
from headgate.state.keyed.memory import MemoryBackend
from headgate.state.keygroups import KeyGroupRange, key_group_range
from headgate.state.rocksdb.backend import RocksDBBackend
from headgate.state.settings import RocksDBSettings
from headgate.state.snapshot import CollectedFiles, FilesCut, RestoredFiles, RestoredState

MAX_PARALLELISM = 128
KEYS = keys_of_type(int)
SPECS = {
    "number": TableSpec("number", Layout(KEYS, "value", codec_of(int))),
    "names": TableSpec("names", Layout(KEYS, "map", codec_of(str), entry_codec(str))),
}
SETTINGS = RocksDBSettings(memory_bytes=32 << 20, write_buffer_bytes=1 << 20)


@dataclass
class Stored:
    """The uploads of one subtask for one state: the handles of one checkpoint."""

    meta: bytes
    ids: dict[str, KeyGroupRange]
    written: KeyGroupRange


@dataclass
class Store:
    """An upload directory: ids are written once, and must never come with other bytes."""

    directory: Path
    files: dict[str, Path] = field(default_factory=dict)
    uploaded_bytes: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def upload(self, collected: CollectedFiles, written: KeyGroupRange) -> Stored:
        with self.guard:
            return self._upload(collected, written)

    def _upload(self, collected: CollectedFiles, written: KeyGroupRange) -> Stored:
        for file in collected.files:
            if file.id in self.files:
                assert self.files[file.id].read_bytes() == file.path.read_bytes(), file.id
                continue
            target = self.directory / f"{len(self.files)}"
            shutil.copy(file.path, target)
            self.files[file.id] = target
            self.uploaded_bytes += target.stat().st_size
        ids = {f.id: KeyGroupRange(f.first_key_group, f.last_key_group) for f in collected.files}
        return Stored(collected.meta, ids, written)

    def download(self, stored: Stored, own: KeyGroupRange) -> RestoredFiles | None:
        """As the runtime does it: the files with own key groups only."""
        if not stored.written.overlaps(own):
            return None
        files = {i: self.files[i] for i, groups in stored.ids.items() if groups.overlaps(own)}
        return RestoredFiles(stored.meta, files, stored.written.first, stored.written.last)


Checkpoint = list[dict[str, Stored]]
"""The uploads of each subtask, by state."""


@dataclass
class World:
    """Makes backends, runs checkpoints and restores."""

    directory: Path
    store: Store
    made: list[KeyedBackend] = field(default_factory=list)
    number: int = 0
    specs: dict[str, TableSpec] = field(default_factory=lambda: dict(SPECS))
    settings: RocksDBSettings = SETTINGS

    def backend(self, own: KeyGroupRange, **settings: Any) -> RocksDBBackend:
        self.number += 1
        backend = RocksDBBackend(
            KEYS,
            self.specs,
            MAX_PARALLELISM,
            directory=self.directory / f"local-{self.number}",
            key_groups=own,
            file_token=f"{self.number}",
            settings=settings.get("settings", self.settings),
        )
        self.made.append(backend)
        return backend

    def start(self, parallelism: int) -> list[RocksDBBackend]:
        return [self.backend(self.own(i, parallelism)) for i in range(parallelism)]

    @staticmethod
    def own(subtask: int, parallelism: int) -> KeyGroupRange:
        return key_group_range(subtask, parallelism, MAX_PARALLELISM)

    def local(self, backend: RocksDBBackend) -> Path:
        return self.directory / f"local-{self.made.index(backend) + 1}"

    def collect(self, cuts: dict[str, Any], own: KeyGroupRange) -> dict[str, Stored]:
        stored = {}
        for name, cut in cuts.items():
            assert isinstance(cut, FilesCut)
            stored[name] = self.store.upload(cut.collect(), own)
            cut.release()
        return stored

    def checkpoint(self, backends: list[RocksDBBackend]) -> Checkpoint:
        return [
            self.collect(backend.snapshot({}), self.own(i, len(backends)))
            for i, backend in enumerate(backends)
        ]

    def restored(self, checkpoint: Checkpoint, own: KeyGroupRange) -> RestoredState:
        state = RestoredState(states={name: spec.info for name, spec in self.specs.items()})
        for name in self.specs:
            found = [self.store.download(one[name], own) for one in checkpoint if name in one]
            state.files[name] = [files for files in found if files is not None]
        return state

    def restore(self, checkpoint: Checkpoint, parallelism: int) -> list[RocksDBBackend]:
        backends = self.start(parallelism)
        for i, backend in enumerate(backends):
            backend.restore(self.restored(checkpoint, self.own(i, parallelism)), 0)
        return backends

    def to_plain(self, checkpoint: Checkpoint) -> Any:
        """A checkpoint and where its files lie, for another process."""
        subtasks = [
            {
                name: (
                    one.meta,
                    {id_: (groups.first, groups.last) for id_, groups in one.ids.items()},
                    (one.written.first, one.written.last),
                )
                for name, one in states.items()
            }
            for states in checkpoint
        ]
        return subtasks, {id_: str(path) for id_, path in self.store.files.items()}

    def from_plain(self, plain: Any) -> Checkpoint:
        """The checkpoint of another process; its files are in the store from now on."""
        subtasks, files = plain
        self.store.files.update({id_: Path(path) for id_, path in files.items()})
        return [
            {
                name: Stored(
                    meta,
                    {id_: KeyGroupRange(*groups) for id_, groups in ids.items()},
                    KeyGroupRange(*written),
                )
                for name, (meta, ids, written) in states.items()
            }
            for states in subtasks
        ]

    def memory(self) -> MemoryBackend:
        backend = MemoryBackend(KEYS, self.specs, MAX_PARALLELISM)
        self.made.append(backend)
        return backend

    def close(self) -> None:
        for backend in self.made:
            backend.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = tmp_path / "store"
    store.mkdir()
    world = World(tmp_path, Store(store))
    yield world
    world.close()


class Job:
    """A plain model beside backends of any parallelism."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.names: dict[int, dict[str, str]] = {}

    def write(self, backends: list[Any], keys: Any, value: int) -> None:
        """Set, and for some keys remove, what the states hold."""
        for key in keys:
            backend = owner(backends, key)
            if (key + value) % 7 == 0:
                backend.value_table("number").delete()
                self.numbers.pop(key, None)
                backend.entry_table("names").clear()
                self.names.pop(key, None)
                continue
            backend.value_table("number").put(value)
            self.numbers[key] = value
            name = f"n{value % 3}"
            backend.entry_table("names").put(name, f"{key}-{value}")
            self.names.setdefault(key, {})[name] = f"{key}-{value}"

    def copy(self) -> Job:
        other = Job()
        other.numbers = dict(self.numbers)
        other.names = {key: dict(names) for key, names in self.names.items()}
        return other

    def check(self, backends: list[Any]) -> None:
        """The backends hold this, each its own keys, and nothing else."""
        numbers: dict[int, int] = {}
        names: dict[int, dict[str, str]] = {}
        for backend in backends:
            for key, _ in backend.addresses("number"):
                assert owner(backends, key) is backend
                numbers[key] = backend.value_table("number").get()
            for key, _ in backend.addresses("names"):
                assert owner(backends, key) is backend
                names[key] = dict(backend.entry_table("names").entries())
        assert numbers == self.numbers
        assert names == self.names


def owner(backends: list[Any], key: int) -> Any:
    """The backend that owns a key; it is the current one there."""
    group = key_group_of(hash_key(key), MAX_PARALLELISM)
    backend = backends[group * len(backends) // MAX_PARALLELISM]
    backend.set_key(key, group)
    return backend


@pytest.fixture
def job() -> Job:
    return Job()
